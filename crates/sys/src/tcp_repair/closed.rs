//! Sockets of connections that have ended, by both FINs or by a reset, and that the program has not closed. The program
//! can still read unread data, and then gets the end of file or the error.

use super::dynamic_state::unread;
use super::ended::{Pair, wait_until};
use super::error::{At, RepairError, Unmovable};
use super::options::SocketOptions;
use super::static_state::{poll_entry, poll_now};
use crate::sockopt::{get_int, ioctl_int};
use crate::tcp_info::{TcpInfo, TcpState};
use libc::SOL_SOCKET;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Requests for the number of bytes received and not read, or written and not acknowledged (`linux/sockios.h`).
const SIOCINQ: libc::c_ulong = 0x541B;
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// Buffer limit for data that the program still has to read; memory is allocated only as data arrives.
const ROOM_BYTES: i32 = 256 << 20;

/// The constant part of such a socket's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpClosed {
    /// True for an IPv6 socket.
    pub v6_socket: bool,
    /// Socket options.
    pub options: SocketOptions,
}

/// The part of an ended connection that the program has not seen yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    /// Data received and not read.
    #[serde(with = "serde_bytes")]
    pub unread: Vec<u8>,
    /// True if the connection failed, which the program learns after the data. The kernel reveals the error only by
    /// clearing it; nearly always the error is a reset.
    pub failed: bool,
}

/// Such a socket under construction, with the other end of a loopback connection that will be ended.
#[derive(Debug)]
pub struct Closing(Pair);

/// Returns true if the socket's connection has ended; false for a socket that was never connected.
///
/// # Errors
/// [`Unmovable::NeverConnected`] for a failed connection attempt whose error the program has not read; otherwise the
/// kernel's error.
pub fn has_closed(fd: BorrowedFd<'_>) -> Result<bool, RepairError> {
    let info = TcpInfo::read(fd).at("TCP_INFO")?;
    let events = events(fd)?;
    if info.state != TcpState::Close || events & libc::POLLRDHUP == 0 {
        return Ok(false);
    }
    let connected = info.options != 0 || info.rtt_us != 0 || info.snd_wnd != 0;
    if !connected && events & libc::POLLERR != 0 {
        return Err(Unmovable::NeverConnected.into());
    }
    Ok(connected)
}

fn events(fd: BorrowedFd<'_>) -> Result<libc::c_short, RepairError> {
    let mut entry = [poll_entry(fd)];
    poll_now(&mut entry)?;
    Ok(entry[0].revents)
}

impl TcpClosed {
    /// Reads a socket for which [`has_closed`] is true, without changing it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Self, RepairError> {
        let domain = get_int(fd, SOL_SOCKET, libc::SO_DOMAIN).at("SO_DOMAIN")?;
        let v6_socket = domain == libc::AF_INET6;
        Ok(Self {
            v6_socket,
            options: SocketOptions::read(fd, v6_socket)?,
        })
    }

    /// Makes a socket for such a connection. Nothing leaves this host.
    ///
    /// # Errors
    /// The kernel's error; the loopback device may be down.
    pub fn prepare(&self) -> Result<Closing, RepairError> {
        Pair::new(self.v6_socket, Some(ROOM_BYTES)).map(Closing)
    }
}

impl Rest {
    /// Reads the unseen part from a socket of a stopped process, without changing the socket.
    ///
    /// # Errors
    /// [`Unmovable::UrgentData`], otherwise the kernel's error.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Self, RepairError> {
        let events = events(fd)?;
        if events & libc::POLLPRI != 0 {
            return Err(Unmovable::UrgentData.into());
        }
        let length = ioctl_int(fd, SIOCINQ).at("SIOCINQ")?;
        // With an empty queue, peeking would clear the socket's error.
        let bytes = match u32::try_from(length).unwrap_or(0) {
            0 => Some(Vec::new()),
            length => unread(fd, length),
        };
        Ok(Self {
            unread: bytes.ok_or(RepairError::Inconsistent("less to be read than was said"))?,
            failed: events & libc::POLLERR != 0,
        })
    }
}

impl AsFd for Closing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ours.as_fd()
    }
}

impl Closing {
    /// Ends the connection, and sets the socket's options.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn end(self, fixed: &TcpClosed, rest: &Rest) -> Result<OwnedFd, RepairError> {
        let Pair { ours, mut theirs } = self.0;
        theirs.write_all(&rest.unread).at("write (loopback)")?;
        if rest.failed {
            let theirs = theirs.as_fd();
            // A reset would discard data that has not arrived.
            wait_until(|| Ok(ioctl_int(theirs, SIOCOUTQ)? == 0)).at("data (loopback)")?;
        }
        Pair { ours, theirs }.finish(rest.failed, |ours| {
            let now = SocketOptions::read(ours, fixed.v6_socket)?;
            fixed.options.apply(ours, &now)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockopt::set_int;
    use std::io::{ErrorKind, Read};
    use std::net::{Shutdown, TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        (near, listener.accept().expect("accepts").0)
    }

    fn closed(near: &TcpStream) {
        wait_until(|| Ok(TcpInfo::read(near.as_fd())?.state == TcpState::Close)).expect("closed");
    }

    /// Returns a socket restored from `near`'s state.
    fn made_again(near: &TcpStream) -> TcpStream {
        closed(near);
        assert!(has_closed(near.as_fd()).expect("looks"));
        let fixed = TcpClosed::read(near.as_fd()).expect("options");
        let rest = Rest::read(near.as_fd()).expect("rest");
        let closing = fixed.prepare().expect("prepared");
        TcpStream::from(closing.end(&fixed, &rest).expect("ended"))
    }

    #[test]
    fn what_was_not_read_comes_before_the_end() {
        let (near, mut far) = pair();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 7) as u8).collect();
        set_int(near.as_fd(), SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20).expect("set");
        far.set_nonblocking(true).expect("set");
        let length = far.write(&bytes).expect("written");
        drop(far);
        wait_until(|| Ok(TcpInfo::read(near.as_fd())?.state == TcpState::CloseWait)).expect("FIN");
        near.shutdown(Shutdown::Write).expect("shut");
        let mut again = made_again(&made_again(&near));
        let mut found = Vec::new();
        again.read_to_end(&mut found).expect("read to the end");
        assert!(found == bytes[..length], "{} of {length}", found.len());
        let error = again.write(&[0]).expect_err("an end");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_was_not_read_comes_before_the_reset() {
        for unread in [&b"last words"[..], b""] {
            let (near, mut far) = pair();
            near.set_nodelay(true).expect("set");
            far.write_all(unread).expect("written");
            rustix::net::sockopt::set_socket_linger(&far, Some(std::time::Duration::ZERO))
                .expect("set");
            drop(far);
            let mut again = made_again(&made_again(&near));
            assert!(again.nodelay().expect("asked"));
            let mut found = vec![0; unread.len()];
            again.read_exact(&mut found).expect("read");
            assert_eq!(found, unread);
            let error = again.read(&mut [0]).expect_err("a reset");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            assert_eq!(again.read(&mut [0]).expect("the end"), 0);
            assert_eq!(
                again.peer_addr().expect_err("none").kind(),
                ErrorKind::NotConnected
            );
            assert!(!Rest::read(made_again(&again).as_fd()).expect("rest").failed);
        }
    }

    #[test]
    fn what_was_never_connected_is_told_apart() {
        let fresh = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .expect("a socket");
        assert!(!has_closed(fresh.as_fd()).expect("looks"));
        let free = TcpListener::bind("127.0.0.1:0").expect("bound");
        let nobody = free.local_addr().expect("bound");
        drop(free);
        rustix::io::ioctl_fionbio(&fresh, true).expect("set");
        rustix::net::connect(&fresh, &nobody).expect_err("under way, or refused");
        wait_until(|| Ok(TcpInfo::read(fresh.as_fd())?.state == TcpState::Close)).expect("refused");
        match has_closed(fresh.as_fd()) {
            Err(RepairError::Unmovable(Unmovable::NeverConnected)) => {}
            other => panic!("{other:?}"),
        }
        rustix::net::sockopt::socket_error(&fresh)
            .expect("asked")
            .expect_err("refused");
        assert!(!has_closed(fresh.as_fd()).expect("looks"));
    }
}
