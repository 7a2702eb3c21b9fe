//! Sockets: dispatch by address family, and netlink sockets.

use super::unix;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, StepContext};
use crate::files::image::{ByteString, NetlinkSocket, OpenFileKind, SocketOption};
use crate::files::syscalls;
use holdfast_sys::socket_filter::{FilterError, SocketFilter};
use holdfast_sys::sockopt::{
    SO_BUF_LOCK, SO_TXREHASH, check, get_bytes, get_int, numbers, set_bytes, value_if_known,
};
use libc::SOL_SOCKET;
use rustix::fs::Stat;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `linux/netlink.h`.
const SOL_NETLINK: i32 = 270;
const NETLINK_LIST_MEMBERSHIPS: i32 = 9;
/// `NETLINK_PKTINFO`, `NETLINK_BROADCAST_ERROR`, `NETLINK_NO_ENOBUFS`, `NETLINK_LISTEN_ALL_NSID`, `NETLINK_CAP_ACK`,
/// `NETLINK_EXT_ACK`, `NETLINK_GET_STRICT_CHK`.
const NETLINK_FLAGS: [(i32, i32); 7] = [
    (SOL_NETLINK, 3),
    (SOL_NETLINK, 4),
    (SOL_NETLINK, 5),
    (SOL_NETLINK, 8),
    (SOL_NETLINK, 10),
    (SOL_NETLINK, 11),
    (SOL_NETLINK, 12),
];
const NETLINK_ADD_MEMBERSHIP: i32 = 1;
/// Options of `SOL_SOCKET` that sockets other than TCP and UDP ones keep. Timestamp options change the values that
/// later options show, so the order matters.
const SOCKET_OPTIONS: &[(i32, i32)] = &[
    (SOL_SOCKET, numbers::SO_TIMESTAMPING),
    (SOL_SOCKET, numbers::SO_TIMESTAMPING_NEW),
    (SOL_SOCKET, libc::SO_TIMESTAMP),
    (SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (SOL_SOCKET, numbers::SO_TIMESTAMP_NEW),
    (SOL_SOCKET, numbers::SO_TIMESTAMPNS_NEW),
    (SOL_SOCKET, libc::SO_DEBUG),
    (SOL_SOCKET, libc::SO_REUSEADDR),
    (SOL_SOCKET, libc::SO_REUSEPORT),
    (SOL_SOCKET, libc::SO_DONTROUTE),
    (SOL_SOCKET, libc::SO_BROADCAST),
    (SOL_SOCKET, libc::SO_KEEPALIVE),
    (SOL_SOCKET, libc::SO_OOBINLINE),
    (SOL_SOCKET, libc::SO_NO_CHECK),
    (SOL_SOCKET, libc::SO_PRIORITY),
    (SOL_SOCKET, libc::SO_LINGER),
    (SOL_SOCKET, libc::SO_PASSCRED),
    (SOL_SOCKET, libc::SO_RCVLOWAT),
    (SOL_SOCKET, libc::SO_RCVTIMEO),
    (SOL_SOCKET, libc::SO_SNDTIMEO),
    (SOL_SOCKET, libc::SO_PASSSEC),
    (SOL_SOCKET, libc::SO_MARK),
    (SOL_SOCKET, libc::SO_RXQ_OVFL),
    (SOL_SOCKET, numbers::SO_WIFI_STATUS),
    (SOL_SOCKET, libc::SO_PEEK_OFF),
    (SOL_SOCKET, numbers::SO_NOFCS),
    (SOL_SOCKET, numbers::SO_SELECT_ERR_QUEUE),
    (SOL_SOCKET, libc::SO_BUSY_POLL),
    (SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    (SOL_SOCKET, numbers::SO_INCOMING_CPU),
    (SOL_SOCKET, libc::SO_ZEROCOPY),
    (SOL_SOCKET, numbers::SO_TXTIME),
    (SOL_SOCKET, numbers::SO_PREFER_BUSY_POLL),
    (SOL_SOCKET, numbers::SO_BUSY_POLL_BUDGET),
    (SOL_SOCKET, SO_TXREHASH),
    (SOL_SOCKET, numbers::SO_RESERVE_MEM),
    (SOL_SOCKET, numbers::SO_RCVMARK),
    (SOL_SOCKET, numbers::SO_PASSPIDFD),
    (SOL_SOCKET, numbers::SO_RCVPRIORITY),
    (SOL_SOCKET, numbers::SO_PASSRIGHTS),
    (SOL_SOCKET, numbers::SO_INQ),
];

/// Saves an open socket of any family; refuses one that cannot move.
pub fn save(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    stat: &Stat,
) -> SaveResult<OpenFileKind> {
    let fd = source.fd();
    let family = get_int(fd, SOL_SOCKET, libc::SO_DOMAIN).with_step("SO_DOMAIN")?;
    let socket = get_int(fd, SOL_SOCKET, libc::SO_TYPE).with_step("SO_TYPE")?;
    let protocol = get_int(fd, SOL_SOCKET, libc::SO_PROTOCOL).with_step("SO_PROTOCOL")?;
    match (family, socket, protocol) {
        (libc::AF_UNIX, ..) => unix::save(saver, source, socket),
        (libc::AF_NETLINK, _, libc::NETLINK_ROUTE) => save_netlink(saver, source, socket),
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, libc::IPPROTO_TCP)
        | (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_UDP) => {
            Ok(OpenFileKind::Inet {
                family,
                socket,
                protocol,
                inode: stat.st_ino,
            })
        }
        (_, _, libc::IPPROTO_MPTCP) => Err(BlockReason::Mptcp.into()),
        (libc::AF_INET | libc::AF_INET6 | libc::AF_NETLINK, ..) => {
            Err(BlockReason::Protocol(protocol, family).into())
        }
        _ => Err(BlockReason::Family(family).into()),
    }
}

fn save_netlink(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
    socket: i32,
) -> SaveResult<OpenFileKind> {
    let fd = source.fd();
    let peek_flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    if saver.frozen && recv(&source.copy, &mut [0u8; 1], peek_flags) != Err(Errno::AGAIN) {
        return Err(BlockReason::NetlinkUnread.into());
    }
    let mut address = [0u8; 12];
    let mut length = 12;
    // SAFETY: `address` is writable for `length` bytes, the size of a `sockaddr_nl`, and both outlive the call.
    let outcome = unsafe {
        let address = address.as_mut_ptr().cast();
        libc::getsockname(fd.as_raw_fd(), address, &raw mut length)
    };
    check(outcome).with_step("getsockname")?;
    let mut memberships = [0u8; 256];
    let length = get_bytes(fd, SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, &mut memberships);
    let length = length
        .with_step("NETLINK_LIST_MEMBERSHIPS")?
        .min(memberships.len());
    let groups = (0..length * 8).filter(|bit| memberships[bit / 8] >> (bit % 8) & 1 == 1);
    Ok(OpenFileKind::Netlink(NetlinkSocket {
        socket,
        port: u32::from_ne_bytes([address[4], address[5], address[6], address[7]]),
        groups: groups.map(|bit| bit as u32 + 1).collect(),
        options: [read_socket_options(fd)?, read_options(fd, &NETLINK_FLAGS)?].concat(),
        filter: read_filter(fd)?,
    }))
}

/// Options for buffer sizes, with the value before the kernel doubles it. Setting a size marks the size as fixed by the
/// program, so the option that tells which sizes are fixed is set afterwards.
const BUFFER_OPTIONS: [(i32, i32); 2] = [
    (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE),
    (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE),
];

/// Returns the options of `SOL_SOCKET` of a socket that is neither TCP nor UDP, in the order in which they are set.
pub fn read_socket_options(fd: BorrowedFd<'_>) -> Result<Vec<SocketOption>, FilesError> {
    let mut found = read_options(fd, SOCKET_OPTIONS)?;
    for (get, set) in BUFFER_OPTIONS {
        let doubled = get_int(fd, SOL_SOCKET, get).with_step("reading a buffer size")?;
        found.push(SocketOption {
            level: SOL_SOCKET,
            name: set,
            value: ByteString((doubled / 2).to_ne_bytes().to_vec()),
        });
    }
    found.extend(read_options(fd, &[(SOL_SOCKET, SO_BUF_LOCK)])?);
    Ok(found)
}

/// Returns the names of the options that [`read_socket_options`] reads.
pub fn allowed_options() -> Vec<(i32, i32)> {
    let buffers = BUFFER_OPTIONS.map(|(_, set)| (SOL_SOCKET, set));
    [SOCKET_OPTIONS, &buffers, &[(SOL_SOCKET, SO_BUF_LOCK)]].concat()
}

/// Returns the filter of a socket that is neither TCP nor UDP.
pub fn read_filter(fd: BorrowedFd<'_>) -> SaveResult<SocketFilter> {
    match SocketFilter::read(fd) {
        Ok(filter) => Ok(filter),
        Err(FilterError::Ebpf) => Err(BlockReason::ExtendedFilter.into()),
        Err(FilterError::Kernel(error)) => Err(error).with_step("SO_GET_FILTER")?,
    }
}

/// Creates a route netlink socket.
pub fn make_netlink(netlink: &NetlinkSocket, flags: u32) -> Result<OwnedFd, FilesError> {
    let fd =
        new_socket(libc::AF_NETLINK, netlink.socket, libc::NETLINK_ROUTE).with_step("socket")?;
    if netlink.port != 0 {
        let mut address = [0u8; 12];
        address[..2].copy_from_slice(&(libc::AF_NETLINK as u16).to_ne_bytes());
        address[4..8].copy_from_slice(&netlink.port.to_ne_bytes());
        // SAFETY: `address` is a `sockaddr_nl` and outlives the call.
        let outcome = unsafe { libc::bind(fd.as_raw_fd(), address.as_ptr().cast(), 12) };
        check(outcome).with_step("bind")?;
    }
    for group in &netlink.groups {
        let value = group.to_ne_bytes();
        set_bytes(fd.as_fd(), SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &value)
            .with_step("NETLINK_ADD_MEMBERSHIP")?;
    }
    let allowed = [&allowed_options()[..], &NETLINK_FLAGS].concat();
    set_options(fd.as_fd(), &allowed, &netlink.options)?;
    netlink
        .filter
        .attach(fd.as_fd())
        .with_step("SO_ATTACH_FILTER")?;
    syscalls::set_status(fd.as_fd(), flags & !(libc::O_ASYNC as u32)).with_step("F_SETFL")?;
    Ok(fd)
}

/// Creates a socket with close-on-exec.
pub fn new_socket(family: i32, socket: i32, protocol: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(family, socket | libc::SOCK_CLOEXEC, protocol) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the options (level, name) that this kernel knows, with their values.
fn read_options(
    fd: BorrowedFd<'_>,
    wanted: &[(i32, i32)],
) -> Result<Vec<SocketOption>, FilesError> {
    let mut found = Vec::new();
    for &(level, name) in wanted {
        let mut value = [0u8; 32];
        match value_if_known(get_bytes(fd, level, name, &mut value)) {
            Ok(Some(length)) => found.push(SocketOption {
                level,
                name,
                value: ByteString(value[..length.min(32)].to_vec()),
            }),
            Ok(None) => {}
            Err(error) => return Err(error).with_step(format!("socket option {name}")),
        }
    }
    Ok(found)
}

/// Sets the options that are allowed and differ.
pub fn set_options(
    fd: BorrowedFd<'_>,
    allowed: &[(i32, i32)],
    options: &[SocketOption],
) -> Result<(), FilesError> {
    for option in options {
        if !allowed.contains(&(option.level, option.name)) {
            continue;
        }
        let mut value = [0u8; 32];
        let present = get_bytes(fd, option.level, option.name, &mut value);
        if present.is_ok_and(|length| value[..length.min(32)] == option.value.0) {
            continue;
        }
        set_bytes(fd, option.level, option.name, &option.value.0)
            .with_step(format!("socket option {}", option.name))?;
    }
    Ok(())
}
