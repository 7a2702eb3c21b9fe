//! Addresses and options of a UDP socket.

use super::multicast_membership::{MulticastMembership, join};
use super::{StepContext, UdpError};
use crate::non_integer_options::NonIntegerOptions;
use crate::options::value_by_id;
use holdfast_sys::address::{RawAddress, bind, canonical, connect, local_address, remote_address};
use holdfast_sys::sockopt::numbers::{
    IP_CHECKSUM, IP_LOCAL_PORT_RANGE, IP_RECVERR_RFC4884, IP_RECVFRAGSIZE, IPV6_2292DSTOPTS,
    IPV6_2292HOPLIMIT, IPV6_2292HOPOPTS, IPV6_2292PKTINFO, IPV6_2292RTHDR, IPV6_ADDR_PREFERENCES,
    IPV6_AUTOFLOWLABEL, IPV6_FLOWINFO, IPV6_FLOWINFO_SEND, IPV6_MINHOPCOUNT, IPV6_RECVERR_RFC4884,
    IPV6_RECVFRAGSIZE, IPV6_ROUTER_ALERT_ISOLATE, SO_BUSY_POLL_BUDGET, SO_INCOMING_CPU, SO_NOFCS,
    SO_PREFER_BUSY_POLL, SO_RCVMARK, SO_RCVPRIORITY, SO_RESERVE_MEM, SO_SELECT_ERR_QUEUE,
    SO_TIMESTAMP_NEW, SO_TIMESTAMPING, SO_TIMESTAMPING_NEW, SO_TIMESTAMPNS_NEW, SO_WIFI_STATUS,
};
use holdfast_sys::sockopt::{
    SO_BUF_LOCK, SO_TXREHASH, check, get_bytes, get_int, set_bytes, set_int, value_if_known,
};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_UDP, SOL_SOCKET};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// `UDP_CORK`, `UDP_ENCAP`, `UDP_NO_CHECK6_*`, `UDP_SEGMENT`, `UDP_GRO` (`linux/udp.h`).
const UDP_CORK: i32 = 1;
const UDP_ENCAP: i32 = 100;
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;
const UDP_SEGMENT: i32 = 103;
const UDP_GRO: i32 = 104;
const IPV6_FREEBIND: i32 = 78;

/// `int` options by their number in the encoded state; numbers never change meaning. Options are set in this order,
/// because setting the TOS also changes the priority.
const INT_OPTIONS: &[(u8, i32, i32)] = &[
    // Each of the timestamp options changes the values of the following ones, so their order matters.
    (45, SOL_SOCKET, SO_TIMESTAMPING),
    (46, SOL_SOCKET, SO_TIMESTAMPING_NEW),
    (34, SOL_SOCKET, libc::SO_TIMESTAMP),
    (35, SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (47, SOL_SOCKET, SO_TIMESTAMP_NEW),
    (48, SOL_SOCKET, SO_TIMESTAMPNS_NEW),
    (1, SOL_SOCKET, libc::SO_REUSEADDR),
    (2, SOL_SOCKET, libc::SO_REUSEPORT),
    (3, SOL_SOCKET, libc::SO_BROADCAST),
    (4, IPPROTO_IP, libc::IP_TOS),
    (5, IPPROTO_IPV6, libc::IPV6_TCLASS),
    (6, SOL_SOCKET, libc::SO_PRIORITY),
    (7, SOL_SOCKET, libc::SO_MARK),
    (8, IPPROTO_IP, libc::IP_TTL),
    (9, IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
    (10, IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (11, IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    (12, IPPROTO_IP, libc::IP_PKTINFO),
    (13, IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    (14, IPPROTO_IP, libc::IP_RECVERR),
    (15, IPPROTO_IPV6, libc::IPV6_RECVERR),
    (16, IPPROTO_IP, libc::IP_RECVTOS),
    (17, IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    (18, IPPROTO_IP, libc::IP_RECVTTL),
    (19, IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
    (20, IPPROTO_IP, libc::IP_RECVORIGDSTADDR),
    (21, IPPROTO_IPV6, libc::IPV6_RECVORIGDSTADDR),
    (22, IPPROTO_IP, IP_RECVFRAGSIZE),
    (23, IPPROTO_IP, libc::IP_MULTICAST_TTL),
    (24, IPPROTO_IP, libc::IP_MULTICAST_LOOP),
    (25, IPPROTO_IP, libc::IP_MULTICAST_ALL),
    (26, IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS),
    (27, IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP),
    (28, IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL),
    (29, IPPROTO_UDP, UDP_NO_CHECK6_TX),
    (30, IPPROTO_UDP, UDP_NO_CHECK6_RX),
    (31, IPPROTO_UDP, UDP_SEGMENT),
    (32, IPPROTO_UDP, UDP_GRO),
    (33, SOL_SOCKET, libc::SO_NO_CHECK),
    (36, SOL_SOCKET, libc::SO_RXQ_OVFL),
    (37, SOL_SOCKET, libc::SO_DONTROUTE),
    (38, SOL_SOCKET, libc::SO_BUSY_POLL),
    (39, IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (40, IPPROTO_IPV6, libc::IPV6_DONTFRAG),
    (41, IPPROTO_IP, libc::IP_TRANSPARENT),
    (42, IPPROTO_IP, libc::IP_FREEBIND),
    (43, IPPROTO_IPV6, IPV6_FREEBIND),
    (44, SOL_SOCKET, libc::SO_PEEK_OFF),
    (49, SOL_SOCKET, libc::SO_DEBUG),
    (50, SOL_SOCKET, libc::SO_KEEPALIVE),
    (51, SOL_SOCKET, libc::SO_OOBINLINE),
    (52, SOL_SOCKET, libc::SO_RCVLOWAT),
    (53, SOL_SOCKET, SO_WIFI_STATUS),
    (54, SOL_SOCKET, SO_NOFCS),
    (55, SOL_SOCKET, SO_SELECT_ERR_QUEUE),
    (INCOMING_CPU_ID, SOL_SOCKET, SO_INCOMING_CPU),
    (57, SOL_SOCKET, libc::SO_ZEROCOPY),
    (58, SOL_SOCKET, SO_PREFER_BUSY_POLL),
    (59, SOL_SOCKET, SO_BUSY_POLL_BUDGET),
    (60, SOL_SOCKET, SO_RCVMARK),
    (61, SOL_SOCKET, SO_RCVPRIORITY),
    (62, SOL_SOCKET, SO_TXREHASH),
    (63, SOL_SOCKET, SO_RESERVE_MEM),
    (70, IPPROTO_IP, libc::IP_MINTTL),
    (71, IPPROTO_IP, libc::IP_RECVOPTS),
    (72, IPPROTO_IP, libc::IP_RETOPTS),
    (73, IPPROTO_IP, libc::IP_PASSSEC),
    (74, IPPROTO_IP, IP_CHECKSUM),
    (75, IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (76, IPPROTO_IP, IP_RECVERR_RFC4884),
    (77, IPPROTO_IP, IP_LOCAL_PORT_RANGE),
    (80, IPPROTO_IPV6, IPV6_2292PKTINFO),
    (81, IPPROTO_IPV6, IPV6_2292HOPOPTS),
    (82, IPPROTO_IPV6, IPV6_2292DSTOPTS),
    (83, IPPROTO_IPV6, IPV6_2292RTHDR),
    (84, IPPROTO_IPV6, IPV6_2292HOPLIMIT),
    (85, IPPROTO_IPV6, libc::IPV6_RECVHOPOPTS),
    (86, IPPROTO_IPV6, libc::IPV6_RECVRTHDR),
    (87, IPPROTO_IPV6, libc::IPV6_RECVDSTOPTS),
    (88, IPPROTO_IPV6, libc::IPV6_RECVPATHMTU),
    (89, IPPROTO_IPV6, IPV6_RECVFRAGSIZE),
    (90, IPPROTO_IPV6, IPV6_FLOWINFO),
    (91, IPPROTO_IPV6, IPV6_FLOWINFO_SEND),
    (92, IPPROTO_IPV6, IPV6_RECVERR_RFC4884),
    (93, IPPROTO_IPV6, IPV6_ROUTER_ALERT_ISOLATE),
    (94, IPPROTO_IPV6, IPV6_ADDR_PREFERENCES),
    (95, IPPROTO_IPV6, IPV6_AUTOFLOWLABEL),
    (96, IPPROTO_IPV6, IPV6_MINHOPCOUNT),
];
/// Number of `SO_INCOMING_CPU`, which the kernel changes with each packet of a connected socket.
const INCOMING_CPU_ID: u8 = 56;

/// A UDP socket's addresses and options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpStaticState {
    /// True for an IPv6 socket.
    pub v6_socket: bool,
    /// Address the socket is bound to; unspecified for a wildcard socket.
    pub local: SocketAddr,
    /// The peer's address, if connected.
    pub remote: Option<SocketAddr>,
    /// `int` options by number.
    pub ints: Vec<(u8, i32)>,
    /// `SO_SNDBUF` and `SO_RCVBUF`, as the kernel counts them.
    pub buffer_sizes: (i32, i32),
    /// `SO_BUF_LOCK`.
    pub buffer_lock: i32,
    /// `SO_BINDTODEVICE`, empty for none.
    pub device: String,
    /// Name of the interface for outgoing multicast (`IP_MULTICAST_IF`, `IPV6_MULTICAST_IF`), empty for the route's
    /// choice.
    pub multicast_interface: String,
    /// Groups that the restored socket joins at once.
    pub memberships: Vec<MulticastMembership>,
    /// Options longer than an `int`.
    pub wide: NonIntegerOptions,
    /// Halves that are shut down: 1 receiving, 2 sending.
    pub shutdown: u8,
}

impl UdpStaticState {
    /// Returns true if other sockets may be bound to the same address and port (`SO_REUSEPORT`) and the socket may
    /// receive datagrams of any client.
    #[must_use]
    pub fn may_share_port(&self) -> bool {
        let set = |(id, value): &(u8, i32)| {
            option_by_id(*id) == Some((SOL_SOCKET, libc::SO_REUSEPORT)) && *value != 0
        };
        self.remote.is_none() && self.local.port() != 0 && self.ints.iter().any(set)
    }
}

/// Returns level and name of an `int` option by its number.
pub fn option_by_id(id: u8) -> Option<(i32, i32)> {
    let known = INT_OPTIONS.iter().find(|(known, ..)| *known == id)?;
    Some((known.1, known.2))
}

/// Reads a socket in use without changing it. `memberships` are the multicast groups that the restored socket joins at
/// once.
///
/// # Errors
/// An option that cannot be moved, by name; [`UdpError::NotBound`] for a socket to which no datagram can have been
/// sent.
pub fn read_static(
    fd: BorrowedFd<'_>,
    memberships: Vec<MulticastMembership>,
) -> Result<UdpStaticState, UdpError> {
    let static_state = read_static_unbound_too(fd, memberships)?;
    if static_state.local.port() == 0 {
        return Err(UdpError::NotBound);
    }
    Ok(static_state)
}

/// Does the same as [`read_static`], but also accepts a socket that is not bound: its port is 0.
///
/// # Errors
/// An option that cannot be moved, by name.
pub fn read_static_unbound_too(
    fd: BorrowedFd<'_>,
    memberships: Vec<MulticastMembership>,
) -> Result<UdpStaticState, UdpError> {
    let domain = get_int(fd, SOL_SOCKET, libc::SO_DOMAIN).map_err(|_| UdpError::NotUdp)?;
    let protocol = get_int(fd, SOL_SOCKET, libc::SO_PROTOCOL).at_step("SO_PROTOCOL")?;
    if !matches!(domain, libc::AF_INET | libc::AF_INET6) || protocol != IPPROTO_UDP {
        return Err(UdpError::NotUdp);
    }
    let v6_socket = domain == libc::AF_INET6;
    let local = local_address(fd).at_step("getsockname")?;
    if get_int(fd, IPPROTO_UDP, UDP_ENCAP).at_step("UDP_ENCAP")? != 0 {
        return Err(UdpError::Encapsulation);
    }
    if get_int(fd, IPPROTO_UDP, UDP_CORK).at_step("UDP_CORK")? != 0 {
        return Err(UdpError::Corked);
    }
    let buffer = |name, step| get_int(fd, SOL_SOCKET, name).at_step(step);
    let remote = remote_address(fd).ok().map(canonical);
    Ok(UdpStaticState {
        v6_socket,
        local: canonical(local),
        ints: read_ints(fd, remote.is_some())?,
        wide: NonIntegerOptions::read(fd, v6_socket)?,
        remote,
        shutdown: shut_halves(fd)?,
        buffer_sizes: (
            buffer(libc::SO_SNDBUF, "SO_SNDBUF")?,
            buffer(libc::SO_RCVBUF, "SO_RCVBUF")?,
        ),
        buffer_lock: buffer(SO_BUF_LOCK, "SO_BUF_LOCK")?,
        device: read_device(fd)?,
        multicast_interface: read_multicast_interface(fd, v6_socket)?,
        memberships,
    })
}

/// Returns the halves that are shut down, as far as poll shows them: a lone shut-down sending half is not visible.
fn shut_halves(fd: BorrowedFd<'_>) -> Result<u8, UdpError> {
    let mut entry = [PollFd::new(&fd, PollFlags::RDHUP)];
    let poll_result = poll(&mut entry, Some(&Timespec::default()));
    poll_result.map_err(std::io::Error::from).at_step("poll")?;
    let events = entry[0].revents();
    Ok(match events {
        _ if events.contains(PollFlags::HUP) => 3,
        _ if events.contains(PollFlags::RDHUP) => 1,
        _ => 0,
    })
}

fn read_ints(fd: BorrowedFd<'_>, connected: bool) -> Result<Vec<(u8, i32)>, UdpError> {
    let mut ints = Vec::with_capacity(INT_OPTIONS.len());
    for (id, level, name) in INT_OPTIONS {
        if *id == INCOMING_CPU_ID && connected {
            continue;
        }
        let value = match value_if_known(get_int(fd, *level, *name)) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => None,
            value => value.at_step("reading a socket option")?,
        };
        ints.extend(value.map(|value| (*id, value)));
    }
    Ok(ints)
}

fn read_device(fd: BorrowedFd<'_>) -> Result<String, UdpError> {
    let mut raw = [0u8; libc::IFNAMSIZ];
    let length =
        get_bytes(fd, SOL_SOCKET, libc::SO_BINDTODEVICE, &mut raw).at_step("SO_BINDTODEVICE")?;
    Ok(holdfast_sys::net::name_from_bytes(
        &raw[..length.min(raw.len())],
    ))
}

fn read_multicast_interface(fd: BorrowedFd<'_>, v6: bool) -> Result<String, UdpError> {
    let index = if v6 {
        get_int(fd, IPPROTO_IPV6, libc::IPV6_MULTICAST_IF).at_step("IPV6_MULTICAST_IF")?
    } else {
        // The kernel returns the index only into a buffer as large as a `struct ip_mreqn`; otherwise, only an address.
        let mut raw = [0u8; 12];
        let length = get_bytes(fd, IPPROTO_IP, libc::IP_MULTICAST_IF, &mut raw)
            .at_step("IP_MULTICAST_IF")?;
        if length < raw.len() {
            return Ok(String::new());
        }
        i32::from_ne_bytes([raw[8], raw[9], raw[10], raw[11]])
    };
    if index == 0 {
        return Ok(String::new());
    }
    holdfast_sys::net::interface_name(index as u32).at_step("if_indextoname")
}

/// Makes a bound socket with the same options, connected if the old one was, and a member of the same groups. The
/// socket receives all datagrams that the host's filters pass from then on, so the hold must be armed first.
///
/// # Errors
/// The kernel's error; [`UdpError::DeviceAbsent`] if an interface is missing.
pub fn prepare(fixed: &UdpStaticState) -> Result<OwnedFd, UdpError> {
    let family = if fixed.v6_socket {
        libc::AF_INET6
    } else {
        libc::AF_INET
    };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(family, kind, 0) };
    check(fd).at_step("socket")?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let socket = fd.as_fd();
    if !fixed.device.is_empty() {
        let name = fixed.device.as_bytes();
        set_bytes(socket, SOL_SOCKET, libc::SO_BINDTODEVICE, name)
            .map_err(|_| UdpError::DeviceAbsent(fixed.device.clone()))?;
    }
    apply_ints(socket, fixed)?;
    let (send, receive) = fixed.buffer_sizes;
    set_int(socket, SOL_SOCKET, libc::SO_SNDBUFFORCE, send / 2).at_step("SO_SNDBUFFORCE")?;
    set_int(socket, SOL_SOCKET, libc::SO_RCVBUFFORCE, receive / 2).at_step("SO_RCVBUFFORCE")?;
    set_int(socket, SOL_SOCKET, SO_BUF_LOCK, fixed.buffer_lock & 3).at_step("SO_BUF_LOCK")?;
    fixed.wide.apply(socket)?;
    apply_multicast_interface(socket, fixed)?;
    if fixed.local.port() != 0 {
        match bind(socket, &bind_address(fixed)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err(UdpError::AddressInUse(fixed.local));
            }
            outcome => outcome.at_step("bind")?,
        }
    }
    if let Some(remote) = fixed.remote {
        connect(socket, &RawAddress::for_family(remote, fixed.v6_socket)).at_step("connect")?;
    }
    for membership in &fixed.memberships {
        join(socket, membership)?;
    }
    fixed
        .wide
        .filter
        .attach(socket)
        .at_step("SO_ATTACH_FILTER")?;
    shut_down(socket, fixed.shutdown)?;
    Ok(fd)
}

/// Shuts halves down. For a socket without a peer the kernel does so and yet returns `ENOTCONN`.
fn shut_down(socket: BorrowedFd<'_>, halves: u8) -> Result<(), UdpError> {
    let how = match halves & 3 {
        1 => Shutdown::Read,
        2 => Shutdown::Write,
        3 => Shutdown::Both,
        _ => return Ok(()),
    };
    match shutdown(socket, how) {
        Ok(()) | Err(Errno::NOTCONN) => Ok(()),
        Err(error) => Err(std::io::Error::from(error)).at_step("shutdown"),
    }
}

/// Returns the address to bind to. A wildcard keeps the socket's own family: `::` on an IPv6 socket also receives IPv4.
fn bind_address(fixed: &UdpStaticState) -> RawAddress {
    RawAddress::for_family(fixed.local, fixed.v6_socket)
}

fn apply_ints(socket: BorrowedFd<'_>, fixed: &UdpStaticState) -> Result<(), UdpError> {
    for (id, level, name) in INT_OPTIONS {
        let Some(value) = value_by_id(&fixed.ints, *id) else {
            continue;
        };
        // Options at their default are skipped, because the kernel refuses some defaults (-1 for unset IPv6 checksum
        // flags).
        let fresh = get_int(socket, *level, *name).ok();
        if fresh != Some(value) {
            set_int(socket, *level, *name, value).at_step("setting a socket option")?;
        }
    }
    Ok(())
}

fn apply_multicast_interface(
    socket: BorrowedFd<'_>,
    fixed: &UdpStaticState,
) -> Result<(), UdpError> {
    if fixed.multicast_interface.is_empty() {
        return Ok(());
    }
    let index = holdfast_sys::net::interface_index(&fixed.multicast_interface)
        .map_err(|_| UdpError::DeviceAbsent(fixed.multicast_interface.clone()))?;
    if fixed.v6_socket {
        return set_int(socket, IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, index as i32)
            .at_step("IPV6_MULTICAST_IF");
    }
    let mut raw = [0u8; 12];
    raw[8..].copy_from_slice(&index.to_ne_bytes());
    set_bytes(socket, IPPROTO_IP, libc::IP_MULTICAST_IF, &raw).at_step("IP_MULTICAST_IF")
}
