//! Pacing: decides when a registrar collects requests before it handles them.
//!
//! A wake-up costs several times as much as a request. So if several hosts send requests within a short time, the
//! requests are collected and handled together. Requests are not collected if only one host sends them, because it may
//! wait for each answer before its next request; nor if there are so many that the next one is always waiting.

use std::time::Duration;

use holdfast_proto::registrar::AssociationId;

/// Requests in a pause below which there is no pause; successive requests of one association count once.
const REQUESTS_MIN: u32 = 4;
/// Requests in a pause above which there is no pause.
const REQUESTS_MAX: u32 = 64;

/// Delay before the next batch of requests, from the recent request counts.
#[derive(Debug)]
pub(super) struct AdaptiveBatchDelay {
    batch_delay: Duration,
    window_start: Duration,
    requests: u32,
    request_runs: u32,
    last_sender: Option<AssociationId>,
    is_batching: bool,
}

impl AdaptiveBatchDelay {
    /// Creates the state. A pause of zero disables pauses.
    pub(super) fn new(batch_delay: Duration) -> AdaptiveBatchDelay {
        AdaptiveBatchDelay {
            batch_delay,
            window_start: Duration::ZERO,
            requests: 0,
            request_runs: 0,
            last_sender: None,
            is_batching: false,
        }
    }

    /// Counts a request that arrived on the association `from`.
    #[inline]
    pub(super) fn count_request(&mut self, from: AssociationId) {
        self.requests += 1;
        if self.last_sender != Some(from) {
            self.last_sender = Some(from);
            self.request_runs += 1;
        }
    }

    /// Returns the time for which to collect requests, after the previous ones are answered.
    pub(super) fn next_batch_delay(&mut self, now: Duration) -> Option<Duration> {
        let batch_delay = self.batch_delay;
        let elapsed = now.saturating_sub(self.window_start);
        if elapsed >= batch_delay && !batch_delay.is_zero() {
            self.is_batching = batch_delay * self.request_runs >= elapsed * REQUESTS_MIN
                && batch_delay * self.requests < elapsed * REQUESTS_MAX;
            self.window_start = now;
            (self.requests, self.request_runs) = (0, 0);
        }
        self.is_batching.then_some(batch_delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH_DELAY: Duration = Duration::from_millis(2);

    /// Returns true if requests at this interval, from this number of associations in turn, lead to pauses.
    fn is_batching(interval: Duration, associations: u64) -> bool {
        let mut pace = AdaptiveBatchDelay::new(BATCH_DELAY);
        let mut now = Duration::from_secs(1);
        let mut sent = 0;
        let mut last = false;
        for _ in 0..100 {
            let start = now;
            let paused = pace.next_batch_delay(now);
            now += paused.unwrap_or(interval).max(interval);
            let arrived = (now - start).as_nanos() / interval.as_nanos();
            for _ in 0..arrived {
                sent += 1;
                pace.count_request(AssociationId(sent % associations));
            }
            last = paused.is_some();
        }
        last
    }

    #[test]
    fn requests_of_several_hosts_are_batched() {
        let us = Duration::from_micros;
        assert!(is_batching(us(100), 1000));
        assert!(is_batching(us(400), 1000));
        // Few requests: little to gain.
        assert!(!is_batching(us(1000), 1000));
        assert!(!is_batching(us(100_000), 1000));
        // A request is always waiting.
        assert!(!is_batching(us(10), 1000));
        // A host waits for each answer.
        assert!(!is_batching(us(100), 1));
    }

    #[test]
    fn old_requests_do_not_count() {
        let mut pace = AdaptiveBatchDelay::new(BATCH_DELAY);
        (0..40).for_each(|from| pace.count_request(AssociationId(from)));
        assert_eq!(pace.next_batch_delay(Duration::from_secs(1)), None);
    }

    #[test]
    fn zero_delay_disables_batching() {
        let mut pace = AdaptiveBatchDelay::new(Duration::ZERO);
        (0..40).for_each(|from| pace.count_request(AssociationId(from)));
        assert_eq!(pace.next_batch_delay(BATCH_DELAY), None);
    }
}
