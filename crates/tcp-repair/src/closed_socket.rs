//! Sockets of connections that have ended, by both FINs or by a reset, and that the program has not closed. The program
//! can still read unread data, and then gets the end of file or the error.

use super::dynamic_state::peek_unread;
use super::error::{RepairError, StepContext, UnmovableReason};
use super::options::SocketOptions;
use super::reset_socket::{LoopbackPair, wait_until};
use super::static_state::{poll_entry, poll_now};
use holdfast_sys::sockopt::{get_int, ioctl_int};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use libc::SOL_SOCKET;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Requests for the number of bytes received and not read, or written and not acknowledged (`linux/sockios.h`).
const SIOCINQ: libc::c_ulong = 0x541B;
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// Buffer limit for data that the program still has to read; memory is allocated only as data arrives.
const RECEIVE_BUFFER_LIMIT: i32 = 256 << 20;

/// The constant part of such a socket's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedTcpSocket {
    /// True for an IPv6 socket.
    pub v6_socket: bool,
    /// Socket options.
    pub options: SocketOptions,
}

/// The part of an ended connection that the program has not seen yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingInput {
    /// Data received and not read.
    #[serde(with = "serde_bytes")]
    pub unread: Vec<u8>,
    /// True if the connection failed, which the program learns after the data. The kernel reveals the error only by
    /// clearing it; nearly always the error is a reset.
    pub is_reset: bool,
}

/// Such a socket under construction, with the other end of a loopback connection that will be ended.
#[derive(Debug)]
pub struct ClosingSocket(LoopbackPair);

/// Returns true if the socket's connection has ended; false for a socket that was never connected.
///
/// # Errors
/// [`UnmovableReason::NeverConnected`] for a failed connection attempt whose error the program has not read; otherwise the
/// kernel's error.
pub fn has_closed(fd: BorrowedFd<'_>) -> Result<bool, RepairError> {
    let info = TcpInfo::read(fd).at_step("TCP_INFO")?;
    let events = poll_events(fd)?;
    if info.state != TcpState::Close || events & libc::POLLRDHUP == 0 {
        return Ok(false);
    }
    let connected = info.options != 0 || info.rtt_us != 0 || info.snd_wnd != 0;
    if !connected && events & libc::POLLERR != 0 {
        return Err(UnmovableReason::NeverConnected.into());
    }
    Ok(connected)
}

fn poll_events(fd: BorrowedFd<'_>) -> Result<libc::c_short, RepairError> {
    let mut entry = [poll_entry(fd)];
    poll_now(&mut entry)?;
    Ok(entry[0].revents)
}

impl EndedTcpSocket {
    /// Reads a socket for which [`has_closed`] is true, without changing it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Self, RepairError> {
        let domain = get_int(fd, SOL_SOCKET, libc::SO_DOMAIN).at_step("SO_DOMAIN")?;
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
    pub fn prepare(&self) -> Result<ClosingSocket, RepairError> {
        LoopbackPair::new(self.v6_socket, Some(RECEIVE_BUFFER_LIMIT)).map(ClosingSocket)
    }
}

impl PendingInput {
    /// Reads the unseen part from a socket of a stopped process, without changing the socket.
    ///
    /// # Errors
    /// [`UnmovableReason::UrgentData`], otherwise the kernel's error.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Self, RepairError> {
        let events = poll_events(fd)?;
        if events & libc::POLLPRI != 0 {
            return Err(UnmovableReason::UrgentData.into());
        }
        let length = ioctl_int(fd, SIOCINQ).at_step("SIOCINQ")?;
        // With an empty queue, peeking would clear the socket's error.
        let bytes = match u32::try_from(length).unwrap_or(0) {
            0 => Some(Vec::new()),
            length => peek_unread(fd, length),
        };
        Ok(Self {
            unread: bytes.ok_or(RepairError::Inconsistent(
                "fewer unread bytes than SIOCINQ reported",
            ))?,
            is_reset: events & libc::POLLERR != 0,
        })
    }
}

impl AsFd for ClosingSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ours.as_fd()
    }
}

impl ClosingSocket {
    /// Ends the connection, and sets the socket's options.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn end(
        self,
        fixed: &EndedTcpSocket,
        pending: &PendingInput,
    ) -> Result<OwnedFd, RepairError> {
        let LoopbackPair { ours, mut theirs } = self.0;
        theirs
            .write_all(&pending.unread)
            .at_step("write (loopback)")?;
        if pending.is_reset {
            let theirs = theirs.as_fd();
            // A reset would discard data that has not arrived.
            wait_until(|| Ok(ioctl_int(theirs, SIOCOUTQ)? == 0))
                .at_step("acknowledgment (loopback)")?;
        }
        LoopbackPair { ours, theirs }.close_pair(pending.is_reset, |ours| {
            let current = SocketOptions::read(ours, fixed.v6_socket)?;
            fixed.options.apply(ours, &current)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_sys::sockopt::set_int;
    use std::io::{ErrorKind, Read};
    use std::net::{Shutdown, TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        (near, listener.accept().expect("accepts").0)
    }

    fn close_and_wait(near: &TcpStream) {
        wait_until(|| Ok(TcpInfo::read(near.as_fd())?.state == TcpState::Close)).expect("closed");
    }

    /// Returns a socket restored from `near`'s state.
    fn restored_copy(near: &TcpStream) -> TcpStream {
        close_and_wait(near);
        assert!(has_closed(near.as_fd()).expect("inspected"));
        let fixed = EndedTcpSocket::read(near.as_fd()).expect("options");
        let pending = PendingInput::read(near.as_fd()).expect("rest");
        let closing = fixed.prepare().expect("prepared");
        TcpStream::from(closing.end(&fixed, &pending).expect("ended"))
    }

    #[test]
    fn unread_data_precedes_end_of_file() {
        let (near, mut far) = pair();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 7) as u8).collect();
        set_int(near.as_fd(), SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20).expect("set");
        far.set_nonblocking(true).expect("set");
        let length = far.write(&bytes).expect("written");
        drop(far);
        wait_until(|| Ok(TcpInfo::read(near.as_fd())?.state == TcpState::CloseWait)).expect("FIN");
        near.shutdown(Shutdown::Write).expect("shut");
        let mut restored = restored_copy(&restored_copy(&near));
        let mut received = Vec::new();
        restored
            .read_to_end(&mut received)
            .expect("read to the end");
        assert!(
            received == bytes[..length],
            "{} of {length}",
            received.len()
        );
        let error = restored.write(&[0]).expect_err("an end");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn unread_data_precedes_reset() {
        for unread in [&b"last words"[..], b""] {
            let (near, mut far) = pair();
            near.set_nodelay(true).expect("set");
            far.write_all(unread).expect("written");
            rustix::net::sockopt::set_socket_linger(&far, Some(std::time::Duration::ZERO))
                .expect("set");
            drop(far);
            let mut restored = restored_copy(&restored_copy(&near));
            assert!(restored.nodelay().expect("asked"));
            let mut received = vec![0; unread.len()];
            restored.read_exact(&mut received).expect("read");
            assert_eq!(received, unread);
            let error = restored.read(&mut [0]).expect_err("a reset");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            assert_eq!(restored.read(&mut [0]).expect("the end"), 0);
            assert_eq!(
                restored.peer_addr().expect_err("none").kind(),
                ErrorKind::NotConnected
            );
            assert!(
                !PendingInput::read(restored_copy(&restored).as_fd())
                    .expect("rest")
                    .is_reset
            );
        }
    }

    #[test]
    fn never_connected_socket_is_not_closed() {
        let fresh = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .expect("a socket");
        assert!(!has_closed(fresh.as_fd()).expect("inspected"));
        let free = TcpListener::bind("127.0.0.1:0").expect("bound");
        let unused_address = free.local_addr().expect("bound");
        drop(free);
        rustix::io::ioctl_fionbio(&fresh, true).expect("set");
        rustix::net::connect(&fresh, &unused_address).expect_err("under way, or refused");
        wait_until(|| Ok(TcpInfo::read(fresh.as_fd())?.state == TcpState::Close)).expect("refused");
        match has_closed(fresh.as_fd()) {
            Err(RepairError::Unmovable(UnmovableReason::NeverConnected)) => {}
            other => panic!("{other:?}"),
        }
        rustix::net::sockopt::socket_error(&fresh)
            .expect("asked")
            .expect_err("refused");
        assert!(!has_closed(fresh.as_fd()).expect("inspected"));
    }
}
