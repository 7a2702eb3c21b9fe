//! Loads of processes over time.

use crate::random::Random;
use crate::time::Time;

/// The demand of one process, in thousandths of a processor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// Mean demand.
    pub base: f64,
    /// Variation over time.
    pub pattern: DemandPattern,
}

/// Variation of a demand over time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DemandPattern {
    /// The demand stays at its mean.
    Steady,
    /// Each measurement of the demand differs at random by up to this part of the mean.
    Noisy(f64),
    /// The demand is three times as high for a tenth of each period.
    Bursty {
        /// The period, in seconds.
        period_s: f64,
        /// Begin of a burst, in seconds.
        phase_s: f64,
    },
    /// The demand swings by half of its mean, as from night to day.
    Daily {
        /// The period, in seconds.
        period_s: f64,
        /// Time of the mean, in seconds.
        phase_s: f64,
    },
}

impl DemandPattern {
    /// Returns true if the mean of some seconds does not change over time.
    #[must_use]
    pub fn is_calm(&self) -> bool {
        matches!(self, DemandPattern::Steady | DemandPattern::Noisy(_))
    }
}

impl Demand {
    /// Returns the demand at a time, without noise.
    #[must_use]
    pub fn mean(&self, at: Time) -> f64 {
        let seconds = at.as_secs_f64();
        match self.pattern {
            DemandPattern::Steady | DemandPattern::Noisy(_) => self.base,
            DemandPattern::Bursty { period_s, phase_s } => {
                let is_burst = (seconds + phase_s) % period_s < period_s / 10.0;
                self.base * if is_burst { 3.0 } else { 1.0 }
            }
            DemandPattern::Daily { period_s, phase_s } => {
                let angle = (seconds + phase_s) / period_s * std::f64::consts::TAU;
                self.base * (1.0 + angle.sin() / 2.0)
            }
        }
    }

    /// Returns the demand that a measurement at this time shows, with noise.
    pub(super) fn measure(&self, at: Time, random: &mut Random) -> u32 {
        let mean = self.mean(at);
        let noise = match self.pattern {
            DemandPattern::Noisy(part) => mean * part * (2.0 * random.fraction() - 1.0),
            _ => 0.0,
        };
        // A float-to-integer conversion saturates.
        (mean + noise).round() as u32
    }
}
