//! A restored socket whose connection continued at the donor: its state is removed again, and its clock kept right.

use super::error::{At, RepairError};
use super::restore::{PreparedSocket, Preparer, RestoredSocket, set_segment_size};
use super::static_state::TcpStatic;
use super::{REPAIR_OFF_QUIET, REPAIR_ON, SEND_QUEUE, TcpDynamic};
use crate::address::disconnect;
use crate::sockopt::{TCP_DELACK_MAX_US, TCP_RTO_MIN_US, get_int, set_int};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::AsFd;

/// Options set by [`Preparer::prepare`] that a disconnect resets, apart from the segment size.
const RESET: [i32; 3] = [libc::TCP_WINDOW_CLAMP, TCP_RTO_MIN_US, TCP_DELACK_MAX_US];

impl RestoredSocket {
    /// Takes the socket out of repair mode, like [`super::activate`] with nothing to send. The caller must keep packets
    /// from reaching and leaving the socket.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn awaken(&self) -> Result<(), RepairError> {
        self.set_repair(REPAIR_OFF_QUIET)?;
        // Leaving repair mode clears SO_REUSEADDR, without which a later listener could not bind to this address.
        // `settle` restores the original value.
        set_int(self.fd.as_fd(), SOL_SOCKET, libc::SO_REUSEADDR, 1).at("SO_REUSEADDR")
    }

    /// Undoes [`RestoredSocket::awaken`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn lull(&self) -> Result<(), RepairError> {
        self.set_repair(REPAIR_ON)
    }

    fn set_repair(&self, mode: i32) -> Result<(), RepairError> {
        set_int(self.fd.as_fd(), IPPROTO_TCP, libc::TCP_REPAIR, mode).at("TCP_REPAIR")
    }

    /// Removes the connection from the socket and returns it to its prepared state: the open file stays the same, so
    /// existing descriptors of it stay valid. Nothing is sent.
    ///
    /// # Errors
    /// The kernel's error; the socket is then closed, silently.
    pub fn take_back(
        self,
        fixed: &TcpStatic,
        preparer: &Preparer,
    ) -> Result<PreparedSocket, RepairError> {
        let socket = self.fd.as_fd();
        // Outside repair mode, a disconnect would send a reset to the peer.
        self.lull()?;
        disconnect(socket).at("disconnect")?;
        // In repair mode a disconnect leaves an error, which the program would read.
        get_int(socket, SOL_SOCKET, libc::SO_ERROR).at("SO_ERROR")?;
        let fresh = preparer.fresh(fixed.v6_socket);
        for name in RESET {
            let wanted = fixed.options.int(IPPROTO_TCP, name).unwrap_or(0);
            if wanted != 0 && Some(wanted) != fresh.int(IPPROTO_TCP, name) {
                set_int(socket, IPPROTO_TCP, name, wanted).at("setting a socket option")?;
            }
        }
        set_segment_size(socket, fixed)?;
        set_int(socket, IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, SEND_QUEUE).at("TCP_REPAIR_QUEUE")?;
        Ok(PreparedSocket::reclaim(self.fd))
    }

    /// Sets the TCP clock of a connection, in repair mode or not (`is_awake`), to the donor's value `elapsed_us` after
    /// `state` was extracted there. A slow message would make the clock late, and the peer drops segments whose
    /// timestamps go back (RFC 7323 section 5.3).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn keep_time(
        &self,
        fixed: &TcpStatic,
        state: &TcpDynamic,
        elapsed_us: u64,
        is_awake: bool,
    ) -> Result<(), RepairError> {
        if !fixed.timestamps {
            return Ok(());
        }
        // The kernel sets clocks in repair mode only.
        if is_awake {
            self.lull()?;
        }
        // Two ticks are added, as in `restore`.
        let clock = state.clock_after(elapsed_us).wrapping_add(2) as i32;
        set_int(self.fd.as_fd(), IPPROTO_TCP, libc::TCP_TIMESTAMP, clock).at("TCP_TIMESTAMP")?;
        match is_awake {
            true => self.awaken(),
            false => Ok(()),
        }
    }
}
