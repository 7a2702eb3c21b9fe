//! Durations of a freeze's steps, shown with the move's status and in the log at level `debug`.

use std::fmt;
use std::time::Instant;

use holdfast_wire::move_frames::StepTime;

/// Steps with their durations, each measured from the end of the previous one.
#[derive(Debug)]
pub(super) struct StepTimer {
    started_at: Instant,
    last_mark: Instant,
    steps: Vec<(&'static str, u128)>,
}

impl StepTimer {
    /// Starts without steps.
    pub(super) fn begin() -> StepTimer {
        let now = Instant::now();
        StepTimer {
            started_at: now,
            last_mark: now,
            steps: Vec::new(),
        }
    }

    /// Returns the time of the start.
    pub(super) fn started_at(&self) -> Instant {
        self.started_at
    }

    /// Records the end of a step of the freeze.
    pub(super) fn mark(&mut self, step: &'static str) {
        let now = Instant::now();
        self.steps.push((step, (now - self.last_mark).as_micros()));
        self.last_mark = now;
    }

    /// Returns the freeze's steps so far, with their durations.
    pub(super) fn list(&self) -> Vec<StepTime> {
        let step = |(name, us): &(&str, u128)| StepTime {
            name: (*name).to_owned(),
            us: u32::try_from(*us).unwrap_or(u32::MAX),
        };
        self.steps.iter().map(step).collect()
    }
}

impl fmt::Display for StepTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (step, micros) in &self.steps {
            write!(f, "{step} {micros} ")?;
        }
        write!(f, "us")
    }
}
