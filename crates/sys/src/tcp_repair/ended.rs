//! A connection as it is after its peer's reset: what a copy of a program has where the original has a connection.

use super::error::{At, RepairError};
use crate::address::local;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_socket_linger;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// How long a reset may take on the loopback device; the machine may be very busy.
const PATIENCE: Timespec = Timespec {
    tv_sec: 30,
    tv_nsec: 0,
};

/// Makes a socket whose connection was reset and whose program has not been told yet: what reads it gets `ECONNRESET`. The
/// connection it had was one over the loopback device, so that nothing leaves this host. Its options are a new socket's.
///
/// # Errors
/// What the kernel refuses; the loopback device may be down.
pub fn ended(v6_socket: bool) -> Result<OwnedFd, RepairError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).at("bind (loopback)")?;
    let address = listener.local_addr().at("getsockname")?;
    let address = match v6_socket {
        true => SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), address.port()),
        false => address,
    };
    let ours = TcpStream::connect(address).at("connect (loopback)")?;
    let our_port = local(ours.as_fd()).at("getsockname")?.port();
    let theirs = loop {
        // Anybody on this host may have connected in between.
        let (theirs, from) = listener.accept().at("accept (loopback)")?;
        if from.port() == our_port {
            break theirs;
        }
    };
    set_socket_linger(&theirs, Some(Duration::ZERO))
        .map_err(io::Error::from)
        .at("SO_LINGER")?;
    drop(theirs);
    let mut entries = [PollFd::new(&ours, PollFlags::empty())];
    let ready = poll(&mut entries, Some(&PATIENCE)).map_err(io::Error::from);
    match ready.at("poll")? {
        0 => Err(io::Error::from(io::ErrorKind::TimedOut)).at("reset (loopback)"),
        _ => Ok(ours.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp_info::{TcpInfo, TcpState};
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
