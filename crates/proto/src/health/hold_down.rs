//! Hold-down against flapping: after repeated failures, recovery counts only after a wait.

use super::HealthConfig;
use core::time::Duration;

/// Most doublings of the shortest wait, for arithmetic without overflow.
const DOUBLINGS_MAX: u32 = 16;

/// Failures of a server or node in the recent past.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct HoldDown {
    /// Number of failures that are not forgotten.
    failures: u32,
    /// End of the last failure.
    recovered_at: Option<Duration>,
    /// Time before which recovery does not count.
    until: Duration,
}

impl HoldDown {
    /// Records a failure, whose hold-down is at most `max`. The first one has none.
    pub fn on_failure(&mut self, now: Duration, config: &HealthConfig, max: Duration) {
        if let Some(recovered_at) = self.recovered_at
            && now >= recovered_at + config.failure_memory
        {
            self.failures = 0;
        }
        let wait = match self.failures {
            0 => Duration::ZERO,
            earlier => {
                let doublings = (earlier - 1).min(DOUBLINGS_MAX);
                (config.hold_down_min * (1 << doublings)).min(max)
            }
        };
        self.failures = self.failures.saturating_add(1);
        self.until = now + wait;
    }

    /// Records the end of a failure.
    pub fn on_recovery(&mut self, now: Duration) {
        self.recovered_at = Some(now);
    }

    /// Returns the time from which recovery counts.
    pub fn until(&self) -> Duration {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_wire::NodeId;

    #[test]
    fn waits_double_up_to_the_limit_and_are_forgotten() {
        let config = HealthConfig::new(NodeId(1));
        let mut hold_down = HoldDown::default();
        let mut now = Duration::from_secs(1);
        let mut waits = Vec::new();
        for _ in 0..8 {
            hold_down.on_failure(now, &config, config.hold_down_max);
            waits.push((hold_down.until() - now).as_secs());
            now = hold_down.until() + Duration::from_millis(10);
            hold_down.on_recovery(now);
        }
        assert_eq!(waits, [0, 1, 2, 4, 8, 10, 10, 10]);
        now += config.failure_memory;
        hold_down.on_failure(now, &config, config.hold_down_max);
        assert_eq!(hold_down.until(), now);
    }
}
