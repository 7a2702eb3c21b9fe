//! The part of a connection's state that stays constant during its life, read while the connection is in use.

use super::error::{RepairError, StepContext, UnmovableReason};
use super::options::{SocketOptions, read_text};
use super::snapshot::SocketOptionsCache;
use holdfast_sys::address::{canonical, local_address, remote_address};
use holdfast_sys::netlink::Netlink;
use holdfast_sys::sock_diag::has_md5_key;
use holdfast_sys::sockopt::{TCP_AO_INFO, get_bytes, get_int};
use holdfast_sys::tcp_info::{OPT_ECN, OPT_SACK, OPT_TIMESTAMPS, OPT_WSCALE, TcpInfo, TcpState};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

/// The parameters that a connection negotiated, and its socket's options. Sent before the freeze.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpStaticState {
    /// Own address; IPv4 even on an IPv6 socket if the flow is IPv4.
    pub local: SocketAddr,
    /// The peer's address, in the same form.
    pub remote: SocketAddr,
    /// True for an IPv6 socket (its flow may still be IPv4, by mapped addresses).
    pub v6_socket: bool,
    /// Window scales, if negotiated (RFC 7323 section 2): the shift of received windows, then the shift of sent
    /// windows.
    pub window_scale: Option<(u8, u8)>,
    /// True if selective acknowledgements were negotiated (RFC 2018).
    pub sack: bool,
    /// True if timestamps were negotiated (RFC 7323 section 3).
    pub timestamps: bool,
    /// True if ECN was negotiated (RFC 3168).
    pub ecn: bool,
    /// Payload of the largest segment sent plus the length of its options: the MSS option's value, or less if the path
    /// allows less. [`super::TcpDynamicState::mss`] has the exact value.
    pub segment_size: u16,
    /// True if the program shut its receiving direction (`SHUT_RD`).
    pub receive_shut: bool,
    /// Socket options.
    pub options: SocketOptions,
}

impl TcpStaticState {
    /// Returns true if both states agree in everything but sizes that the kernel tunes by itself.
    #[must_use]
    pub fn equals_except_tuned(&self, other: &Self) -> bool {
        let mut tuned = other.clone();
        tuned.segment_size = self.segment_size;
        tuned.options.copy_tuned(&self.options);
        *self == tuned
    }
}

/// Reads the static state of a connection in use without changing the socket, and refuses a connection that cannot be
/// moved.
///
/// # Errors
/// [`RepairError::Unmovable`] names the state or feature that prevents the move.
pub fn read_static(fd: BorrowedFd<'_>) -> Result<TcpStaticState, RepairError> {
    TcpStaticReader::new()?.read(fd)
}

/// Reader of many static states over one netlink socket of this network namespace.
#[derive(Debug)]
pub struct TcpStaticReader {
    netlink: Netlink,
    pub(super) known_options: SocketOptionsCache,
}

impl TcpStaticReader {
    /// Makes a reader for sockets of the calling thread's network namespace.
    ///
    /// # Errors
    /// Errors of making a netlink socket.
    pub fn new() -> Result<Self, RepairError> {
        let netlink = Netlink::new(libc::NETLINK_SOCK_DIAG).at_step("sock_diag")?;
        Ok(Self {
            netlink,
            known_options: SocketOptionsCache::default(),
        })
    }

    /// Does the same as [`read_static`].
    ///
    /// # Errors
    /// As [`read_static`].
    pub fn read(&mut self, fd: BorrowedFd<'_>) -> Result<TcpStaticState, RepairError> {
        read_with(&mut self.netlink, fd)
    }
}

fn read_with(netlink: &mut Netlink, fd: BorrowedFd<'_>) -> Result<TcpStaticState, RepairError> {
    let v6_socket = check_kind(fd)?;
    let info = TcpInfo::read(fd).at_step("TCP_INFO")?;
    check_state(info.state)?;
    check_features(fd)?;
    let receive_shut = check_urgent(fd)? && !info.state.has_received_fin();
    let (local, remote) = addresses(fd)?;
    check_keys_and_namespace(netlink, fd, local, remote, v6_socket)?;
    let negotiated = |bit| info.options & bit != 0;
    Ok(TcpStaticState {
        local,
        remote,
        v6_socket,
        window_scale: negotiated(OPT_WSCALE).then_some((info.snd_wscale, info.rcv_wscale)),
        sack: negotiated(OPT_SACK),
        timestamps: negotiated(OPT_TIMESTAMPS),
        ecn: negotiated(OPT_ECN),
        segment_size: segment_size(info.snd_mss, negotiated(OPT_TIMESTAMPS)),
        receive_shut,
        options: SocketOptions::read(fd, v6_socket)?,
    })
}

/// Refuses a connection with MD5 keys, and a connection of another network namespace.
fn check_keys_and_namespace(
    netlink: &mut Netlink,
    fd: BorrowedFd<'_>,
    local: SocketAddr,
    remote: SocketAddr,
    v6_socket: bool,
) -> Result<(), RepairError> {
    match has_md5_key(netlink, fd, local, remote, v6_socket).at_step("sock_diag")? {
        Some(false) => Ok(()),
        Some(true) => Err(UnmovableReason::Md5.into()),
        None => Err(UnmovableReason::OtherNamespace.into()),
    }
}

/// Returns the segment size for `tcpi_snd_mss`, from which the kernel deducts the timestamp option's 12 bytes (RFC 7323
/// appendix A).
pub(super) fn segment_size(snd_mss: u32, timestamps: bool) -> u16 {
    let options = if timestamps { 12 } else { 0 };
    u16::try_from(snd_mss + options).unwrap_or(u16::MAX)
}

/// Returns true for an IPv6 socket; refuses any socket but a TCP one.
fn check_kind(fd: BorrowedFd<'_>) -> Result<bool, RepairError> {
    let domain = get_int(fd, SOL_SOCKET, libc::SO_DOMAIN).map_err(|_| UnmovableReason::NotTcp)?;
    let protocol = get_int(fd, SOL_SOCKET, libc::SO_PROTOCOL).at_step("SO_PROTOCOL")?;
    match (domain, protocol) {
        (libc::AF_INET | libc::AF_INET6, libc::IPPROTO_TCP) => Ok(domain == libc::AF_INET6),
        (_, libc::IPPROTO_MPTCP) => Err(UnmovableReason::Mptcp.into()),
        _ => Err(UnmovableReason::NotTcp.into()),
    }
}

fn check_state(state: TcpState) -> Result<(), UnmovableReason> {
    match state {
        TcpState::Listen => Err(UnmovableReason::Listening),
        TcpState::SynSent | TcpState::SynReceived => Err(UnmovableReason::Handshake(state)),
        TcpState::TimeWait | TcpState::Close => Err(UnmovableReason::Closed),
        TcpState::Established
        | TcpState::FinWait1
        | TcpState::FinWait2
        | TcpState::CloseWait
        | TcpState::LastAck
        | TcpState::Closing => Ok(()),
    }
}

fn check_features(fd: BorrowedFd<'_>) -> Result<(), RepairError> {
    if let Ok(ulp) = read_text(fd, IPPROTO_TCP, libc::TCP_ULP)
        && !ulp.is_empty()
    {
        return Err(UnmovableReason::UpperLayerProtocol(ulp).into());
    }
    // The buffer is as long as `struct tcp_ao_info_opt`. A socket without keys returns ENOENT, a kernel without TCP-AO
    // ENOPROTOOPT.
    if get_bytes(fd, IPPROTO_TCP, TCP_AO_INFO, &mut [0u8; 56]).is_ok() {
        return Err(UnmovableReason::TcpAo.into());
    }
    // Peeking at received data would move the offset. Kernels before 6.9 support the option for datagrams only.
    match get_int(fd, SOL_SOCKET, libc::SO_PEEK_OFF) {
        Ok(0..) => Err(UnmovableReason::PeekOffset.into()),
        _ => Ok(()),
    }
}

/// Refuses urgent data; returns true if the receiving direction is shut.
fn check_urgent(fd: BorrowedFd<'_>) -> Result<bool, RepairError> {
    let mut entry = [poll_entry(fd)];
    poll_now(&mut entry)?;
    let [poll] = entry;
    if poll.revents & libc::POLLPRI != 0 {
        return Err(UnmovableReason::UrgentData.into());
    }
    Ok(poll.revents & libc::POLLRDHUP != 0)
}

/// Makes a `poll` entry for urgent data and a shut receiving direction.
pub(super) fn poll_entry(fd: BorrowedFd<'_>) -> libc::pollfd {
    libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLPRI | libc::POLLRDHUP,
        revents: 0,
    }
}

/// Calls `poll` without waiting.
pub(super) fn poll_now(entries: &mut [libc::pollfd]) -> Result<(), RepairError> {
    // SAFETY: the entries are valid and outlive the call; a timeout of zero returns at once.
    let outcome = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, 0) };
    holdfast_sys::sockopt::check(outcome).at_step("poll")
}

fn addresses(fd: BorrowedFd<'_>) -> Result<(SocketAddr, SocketAddr), RepairError> {
    let local = canonical(local_address(fd).at_step("getsockname")?);
    let remote = canonical(remote_address(fd).at_step("getpeername")?);
    check_host_addresses(local, remote)?;
    Ok((local, remote))
}

/// Refuses addresses that are valid on this host's link only.
pub(super) fn check_host_addresses(
    local: SocketAddr,
    remote: SocketAddr,
) -> Result<(), UnmovableReason> {
    for ip in [local.ip(), remote.ip()] {
        let host_only = match ip {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        if host_only {
            return Err(UnmovableReason::HostOnlyAddress(ip));
        }
    }
    Ok(())
}
