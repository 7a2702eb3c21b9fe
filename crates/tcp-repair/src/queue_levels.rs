//! Queue lengths and congestion control of live and restored sockets.

use super::error::{RepairError, StepContext};
use holdfast_sys::sockopt::{ioctl_int, set_bytes};
use holdfast_sys::tcp_info::TcpInfo;
use libc::IPPROTO_TCP;
use std::os::fd::BorrowedFd;

/// Request for the number of bytes in the receive queue (`linux/sockios.h`).
const SIOCINQ: libc::c_ulong = 0x541B;
/// Request for the number of bytes in the send queue.
const SIOCOUTQ: libc::c_ulong = 0x5411;
/// Request for the number of bytes in the send queue that were never sent.
const SIOCOUTQNSD: libc::c_ulong = 0x894B;

/// Fill levels of a connection's queues, and the drain rate of the send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLevels {
    /// Bytes never sent.
    pub unsent: u32,
    /// Bytes sent and not acknowledged.
    pub unacknowledged: u32,
    /// Bytes received and not read.
    pub unread: u32,
    /// Delivery rate in bytes per second, as the kernel last measured; 0 when unknown.
    pub delivery_rate: u64,
    /// Smoothed round-trip time, microseconds; 0 when unknown.
    pub srtt_us: u32,
}

/// Reads the queues of a live connection.
///
/// # Errors
/// The kernel's error.
pub fn queue_levels(socket: BorrowedFd<'_>) -> Result<QueueLevels, RepairError> {
    let size = |request| ioctl_int(socket, request).map(|bytes| u32::try_from(bytes).unwrap_or(0));
    let outgoing = size(SIOCOUTQ).at_step("SIOCOUTQ")?;
    let unsent = size(SIOCOUTQNSD).at_step("SIOCOUTQNSD")?;
    let info = TcpInfo::read(socket).at_step("TCP_INFO")?;
    Ok(QueueLevels {
        unsent,
        unacknowledged: outgoing.saturating_sub(unsent),
        unread: size(SIOCINQ).at_step("SIOCINQ")?,
        delivery_rate: info.delivery_rate,
        srtt_us: info.rtt_us,
    })
}

/// Sets the congestion control by name (at most 15 bytes).
///
/// # Errors
/// The kernel lacks that algorithm or does not allow it.
pub fn set_congestion_control(socket: BorrowedFd<'_>, name: &str) -> Result<(), RepairError> {
    set_bytes(socket, IPPROTO_TCP, libc::TCP_CONGESTION, name.as_bytes()).at_step("TCP_CONGESTION")
}
