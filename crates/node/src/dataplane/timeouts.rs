//! Longest retransmission timeouts that moved connections get back some time after they have arrived: until a round trip was
//! measured there, a cap is better. Nobody keeps a descriptor of them for it.

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_bpf::timeouts::Timeouts;

/// How long after their arrival connections have the cap.
pub const AFTER: Duration = Duration::from_secs(1);

static TIMEOUTS: OnceLock<Option<Timeouts>> = OnceLock::new();
static ORDERED: AtomicBool = AtomicBool::new(false);

/// Loads what it takes; where the kernel does not take that, [`order`] says so.
pub fn load() -> Option<&'static Timeouts> {
    let load = || {
        let loaded = Timeouts::load();
        let report = |error: &_| tracing::warn!(%error, "timeouts of connections are set at once");
        loaded.inspect_err(report).ok()
    };
    TIMEOUTS.get_or_init(load).as_ref()
}

/// Remembers the longest timeout of a connection; whether [`give_back`] will set it.
pub fn order(socket: BorrowedFd<'_>, longest_ms: i32) -> bool {
    let ordered = load().is_some_and(|timeouts| timeouts.order(socket, longest_ms).is_ok());
    ORDERED.fetch_or(ordered, Ordering::AcqRel);
    ordered
}

/// Sets what was ordered, if anything was. Goes through all connections of the host: some milliseconds.
pub fn give_back() {
    if !ORDERED.swap(false, Ordering::AcqRel) {
        return;
    }
    if let Some(timeouts) = load()
        && let Err(error) = timeouts.give_back()
    {
        tracing::warn!(%error, "connections keep a short retransmission timeout");
    }
}
