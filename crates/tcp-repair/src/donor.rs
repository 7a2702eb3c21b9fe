//! The donor's socket after the freeze: abandoned, or resumed.

use super::error::{RepairError, StepContext};
use super::static_state::TcpStaticState;
use super::{REPAIR_OFF_QUIET, REPAIR_ON};
use holdfast_sys::address::disconnect;
use holdfast_sys::sockopt::{get_int, set_int};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::BorrowedFd;

/// Closes a socket at the donor after its connection moved to another host: nothing is sent, and the address pair is
/// free at once, even while a program keeps a descriptor (the socket reads as closed).
///
/// # Errors
/// The kernel's error.
pub fn abandon(socket: BorrowedFd<'_>) -> Result<(), RepairError> {
    // In repair mode a disconnect is silent; otherwise it would send a reset to the peer.
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON).at_step("TCP_REPAIR")?;
    disconnect(socket).at_step("disconnect")
}

/// Resumes a frozen socket at the donor after a failed handoff: the connection continues, and unsent data is pushed at
/// once.
///
/// # Errors
/// The kernel's error.
pub fn resume(socket: BorrowedFd<'_>, fixed: &TcpStaticState) -> Result<(), RepairError> {
    leave_repair(socket, fixed)?;
    let value = |name| fixed.options.int(IPPROTO_TCP, name).unwrap_or(0);
    push_queued(socket, value(libc::TCP_CORK), value(libc::TCP_NODELAY))
}

/// Does the same as [`resume`] for a socket whose static state is unknown; its `SO_REUSEADDR` is lost.
///
/// # Errors
/// The kernel's error.
pub fn resume_without_state(socket: BorrowedFd<'_>) -> Result<(), RepairError> {
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF_QUIET).at_step("TCP_REPAIR")?;
    let value = |name| get_int(socket, IPPROTO_TCP, name);
    let cork = value(libc::TCP_CORK).at_step("TCP_CORK")?;
    push_queued(
        socket,
        cork,
        value(libc::TCP_NODELAY).at_step("TCP_NODELAY")?,
    )
}

/// Pushes queued data by setting TCP_NODELAY. A corked socket is left alone: the program will push.
fn push_queued(socket: BorrowedFd<'_>, cork: i32, nodelay: i32) -> Result<(), RepairError> {
    if cork != 0 {
        return Ok(());
    }
    set_int(socket, IPPROTO_TCP, libc::TCP_NODELAY, 1).at_step("TCP_NODELAY")?;
    if nodelay == 0 {
        set_int(socket, IPPROTO_TCP, libc::TCP_NODELAY, 0).at_step("TCP_NODELAY")?;
    }
    Ok(())
}

/// Leaves repair mode at the donor, and restores the option that leaving clears.
pub(super) fn leave_repair(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
) -> Result<(), RepairError> {
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF_QUIET).at_step("TCP_REPAIR")?;
    if fixed.options.reuse_address {
        set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, 1).at_step("SO_REUSEADDR")?;
    }
    Ok(())
}

/// Advances the TCP clock of one connection by `ticks` (its unit: milliseconds or microseconds; an even number). For
/// tests: on one machine all namespaces share a clock, and this function makes the connections of one node look as if
/// its clock ran ahead of the others'. The rest of this module works with any host clock, because `TCP_TIMESTAMP` is
/// read and set as the connection's own value.
///
/// # Errors
/// The kernel's error.
pub fn shift_timestamp_clock(socket: BorrowedFd<'_>, ticks: u32) -> Result<(), RepairError> {
    let reuse = get_int(socket, SOL_SOCKET, libc::SO_REUSEADDR).at_step("SO_REUSEADDR")?;
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON).at_step("TCP_REPAIR")?;
    let now = get_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP).at_step("TCP_TIMESTAMP")?;
    let ahead = (now as u32).wrapping_add(ticks & !1) as i32;
    let outcome = set_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP, ahead).at_step("TCP_TIMESTAMP");
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF_QUIET).at_step("TCP_REPAIR")?;
    set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, reuse).at_step("SO_REUSEADDR")?;
    outcome
}
