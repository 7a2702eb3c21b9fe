//! The virtual time of a run, faster than the wall clock.

use std::time::{Duration, Instant};

use holdfast_sim::Time;

/// Virtual time: the wall clock's time since the start, multiplied by the time-lapse.
#[derive(Clone, Copy, Debug)]
pub(super) struct VirtualClock {
    start: Instant,
    lapse: f64,
}

impl VirtualClock {
    /// Creates a clock that begins at `start`.
    pub(super) fn new(start: Instant, lapse: f64) -> VirtualClock {
        VirtualClock { start, lapse }
    }

    /// Returns the virtual time; 0 before the start.
    pub(super) fn now(&self) -> Time {
        let since = Instant::now().saturating_duration_since(self.start);
        Time::from_secs_f64(since.as_secs_f64() * self.lapse)
    }

    /// Returns the wall clock's time until a virtual time; zero if the time has passed.
    pub(super) fn wall_time_until(&self, time: Time) -> Duration {
        let at = self.start + Duration::from_secs_f64(time.as_secs_f64() / self.lapse);
        at.saturating_duration_since(Instant::now())
    }
}

/// Gives the thread priority over the machine's other work, because the time-lapse would multiply every pause. Without
/// the permission, the thread keeps its priority.
pub(super) fn raise_priority() {
    let _ = holdfast_sys::priority::become_realtime();
}
