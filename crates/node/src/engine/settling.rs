//! Sockets that have just arrived get the options that nothing waited for; their longest retransmission timeout some time later
//! (see [`timeouts`]).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_sys::tcp_repair::{self, TcpStatic, Uncap};

use crate::dataplane::timeouts;

/// When timeouts are to be given back.
#[derive(Default)]
pub struct Settling {
    at: Option<Duration>,
}

impl Settling {
    /// A socket arrived. Its copy is closed at once: it would hold up a close by the program.
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

    /// When there is something to do.
    pub fn next_wake(&self) -> Option<Duration> {
        self.at
    }

    /// Does what is due, by a thread of its own: it takes milliseconds, and a handoff may be in its freeze.
    pub fn poll(&mut self, now: Duration) {
        if self.at.take_if(|at| *at <= now).is_some() {
            std::thread::spawn(timeouts::give_back);
        }
    }
}
