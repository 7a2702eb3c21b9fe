//! Socket options of arrived connections that are set after the freeze. The longest retransmission timeout is restored some time later
//! (see [`retransmission_timeouts`]).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_tcp_repair::{TcpStaticState, TimeoutUncapCondition};

use crate::dataplane::retransmission_timeouts;

/// Sets the deferred options of sockets, and keeps the time of the next restoration of timeouts.
#[derive(Default)]
pub struct DeferredSocketOptions {
    restore_at: Option<Duration>,
}

impl DeferredSocketOptions {
    /// Sets the deferred options of an arrived socket. Closes the descriptor's copy at once, because the copy would
    /// delay a close by the program.
    pub fn apply(&mut self, now: Duration, socket: OwnedFd, static_state: &TcpStaticState) {
        if let Err(error) = holdfast_tcp_repair::set_deferred_options(socket.as_fd(), static_state)
        {
            tracing::debug!(%error, "cannot set an option of a moved socket");
        }
        let Some(longest_ms) = static_state.longest_timeout_ms() else {
            return;
        };
        if retransmission_timeouts::record(socket.as_fd(), longest_ms) {
            self.restore_at
                .get_or_insert(now + retransmission_timeouts::CAP_DURATION);
        } else {
            let _ = holdfast_tcp_repair::uncap_timeout(
                socket.as_fd(),
                static_state,
                TimeoutUncapCondition::Always,
            );
        }
    }

    /// Returns the time of the next restoration.
    pub fn next_wake(&self) -> Option<Duration> {
        self.restore_at
    }

    /// Restores due timeouts in a separate thread, because the work takes milliseconds and a handoff may be in its
    /// freeze.
    pub fn poll(&mut self, now: Duration) {
        if self.restore_at.take_if(|at| *at <= now).is_some() {
            std::thread::spawn(retransmission_timeouts::restore_recorded);
        }
    }
}
