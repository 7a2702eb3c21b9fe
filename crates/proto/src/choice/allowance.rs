//! Limit on the rate at which an element answers probes.

use std::time::Duration;

/// Allowed interval of probes, one a millisecond: enough for a user that makes 300 choices a second among this host's
/// elements.
const INTERVAL: Duration = Duration::from_millis(1);
/// Allowed burst ahead of the rate: a thousand probes at once.
const AHEAD_MAX: Duration = Duration::from_secs(1);
/// Burst beyond which a prober is considered malicious.
const PATIENCE: Duration = Duration::from_secs(10);

/// Remaining allowance of one prober.
#[derive(Debug, Clone, Copy, Default)]
pub struct Allowance {
    /// Time at which the probes so far would have arrived at the allowed rate.
    used_until: Duration,
}

/// Decision about a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The probe is answered.
    Answered,
    /// The probe is dropped: there were too many.
    Dropped,
    /// This probe and all later ones are dropped: there were far too many without a pause.
    Enough,
}

impl Allowance {
    /// Counts a probe, whatever the decision, and returns the decision.
    pub fn ask(&mut self, now: Duration) -> Verdict {
        self.used_until = self.used_until.max(now) + INTERVAL;
        match self.used_until - now {
            ahead if ahead > PATIENCE => Verdict::Enough,
            ahead if ahead > AHEAD_MAX => Verdict::Dropped,
            _ => Verdict::Answered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_too_often_is_not_answered_and_who_goes_on_is_left() {
        let mut allowance = Allowance::default();
        let mut now = Duration::from_secs(7);
        let mut ask = |now, times: usize| {
            let verdicts = (0..times).map(|_| allowance.ask(now));
            let verdicts: Vec<Verdict> = verdicts.collect();
            let of = |wanted| verdicts.iter().filter(|one| **one == wanted).count();
            [Verdict::Answered, Verdict::Dropped, Verdict::Enough].map(of)
        };
        assert_eq!(ask(now, 1_500), [1_000, 500, 0]);
        // A second later 500 of the 1,500 remain.
        now += Duration::from_secs(1);
        assert_eq!(ask(now, 1_000), [500, 500, 0]);
        assert_eq!(ask(now, 9_000), [0, 8_500, 500]);
        now += Duration::from_secs(60);
        assert_eq!(ask(now, 1), [1, 0, 0]);
    }
}
