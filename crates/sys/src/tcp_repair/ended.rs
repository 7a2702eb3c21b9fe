//! A connection after a reset by its peer: a cloned program gets such a socket in place of each of the original's
//! connections.

use super::error::{At, RepairError};
use crate::address::{RawAddress, connect, local};
use crate::sockopt::{check, set_int};
use crate::tcp_info::{TcpInfo, TcpState};
use libc::SOL_SOCKET;
use rustix::net::sockopt::set_socket_linger;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest wait for an event on the loopback device; long because the machine may be very busy.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two polls.
const PAUSE: Duration = Duration::from_micros(100);

/// Makes a socket whose connection was reset and whose program has not read the error: the first read gets
/// `ECONNRESET`. Its connection was one over the loopback device, so that nothing leaves this host. Its options are a
/// new socket's.
///
/// # Errors
/// The kernel's error; the loopback device may be down.
pub fn ended(v6_socket: bool) -> Result<OwnedFd, RepairError> {
    Pair::new(v6_socket, None)?.finish(true, |_| Ok(()))
}

/// Both ends of a connection over the loopback device.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) ours: TcpStream,
    pub(super) theirs: TcpStream,
}

impl Pair {
    /// Makes a loopback connection; `room` is the number of bytes that may be in transit to our end.
    pub(super) fn new(v6_socket: bool, room: Option<i32>) -> Result<Self, RepairError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).at("bind (loopback)")?;
        let address = listener.local_addr().at("getsockname")?;
        let family = if v6_socket {
            libc::AF_INET6
        } else {
            libc::AF_INET
        };
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        check(fd).at("socket")?;
        // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
        let ours = unsafe { OwnedFd::from_raw_fd(fd) };
        if let Some(room) = room {
            // The receive buffer is set before connecting, because the handshake fixes the window scale.
            set_int(ours.as_fd(), SOL_SOCKET, libc::SO_RCVBUFFORCE, room).at("SO_RCVBUFFORCE")?;
        }
        let address = RawAddress::for_family(address, v6_socket);
        connect(ours.as_fd(), &address).at("connect (loopback)")?;
        let our_port = local(ours.as_fd()).at("getsockname")?.port();
        let theirs = loop {
            // Any process of this host may have connected in between.
            let (theirs, from) = listener.accept().at("accept (loopback)")?;
            if from.port() == our_port {
                break theirs;
            }
        };
        if let Some(room) = room {
            set_int(theirs.as_fd(), SOL_SOCKET, libc::SO_SNDBUFFORCE, room).at("SO_SNDBUFFORCE")?;
        }
        Ok(Self {
            ours: ours.into(),
            theirs,
        })
    }

    /// Ends the connection by a reset or by both FINs, and then calls `finished` with our end.
    pub(super) fn finish(
        self,
        reset: bool,
        finished: impl FnOnce(BorrowedFd<'_>) -> Result<(), RepairError>,
    ) -> Result<OwnedFd, RepairError> {
        let Self { ours, theirs } = self;
        if reset {
            set_socket_linger(&theirs, Some(Duration::ZERO))
                .map_err(io::Error::from)
                .at("SO_LINGER")?;
        }
        drop(theirs);
        let state = || TcpInfo::read(ours.as_fd()).map(|info| info.state);
        if !reset {
            wait_until(|| Ok(state()? == TcpState::CloseWait)).at("FIN (loopback)")?;
            ours.shutdown(Shutdown::Write).at("shutdown (loopback)")?;
        }
        wait_until(|| Ok(state()? == TcpState::Close)).at("end (loopback)")?;
        finished(ours.as_fd())?;
        Ok(ours.into())
    }
}

/// Waits for an event on the loopback device.
pub(super) fn wait_until(condition: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    let began = Instant::now();
    while !condition()? {
        if began.elapsed() > PATIENCE {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use std::io::{Read, Write};

    #[test]
    fn what_reads_it_learns_of_the_reset_and_then_of_the_end() {
        for v6_socket in [false, true] {
            let socket = ended(v6_socket).expect("a socket");
            let state = TcpInfo::read(socket.as_fd()).expect("TCP_INFO").state;
            assert_eq!(state, TcpState::Close);
            let mut entries = [PollFd::new(&socket, PollFlags::IN | PollFlags::OUT)];
            poll(&mut entries, None).expect("poll");
            let flags = entries[0].revents();
            assert!(
                flags.contains(PollFlags::ERR | PollFlags::HUP | PollFlags::IN),
                "{flags:?}"
            );
            let mut stream = TcpStream::from(socket);
            let error = stream.read(&mut [0]).expect_err("a reset");
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            assert_eq!(stream.read(&mut [0]).expect("the end"), 0);
            let error = stream.write(&[0]).expect_err("an end");
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
    }
}
