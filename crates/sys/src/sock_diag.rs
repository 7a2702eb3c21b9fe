//! Socket diagnostics (`sock_diag(7)`): lists all connections of a service in one request.

use crate::address::canonical;
use crate::netlink::{Netlink, NetlinkRequest, attributes};
use crate::sockopt::{get_bytes, get_int};
use crate::tcp_info::{TcpInfo, TcpState};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

/// Opens a netlink socket for the requests of this module.
///
/// # Errors
/// No descriptor or memory is left.
pub fn open() -> io::Result<Netlink> {
    Netlink::new(libc::NETLINK_SOCK_DIAG)
}

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// Attribute numbers of `linux/inet_diag.h`.
const INET_DIAG_INFO: u16 = 2;
const INET_DIAG_SHUTDOWN: u16 = 8;
const INET_DIAG_SKV6ONLY: u16 = 11;
const INET_DIAG_MD5SIG: u16 = 18;
/// Extension bit that requests `TCP_INFO`.
const REQUEST_TCP_INFO: u8 = 1 << (INET_DIAG_INFO - 1);
/// Length of `struct inet_diag_msg`, bytes.
const DIAG_MESSAGE_LEN: usize = 72;
/// Offset of the socket's cookie in `struct inet_diag_msg`.
const COOKIE_OFFSET: usize = 44;
/// `INET_DIAG_NOCOOKIE`.
const NO_COOKIE: [u8; 8] = [0xff; 8];
/// State numbers `TCP_ESTABLISHED` and so on of `net/tcp_states.h`.
const ESTABLISHED: u8 = 1;
const SYN_RECEIVED: u8 = 3;
const NEW_SYN_RECEIVED: u8 = 12;
const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;
const LISTEN: u8 = 10;
/// State bit of listeners, which are not connections.
const LISTEN_BIT: u32 = 1 << LISTEN;
/// A socket's cookie (`SO_COOKIE`), 8 bytes.
pub type SocketCookie = [u8; 8];

/// One TCP connection as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedConnection {
    /// Own address (IPv4-mapped addresses as IPv4).
    pub local: SocketAddr,
    /// The peer's address (IPv4-mapped addresses as IPv4).
    pub remote: SocketAddr,
    /// Bytes received and not read.
    pub receive_queue: u32,
    /// Bytes written and not acknowledged.
    pub send_queue: u32,
    /// User ID of the socket's owner.
    pub uid: u32,
    /// Inode of the socket, as in `/proc/PID/fd`; 0 if no process holds the socket.
    pub inode: u32,
    /// `TCP_INFO`; `None` in TIME-WAIT.
    pub info: Option<TcpInfo>,
}

/// Lists all TCP connections (not listeners) of this network namespace with the local port `port` and, if given, the
/// local address `address`.
///
/// # Errors
/// Errors of the netlink request.
pub fn tcp_connections(address: Option<IpAddr>, port: u16) -> io::Result<Vec<ListedConnection>> {
    let mut found = Vec::new();
    dump_sockets(
        libc::IPPROTO_TCP,
        port,
        !LISTEN_BIT,
        REQUEST_TCP_INFO,
        |_, one| {
            if address.is_none_or(|ip| ip == one.local.ip()) {
                found.push(one);
            }
        },
    )?;
    Ok(found)
}

/// Counts the connections of the TCP service at `at` with a peer that may still be served: established ones, accepted
/// or not, and ones that only the peer has closed. Returns `None` if nothing in this network namespace listens there.
///
/// # Errors
/// Errors of the netlink request.
pub fn tcp_service_connections(service: SocketAddr) -> io::Result<Option<u32>> {
    let states = 1 << ESTABLISHED | 1 << CLOSE_WAIT | LISTEN_BIT;
    let (mut at_address, mut at_wildcard) = (0, 0);
    let (mut listens_at_address, mut listens_at_wildcard) = (false, false);
    dump_sockets(
        libc::IPPROTO_TCP,
        service.port(),
        states,
        0,
        |state, one| {
            let is_at_address = one.local.ip() == service.ip();
            if state == LISTEN {
                listens_at_address |= is_at_address;
                listens_at_wildcard |= one.local.ip().is_unspecified();
            } else {
                at_address += u32::from(is_at_address);
                at_wildcard += 1;
            }
        },
    )?;
    // A wildcard listener serves all addresses except the addresses with a listener of their own.
    Ok(match (listens_at_address, listens_at_wildcard) {
        (true, _) => Some(at_address),
        (false, true) => Some(at_wildcard),
        (false, false) => None,
    })
}

/// A server's socket in a list of the kernel: a TCP listener, or a UDP socket without a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedServerSocket {
    /// Own address (IPv4-mapped addresses as IPv4).
    pub local: SocketAddr,
    /// True for an IPv6 socket that receives no IPv4 clients.
    pub is_ipv6_only: bool,
    /// The socket's cookie, as a number.
    pub cookie: u64,
    /// Inode of the socket, as in `/proc/PID/fd`; 0 if no process holds the socket.
    pub inode: u32,
    /// Number of connections that wait to be accepted (TCP), or bytes in the receive queue (UDP).
    pub waiting: u32,
}

impl ListedServerSocket {
    /// Returns true if clients of a service at this address reach the socket, unless another socket is bound more
    /// exactly.
    pub fn receives(&self, service: SocketAddr) -> bool {
        let is_wildcard = self.local.ip().is_unspecified()
            && (self.local.is_ipv4() == service.is_ipv4()
                || self.local.is_ipv6() && !self.is_ipv6_only);
        self.local.port() == service.port() && (is_wildcard || self.local.ip() == service.ip())
    }
}

/// Lists the TCP listeners of the network namespace of `netlink`, on all ports.
///
/// # Errors
/// Errors of the netlink request.
pub fn tcp_listeners(netlink: &mut Netlink) -> io::Result<Vec<ListedServerSocket>> {
    receiving_sockets(netlink, libc::IPPROTO_TCP, LISTEN_BIT, 0)
}

/// Lists the UDP sockets without a peer that have this local port, in the network namespace of `netlink`.
///
/// # Errors
/// Errors of the netlink request.
pub fn udp_receivers(netlink: &mut Netlink, port: u16) -> io::Result<Vec<ListedServerSocket>> {
    receiving_sockets(netlink, libc::IPPROTO_UDP, 1 << CLOSE, port)
}

fn receiving_sockets(
    netlink: &mut Netlink,
    protocol: i32,
    states: u32,
    port: u16,
) -> io::Result<Vec<ListedServerSocket>> {
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let identity = socket_id(port, NO_COOKIE);
        let request = diag_request((family, protocol), states, 0, &identity);
        let outcome = netlink.request(request, libc::NLM_F_DUMP, |_, body| {
            let Some(one) = parse_diag_message(body).filter(|one| one.local.port() != 0) else {
                return;
            };
            let is_ipv6_only = attributes(&body[DIAG_MESSAGE_LEN..])
                .any(|(kind, value)| kind == INET_DIAG_SKV6ONLY && value.first() == Some(&1));
            let cookie = body.get(COOKIE_OFFSET..COOKIE_OFFSET + 8);
            let cookie = cookie.and_then(|cookie| SocketCookie::try_from(cookie).ok());
            found.push(ListedServerSocket {
                local: one.local,
                is_ipv6_only,
                cookie: cookie.map_or(0, u64::from_ne_bytes),
                inode: one.inode,
                waiting: one.receive_queue,
            });
        });
        match outcome {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            other => other?,
        }
    }
    Ok(found)
}

/// Returns one established connection of the network namespace of `netlink`; `None` if there is none between these
/// addresses, or one side has closed.
///
/// # Errors
/// Errors of the netlink request.
pub fn established_connection(
    netlink: &mut Netlink,
    local: SocketAddr,
    remote: SocketAddr,
) -> io::Result<Option<ListedConnection>> {
    let is_ipv6 = local.is_ipv6();
    let family = if is_ipv6 {
        libc::AF_INET6
    } else {
        libc::AF_INET
    };
    let identity = full_socket_id(local, remote, is_ipv6, NO_COOKIE);
    let request = diag_request(
        (family, libc::IPPROTO_TCP),
        u32::MAX,
        REQUEST_TCP_INFO,
        &identity,
    );
    let mut found = None;
    let outcome = netlink.request(request, 0, |_, body| {
        let is_established = body.get(1) == Some(&ESTABLISHED);
        found = parse_diag_message(body).filter(|_| is_established);
    });
    match outcome {
        Ok(()) => Ok(found),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns true if handshakes of a TCP service with this port are under way.
///
/// # Errors
/// Errors of the netlink request.
pub fn has_half_open_tcp(port: u16) -> io::Result<bool> {
    let mut found = false;
    dump_sockets(
        libc::IPPROTO_TCP,
        port,
        1 << SYN_RECEIVED | 1 << NEW_SYN_RECEIVED,
        0,
        |_, _| found = true,
    )?;
    Ok(found)
}

/// Lists all sockets of a protocol (`IPPROTO_TCP`, `IPPROTO_UDP`) with this local port, listeners included, each with
/// its state. UDP sockets without a peer are in [`TcpState::Close`]. The list is empty if the kernel does not list the
/// protocol.
pub fn sockets_on_port(protocol: i32, port: u16) -> io::Result<Vec<(TcpState, ListedConnection)>> {
    let mut found = Vec::new();
    dump_sockets(protocol, port, u32::MAX, 0, |state, one| {
        found.extend(TcpState::from_kernel(state).map(|state| (state, one)));
    })?;
    Ok(found)
}

/// Returns the shut-down halves (1 receiving, 2 sending) of UDP sockets by `SO_COOKIE`; omits sockets with both halves
/// open.
pub fn udp_shutdowns(netlink: &mut Netlink) -> io::Result<HashMap<SocketCookie, u8>> {
    let mut found = HashMap::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let identity = socket_id(0, NO_COOKIE);
        let wanted = diag_request((family, libc::IPPROTO_UDP), u32::MAX, 0, &identity);
        let outcome = netlink.request(wanted, libc::NLM_F_DUMP, |_, body| {
            let attribute_bytes = body.get(DIAG_MESSAGE_LEN..).unwrap_or(&[]);
            let shut = attributes(attribute_bytes).find(|(kind, _)| *kind == INET_DIAG_SHUTDOWN);
            let halves = shut.and_then(|(_, value)| value.first().copied());
            let cookie = body.get(COOKIE_OFFSET..COOKIE_OFFSET + 8);
            let cookie = cookie.and_then(|cookie| SocketCookie::try_from(cookie).ok());
            if let (Some(cookie), Some(halves @ 1..)) = (cookie, halves) {
                found.insert(cookie, halves);
            }
        });
        match outcome {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            other => other?,
        }
    }
    Ok(found)
}

/// Lists sockets of a protocol with this local port and one of the states in the bit set `states`. `take` gets a
/// socket's state, and the socket with the attributes that `extensions` request.
fn dump_sockets(
    protocol: i32,
    port: u16,
    states: u32,
    extensions: u8,
    mut take: impl FnMut(u8, ListedConnection),
) -> io::Result<()> {
    let mut netlink = open()?;
    for family in [libc::AF_INET, libc::AF_INET6] {
        let identity = socket_id(port, NO_COOKIE);
        let request = diag_request((family, protocol), states, extensions, &identity);
        let outcome = netlink.request(request, libc::NLM_F_DUMP, |_, body| {
            if let Some(one) = parse_diag_message(body).filter(|one| one.local.port() == port) {
                take(body[1], one);
            }
        });
        match outcome {
            // A kernel without IPv6, or without diagnostics for the protocol, has no handler.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Builds a `struct inet_diag_req_v2`.
fn diag_request(
    (family, protocol): (i32, i32),
    states: u32,
    extensions: u8,
    identity: &[u8; 48],
) -> NetlinkRequest {
    let mut fixed = [0u8; 56];
    fixed[0] = family as u8;
    fixed[1] = protocol as u8;
    fixed[2] = extensions;
    fixed[4..8].copy_from_slice(&states.to_ne_bytes());
    fixed[8..].copy_from_slice(identity);
    NetlinkRequest::new(BY_FAMILY, 0, &fixed)
}

/// Builds a `struct inet_diag_sockid` with a local port and a cookie only.
fn socket_id(port: u16, cookie: SocketCookie) -> [u8; 48] {
    let mut raw = [0u8; 48];
    raw[..2].copy_from_slice(&port.to_be_bytes());
    raw[40..].copy_from_slice(&cookie);
    raw
}

/// Parses a `struct inet_diag_msg` and its attributes.
fn parse_diag_message(body: &[u8]) -> Option<ListedConnection> {
    let fixed = body.get(..DIAG_MESSAGE_LEN)?;
    let address = |at: usize, port: usize| {
        let port = u16::from_be_bytes([fixed[port], fixed[port + 1]]);
        let ip: IpAddr = if i32::from(fixed[0]) == libc::AF_INET {
            <[u8; 4]>::try_from(&fixed[at..at + 4]).ok()?.into()
        } else {
            <[u8; 16]>::try_from(&fixed[at..at + 16]).ok()?.into()
        };
        Some(canonical(SocketAddr::new(ip, port)))
    };
    let word = |at: usize| Some(u32::from_ne_bytes(fixed[at..at + 4].try_into().ok()?));
    Some(ListedConnection {
        local: address(8, 4)?,
        remote: address(24, 6)?,
        receive_queue: word(56)?,
        send_queue: word(60)?,
        uid: word(64)?,
        inode: word(68)?,
        info: attributes(&body[DIAG_MESSAGE_LEN..])
            .find(|(kind, _)| *kind == INET_DIAG_INFO)
            .and_then(|(_, value)| TcpInfo::parse(value)),
    })
}

/// Returns true if a connection has MD5 keys, which only sock_diag shows; `None` if the connection is not in the network
/// namespace of `netlink`.
///
/// # Errors
/// Errors of the netlink request.
pub fn has_md5_key(
    netlink: &mut Netlink,
    fd: BorrowedFd<'_>,
    local: SocketAddr,
    remote: SocketAddr,
    v6_socket: bool,
) -> io::Result<Option<bool>> {
    let mut cookie: SocketCookie = [0; 8];
    get_bytes(fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    let family = if v6_socket {
        libc::AF_INET6
    } else {
        libc::AF_INET
    };
    let mut identity = full_socket_id(local, remote, v6_socket, cookie);
    // The kernel finds a socket that is bound to a device only with that device's index.
    let device = get_int(fd, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX)?;
    identity[36..40].copy_from_slice(&device.to_ne_bytes());
    let mut has_key = false;
    let outcome = netlink.request(
        diag_request(
            (family, libc::IPPROTO_TCP),
            u32::MAX,
            REQUEST_TCP_INFO,
            &identity,
        ),
        0,
        |_, body| {
            let attribute_bytes = body.get(DIAG_MESSAGE_LEN..).unwrap_or(&[]);
            has_key = attributes(attribute_bytes).any(|(kind, _)| kind == INET_DIAG_MD5SIG);
        },
    );
    match outcome {
        Ok(()) => Ok(Some(has_key)),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESTALE) => Ok(None),
            _ => Err(error),
        },
    }
}

fn full_socket_id(
    local: SocketAddr,
    remote: SocketAddr,
    v6_socket: bool,
    cookie: SocketCookie,
) -> [u8; 48] {
    let mut raw = socket_id(local.port(), cookie);
    raw[2..4].copy_from_slice(&remote.port().to_be_bytes());
    let mut write = |at: usize, ip: IpAddr| match ip {
        IpAddr::V4(v4) if v6_socket => {
            raw[at..at + 16].copy_from_slice(&v4.to_ipv6_mapped().octets());
        }
        IpAddr::V4(v4) => raw[at..at + 4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => raw[at..at + 16].copy_from_slice(&v6.octets()),
    };
    write(4, local.ip());
    write(20, remote.ip());
    raw
}
