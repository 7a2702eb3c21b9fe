//! The part of a connection's state that changes with every segment, extracted in the freeze.

use super::error::{RepairError, StepContext, UnmovableReason};
use super::static_state::{TcpStaticState, poll_entry, poll_now};
use super::{RECEIVE_QUEUE, REPAIR_ON, SEND_QUEUE, TCP_REPAIR_WINDOW};
use holdfast_sys::sockopt::{check_length, get_bytes, get_int, ioctl_int, set_int};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use libc::IPPROTO_TCP;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Request for the number of unread bytes in the receive queue (`linux/sockios.h`; also `FIONREAD`).
const SIOCINQ: libc::c_ulong = 0x541B;
/// Request for the number of unacknowledged bytes in the send queue (also `TIOCOUTQ`).
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// Sequence numbers, queues, windows and clock of a frozen connection. Its postcard encoding takes under 80 bytes when
/// the queues are empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpDynamicState {
    /// State at the freeze.
    pub state: TcpState,
    /// Sequence number of the next byte that the program writes; an own FIN is counted once queued.
    pub write_seq: u32,
    /// Next sequence number expected from the peer; a received FIN is counted.
    pub rcv_nxt: u32,
    /// Largest segment that the peer accepts, from its MSS option (options not deducted; RFC 9293 section 3.7.1).
    pub mss: u16,
    /// TCP clock of the connection (the next TSval), rounded as the kernel reports it: the low bit says if the clock
    /// counts microseconds (set) or milliseconds.
    pub timestamp: u32,
    /// Send and receive windows.
    pub window: TcpRepairWindow,
    /// Congestion state.
    pub congestion: CongestionState,
    /// True if ECN was negotiated (RFC 3168). Repair mode cannot restore ECN: the acceptor's socket neither marks its
    /// packets nor echoes marks. The field records the loss, and allows restoring ECN by another way.
    pub ecn: bool,
    /// True if an own FIN is queued but was not sent.
    pub fin_unsent: bool,
    /// Data received in order and not read by the program.
    #[serde(with = "serde_bytes")]
    pub unread: Vec<u8>,
    /// Data written by the program and not acknowledged by the peer: first the sent bytes, then the unsent ones.
    #[serde(with = "serde_bytes")]
    pub outgoing: Vec<u8>,
    /// Number of bytes at the end of `outgoing` that were never sent.
    pub unsent: u32,
}

/// `struct tcp_repair_window` (`linux/tcp.h`), with sequence numbers relative to `rcv_nxt`, which makes their encoding
/// short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpRepairWindow {
    /// `rcv_nxt` minus the sequence number of the segment that last updated the peer's window.
    pub snd_wl1_back: u32,
    /// The peer's receive window, bytes.
    pub snd_wnd: u32,
    /// Largest window that the peer has advertised, bytes.
    pub max_window: u32,
    /// Own receive window as last advertised, bytes.
    pub rcv_wnd: u32,
    /// `rcv_nxt` minus its value at that advertisement.
    pub rcv_wup_back: u32,
}

/// The sender's knowledge of the path (`TCP_INFO`); the kernel has no socket option to set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CongestionState {
    /// Congestion window, segments.
    pub window: u32,
    /// Slow start threshold, segments; `None` if none is set.
    pub threshold: Option<u32>,
    /// Smoothed round-trip time, microseconds.
    pub srtt_us: u32,
    /// Mean deviation of the round-trip time, microseconds.
    pub rttvar_us: u32,
    /// Smallest round-trip time, microseconds.
    pub min_rtt_us: u32,
    /// Delivery rate, bytes per second.
    pub delivery_rate: u64,
}

/// The kernel's `TCP_INFINITE_SSTHRESH`.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

impl Default for TcpDynamicState {
    fn default() -> Self {
        Self {
            state: TcpState::Close,
            write_seq: 0,
            rcv_nxt: 0,
            mss: 0,
            timestamp: 0,
            window: TcpRepairWindow::default(),
            congestion: CongestionState::default(),
            ecn: false,
            fin_unsent: false,
            unread: Vec::new(),
            outgoing: Vec::new(),
            unsent: 0,
        }
    }
}

impl TcpDynamicState {
    /// Splits `outgoing` into the bytes sent and not acknowledged, and the bytes never sent.
    ///
    /// # Errors
    /// [`RepairError::Inconsistent`] if `unsent` exceeds the length of `outgoing`.
    pub fn outgoing_parts(&self) -> Result<(&[u8], &[u8]), RepairError> {
        self.outgoing
            .len()
            .checked_sub(self.unsent as usize)
            .map(|sent| self.outgoing.split_at(sent))
            .ok_or(RepairError::Inconsistent("more unsent bytes than queued"))
    }

    /// Returns the sequence number of the first byte of `outgoing` (of the FIN, if the queue is empty and a FIN was
    /// written).
    #[must_use]
    pub fn first_outgoing(&self) -> u32 {
        self.write_seq
            .wrapping_sub(u32::from(self.state.has_sent_fin()))
            .wrapping_sub(self.outgoing.len() as u32)
    }

    /// Returns the sequence number after the last received byte, not counting a FIN.
    #[must_use]
    pub fn received_data_end(&self) -> u32 {
        self.rcv_nxt
            .wrapping_sub(u32::from(self.state.has_received_fin()))
    }

    /// Advances the clock, in its unit; the low bit is kept.
    pub fn advance_clock(&mut self, elapsed_us: u64) {
        self.timestamp = self.clock_after(elapsed_us);
    }

    /// Returns the clock `elapsed_us` after it was read, rounded up to an even number of its ticks.
    pub(super) fn clock_after(&self, elapsed_us: u64) -> u32 {
        let ticks = match self.timestamp & 1 {
            1 => elapsed_us,
            _ => elapsed_us / 1000,
        };
        self.timestamp
            .wrapping_add((ticks as u32).wrapping_add(1) & !1)
    }

    /// Returns true if an own FIN was sent (acknowledged or not).
    #[must_use]
    pub fn has_sent_fin(&self) -> bool {
        self.state.has_sent_fin() && !self.fin_unsent
    }

    /// Returns true if the peer has not acknowledged everything that was sent.
    #[must_use]
    pub fn has_unacknowledged(&self) -> bool {
        let fin = self.has_sent_fin() && self.state != TcpState::FinWait2;
        fin || self.outgoing.len() > self.unsent as usize
    }
}

/// Freezes the socket (repair mode on) and extracts its dynamic state. The flow's ingress and egress must be shut, and
/// the program must not use the socket any more.
///
/// # Errors
/// After any error the socket has been returned to the program ([`super::resume`]) and nothing is lost.
pub fn extract(fd: BorrowedFd<'_>, fixed: &TcpStaticState) -> Result<TcpDynamicState, RepairError> {
    let mut state = TcpDynamicState::default();
    extract_into(fd, fixed, &mut state)?;
    Ok(state)
}

/// Does the same as [`extract`], into a value that the caller reuses for its buffers.
///
/// # Errors
/// As [`extract`].
pub fn extract_into(
    fd: BorrowedFd<'_>,
    fixed: &TcpStaticState,
    state: &mut TcpDynamicState,
) -> Result<(), RepairError> {
    let mut entry = [poll_entry(fd)];
    poll_now(&mut entry)?;
    extract_polled(fd, fixed, state, entry[0].revents)
}

/// Does the same as [`extract_into`], after a `poll` for urgent data. With urgent data present, the receive queue's
/// length does not count the data after it, so the socket is left alone.
pub(super) fn extract_polled(
    fd: BorrowedFd<'_>,
    fixed: &TcpStaticState,
    state: &mut TcpDynamicState,
    events: libc::c_short,
) -> Result<(), RepairError> {
    if events & libc::POLLPRI != 0 {
        return Err(UnmovableReason::UrgentData.into());
    }
    set_int(fd, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON).at_step("TCP_REPAIR")?;
    let outcome = extract_state(fd, fixed, state);
    if outcome.is_err() {
        // The first error is more specific. If leaving repair mode fails too, the socket is lost in any case.
        let _ = super::donor::leave_repair(fd, fixed);
    }
    outcome
}

/// Extracts the state. The order matters: while the send queue is the selected repair queue, the kernel's own pushes
/// mark unsent data as sent without transmitting it. So `TCP_INFO` is read first, and the receive queue is selected
/// last.
fn extract_state(
    fd: BorrowedFd<'_>,
    fixed: &TcpStaticState,
    state: &mut TcpDynamicState,
) -> Result<(), RepairError> {
    let info = TcpInfo::read(fd).at_step("TCP_INFO")?;
    if matches!(info.state, TcpState::Close | TcpState::TimeWait) {
        return Err(UnmovableReason::Closed.into());
    }
    state.state = info.state;
    state.ecn = fixed.ecn;
    state.congestion = congestion(&info);
    extract_send_queue(fd, &info, state)?;
    set_int(fd, IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, RECEIVE_QUEUE).at_step("TCP_REPAIR_QUEUE")?;
    state.rcv_nxt = get_int(fd, IPPROTO_TCP, libc::TCP_QUEUE_SEQ).at_step("TCP_QUEUE_SEQ")? as u32;
    let unread = ioctl_int(fd, SIOCINQ).at_step("SIOCINQ")?;
    peek_queue(fd, unread, &mut state.unread)?;
    state.window = extract_window(fd, state.rcv_nxt)?;
    let mss = get_int(fd, IPPROTO_TCP, libc::TCP_MAXSEG).at_step("TCP_MAXSEG")?;
    state.mss = u16::try_from(mss).map_err(|_| RepairError::Inconsistent("MSS above 65535"))?;
    state.timestamp = if fixed.timestamps {
        get_int(fd, IPPROTO_TCP, libc::TCP_TIMESTAMP).at_step("TCP_TIMESTAMP")? as u32
    } else {
        0
    };
    Ok(())
}

fn congestion(info: &TcpInfo) -> CongestionState {
    CongestionState {
        window: info.snd_cwnd,
        threshold: (info.snd_ssthresh != NO_THRESHOLD).then_some(info.snd_ssthresh),
        srtt_us: info.rtt_us,
        rttvar_us: info.rttvar_us,
        min_rtt_us: info.min_rtt_us,
        delivery_rate: info.delivery_rate,
    }
}

fn extract_send_queue(
    fd: BorrowedFd<'_>,
    info: &TcpInfo,
    state: &mut TcpDynamicState,
) -> Result<(), RepairError> {
    set_int(fd, IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, SEND_QUEUE).at_step("TCP_REPAIR_QUEUE")?;
    state.write_seq =
        get_int(fd, IPPROTO_TCP, libc::TCP_QUEUE_SEQ).at_step("TCP_QUEUE_SEQ")? as u32;
    state.outgoing.clear();
    state.unsent = 0;
    state.fin_unsent = false;
    if info.unacked == 0 && info.notsent_bytes == 0 {
        return Ok(());
    }
    // Both counts include a FIN. The FIN is the last byte of the queue, so it is unsent if anything is.
    let queued = ioctl_int(fd, SIOCOUTQ).at_step("SIOCOUTQ")?;
    let fin = i32::from(state.state.has_sent_fin() && state.state != TcpState::FinWait2);
    state.fin_unsent = fin == 1 && info.notsent_bytes > 0;
    state.unsent = info.notsent_bytes - u32::from(state.fin_unsent);
    peek_queue(fd, queued - fin, &mut state.outgoing)
}

/// Returns the received and unread data if it has exactly `length` bytes; does not change the socket.
#[must_use]
pub fn peek_unread(fd: BorrowedFd<'_>, length: u32) -> Option<Vec<u8>> {
    // One more byte of buffer shows if there is more data.
    let mut bytes = vec![0; length as usize + 1];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: `bytes` is writable for its length and outlives the call.
    let outcome = unsafe {
        libc::recv(
            fd.as_raw_fd(),
            bytes.as_mut_ptr().cast(),
            bytes.len(),
            flags,
        )
    };
    let count = check_length(outcome).ok()?;
    bytes.pop();
    (count == bytes.len()).then_some(bytes)
}

/// Copies exactly `length` bytes of the selected queue.
fn peek_queue(fd: BorrowedFd<'_>, length: i32, into: &mut Vec<u8>) -> Result<(), RepairError> {
    into.clear();
    let length = usize::try_from(length).unwrap_or(0);
    if length == 0 {
        return Ok(());
    }
    into.resize(length, 0);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: `into` is writable for `length` bytes and outlives the call.
    let outcome = unsafe { libc::recv(fd.as_raw_fd(), into.as_mut_ptr().cast(), length, flags) };
    if check_length(outcome).at_step("recv MSG_PEEK")? == length {
        Ok(())
    } else {
        Err(RepairError::Inconsistent(
            "a queue holds fewer bytes than the kernel reported (urgent data?)",
        ))
    }
}

fn extract_window(fd: BorrowedFd<'_>, rcv_nxt: u32) -> Result<TcpRepairWindow, RepairError> {
    let mut raw = [0u8; 20];
    let length =
        get_bytes(fd, IPPROTO_TCP, TCP_REPAIR_WINDOW, &mut raw).at_step("TCP_REPAIR_WINDOW")?;
    if length != raw.len() {
        return Err(RepairError::Inconsistent(
            "TCP_REPAIR_WINDOW is not 20 bytes",
        ));
    }
    let word = |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    Ok(TcpRepairWindow {
        snd_wl1_back: rcv_nxt.wrapping_sub(word(0)),
        snd_wnd: word(4),
        max_window: word(8),
        rcv_wnd: word(12),
        rcv_wup_back: rcv_nxt.wrapping_sub(word(16)),
    })
}
