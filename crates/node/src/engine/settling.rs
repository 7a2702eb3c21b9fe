//! Sockets that have just arrived and wait for their first measured round trip, after which their longest retransmission
//! timeout is given back (see `tcp_repair::settle`).

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_sys::tcp_repair::{self, RepairError, Settled, TcpStatic, Uncap};

/// How long after its arrival a socket is looked at first, and for the last time. Not for longer: our duplicate of the
/// descriptor holds up a close by the program.
const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_millis(500);

/// Sockets looked at in one go: a few microseconds each, while a handoff may be in its freeze.
const SLICE: usize = 16;

struct Arrived {
    at: Duration,
    socket: OwnedFd,
    fixed: TcpStatic,
}

/// Sockets without a measured round trip, each kind in the order of arrival.
#[derive(Default)]
pub struct Settling {
    new: VecDeque<Arrived>,
    silent: VecDeque<Arrived>,
}

impl Settling {
    /// A socket arrived.
    pub fn settle(&mut self, now: Duration, socket: OwnedFd, fixed: TcpStatic) {
        if let Err(error) = tcp_repair::settle_options(socket.as_fd(), &fixed) {
            not_set(&error);
        }
        // It has just arrived: no round trip is measured yet.
        let at = now;
        self.new.push_back(Arrived { at, socket, fixed });
    }

    /// When there is something to do.
    pub fn next_wake(&self) -> Option<Duration> {
        let first = self.new.front().map(|arrived| arrived.at + FIRST);
        let last = self.silent.front().map(|arrived| arrived.at + LAST);
        first.into_iter().chain(last).min()
    }

    /// Looks at those whose time has come, a few of them.
    pub fn poll(&mut self, now: Duration) {
        for _ in 0..SLICE {
            if let Some(arrived) = due(&mut self.silent, now, LAST) {
                uncap(&arrived, Uncap::Now);
            } else if let Some(arrived) = due(&mut self.new, now, FIRST) {
                if !uncap(&arrived, Uncap::Measured) {
                    self.silent.push_back(arrived);
                }
            } else {
                return;
            }
        }
    }
}

fn due(queue: &mut VecDeque<Arrived>, now: Duration, after: Duration) -> Option<Arrived> {
    let is_due = queue.front()?.at + after <= now;
    is_due.then(|| queue.pop_front()).flatten()
}

fn uncap(arrived: &Arrived, when: Uncap) -> bool {
    let socket = arrived.socket.as_fd();
    is_done(tcp_repair::uncap_timeout(socket, &arrived.fixed, when))
}

fn is_done(settled: Result<Settled, RepairError>) -> bool {
    match settled {
        Ok(settled) => settled == Settled::Done,
        Err(error) => {
            not_set(&error);
            true
        }
    }
}

fn not_set(error: &RepairError) {
    tracing::debug!(%error, "an option of a moved socket could not be set");
}
