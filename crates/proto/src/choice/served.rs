//! An element's answer to a probe.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of ended requests to remember.
const REMEMBERED: usize = 64;
/// Number of remembered requests that make an estimate: the ones that met a similar number of others.
const NEAREST: usize = 9;

/// An element's requests in flight, and the durations of ended ones.
#[derive(Debug, Clone, Default)]
pub struct Served {
    in_flight: u32,
    /// For each ended request the number of others in flight at its start, and its duration.
    ended: VecDeque<(u32, Duration)>,
}

impl Served {
    /// Counts a new request. Returns the number of others in flight, to be passed to [`Served::end`].
    pub fn begin(&mut self) -> u32 {
        self.in_flight += 1;
        self.in_flight - 1
    }

    /// Records the end of a request, with its duration.
    pub fn end(&mut self, met: u32, took: Duration) {
        self.lost();
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((met, took));
    }

    /// Records a failed request, from which nothing is learned.
    pub fn lost(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Returns the answer to a probe: the requests in flight, and the median duration of requests that met a similar
    /// number; none if no request has ended.
    #[must_use]
    pub fn report(&self) -> (u32, Option<Duration>) {
        // Among equally similar requests the latest are taken.
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
        // Requests that were alone took 1 s, requests that met two others 3 s.
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
