//! A restored socket whose connection continued at the donor: its state is removed again, and its clock kept right.

use super::error::{RepairError, StepContext};
use super::restore::{PreparedSocket, RestoredSocket, SocketPreparer, set_segment_size};
use super::static_state::TcpStaticState;
use super::{REPAIR_OFF_QUIET, REPAIR_ON, SEND_QUEUE, TcpDynamicState};
use holdfast_sys::address::disconnect;
use holdfast_sys::sockopt::{TCP_DELACK_MAX_US, TCP_RTO_MIN_US, get_int, set_int};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::AsFd;

/// Options set by [`SocketPreparer::prepare`] that a disconnect resets, apart from the segment size.
const RESET_BY_DISCONNECT: [i32; 3] = [libc::TCP_WINDOW_CLAMP, TCP_RTO_MIN_US, TCP_DELACK_MAX_US];

impl RestoredSocket {
    /// Takes the socket out of repair mode, like [`super::activate`] with nothing to send. The caller must keep packets
    /// from reaching and leaving the socket.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn leave_repair(&self) -> Result<(), RepairError> {
        self.set_repair(REPAIR_OFF_QUIET)?;
        // Leaving repair mode clears SO_REUSEADDR, without which a later listener could not bind to this address.
        // `settle` restores the original value.
        set_int(self.fd.as_fd(), SOL_SOCKET, libc::SO_REUSEADDR, 1).at_step("SO_REUSEADDR")
    }

    /// Undoes [`RestoredSocket::leave_repair`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn enter_repair(&self) -> Result<(), RepairError> {
        self.set_repair(REPAIR_ON)
    }

    fn set_repair(&self, mode: i32) -> Result<(), RepairError> {
        set_int(self.fd.as_fd(), IPPROTO_TCP, libc::TCP_REPAIR, mode).at_step("TCP_REPAIR")
    }

    /// Removes the connection from the socket and returns it to its prepared state: the open file stays the same, so
    /// existing descriptors of it stay valid. Nothing is sent.
    ///
    /// # Errors
    /// The kernel's error; the socket is then closed, silently.
    pub fn reset_to_prepared(
        self,
        fixed: &TcpStaticState,
        preparer: &SocketPreparer,
    ) -> Result<PreparedSocket, RepairError> {
        let socket = self.fd.as_fd();
        // Outside repair mode, a disconnect would send a reset to the peer.
        self.enter_repair()?;
        disconnect(socket).at_step("disconnect")?;
        // In repair mode a disconnect leaves an error, which the program would read.
        get_int(socket, SOL_SOCKET, libc::SO_ERROR).at_step("SO_ERROR")?;
        let fresh = preparer.fresh_options(fixed.v6_socket);
        for name in RESET_BY_DISCONNECT {
            let value = fixed.options.int(IPPROTO_TCP, name).unwrap_or(0);
            if value != 0 && Some(value) != fresh.int(IPPROTO_TCP, name) {
                set_int(socket, IPPROTO_TCP, name, value).at_step("setting a socket option")?;
            }
        }
        set_segment_size(socket, fixed)?;
        set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, SEND_QUEUE)
            .at_step("TCP_REPAIR_QUEUE")?;
        Ok(PreparedSocket::reclaim(self.fd))
    }

    /// Sets the TCP clock of a connection, in repair mode or not (`left_repair`), to the donor's value `elapsed_us` after
    /// `state` was extracted there. A slow message would make the clock late, and the peer drops segments whose
    /// timestamps go back (RFC 7323 section 5.3).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn sync_clock(
        &self,
        fixed: &TcpStaticState,
        state: &TcpDynamicState,
        elapsed_us: u64,
        left_repair: bool,
    ) -> Result<(), RepairError> {
        if !fixed.timestamps {
            return Ok(());
        }
        // The kernel sets clocks in repair mode only.
        if left_repair {
            self.enter_repair()?;
        }
        // Two ticks are added, as in `restore`.
        let clock = state.clock_after(elapsed_us).wrapping_add(2) as i32;
        set_int(self.fd.as_fd(), IPPROTO_TCP, libc::TCP_TIMESTAMP, clock)
            .at_step("TCP_TIMESTAMP")?;
        match left_repair {
            true => self.leave_repair(),
            false => Ok(()),
        }
    }
}
