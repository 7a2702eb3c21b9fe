//! Restoration of the longest retransmission timeout of moved connections. A lower cap applies until a round trip was
//! measured at the new node. The daemon keeps no descriptor of the connections in the meantime.

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_bpf::timeouts::Timeouts;

/// Time after the move for which connections have the cap.
pub const AFTER: Duration = Duration::from_secs(1);

static TIMEOUTS: OnceLock<Option<Timeouts>> = OnceLock::new();
static ORDERED: AtomicBool = AtomicBool::new(false);

/// Loads the program once. If the kernel refuses it, [`order`] returns false.
pub fn load() -> Option<&'static Timeouts> {
    let load = || {
        let loaded = Timeouts::load();
        let report = |error: &_| tracing::warn!(%error, "timeouts of connections are set at once");
        loaded.inspect_err(report).ok()
    };
    TIMEOUTS.get_or_init(load).as_ref()
}

/// Records the longest timeout of a connection. Returns true if [`give_back`] will set it.
pub fn order(socket: BorrowedFd<'_>, longest_ms: i32) -> bool {
    let ordered = load().is_some_and(|timeouts| timeouts.order(socket, longest_ms).is_ok());
    ORDERED.fetch_or(ordered, Ordering::AcqRel);
    ordered
}

/// Sets all recorded timeouts, if there are any. Visits all connections of the host, which takes some milliseconds.
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
