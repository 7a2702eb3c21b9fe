//! Preparations for a process being moved here.

use std::os::unix::net::UnixListener;
use std::path::Path;

use holdfast_checkpoint::acceptor::ClockOffsets;
use holdfast_checkpoint::image::ClockReadings;
use rustix::time::ClockId;

/// Binds the socket at which a later daemon finds the restorer.
pub(super) fn bind_adoption_socket(path: &Path) -> std::io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path)
}

/// Returns clock offsets for a process whose clocks were ahead of this host's, so that its time never runs backwards.
pub(super) fn clock_offsets(donor_clocks: ClockReadings) -> ClockOffsets {
    let ahead = |donor_ns: u64, clock: ClockId| {
        let now = rustix::time::clock_gettime(clock);
        let own_ns = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        i64::try_from((i128::from(donor_ns) - own_ns).max(0)).unwrap_or(i64::MAX)
    };
    ClockOffsets {
        monotonic_ns: ahead(donor_clocks.monotonic_ns, ClockId::Monotonic),
        boot_ns: ahead(donor_clocks.boot_ns, ClockId::Boottime),
    }
}
