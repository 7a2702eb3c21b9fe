//! Completion of a moved connection's socket after the freeze.

use super::error::{RepairError, StepContext};
use super::restore::FIRST_TIMEOUT_CAP_MS;
use super::static_state::TcpStaticState;
use holdfast_sys::sockopt::{TCP_RTO_MAX_MS, check, set_int};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Result of [`set_deferred_options_and_timeout`]: done, or to be called again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeferredOptionsOutcome {
    /// All options have their original values.
    Done,
    /// No round trip was measured yet, so the cap on the retransmission timeout stays.
    TimeoutCapped,
}

/// Sets options that could not be set before [`super::activate`] and that nothing waits for: `SO_REUSEADDR` (which
/// repair mode changes), `SO_KEEPALIVE` (whose timer repair mode does not stop), `TCP_NOTSENT_LOWAT` (which would have
/// kept the queue from being filled), `SHUT_RD`, and, if the new socket has measured a round trip, the longest
/// retransmission timeout. Otherwise [`uncap_timeout`] sets the timeout later.
///
/// # Errors
/// The kernel's error.
pub fn set_deferred_options_and_timeout(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
) -> Result<DeferredOptionsOutcome, RepairError> {
    set_deferred_options(socket, fixed)?;
    uncap_timeout(socket, fixed, TimeoutUncapCondition::RoundTripMeasured)
}

/// Does the same as [`set_deferred_options_and_timeout`] but for the retransmission timeout.
///
/// # Errors
/// The kernel's error.
pub fn set_deferred_options(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
) -> Result<(), RepairError> {
    let reuse = i32::from(fixed.options.reuse_address);
    set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, reuse).at_step("SO_REUSEADDR")?;
    set_remaining_options(socket, fixed)
}

/// Does the same as [`set_deferred_options`] for a connection that left repair mode early ([`super::RestoredSocket::leave_repair`])
/// and has had `SO_REUSEADDR` since.
///
/// # Errors
/// The kernel's error.
pub fn set_deferred_options_of_early_restored(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
) -> Result<(), RepairError> {
    match fixed.options.reuse_address {
        true => set_remaining_options(socket, fixed),
        false => set_deferred_options(socket, fixed),
    }
}

fn set_remaining_options(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
) -> Result<(), RepairError> {
    let options = &fixed.options;
    if options.has_keepalive() {
        set_int(socket, SOL_SOCKET, libc::SO_KEEPALIVE, 1).at_step("SO_KEEPALIVE")?;
    }
    if options.notsent_lowat != 0 {
        let value = options.notsent_lowat;
        set_int(socket, IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, value)
            .at_step("TCP_NOTSENT_LOWAT")?;
    }
    if fixed.receive_shut {
        // SAFETY: no pointers are passed.
        check(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RD) }).at_step("shutdown")?;
    }
    Ok(())
}

impl TcpStaticState {
    /// Returns the longest retransmission timeout, in milliseconds, if it differs from the cap.
    pub fn longest_timeout_ms(&self) -> Option<i32> {
        let longest = self.options.int(IPPROTO_TCP, TCP_RTO_MAX_MS)?;
        (longest != FIRST_TIMEOUT_CAP_MS).then_some(longest)
    }
}

/// Time at which [`uncap_timeout`] restores the longest retransmission timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeoutUncapCondition {
    /// Once a round trip was measured: the timeout is then right without a cap.
    RoundTripMeasured,
    /// In any case, so that a silent connection does not keep the cap for ever.
    Always,
}

/// Restores a socket's original longest retransmission timeout.
///
/// # Errors
/// The kernel's error.
pub fn uncap_timeout(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
    condition: TimeoutUncapCondition,
) -> Result<DeferredOptionsOutcome, RepairError> {
    let Some(longest) = fixed.options.int(IPPROTO_TCP, TCP_RTO_MAX_MS) else {
        return Ok(DeferredOptionsOutcome::Done);
    };
    if condition == TimeoutUncapCondition::RoundTripMeasured {
        let info = TcpInfo::read(socket).at_step("TCP_INFO")?;
        if info.rtt_us == 0 && info.state != TcpState::Close {
            return Ok(DeferredOptionsOutcome::TimeoutCapped);
        }
    }
    set_int(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, longest).at_step("TCP_RTO_MAX_MS")?;
    Ok(DeferredOptionsOutcome::Done)
}
