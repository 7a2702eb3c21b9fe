//! An element's answer to a probe.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of ended requests to remember.
const ENDED_MAX: usize = 64;
/// Number of remembered requests that make an estimate: the ones that met a similar number of others.
const NEAREST_COUNT: usize = 9;

/// An element's requests in flight, and the durations of ended ones.
#[derive(Debug, Clone, Default)]
pub struct ServerLoad {
    in_flight: u32,
    /// For each ended request the number of others in flight at its start, and its duration.
    ended_requests: VecDeque<(u32, Duration)>,
}

impl ServerLoad {
    /// Counts a new request. Returns the number of others in flight, to be passed to [`ServerLoad::end_request`].
    pub fn begin_request(&mut self) -> u32 {
        self.in_flight += 1;
        self.in_flight - 1
    }

    /// Records the end of a request, with its duration.
    pub fn end_request(&mut self, others_in_flight: u32, duration: Duration) {
        self.fail_request();
        if self.ended_requests.len() == ENDED_MAX {
            self.ended_requests.pop_front();
        }
        self.ended_requests.push_back((others_in_flight, duration));
    }

    /// Records a failed request, from which nothing is learned.
    pub fn fail_request(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Returns the answer to a probe: the requests in flight, and the median duration of requests that met a similar
    /// number; none if no request has ended.
    #[must_use]
    pub fn probe_report(&self) -> (u32, Option<Duration>) {
        // Among equally similar requests the latest are taken.
        let mut nearest: Vec<(u32, Duration)> = self.ended_requests.iter().rev().copied().collect();
        nearest.sort_by_key(|(met, _)| met.abs_diff(self.in_flight));
        nearest.truncate(NEAREST_COUNT);
        nearest.sort_by_key(|(_, took)| *took);
        let median = nearest.get(nearest.len() / 2).map(|(_, took)| *took);
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
    fn estimate_uses_requests_with_similar_load() {
        let mut server_load = ServerLoad::default();
        assert_eq!(server_load.probe_report(), (0, None));
        // Requests that were alone took 1 s, requests that met two others 3 s.
        for _ in 0..10 {
            server_load.begin_request();
            server_load.end_request(0, secs(1));
            server_load.begin_request();
            server_load.end_request(2, secs(3));
        }
        assert_eq!(server_load.probe_report(), (0, Some(secs(1))));
        assert_eq!(
            (server_load.begin_request(), server_load.begin_request()),
            (0, 1)
        );
        assert_eq!(server_load.probe_report(), (2, Some(secs(3))));
        server_load.fail_request();
        assert_eq!(server_load.probe_report().0, 1);
    }

    #[test]
    fn old_requests_are_forgotten() {
        let mut server_load = ServerLoad::default();
        for duration in (0..200).map(secs) {
            let met = server_load.begin_request();
            server_load.end_request(met, duration);
        }
        assert_eq!(server_load.ended_requests.len(), ENDED_MAX);
        assert_eq!(server_load.probe_report().1, Some(secs(195)));
    }
}
