//! The longest waits of clients for answers, over time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Length of the intervals of which each has its longest wait.
const INTERVAL: Duration = Duration::from_millis(100);

/// The longest wait that ended in each interval of 100 ms. Memory grows by 160 bytes a second.
#[derive(Debug)]
pub struct LongestWaits {
    origin: Instant,
    intervals: Mutex<Vec<Duration>>,
}

impl Default for LongestWaits {
    fn default() -> LongestWaits {
        LongestWaits {
            origin: Instant::now(),
            intervals: Mutex::default(),
        }
    }
}

impl LongestWaits {
    /// Records a wait that ended at `answered`.
    pub fn record(&self, answered: Instant, wait: Duration) {
        let index = self.interval_of(answered);
        let mut intervals = self.intervals();
        if intervals.len() <= index {
            intervals.resize(index + 1, Duration::ZERO);
        }
        intervals[index] = intervals[index].max(wait);
    }

    /// Returns the longest wait that ended between two times, which are rounded outward to whole intervals. A wait that
    /// began earlier counts in full. Zero if no wait ended.
    #[must_use]
    pub fn longest_within(&self, begin: Instant, end: Instant) -> Duration {
        let (first, last) = (self.interval_of(begin), self.interval_of(end));
        let intervals = self.intervals();
        let within = intervals.iter().take(last + 1).skip(first);
        within.copied().max().unwrap_or_default()
    }

    fn interval_of(&self, at: Instant) -> usize {
        let since = at.saturating_duration_since(self.origin);
        (since.as_millis() / INTERVAL.as_millis()) as usize
    }

    fn intervals(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.intervals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_wait_of_a_period_is_found() {
        let ms = Duration::from_millis;
        let waits = LongestWaits::default();
        let at = |offset| waits.origin + ms(offset);
        for (answered, wait) in [(50, 3), (60, 9), (250, 40), (1_000, 7)] {
            waits.record(at(answered), ms(wait));
        }
        assert_eq!(waits.longest_within(at(0), at(99)), ms(9));
        assert_eq!(waits.longest_within(at(0), at(5_000)), ms(40));
        assert_eq!(waits.longest_within(at(300), at(900)), ms(0));
        assert_eq!(waits.longest_within(at(300), at(1_000)), ms(7));
        // Times before the first record count as its interval.
        assert_eq!(waits.longest_within(at(0) - ms(70), at(0)), ms(9));
    }
}
