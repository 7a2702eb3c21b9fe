//! Deferred options of sockets that have just arrived. The longest retransmission timeout is restored some time later
//! (see [`timeouts`]).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_sys::tcp_repair::{self, TcpStatic, Uncap};

use crate::dataplane::timeouts;

/// Time of the next restoration of timeouts.
#[derive(Default)]
pub struct Settling {
    at: Option<Duration>,
}

impl Settling {
    /// Sets the deferred options of an arrived socket. Closes the descriptor's copy at once, because the copy would
    /// delay a close by the program.
    pub fn settle(&mut self, now: Duration, socket: OwnedFd, fixed: &TcpStatic) {
        if let Err(error) = tcp_repair::settle_options(socket.as_fd(), fixed) {
            tracing::debug!(%error, "an option of a moved socket could not be set");
        }
        let Some(longest_ms) = fixed.longest_timeout_ms() else {
            return;
        };
        if timeouts::order(socket.as_fd(), longest_ms) {
            self.at.get_or_insert(now + timeouts::AFTER);
        } else {
            let _ = tcp_repair::uncap_timeout(socket.as_fd(), fixed, Uncap::Now);
        }
    }

    /// Returns the time of the next restoration.
    pub fn next_wake(&self) -> Option<Duration> {
        self.at
    }

    /// Restores due timeouts in a separate thread, because the work takes milliseconds and a handoff may be in its
    /// freeze.
    pub fn poll(&mut self, now: Duration) {
        if self.at.take_if(|at| *at <= now).is_some() {
            std::thread::spawn(timeouts::give_back);
        }
    }
}
