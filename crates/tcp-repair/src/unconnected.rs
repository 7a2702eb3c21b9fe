//! TCP sockets without a connection: listeners, and sockets that are not connected yet.

use super::error::{RepairError, StepContext, UnmovableReason, map_bind_error};
use super::options::SocketOptions;
use holdfast_sys::address::{RawAddress, bind, canonical, local_address};
use holdfast_sys::sockopt::numbers::TCP_FASTOPEN_KEY;
use holdfast_sys::sockopt::{check, get_bytes, get_int, set_bytes, set_int};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use libc::{IPPROTO_IP, IPPROTO_TCP, SOL_SOCKET};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Parameters of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenParameters {
    /// Largest number of connections that wait to be accepted.
    pub backlog: i32,
    /// `TCP_DEFER_ACCEPT`, seconds.
    pub defer_accept_s: i32,
    /// `TCP_FASTOPEN`: largest number of pending requests with data; 0 disables the feature.
    pub fast_open: i32,
    /// `TCP_FASTOPEN_KEY`, 16 bytes per key, if [`ListenParameters::fast_open`] is not 0, so that cookies of clients stay valid.
    pub fast_open_keys: Vec<u8>,
}

/// A TCP socket without a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnconnectedTcpSocket {
    /// True for an IPv6 socket.
    pub v6_socket: bool,
    /// Address the socket is bound to; unspecified for a wildcard socket.
    pub local: Option<SocketAddr>,
    /// Listener parameters; `None` if the socket does not listen.
    pub listen: Option<ListenParameters>,
    /// Socket options.
    pub options: SocketOptions,
}

impl ListenParameters {
    fn read(fd: BorrowedFd<'_>, backlog: u32) -> Result<Self, RepairError> {
        let int = |name, step| get_int(fd, IPPROTO_TCP, name).at_step(step);
        let fast_open = int(libc::TCP_FASTOPEN, "TCP_FASTOPEN")?;
        let mut keys = [0; 32];
        let length = match fast_open {
            0 => 0,
            _ => get_bytes(fd, IPPROTO_TCP, TCP_FASTOPEN_KEY, &mut keys)
                .at_step("TCP_FASTOPEN_KEY")?,
        };
        Ok(Self {
            backlog: i32::try_from(backlog).unwrap_or(i32::MAX),
            defer_accept_s: int(libc::TCP_DEFER_ACCEPT, "TCP_DEFER_ACCEPT")?,
            fast_open,
            fast_open_keys: keys[..length.min(keys.len())].to_vec(),
        })
    }
}

impl UnconnectedTcpSocket {
    /// Reads a socket in use without changing it. Connections that wait to be accepted are not included.
    ///
    /// # Errors
    /// [`UnmovableReason::Handshake`] for a connection under construction, [`UnmovableReason::NotTcp`]; otherwise the kernel's
    /// error.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Self, RepairError> {
        let domain =
            get_int(fd, SOL_SOCKET, libc::SO_DOMAIN).map_err(|_| UnmovableReason::NotTcp)?;
        let v6_socket = domain == libc::AF_INET6;
        let info = TcpInfo::read(fd).at_step("TCP_INFO")?;
        let waiting = match info.state {
            TcpState::Listen => Some(ListenParameters::read(fd, info.sacked)?),
            TcpState::Close | TcpState::TimeWait => None,
            other => return Err(UnmovableReason::Handshake(other).into()),
        };
        let address = local_address(fd).at_step("getsockname")?;
        Ok(Self {
            v6_socket,
            local: (address.port() != 0).then(|| canonical(address)),
            listen: waiting,
            options: SocketOptions::read_unconnected(fd, v6_socket)?,
        })
    }

    /// Returns the number of connections that wait to be accepted.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unaccepted_count(fd: BorrowedFd<'_>) -> Result<u32, RepairError> {
        let info = TcpInfo::read(fd).at_step("TCP_INFO")?;
        let listens = info.state == TcpState::Listen;
        Ok(if listens { info.unacked } else { 0 })
    }

    /// Makes a socket with the same options and address that does not listen yet.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn prepare(&self) -> Result<OwnedFd, RepairError> {
        let family = if self.v6_socket {
            libc::AF_INET6
        } else {
            libc::AF_INET
        };
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(family, kind, IPPROTO_TCP) };
        check(fd).at_step("socket")?;
        // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = fd.as_fd();
        let fresh = SocketOptions::read_unconnected(socket, self.v6_socket)?;
        self.options.apply(socket, &fresh)?;
        if let Some(address) = self.local {
            // Connections restored for the same address are bound to it already.
            set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, 1).at_step("SO_REUSEADDR")?;
            set_int(socket, IPPROTO_IP, libc::IP_FREEBIND, 1).at_step("IP_FREEBIND")?;
            let raw = RawAddress::for_family(address, self.v6_socket);
            map_bind_error(bind(socket, &raw), address)?;
        }
        Ok(fd)
    }

    /// Makes a prepared socket listen, if the original did, and sets the remaining options.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn restore(&self, socket: BorrowedFd<'_>) -> Result<(), RepairError> {
        if let Some(waiting) = &self.listen {
            if waiting.defer_accept_s != 0 {
                set_int(
                    socket,
                    IPPROTO_TCP,
                    libc::TCP_DEFER_ACCEPT,
                    waiting.defer_accept_s,
                )
                .at_step("TCP_DEFER_ACCEPT")?;
            }
            // SAFETY: no pointers are passed.
            check(unsafe { libc::listen(socket.as_raw_fd(), waiting.backlog) })
                .at_step("listen")?;
            if waiting.fast_open != 0 {
                if !waiting.fast_open_keys.is_empty() {
                    let keys = &waiting.fast_open_keys;
                    set_bytes(socket, IPPROTO_TCP, TCP_FASTOPEN_KEY, keys)
                        .at_step("TCP_FASTOPEN_KEY")?;
                }
                set_int(socket, IPPROTO_TCP, libc::TCP_FASTOPEN, waiting.fast_open)
                    .at_step("TCP_FASTOPEN")?;
            }
        }
        let low = self.options.notsent_lowat;
        if low != 0 {
            set_int(socket, IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, low)
                .at_step("TCP_NOTSENT_LOWAT")?;
        }
        let free = i32::from(self.options.free_bind);
        set_int(socket, IPPROTO_IP, libc::IP_FREEBIND, free).at_step("IP_FREEBIND")?;
        let reuse = i32::from(self.options.reuse_address);
        set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, reuse).at_step("SO_REUSEADDR")
    }
}
