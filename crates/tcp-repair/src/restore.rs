//! Restore of a connection's socket at the acceptor.

use super::dynamic_state::TcpDynamicState;
use super::error::{RepairError, StepContext, map_bind_error};
use super::options::SocketOptions;
use super::retransmission::first_retransmission;
use super::static_state::TcpStaticState;
use super::{
    RECEIVE_QUEUE, REPAIR_OFF, REPAIR_OFF_QUIET, REPAIR_ON, SEND_QUEUE, TCP_REPAIR_WINDOW,
};
use holdfast_sys::address::{RawAddress, bind, connect};
use holdfast_sys::sockopt::{TCP_RTO_MAX_MS, check, check_length, set_bytes, set_int};
use holdfast_sys::tcp_info::TcpState;
use libc::{IPPROTO_IP, IPPROTO_TCP, SOL_SOCKET};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Smallest value that `TCP_RTO_MAX_MS` accepts, milliseconds.
pub(super) const FIRST_TIMEOUT_CAP_MS: i32 = 1000;

/// A socket made before the freeze: in repair mode, bound, with its options; not connected, and silent.
#[derive(Debug)]
pub struct PreparedSocket {
    fd: OwnedFd,
}

/// A socket that has its connection back but is still in repair mode: it sends nothing by itself.
#[derive(Debug)]
pub struct RestoredSocket {
    pub(super) fd: OwnedFd,
}

impl PreparedSocket {
    /// Wraps a socket that [`SocketPreparer::prepare`] made in an earlier process and whose descriptor was kept in the fd
    /// store.
    #[must_use]
    pub fn reclaim(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for PreparedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsFd for RestoredSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<RestoredSocket> for OwnedFd {
    fn from(socket: RestoredSocket) -> Self {
        socket.fd
    }
}

/// Maker of sockets. Reads the options of a fresh socket in this namespace once, so that only differing options are
/// set.
#[derive(Debug)]
pub struct SocketPreparer {
    fresh_v4: SocketOptions,
    fresh_v6: Option<SocketOptions>,
}

impl SocketPreparer {
    /// Reads the options of a fresh socket of each family; a host without IPv6 has none of that family.
    ///
    /// # Errors
    /// The kernel's error from making or reading a socket.
    pub fn new() -> Result<Self, RepairError> {
        let v4 = stream_socket(false, false).at_step("socket")?;
        let fresh_v6 = match stream_socket(true, false) {
            Ok(fd) => Some(SocketOptions::read(fd.as_fd(), true)?),
            Err(_) => None,
        };
        Ok(Self {
            fresh_v4: SocketOptions::read(v4.as_fd(), false)?,
            fresh_v6,
        })
    }

    /// Returns the options of a fresh socket.
    pub(super) fn fresh_options(&self, v6: bool) -> &SocketOptions {
        match (v6, &self.fresh_v6) {
            (true, Some(v6)) => v6,
            _ => &self.fresh_v4,
        }
    }

    /// Makes a socket for the connection: in repair mode, with its options, bound. Sends nothing.
    ///
    /// # Errors
    /// [`RepairError::Unmovable`] when this host lacks a device or congestion control; otherwise the kernel's error.
    pub fn prepare(&self, fixed: &TcpStaticState) -> Result<PreparedSocket, RepairError> {
        // The blocking mode is set at creation: a restored program may share the descriptor and use it at once, and
        // changing the mode later would be too late.
        let fd = stream_socket(fixed.v6_socket, fixed.options.nonblocking).at_step("socket")?;
        let socket = fd.as_fd();
        // Repair mode comes before bind, so that bind succeeds beside a listener of the same address.
        set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON).at_step("TCP_REPAIR")?;
        fixed
            .options
            .apply(socket, self.fresh_options(fixed.v6_socket))?;
        if fixed.options.has_keepalive() {
            // Repair mode stops neither the probes of a connected socket nor its keepalive timeout. `settle` sets the
            // option.
            set_int(socket, SOL_SOCKET, libc::SO_KEEPALIVE, 0).at_step("SO_KEEPALIVE")?;
        }
        set_segment_size(socket, fixed)?;
        // A socket that never measured a round trip waits 3 s for its first retransmission. No option sets the measured
        // value, but this one caps the wait. `settle` restores the cap. Kernels before 6.15 do not have the option.
        let _ = set_int(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, FIRST_TIMEOUT_CAP_MS);
        bind_local(socket, fixed)?;
        set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, SEND_QUEUE)
            .at_step("TCP_REPAIR_QUEUE")?;
        Ok(PreparedSocket { fd })
    }
}

/// Sets the segment size. `TCP_REPAIR_OPTIONS` sets the peer's MSS but not the segment size, which `connect` computes
/// (from 536 without another value). The kernel accepts 88 to 32767 here.
pub(super) fn set_segment_size(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
) -> Result<(), RepairError> {
    let segment = i32::from(fixed.segment_size).clamp(88, 32_767);
    set_int(socket, IPPROTO_TCP, libc::TCP_MAXSEG, segment).at_step("TCP_MAXSEG")
}

/// Does the same as [`SocketPreparer::prepare`] for one socket.
///
/// # Errors
/// As [`SocketPreparer::prepare`].
pub fn prepare(fixed: &TcpStaticState) -> Result<PreparedSocket, RepairError> {
    SocketPreparer::new()?.prepare(fixed)
}

/// Binds the socket to its local address. A connection that began at another host's address keeps that
/// address, which this host does not have; routing lets only a transparent socket send from it.
fn bind_local(socket: BorrowedFd<'_>, fixed: &TcpStaticState) -> Result<(), RepairError> {
    let address = RawAddress::for_family(fixed.local, fixed.v6_socket);
    let transparent =
        || set_int(socket, IPPROTO_IP, libc::IP_TRANSPARENT, 1).at_step("IP_TRANSPARENT");
    if fixed.options.free_bind {
        set_int(socket, IPPROTO_IP, libc::IP_FREEBIND, 1).at_step("IP_FREEBIND")?;
        // With IP_FREEBIND, bind accepts any address, even one that routing would not send from.
        if !holdfast_sys::net::is_local(fixed.local.ip()).unwrap_or(true) {
            transparent()?;
        }
    }
    match bind(socket, &address) {
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
            transparent()?;
            map_bind_error(bind(socket, &address), fixed.local)
        }
        outcome => map_bind_error(outcome, fixed.local),
    }
}

fn stream_socket(v6: bool, nonblocking: bool) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let mode = if nonblocking { libc::SOCK_NONBLOCK } else { 0 };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | mode;
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(family, kind, libc::IPPROTO_TCP) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Restores the connection in a prepared socket; repair mode stays on and nothing is sent. The service address must be
/// configured and there must be a route to the peer. If [`super::injected_peer_packet`] returns a packet, the packet
/// must be delivered to this socket next, before [`activate`].
///
/// # Errors
/// The kernel's error; the socket is then closed, silently.
pub fn restore(
    prepared: PreparedSocket,
    fixed: &TcpStaticState,
    state: &TcpDynamicState,
) -> Result<RestoredSocket, RepairError> {
    let fd = prepared.fd;
    let socket = fd.as_fd();
    let (sent, _) = state.outgoing_parts()?;
    if fixed.timestamps {
        // The kernel cleared or set the low bit of the value that it returned, so the true value may be one higher, and
        // the peer may have seen it. Adding two is certainly enough, and keeps the low bit (the unit).
        let clock = state.timestamp.wrapping_add(2) as i32;
        set_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP, clock).at_step("TCP_TIMESTAMP")?;
    }
    let first_unread = state
        .received_data_end()
        .wrapping_sub(state.unread.len() as u32);
    set_queue_seq(socket, state.first_outgoing())?;
    select_queue(socket, RECEIVE_QUEUE)?;
    set_queue_seq(socket, first_unread)?;
    connect(
        socket,
        &RawAddress::for_family(fixed.remote, fixed.v6_socket),
    )
    .at_step("connect")?;
    set_tcp_options(socket, fixed, state.mss)?;
    write_queue(socket, &state.unread, libc::SO_RCVBUFFORCE, &fixed.options)?;
    set_window(socket, state)?;
    let fin = state.has_sent_fin() && state.state != TcpState::LastAck;
    if fin || !sent.is_empty() {
        select_queue(socket, SEND_QUEUE)?;
        write_queue(socket, sent, libc::SO_SNDBUFFORCE, &fixed.options)?;
    }
    if fin {
        shut_write(socket)?;
    }
    Ok(RestoredSocket { fd })
}

fn select_queue(socket: BorrowedFd<'_>, queue: i32) -> Result<(), RepairError> {
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, queue).at_step("TCP_REPAIR_QUEUE")
}

fn set_queue_seq(socket: BorrowedFd<'_>, sequence: u32) -> Result<(), RepairError> {
    set_int(socket, IPPROTO_TCP, libc::TCP_QUEUE_SEQ, sequence as i32).at_step("TCP_QUEUE_SEQ")
}

/// Shuts the sending direction; in repair mode the kernel queues the FIN as sent, without sending it.
fn shut_write(socket: BorrowedFd<'_>) -> Result<(), RepairError> {
    // SAFETY: no pointers are passed.
    check(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_WR) }).at_step("shutdown")
}

/// Sets `TCP_REPAIR_OPTIONS`: pairs of option kind (RFC 9293 section 3.1, RFC 7323, RFC 2018) and value.
fn set_tcp_options(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
    mss: u16,
) -> Result<(), RepairError> {
    let mut raw = [0u8; 32];
    let mut length = 0;
    let mut add = |kind: u32, value: u32| {
        raw[length..length + 4].copy_from_slice(&kind.to_ne_bytes());
        raw[length + 4..length + 8].copy_from_slice(&value.to_ne_bytes());
        length += 8;
    };
    add(2, u32::from(mss));
    if let Some((send, receive)) = fixed.window_scale {
        add(3, u32::from(send) | u32::from(receive) << 16);
    }
    if fixed.sack {
        add(4, 0);
    }
    if fixed.timestamps {
        add(8, 0);
    }
    set_bytes(
        socket,
        IPPROTO_TCP,
        libc::TCP_REPAIR_OPTIONS,
        &raw[..length],
    )
    .at_step("TCP_REPAIR_OPTIONS")
}

fn set_window(socket: BorrowedFd<'_>, state: &TcpDynamicState) -> Result<(), RepairError> {
    let window = &state.window;
    let received_end = state.received_data_end();
    let mut rcv_wup = state.rcv_nxt.wrapping_sub(window.rcv_wup_back);
    let mut rcv_wnd = window.rcv_wnd;
    if state.state.has_received_fin() && rcv_wup == state.rcv_nxt {
        // The FIN was acknowledged, but this socket has not received it yet; the right window edge stays.
        rcv_wup = received_end;
        rcv_wnd = rcv_wnd.saturating_add(1);
    }
    let words = [
        state.rcv_nxt.wrapping_sub(window.snd_wl1_back),
        window.snd_wnd,
        window.max_window,
        rcv_wnd,
        rcv_wup,
    ];
    let mut raw = [0u8; 20];
    for (slot, word) in raw.chunks_exact_mut(4).zip(words) {
        slot.copy_from_slice(&word.to_ne_bytes());
    }
    set_bytes(socket, IPPROTO_TCP, TCP_REPAIR_WINDOW, &raw).at_step("TCP_REPAIR_WINDOW")
}

/// Writes `bytes` to the selected queue (or sends them, outside repair mode), and enlarges the buffer if necessary.
fn write_queue(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    buffer_option: i32,
    options: &SocketOptions,
) -> Result<(), RepairError> {
    let mut rest = bytes;
    let mut size = bytes.len();
    let mut enlarged = false;
    while !rest.is_empty() {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `rest` is readable for its length and outlives the call.
        let outcome =
            unsafe { libc::send(socket.as_raw_fd(), rest.as_ptr().cast(), rest.len(), flags) };
        match check_length(outcome) {
            Ok(count) => rest = &rest[count..],
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::ENOMEM) if size < 1 << 30 => {
                    size = (size * 2).max(65_536);
                    let _ = set_int(socket, SOL_SOCKET, buffer_option, size as i32);
                    enlarged = true;
                }
                Some(libc::EINTR) => {}
                _ => return Err(error).at_step("send"),
            },
        }
    }
    if enlarged {
        options.apply_buffer_lock(socket)?;
    }
    Ok(())
}

/// Condition under which leaving repair mode sends a window probe, which the peer answers with an acknowledgement of
/// its present state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WindowProbe {
    /// Never. Right if every packet of the freeze was held and is delivered, and the connection stays for some seconds:
    /// windows are restored exactly, so there is nothing to learn.
    #[default]
    Never,
    /// If the peer has not acknowledged everything that was sent. Its acknowledgement may have been lost before the
    /// freeze, and the new socket would notice only after its first timeout, 1 s.
    IfUnacknowledged,
    /// Windows are probed in any case. Right for a freeze in which packets may have been lost: after a lost window update the connection would
    /// otherwise wait until a timer expires.
    Always,
}

/// Resumes the connection: repair mode off, then unsent data and FIN are sent. If the peer has acknowledged nothing
/// since the connection's last move, its first segment is retransmitted at once: the first timeout of a new socket is
/// 1 s, and would never expire if the connection moved again sooner each time. [`super::set_deferred_options_and_timeout`]
/// sets the options that could not be set before.
///
/// # Errors
/// The kernel's error.
pub fn activate(
    restored: RestoredSocket,
    fixed: &TcpStaticState,
    state: &TcpDynamicState,
    probe: WindowProbe,
) -> Result<OwnedFd, RepairError> {
    activate_from(restored, fixed, state, probe, 0)
}

/// Does the same as [`activate`], but for the first `pushed` bytes of the unsent part, which the socket already has.
pub(super) fn activate_from(
    restored: RestoredSocket,
    fixed: &TcpStaticState,
    state: &TcpDynamicState,
    probe: WindowProbe,
    pushed: usize,
) -> Result<OwnedFd, RepairError> {
    let socket = restored.fd.as_fd();
    let (_, unsent) = state.outgoing_parts()?;
    let unsent = unsent.get(pushed..).unwrap_or_default();
    if state.state == TcpState::LastAck && state.has_sent_fin() {
        select_queue(socket, SEND_QUEUE)?;
        shut_write(socket)?;
    }
    let sends_probe = match probe {
        WindowProbe::Never => false,
        WindowProbe::IfUnacknowledged => state.has_unacknowledged(),
        WindowProbe::Always => true,
    };
    // A zero round-trip time shows that no acknowledgement has arrived: the first one measures it. The loopback device
    // loses nothing.
    let is_unanswered = state.has_unacknowledged() && state.congestion.srtt_us == 0;
    let retransmission = match is_unanswered && !fixed.remote.ip().is_loopback() {
        true => first_retransmission(socket, fixed, state)?,
        false => None,
    };
    let mode = match sends_probe && retransmission.is_none() {
        false => REPAIR_OFF_QUIET,
        true => REPAIR_OFF,
    };
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, mode).at_step("TCP_REPAIR")?;
    if let Some(packet) = retransmission {
        // If the packet cannot be sent, the socket retransmits after its timeout.
        let _ = holdfast_sys::packet::send(&packet);
    }
    write_queue(socket, unsent, libc::SO_SNDBUFFORCE, &fixed.options)?;
    if state.fin_unsent {
        shut_write(socket)?;
    }
    Ok(restored.fd)
}
