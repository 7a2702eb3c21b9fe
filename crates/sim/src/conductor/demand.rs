//! Loads of processes over time.

use crate::random::Random;
use crate::time::Time;

/// Requests in each hour of a recorded day: all requests to the web server of the San Diego Supercomputer Center on
/// 22 August 1995, Pacific Daylight Time. Counted in the trace SDSC-HTTP of the Internet Traffic Archive,
/// <https://ita.ee.lbl.gov/html/contrib/SDSC-HTTP.html>, which has 28,338 requests.
const RECORDED_REQUESTS: [f64; 24] = [
    592.0, 443.0, 610.0, 611.0, 429.0, 542.0, 802.0, 1_393.0, 1_797.0, 1_898.0, 2_058.0, 2_258.0,
    1_851.0, 2_298.0, 1_930.0, 1_649.0, 1_537.0, 1_101.0, 1_037.0, 684.0, 869.0, 693.0, 713.0,
    543.0,
];
/// Mean number of requests in an hour of the recorded day.
const RECORDED_MEAN: f64 = 28_338.0 / 24.0;

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
    /// The demand has the shape of a recorded day: that of the requests to a public web server.
    Recorded {
        /// Duration of the day, in seconds.
        period_s: f64,
        /// Time since midnight at the start, in seconds of that day.
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
            DemandPattern::Recorded { period_s, phase_s } => {
                self.base * recorded_factor((seconds + phase_s) / period_s)
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

/// Returns the ratio of the recorded demand to its mean, after a number of days. Between the middles of two hours the demand
/// changes linearly.
fn recorded_factor(days: f64) -> f64 {
    let hours = days.rem_euclid(1.0) * 24.0 + 23.5;
    // A float-to-integer conversion truncates.
    let hour = hours as usize;
    let [before, after] = [hour, hour + 1].map(|hour| RECORDED_REQUESTS[hour % 24]);
    (before + (after - before) * hours.fract()) / RECORDED_MEAN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_day_has_the_peak_and_the_mean_of_the_trace() {
        assert_eq!(RECORDED_REQUESTS.iter().sum::<f64>(), 24.0 * RECORDED_MEAN);
        let at_hour = |hour: f64| recorded_factor(hour / 24.0) * RECORDED_MEAN;
        assert!((at_hour(13.5) - 2_298.0).abs() < 1e-6);
        assert!((at_hour(24.0) - (543.0 + 592.0) / 2.0).abs() < 1e-6);
        let minutes = (0..1_440).map(|minute| recorded_factor(f64::from(minute) / 1_440.0));
        assert!((minutes.sum::<f64>() / 1_440.0 - 1.0).abs() < 1e-3);
    }
}
