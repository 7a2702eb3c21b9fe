//! Sockets that an earlier daemon restored, and perhaps activated before it died.

use super::dynamic_state::TcpDynamicState;
use super::error::{RepairError, StepContext};
use super::restore::{RestoredSocket, WindowProbe, activate_from};
use super::static_state::TcpStaticState;
use holdfast_sys::sockopt::ioctl_int;
use holdfast_sys::tcp_info::TcpInfo;
use std::os::fd::{AsFd, OwnedFd};

/// Bytes in the send queue (`linux/sockios.h`).
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// Does the same as [`super::activate`] for a socket that may have been activated already, in whole or in part: pushes
/// only data that was not pushed. May be repeated.
///
/// # Errors
/// The kernel's error.
pub fn activate_again(
    socket: OwnedFd,
    fixed: &TcpStaticState,
    state: &TcpDynamicState,
) -> Result<OwnedFd, RepairError> {
    let (sent, unsent) = state.outgoing_parts()?;
    let queued = ioctl_int(socket.as_fd(), SIOCOUTQ).at_step("SIOCOUTQ")?;
    let acked = TcpInfo::read(socket.as_fd())
        .at_step("TCP_INFO")?
        .bytes_acked;
    // Since the restore the socket has received `sent`, then the pushed bytes; acknowledged bytes left the queue.
    let ever_queued = u64::try_from(queued).unwrap_or(0) + acked;
    let pushed = ever_queued
        .saturating_sub(sent.len() as u64)
        .min(unsent.len() as u64);
    let restored = RestoredSocket { fd: socket };
    // The packets held in the freeze were lost with the earlier daemon.
    activate_from(restored, fixed, state, WindowProbe::Always, pushed as usize)
}
