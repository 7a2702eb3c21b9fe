//! The donor's socket after the freeze: given up, or taken back.

use super::error::{At, RepairError};
use super::static_state::TcpStatic;
use super::{REPAIR_OFF_QUIET, REPAIR_ON};
use crate::address::disconnect;
use crate::sockopt::{get_int, set_int};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::BorrowedFd;

/// Ends a socket at the donor after its connection went to another host: nothing goes on the wire, and the address
/// pair is free at once, even while a program keeps a descriptor (it reads as closed).
///
/// # Errors
/// What the kernel refuses.
pub fn abandon(socket: BorrowedFd<'_>) -> Result<(), RepairError> {
    // In repair mode a disconnect is silent; otherwise it would reset the peer.
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON).at("TCP_REPAIR")?;
    disconnect(socket).at("disconnect")
}

/// Takes a frozen socket back at the donor after a failed handoff: it goes on, and unsent data is pushed at once.
///
/// # Errors
/// What the kernel refuses.
pub fn resume(socket: BorrowedFd<'_>, fixed: &TcpStatic) -> Result<(), RepairError> {
    leave_repair(socket, fixed)?;
    let value = |name| fixed.options.int(IPPROTO_TCP, name).unwrap_or(0);
    push(socket, value(libc::TCP_CORK), value(libc::TCP_NODELAY))
}

/// [`resume`] of a socket of which nothing is known but what it says itself. That it had `SO_REUSEADDR` is lost.
///
/// # Errors
/// What the kernel refuses.
pub fn wake(socket: BorrowedFd<'_>) -> Result<(), RepairError> {
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF_QUIET).at("TCP_REPAIR")?;
    let value = |name| get_int(socket, IPPROTO_TCP, name);
    let cork = value(libc::TCP_CORK).at("TCP_CORK")?;
    push(socket, cork, value(libc::TCP_NODELAY).at("TCP_NODELAY")?)
}

/// Setting TCP_NODELAY pushes what is queued. A corked socket is left alone: the program will push.
fn push(socket: BorrowedFd<'_>, cork: i32, nodelay: i32) -> Result<(), RepairError> {
    if cork != 0 {
        return Ok(());
    }
    set_int(socket, IPPROTO_TCP, libc::TCP_NODELAY, 1).at("TCP_NODELAY")?;
    if nodelay == 0 {
        set_int(socket, IPPROTO_TCP, libc::TCP_NODELAY, 0).at("TCP_NODELAY")?;
    }
    Ok(())
}

/// Repair mode off at the donor, and what that clears set again.
pub(super) fn leave_repair(socket: BorrowedFd<'_>, fixed: &TcpStatic) -> Result<(), RepairError> {
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF_QUIET).at("TCP_REPAIR")?;
    if fixed.options.reuse_address {
        set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, 1).at("SO_REUSEADDR")?;
    }
    Ok(())
}

/// Moves the TCP clock of one connection ahead by `ticks` (its unit: milliseconds, or microseconds where the
/// connection counts them; an even number). For tests: on one machine all namespaces share a clock, and this makes
/// the connections of one node look as if its clock ran ahead of the others'. Nothing else in this module needs to
/// know: `TCP_TIMESTAMP` is given and taken as the connection's own value, whatever a host's clock says.
///
/// # Errors
/// What the kernel refuses.
pub fn shift_timestamp_clock(socket: BorrowedFd<'_>, ticks: u32) -> Result<(), RepairError> {
    let reuse = get_int(socket, SOL_SOCKET, libc::SO_REUSEADDR).at("SO_REUSEADDR")?;
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON).at("TCP_REPAIR")?;
    let now = get_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP).at("TCP_TIMESTAMP")?;
    let ahead = (now as u32).wrapping_add(ticks & !1) as i32;
    let outcome = set_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP, ahead).at("TCP_TIMESTAMP");
    set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF_QUIET).at("TCP_REPAIR")?;
    set_int(socket, SOL_SOCKET, libc::SO_REUSEADDR, reuse).at("SO_REUSEADDR")?;
    outcome
}
