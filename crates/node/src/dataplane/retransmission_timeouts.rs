//! Restoration of the longest retransmission timeout of moved connections. A lower cap applies until a round trip was
//! measured at the new node. The daemon keeps no descriptor of the connections in the meantime.

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_bpf::rto_max::RtoMaxSetter;

/// Time after the move for which connections have the cap.
pub const CAP_DURATION: Duration = Duration::from_secs(1);

static RTO_MAX_SETTER: OnceLock<Option<RtoMaxSetter>> = OnceLock::new();
static HAS_RECORDED: AtomicBool = AtomicBool::new(false);

/// Loads the program once. If the kernel refuses it, [`record`] returns false.
pub fn load() -> Option<&'static RtoMaxSetter> {
    let load = || {
        let loaded = RtoMaxSetter::load();
        let report =
            |error: &_| tracing::warn!(%error, "cannot set retransmission timeouts in bulk");
        loaded.inspect_err(report).ok()
    };
    RTO_MAX_SETTER.get_or_init(load).as_ref()
}

/// Records the longest timeout of a connection. Returns true if [`restore_recorded`] will set it.
pub fn record(socket: BorrowedFd<'_>, timeout_max_ms: i32) -> bool {
    let recorded = load().is_some_and(|timeouts| timeouts.store(socket, timeout_max_ms).is_ok());
    HAS_RECORDED.fetch_or(recorded, Ordering::AcqRel);
    recorded
}

/// Sets all recorded timeouts, if there are any. Visits all connections of the host, which takes some milliseconds.
pub fn restore_recorded() {
    if !HAS_RECORDED.swap(false, Ordering::AcqRel) {
        return;
    }
    if let Some(timeouts) = load()
        && let Err(error) = timeouts.restore()
    {
        tracing::warn!(%error, "cannot restore retransmission timeouts: connections keep a short one");
    }
}
