//! Durations of a freeze's steps, shown with the move's status and in the log at level `debug`.

use std::fmt;
use std::time::Instant;

use holdfast_wire::migration::StepTime;

/// Steps with their durations, each measured from the end of the previous one.
#[derive(Debug)]
pub(super) struct Steps {
    began: Instant,
    last: Instant,
    micros: Vec<(&'static str, u128)>,
}

impl Steps {
    /// Starts without steps.
    pub(super) fn begin() -> Steps {
        let began = Instant::now();
        Steps {
            began,
            last: began,
            micros: Vec::new(),
        }
    }

    /// Returns the time of the start.
    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// Records the end of a step.
    pub(super) fn done(&mut self, step: &'static str) {
        let now = Instant::now();
        self.micros.push((step, (now - self.last).as_micros()));
        self.last = now;
    }

    /// Returns all steps.
    pub(super) fn list(&self) -> Vec<StepTime> {
        let step = |(name, us): &(&str, u128)| StepTime {
            name: (*name).to_owned(),
            us: u32::try_from(*us).unwrap_or(u32::MAX),
        };
        self.micros.iter().map(step).collect()
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (step, micros) in &self.micros {
            write!(f, "{step} {micros} ")?;
        }
        write!(f, "us")
    }
}
