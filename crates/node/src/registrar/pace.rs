//! Pacing: decides when a registrar collects requests before it handles them.
//!
//! A wake-up costs several times as much as a request. So if several hosts send requests within a short time, the
//! requests are collected and handled together. Requests are not collected if only one host sends them, because it may
//! wait for each answer before its next request; nor if there are so many that the next one is always waiting.

use std::time::Duration;

use holdfast_proto::registrar::AssociationId;

/// Requests in a pause below which there is no pause; successive requests of one association count once.
const FEW: u32 = 4;
/// Requests in a pause above which there is no pause.
const MANY: u32 = 64;

/// Recent request counts.
#[derive(Debug)]
pub(super) struct Pace {
    pause: Duration,
    since: Duration,
    heard: u32,
    turns: u32,
    last: Option<AssociationId>,
    gathers: bool,
}

impl Pace {
    /// Creates the state. A pause of zero disables pauses.
    pub(super) fn new(pause: Duration) -> Pace {
        Pace {
            pause,
            since: Duration::ZERO,
            heard: 0,
            turns: 0,
            last: None,
            gathers: false,
        }
    }

    /// Counts a request.
    #[inline]
    pub(super) fn heard(&mut self, from: AssociationId) {
        self.heard += 1;
        if self.last != Some(from) {
            self.last = Some(from);
            self.turns += 1;
        }
    }

    /// Returns the time for which to collect requests, after the previous ones are answered.
    pub(super) fn pause(&mut self, now: Duration) -> Option<Duration> {
        let pause = self.pause;
        let elapsed = now.saturating_sub(self.since);
        if elapsed >= pause && !pause.is_zero() {
            self.gathers =
                pause * self.turns >= elapsed * FEW && pause * self.heard < elapsed * MANY;
            self.since = now;
            (self.heard, self.turns) = (0, 0);
        }
        self.gathers.then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(2);

    /// Returns true if requests at this interval, from this number of associations in turn, lead to pauses.
    fn gathers(interval: Duration, associations: u64) -> bool {
        let mut pace = Pace::new(PAUSE);
        let mut now = Duration::from_secs(1);
        let mut asked = 0;
        let mut last = false;
        for _ in 0..100 {
            let begun = now;
            let paused = pace.pause(now);
            now += paused.unwrap_or(interval).max(interval);
            let came = (now - begun).as_nanos() / interval.as_nanos();
            for _ in 0..came {
                asked += 1;
                pace.heard(AssociationId(asked % associations));
            }
            last = paused.is_some();
        }
        last
    }

    #[test]
    fn requests_are_let_come_where_several_hosts_make_some() {
        let us = Duration::from_micros;
        assert!(gathers(us(100), 1000));
        assert!(gathers(us(400), 1000));
        // Few requests: little to gain.
        assert!(!gathers(us(1000), 1000));
        assert!(!gathers(us(100_000), 1000));
        // A request is always waiting.
        assert!(!gathers(us(10), 1000));
        // A host waits for each answer.
        assert!(!gathers(us(100), 1));
    }

    #[test]
    fn many_long_ago_are_few() {
        let mut pace = Pace::new(PAUSE);
        (0..40).for_each(|from| pace.heard(AssociationId(from)));
        assert_eq!(pace.pause(Duration::from_secs(1)), None);
    }

    #[test]
    fn there_may_be_none() {
        let mut pace = Pace::new(Duration::ZERO);
        (0..40).for_each(|from| pace.heard(AssociationId(from)));
        assert_eq!(pace.pause(PAUSE), None);
    }
}
