//! Limit on the rate at which an element answers probes.

use std::time::Duration;

/// Allowed interval of probes, one a millisecond: enough for a user that makes 300 choices a second among this host's
/// elements.
const PROBE_INTERVAL: Duration = Duration::from_millis(1);
/// Allowed burst ahead of the rate: a thousand probes at once.
const BURST_MAX: Duration = Duration::from_secs(1);
/// Burst beyond which a prober is considered malicious.
const MALICIOUS_BURST: Duration = Duration::from_secs(10);

/// Remaining allowance of one prober.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProbeAllowance {
    /// Time at which the probes so far would have arrived at the allowed rate.
    used_until: Duration,
}

/// Decision about a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeVerdict {
    /// The probe is answered.
    Answered,
    /// The probe is dropped: there were too many.
    Dropped,
    /// This probe and all later ones are dropped: there were far too many without a pause.
    Blocked,
}

impl ProbeAllowance {
    /// Counts a probe, whatever the decision, and returns the decision.
    pub fn count_probe(&mut self, now: Duration) -> ProbeVerdict {
        self.used_until = self.used_until.max(now) + PROBE_INTERVAL;
        match self.used_until - now {
            ahead if ahead > MALICIOUS_BURST => ProbeVerdict::Blocked,
            ahead if ahead > BURST_MAX => ProbeVerdict::Dropped,
            _ => ProbeVerdict::Answered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prober_above_rate_is_dropped_and_persistent_one_is_blocked() {
        let mut allowance = ProbeAllowance::default();
        let mut now = Duration::from_secs(7);
        let mut count_probes = |now, times: usize| {
            let verdicts = (0..times).map(|_| allowance.count_probe(now));
            let verdicts: Vec<ProbeVerdict> = verdicts.collect();
            let count = |wanted| verdicts.iter().filter(|one| **one == wanted).count();
            [
                ProbeVerdict::Answered,
                ProbeVerdict::Dropped,
                ProbeVerdict::Blocked,
            ]
            .map(count)
        };
        assert_eq!(count_probes(now, 1_500), [1_000, 500, 0]);
        // A second later 500 of the 1,500 remain.
        now += Duration::from_secs(1);
        assert_eq!(count_probes(now, 1_000), [500, 500, 0]);
        assert_eq!(count_probes(now, 9_000), [0, 8_500, 500]);
        now += Duration::from_secs(60);
        assert_eq!(count_probes(now, 1), [1, 0, 0]);
    }
}
