//! Batch size: as many connections as are predicted to freeze for less than the bound.
//!
//! The prediction is `fixed_wait + work(flows) + bytes / rate`. `work` is a line, learned from the phases that touch every
//! connection (extract, restore). `fixed_wait` is learned from the phases that wait for frames (transfer, commit), and
//! `rate` from bulk transfers. The effect of a busy machine on one batch in ten must not shrink the other nine, since
//! small batches pay the fixed part more often: `fixed_wait` follows the median, and a sample of `work` counts for at most
//! twice the prediction.

use super::event::BatchPhaseTimes;
use core::time::Duration;

/// Bytes of dynamic state besides the queues.
pub(super) const STATE_BYTES: usize = 160;
/// Weight of a new sample in the rate.
const RATE_SAMPLE_WEIGHT: f64 = 0.125;
/// Bound of a sample, as a multiple of the estimate: for the rate, and for the work.
const RATE_SAMPLE_MAX: f64 = 4.0;
const WORK_SAMPLE_MAX: f64 = 2.0;
/// Step towards the median: this share of the estimate, up or down.
const MEDIAN_STEP: f64 = 0.08;
/// Least bytes of a transfer that is bound by the channel's rate and not by its delay.
const BULK_BYTES_MIN: usize = 64 << 10;

/// Cost model of a freeze. Times in microseconds.
#[derive(Debug, Clone)]
pub(super) struct BatchCostModel {
    fixed_wait: f64,
    work_line: LinearFit,
    /// Bytes a microsecond, which is also MB/s.
    rate: f64,
}

impl BatchCostModel {
    /// Returns a model with first guesses, on the careful side.
    pub(super) fn new() -> BatchCostModel {
        BatchCostModel {
            fixed_wait: 300.0,
            work_line: LinearFit::new(100.0, 15.0),
            rate: 50.0,
        }
    }

    pub(super) fn predict(&self, flows: usize, bytes: usize) -> Duration {
        let micros = self.fixed_wait + self.work(flows, bytes);
        Duration::from_nanos((micros * 1000.0) as u64)
    }

    /// Returns the part that grows with the batch, in microseconds.
    fn work(&self, flows: usize, bytes: usize) -> f64 {
        self.work_line.evaluate(flows) + bytes as f64 / self.rate
    }

    /// Returns the predicted time to transfer `bytes`.
    pub(super) fn predict_transfer(&self, bytes: usize) -> Duration {
        Duration::from_nanos((bytes as f64 / self.rate * 1000.0) as u64)
    }

    /// Returns how many flows without queues fit into `freeze_max`, at least one.
    pub(super) fn flows_that_fit(&self, freeze_max: Duration, flows_max: usize) -> usize {
        self.count_that_fit(std::iter::repeat_n(0, flows_max), freeze_max, usize::MAX)
    }

    /// Returns how many of the first flows, given the bytes in their queues, fit into `freeze_max` and `bytes_max`. At
    /// least one if there is one: a connection that does not fit moves alone.
    pub(super) fn count_that_fit(
        &self,
        queued: impl Iterator<Item = usize>,
        freeze_max: Duration,
        bytes_max: usize,
    ) -> usize {
        // If waiting alone takes (almost) all of the time, smaller batches would only wait more often.
        let bound = freeze_max.as_secs_f64() * 1e6;
        let work_max = (bound - self.fixed_wait).max(bound / 2.0);
        let mut flows = 0;
        let mut bytes = 0;
        for queue in queued {
            bytes += STATE_BYTES + queue;
            let fits = bytes <= bytes_max && self.work(flows + 1, bytes) <= work_max;
            if flows > 0 && !fits {
                break;
            }
            flows += 1;
        }
        flows
    }

    /// Learns from a batch of `flows` connections with `bytes` of state.
    pub(super) fn learn(&mut self, flows: usize, bytes: usize, phases: &BatchPhaseTimes) {
        if flows == 0 {
            return;
        }
        let transfer = phases.transfer.as_secs_f64() * 1e6;
        if transfer > 0.0 {
            let sample = bytes as f64 / transfer;
            if bytes >= BULK_BYTES_MIN {
                self.rate = blend_rate(self.rate, sample).max(0.1);
            } else {
                // A small transfer is bound by delay: its rate is only a lower limit.
                self.rate = self.rate.max(sample);
            }
        }
        let micros = |duration: Duration| duration.as_secs_f64() * 1e6;
        let fixed_wait = transfer + micros(phases.commit) - bytes as f64 / self.rate;
        self.fixed_wait = step_towards(self.fixed_wait, fixed_wait).max(20.0);
        self.work_line
            .learn(flows, micros(phases.extract) + micros(phases.restore));
    }
}

/// A line `fixed + slope * flows`, by least squares over about the last 30 samples and a permanent first guess. While
/// all batches have one size, the guess alone says which part of their time is fixed.
#[derive(Debug, Clone)]
struct LinearFit {
    fixed: f64,
    slope: f64,
    /// Sums over the samples: their weight, flows, flows squared, times, flows times times.
    sums: [f64; 5],
    guess: [f64; 5],
}

/// Factor by which each new sample reduces the weight of the earlier ones.
const FADE_FACTOR: f64 = 0.97;

impl LinearFit {
    /// Returns a line whose first guess counts like two samples.
    fn new(fixed: f64, slope: f64) -> LinearFit {
        let mut guess = [0.0; 5];
        for flows in [0.0, 32.0] {
            add(&mut guess, flows, fixed + slope * flows);
        }
        LinearFit {
            fixed,
            slope,
            sums: [0.0; 5],
            guess,
        }
    }

    fn evaluate(&self, flows: usize) -> f64 {
        self.fixed + self.slope * flows as f64
    }

    fn learn(&mut self, flows: usize, micros: f64) {
        let micros = micros.min(self.evaluate(flows) * WORK_SAMPLE_MAX);
        self.sums.iter_mut().for_each(|sum| *sum *= FADE_FACTOR);
        add(&mut self.sums, flows as f64, micros);
        let sum = |index: usize| self.sums[index] + self.guess[index];
        let [weight, n, nn, t, nt] = [0, 1, 2, 3, 4].map(sum);
        let slope = (weight * nt - n * t) / (weight * nn - n * n);
        // Noise may tilt the line beyond the possible: then it passes through the origin, or is level.
        self.slope = slope.clamp(0.5, nt / nn);
        self.fixed = ((t - self.slope * n) / weight).max(0.0);
    }
}

fn add(sums: &mut [f64; 5], flows: f64, micros: f64) {
    let terms = [1.0, flows, flows * flows, micros, flows * micros];
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += term;
    }
}

/// Moves an estimate one step towards the median of the samples.
fn step_towards(estimate: f64, sample: f64) -> f64 {
    if sample > estimate {
        estimate * (1.0 + MEDIAN_STEP)
    } else {
        estimate / (1.0 + MEDIAN_STEP)
    }
}

fn blend_rate(old: f64, sample: f64) -> f64 {
    old + RATE_SAMPLE_WEIGHT * (sample.clamp(0.0, old * RATE_SAMPLE_MAX) - old)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(micros: u64) -> BatchPhaseTimes {
        BatchPhaseTimes {
            extract: Duration::from_micros(micros),
            commit: Duration::from_micros(300),
            ..BatchPhaseTimes::default()
        }
    }

    #[test]
    fn batch_grows_with_cheap_flows_and_shrinks_with_costly_ones() {
        let bound = Duration::from_millis(2);
        let mut model = BatchCostModel::new();
        let first = model.flows_that_fit(bound, 10_000);
        for _ in 0..50 {
            let flows = model.flows_that_fit(bound, 10_000);
            model.learn(flows, 0, &phases(flows as u64));
        }
        let cheap = model.flows_that_fit(bound, 10_000);
        assert!(cheap > 3 * first, "{first} then {cheap}");
        for _ in 0..100 {
            let flows = model.flows_that_fit(bound, 10_000);
            model.learn(flows, 0, &phases(100 * flows as u64));
        }
        let costly = model.flows_that_fit(bound, 10_000);
        assert!((10..=20).contains(&costly), "{costly}");
    }

    #[test]
    fn fixed_cost_does_not_shrink_batches() {
        let bound = Duration::from_micros(1_200);
        let mut model = BatchCostModel::new();
        for _ in 0..100 {
            let flows = model.flows_that_fit(bound, 10_000);
            model.learn(flows, 0, &phases(250 + 12 * flows as u64));
        }
        let flows = model.flows_that_fit(bound, 10_000);
        assert!((35..=60).contains(&flows), "{flows}");
    }

    #[test]
    fn rare_slow_batches_do_not_shrink_others() {
        let bound = Duration::from_millis(2);
        let mut model = BatchCostModel::new();
        let before = model.flows_that_fit(bound, 10_000);
        for round in 0..100 {
            let slow = if round % 5 == 0 { 1_000_000 } else { 0 };
            model.learn(before, 0, &phases(15 * before as u64 + slow));
        }
        assert!(model.flows_that_fit(bound, 10_000) * 2 > before);
    }

    #[test]
    fn slow_frames_do_not_reduce_batch_to_one_flow() {
        let bound = Duration::from_millis(2);
        let mut model = BatchCostModel::new();
        let slow_phases = BatchPhaseTimes {
            commit: Duration::from_millis(50),
            ..phases(1_000)
        };
        for _ in 0..200 {
            model.learn(100, 0, &slow_phases);
        }
        assert!(model.flows_that_fit(bound, 10_000) >= 50);
    }

    #[test]
    fn full_queue_gets_own_batch_and_small_queues_share_one() {
        let model = BatchCostModel::new();
        let bound = Duration::from_millis(2);
        let queues = [200_000, 0, 0, 0];
        assert_eq!(model.count_that_fit(queues.into_iter(), bound, 4 << 20), 1);
        assert_eq!(
            model.count_that_fit(queues[1..].iter().copied(), bound, 4 << 20),
            3
        );
        assert_eq!(model.count_that_fit(std::iter::empty(), bound, 4 << 20), 0);
        assert!(model.predict(3, 3 * STATE_BYTES) <= bound);
    }

    #[test]
    fn bulk_transfers_set_rate_and_small_ones_only_raise_it() {
        let mut model = BatchCostModel::new();
        let slow = BatchPhaseTimes {
            transfer: Duration::from_millis(8),
            ..BatchPhaseTimes::default()
        };
        model.learn(1, 1_000, &slow);
        assert_eq!(model.predict_transfer(50_000_000), Duration::from_secs(1));
        for _ in 0..60 {
            model.learn(1, 100_000, &slow);
        }
        let seconds = model.predict_transfer(12_500_000).as_secs_f64();
        assert!((0.9..1.1).contains(&seconds), "{seconds}");
    }
}
