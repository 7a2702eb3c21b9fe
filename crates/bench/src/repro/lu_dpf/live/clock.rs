//! One time for all of a run, faster than the wall clock's.

use std::time::{Duration, Instant};

use holdfast_sim::Time;

/// The run's time: so many times the wall clock's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
    lapse: f64,
}

impl Clock {
    /// It begins at `start`.
    pub(super) fn new(start: Instant, lapse: f64) -> Clock {
        Clock { start, lapse }
    }

    /// The time; 0 before the start.
    pub(super) fn now(&self) -> Time {
        let since = Instant::now().saturating_duration_since(self.start);
        Time::from_secs_f64(since.as_secs_f64() * self.lapse)
    }

    /// The wall clock's time until then; none if it has come.
    pub(super) fn until(&self, time: Time) -> Duration {
        let at = self.start + Duration::from_secs_f64(time.as_secs_f64() / self.lapse);
        at.saturating_duration_since(Instant::now())
    }
}

/// Ahead of the machine's other work, whose pauses the time-lapse would multiply. Where that is not allowed, it runs as
/// all others do.
pub(super) fn hurry() {
    let _ = holdfast_sys::priority::be_realtime();
}
