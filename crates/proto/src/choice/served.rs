//! What an element answers to a probe.

use std::collections::VecDeque;
use std::time::Duration;

/// Requests that an estimate is made of.
const REMEMBERED: usize = 64;
/// Of these, those taken which met about as many others as there are.
const NEAREST: usize = 9;

/// An element's requests in flight, and how long those took that have ended.
#[derive(Debug, Clone, Default)]
pub struct Served {
    in_flight: u32,
    /// How many others each met when it came, and what it took.
    ended: VecDeque<(u32, Duration)>,
}

impl Served {
    /// A request comes. How many others it meets: to be told to [`Served::end`].
    pub fn begin(&mut self) -> u32 {
        self.in_flight += 1;
        self.in_flight - 1
    }

    /// It has ended, so long after it came.
    pub fn end(&mut self, met: u32, took: Duration) {
        self.lost();
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((met, took));
    }

    /// It has failed: nothing is learned of it.
    pub fn lost(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// The answer: requests in flight, and the median of what the requests took that met about as many; none if none has ended.
    #[must_use]
    pub fn report(&self) -> (u32, Option<Duration>) {
        // Of those that met as many the latest are taken.
        let mut near: Vec<(u32, Duration)> = self.ended.iter().rev().copied().collect();
        near.sort_by_key(|(met, _)| met.abs_diff(self.in_flight));
        near.truncate(NEAREST);
        near.sort_by_key(|(_, took)| *took);
        let median = near.get(near.len() / 2).map(|(_, took)| *took);
        (self.in_flight, median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_estimate_is_of_requests_that_met_as_many() {
        let mut served = Served::default();
        assert_eq!(served.report(), (0, None));
        // Those that were alone took 1 s, those that met two 3 s.
        for _ in 0..10 {
            served.begin();
            served.end(0, secs(1));
            served.begin();
            served.end(2, secs(3));
        }
        assert_eq!(served.report(), (0, Some(secs(1))));
        assert_eq!((served.begin(), served.begin()), (0, 1));
        assert_eq!(served.report(), (2, Some(secs(3))));
        served.lost();
        assert_eq!(served.report().0, 1);
    }

    #[test]
    fn the_past_is_forgotten() {
        let mut served = Served::default();
        for took in (0..200).map(secs) {
            let met = served.begin();
            served.end(met, took);
        }
        assert_eq!(served.ended.len(), REMEMBERED);
        assert_eq!(served.report().1, Some(secs(195)));
    }
}
