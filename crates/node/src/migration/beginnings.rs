//! Preparations for a process being moved here.

use std::os::unix::net::UnixListener;
use std::path::Path;

use holdfast_sys::process::acceptor::ClockOffsets;
use holdfast_sys::process::image::Clocks;
use rustix::time::ClockId;

/// Binds the socket at which a later daemon finds the restorer.
pub(super) fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path)
}

/// Returns clock offsets for a process whose clocks were ahead of this host's, so that its time never runs backwards.
pub(super) fn offsets(theirs: Clocks) -> ClockOffsets {
    let ahead = |theirs: u64, clock: ClockId| {
        let now = rustix::time::clock_gettime(clock);
        let ours = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        i64::try_from((i128::from(theirs) - ours).max(0)).unwrap_or(i64::MAX)
    };
    ClockOffsets {
        monotonic_ns: ahead(theirs.monotonic_ns, ClockId::Monotonic),
        boot_ns: ahead(theirs.boot_ns, ClockId::Boottime),
    }
}
