//! A connection after a reset by its peer: a cloned program gets such a socket in place of each of the original's
//! connections.

use super::error::{RepairError, StepContext};
use holdfast_sys::address::{RawAddress, connect, local_address};
use holdfast_sys::sockopt::{check, set_int};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use libc::SOL_SOCKET;
use rustix::net::sockopt::set_socket_linger;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest wait for an event on the loopback device; long because the machine may be very busy.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two polls.
const POLL_PAUSE: Duration = Duration::from_micros(100);

/// Makes a socket whose connection was reset and whose program has not read the error: the first read gets
/// `ECONNRESET`. Its connection was one over the loopback device, so that nothing leaves this host. Its options are a
/// new socket's.
///
/// # Errors
/// The kernel's error; the loopback device may be down.
pub fn reset_socket(v6_socket: bool) -> Result<OwnedFd, RepairError> {
    LoopbackPair::new(v6_socket, None)?.close_pair(true, |_| Ok(()))
}

/// Both ends of a connection over the loopback device.
#[derive(Debug)]
pub(super) struct LoopbackPair {
    pub(super) ours: TcpStream,
    pub(super) theirs: TcpStream,
}

impl LoopbackPair {
    /// Makes a loopback connection; `receive_buffer` is the number of bytes that may be in transit to our end.
    pub(super) fn new(v6_socket: bool, receive_buffer: Option<i32>) -> Result<Self, RepairError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).at_step("bind (loopback)")?;
        let address = listener.local_addr().at_step("getsockname")?;
        let family = if v6_socket {
            libc::AF_INET6
        } else {
            libc::AF_INET
        };
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        check(fd).at_step("socket")?;
        // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
        let ours = unsafe { OwnedFd::from_raw_fd(fd) };
        if let Some(receive_buffer) = receive_buffer {
            // The receive buffer is set before connecting, because the handshake fixes the window scale.
            set_int(
                ours.as_fd(),
                SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                receive_buffer,
            )
            .at_step("SO_RCVBUFFORCE")?;
        }
        let address = RawAddress::for_family(address, v6_socket);
        connect(ours.as_fd(), &address).at_step("connect (loopback)")?;
        let our_port = local_address(ours.as_fd()).at_step("getsockname")?.port();
        let theirs = loop {
            // Any process of this host may have connected in between.
            let (theirs, from) = listener.accept().at_step("accept (loopback)")?;
            if from.port() == our_port {
                break theirs;
            }
        };
        if let Some(receive_buffer) = receive_buffer {
            set_int(
                theirs.as_fd(),
                SOL_SOCKET,
                libc::SO_SNDBUFFORCE,
                receive_buffer,
            )
            .at_step("SO_SNDBUFFORCE")?;
        }
        Ok(Self {
            ours: ours.into(),
            theirs,
        })
    }

    /// Ends the connection by a reset or by both FINs, and then calls `on_closed` with our end.
    pub(super) fn close_pair(
        self,
        reset: bool,
        on_closed: impl FnOnce(BorrowedFd<'_>) -> Result<(), RepairError>,
    ) -> Result<OwnedFd, RepairError> {
        let Self { ours, theirs } = self;
        if reset {
            set_socket_linger(&theirs, Some(Duration::ZERO))
                .map_err(io::Error::from)
                .at_step("SO_LINGER")?;
        }
        drop(theirs);
        let state = || TcpInfo::read(ours.as_fd()).map(|info| info.state);
        if !reset {
            wait_until(|| Ok(state()? == TcpState::CloseWait)).at_step("FIN (loopback)")?;
            ours.shutdown(Shutdown::Write)
                .at_step("shutdown (loopback)")?;
        }
        wait_until(|| Ok(state()? == TcpState::Close)).at_step("reset (loopback)")?;
        on_closed(ours.as_fd())?;
        Ok(ours.into())
    }
}

/// Waits for an event on the loopback device.
pub(super) fn wait_until(condition: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    let began = Instant::now();
    while !condition()? {
        if began.elapsed() > WAIT_LIMIT {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        std::thread::sleep(POLL_PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use std::io::{Read, Write};

    #[test]
    fn reset_socket_reports_reset_then_end() {
        for v6_socket in [false, true] {
            let socket = reset_socket(v6_socket).expect("a socket");
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
