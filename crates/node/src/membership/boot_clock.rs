//! The clock of the membership: time since the host booted, with the time that the host was suspended
//! (`CLOCK_BOOTTIME`). A host that wakes from suspension therefore finds its lease ended. eBPF programs read the same clock
//! by `bpf_ktime_get_boot_ns`.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Returns the time since the host booted.
pub(super) fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanoseconds)
}

/// Returns the instant at which this clock shows `at`; the present for a past time.
pub(super) fn instant_at(at: Duration) -> Instant {
    Instant::now() + at.saturating_sub(now())
}
