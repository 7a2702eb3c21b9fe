//! Non-blocking TCP sockets.

use crate::FailureDetection;
use holdfast_sys::tcp_info::TcpInfo;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketFlags, SocketType, acceptfrom_with, bind, connect as dial,
    getsockname, listen as begin_listening, socket_with, sockopt,
};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Most connections that wait to be accepted; the system has a limit of its own.
const BACKLOG: i32 = 4096;

fn open(family_of: SocketAddr) -> io::Result<OwnedFd> {
    let family = match family_of {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Makes a listening socket; returns it with its address.
pub(super) fn listen(at: SocketAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let socket = open(at)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &at)?;
    begin_listening(&socket, BACKLOG)?;
    let at = to_internet_address(getsockname(&socket)?)?;
    Ok((socket, at))
}

/// Returns the next waiting connection, if there is one.
///
/// # Errors
/// The system has no free descriptor or no memory.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    loop {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match acceptfrom_with(listener, flags) {
            Ok((socket, Some(from))) => {
                return Ok(Some((socket.into(), to_internet_address(from)?)));
            }
            Err(Errno::AGAIN) => return Ok(None),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                return Err(error.into());
            }
            // The connection or its network is gone again: see accept(2).
            Ok((_, None)) | Err(_) => {}
        }
    }
}

/// Starts a TCP connection, without waiting until it is established.
pub(super) fn connect(to: SocketAddr, from: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = open(to)?;
    if let Some(from) = from.filter(|from| !from.is_unspecified()) {
        bind(&socket, &SocketAddr::new(from, 0))?;
    }
    match dial(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Sets options of a TCP connection: messages leave at once, and a silent peer is detected.
pub(super) fn set_options(socket: &TcpStream, failure: &FailureDetection) -> io::Result<()> {
    let seconds = |time: Duration| Duration::from_secs(time.as_secs_f64().ceil().max(1.0) as u64);
    let (idle, interval) = (seconds(failure.heartbeat), seconds(failure.rto_max));
    let count = u32::from(failure.association_retransmissions.clamp(1, 127));
    let timeout = idle + interval * count;
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, idle)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, count)?;
    let timeout_ms = timeout.as_millis().try_into().unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(socket, timeout_ms)?;
    Ok(())
}

/// Makes closing reset the connection, so that the other side notices at once.
pub(super) fn reset_on_close(socket: &TcpStream) {
    // Without the option the other side notices a little later.
    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Returns the minimum round-trip time of some minutes: the smoothed time would include the peer's delay of
/// acknowledgements (40 ms and more).
pub(super) fn round_trip(socket: &TcpStream) -> io::Result<Duration> {
    let info = TcpInfo::read(socket.as_fd())?;
    // The kernel uses the largest value for "not measured".
    let minimum = Some(info.min_rtt_us).filter(|least| *least != u32::MAX);
    Ok(Duration::from_micros(minimum.unwrap_or(0).into()))
}

fn to_internet_address(address: SocketAddrAny) -> io::Result<SocketAddr> {
    let internet = SocketAddr::try_from(address);
    internet.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}
