//! A restored socket whose connection went on at the donor: the state it got is taken back, and the clock kept right.

use super::error::{At, RepairError};
use super::restore::{PreparedSocket, Preparer, RestoredSocket, set_segment_size};
use super::static_state::TcpStatic;
use super::{REPAIR_OFF_QUIET, REPAIR_ON, SEND_QUEUE, TcpDynamic};
use crate::address::disconnect;
use crate::sockopt::{TCP_DELACK_MAX_US, TCP_RTO_MIN_US, get_int, set_int};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::AsFd;

/// What a disconnect resets of all that [`Preparer::prepare`] has set, beside the segment size.
const RESET: [i32; 3] = [libc::TCP_WINDOW_CLAMP, TCP_RTO_MIN_US, TCP_DELACK_MAX_US];

impl RestoredSocket {
    /// Takes the socket out of repair mode, as [`super::activate`] does where nothing is to be sent. Whoever calls it sees to it that
    /// nothing comes to it, and nothing leaves.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn awaken(&self) -> Result<(), RepairError> {
        self.set_repair(REPAIR_OFF_QUIET)?;
        // Leaving repair mode clears it, and who listens at this address does so later: `settle` has what it was.
        set_int(self.fd.as_fd(), SOL_SOCKET, libc::SO_REUSEADDR, 1).at("SO_REUSEADDR")
    }

    /// Undoes [`RestoredSocket::awaken`].
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn lull(&self) -> Result<(), RepairError> {
        self.set_repair(REPAIR_ON)
    }

    fn set_repair(&self, mode: i32) -> Result<(), RepairError> {
        set_int(self.fd.as_fd(), IPPROTO_TCP, libc::TCP_REPAIR, mode).at("TCP_REPAIR")
    }

    /// Takes the connection from the socket, which is then as it was prepared: the same open file, so that who has a
    /// descriptor of it keeps it. Nothing goes on the wire.
    ///
    /// # Errors
    /// What the kernel refuses; the socket is then closed, silently.
    pub fn take_back(
        self,
        fixed: &TcpStatic,
        preparer: &Preparer,
    ) -> Result<PreparedSocket, RepairError> {
        let socket = self.fd.as_fd();
        // One that is awake would reset its peer.
        self.lull()?;
        disconnect(socket).at("disconnect")?;
        // In repair mode a disconnect leaves an error for the program to find.
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

    /// Sets the TCP clock of a connection, which may be awake, to what it is at the donor `elapsed_us` after `state` was taken there. A message
    /// that was long under way makes the clock late, and the peer drops segments whose timestamps go back (RFC 7323
    /// section 5.3).
    ///
    /// # Errors
    /// What the kernel refuses.
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
        // The kernel sets clocks in repair mode alone.
        if is_awake {
            self.lull()?;
        }
        // Two more, as in `restore`.
        let clock = state.clock_after(elapsed_us).wrapping_add(2) as i32;
        set_int(self.fd.as_fd(), IPPROTO_TCP, libc::TCP_TIMESTAMP, clock).at("TCP_TIMESTAMP")?;
        match is_awake {
            true => self.awaken(),
            false => Ok(()),
        }
    }
}
