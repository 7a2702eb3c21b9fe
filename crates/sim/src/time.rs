//! Virtual time.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A time in nanoseconds, since the start of a simulation or between two moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Time(pub u64);

const NS_PER_SECOND: u64 = 1_000_000_000;

impl Time {
    /// The start of a simulation.
    pub const ZERO: Time = Time(0);

    /// Converts seconds; negative numbers and NaN become 0.
    #[must_use]
    pub fn from_secs_f64(seconds: f64) -> Time {
        // A float-to-integer conversion saturates.
        Time((seconds * NS_PER_SECOND as f64).round() as u64)
    }

    /// Converts milliseconds; negative numbers and NaN become 0.
    #[must_use]
    pub fn from_ms_f64(milliseconds: f64) -> Time {
        Time::from_secs_f64(milliseconds / 1e3)
    }

    /// Converts microseconds; saturates at the largest time.
    #[must_use]
    pub const fn from_micros(microseconds: u64) -> Time {
        Time(microseconds.saturating_mul(1_000))
    }

    /// Returns the time in seconds.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / NS_PER_SECOND as f64
    }

    /// Returns the time since `earlier`; 0 if that is later.
    #[must_use]
    pub fn since(self, earlier: Time) -> Time {
        Time(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Time {
    type Output = Time;

    fn add(self, other: Time) -> Time {
        Time(self.0.saturating_add(other.0))
    }
}

impl Sub for Time {
    type Output = Time;

    fn sub(self, other: Time) -> Time {
        self.since(other)
    }
}

/// Converts a time to the state machines' type.
impl From<Time> for Duration {
    fn from(time: Time) -> Duration {
        Duration::from_nanos(time.0)
    }
}

/// Converts a duration; the maximum is `u64::MAX` nanoseconds, some 584 years.
impl From<Duration> for Time {
    fn from(duration: Duration) -> Time {
        let seconds = duration.as_secs().saturating_mul(NS_PER_SECOND);
        Time(seconds.saturating_add(u64::from(duration.subsec_nanos())))
    }
}
