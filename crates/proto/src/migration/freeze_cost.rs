//! Predicts the freeze of a process: `fixed + sockets + processes + threads + mappings + shared bytes + dirty bytes`,
//! each at its own cost.
//!
//! The costs are a plane through the last freezes, by least squares together with a permanent first guess. Each
//! strategy for sockets has a plane of its own. The cost of a byte is guessed from the rounds, whose rate covers the
//! whole path of a page: the scan, the copy, the link. In a freeze a byte costs less, since the original does not run
//! meanwhile and the acceptor has most of the pages.

use core::time::Duration;
use holdfast_wire::move_frames::SocketStrategy;

/// Weight of a new sample in the rate.
const SAMPLE_WEIGHT: f64 = 0.25;
/// Bound of a sample, as a multiple of the estimate.
const SAMPLE_MAX: f64 = 4.0;
/// Weight of a new sample in `FreezeCostModel::share_estimate`, the first guess for the strategy with the least left, and the lower
/// bound.
const SENT_SHARE_WEIGHT: f64 = 0.5;
const SENT_SHARE_GUESS: f64 = 0.3;
const SENT_SHARE_MIN: f64 = 0.01;
/// Least bytes from which `share_estimate` is learned.
const SENT_SHARE_BYTES_MIN: u64 = 4096;
/// Least bytes of a transfer that is bound by the rate and not by its delay.
const BULK_BYTES_MIN: u64 = 256 << 10;
/// Factor by which each new sample reduces the weight of the earlier ones.
const FADE_FACTOR: f64 = 0.9;
/// Spread of freezes with the same load, in microseconds. A guess is weighted against it, as if the guess could be
/// wrong by its whole value.
const NOISE_US: f64 = 300.0;
/// Unit in which the model counts bytes.
const UNIT_BYTES: f64 = 1048576.0;

/// The properties of a process that determine its freeze.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FreezeLoad {
    /// Bytes that the freeze would send.
    pub dirty_bytes: u64,
    /// Number of sockets.
    pub sockets: u32,
    /// Composition of the process tree.
    pub tree: ProcessTree,
}

/// Composition of a tree of processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessTree {
    /// Number of processes.
    pub processes: u32,
    /// Number of threads in all processes.
    pub threads: u32,
    /// Number of mappings in all processes.
    pub mappings: u32,
    /// Bytes of shared memory with content, which a freeze compares.
    pub shared_bytes: u64,
}

/// Cost model of freezes. Times in microseconds.
#[derive(Debug, Clone)]
pub(super) struct FreezeCostModel {
    /// Bytes a microsecond, which is also MB/s.
    rate: f64,
    /// Time from the last scan to the freeze.
    scan_to_freeze: f64,
    /// Share of the expected bytes that a freeze sends, for each strategy; pages written in between may be sent before.
    sent_share: [f64; 3],
    cost_planes: [CostRegression; 3],
}

impl FreezeCostModel {
    /// Returns a model with first guesses, on the careful side.
    pub(super) fn new() -> FreezeCostModel {
        FreezeCostModel {
            rate: 100.0,
            scan_to_freeze: 2_000.0,
            sent_share: [1.0, 1.0, SENT_SHARE_GUESS],
            cost_planes: [60.0, 8.0, 4.0]
                .map(|socket| CostRegression::new([1_600.0, socket, 400.0, 40.0, 0.8, 400.0])),
        }
    }

    /// Returns the rate in bytes a second.
    pub(super) fn rate(&self) -> u64 {
        (self.rate * 1e6) as u64
    }

    pub(super) fn predict(&self, strategy: SocketStrategy, load: FreezeLoad) -> Duration {
        let micros = self.cost_planes[strategy_index(strategy)].evaluate(load, self.rate);
        Duration::from_nanos((micros * 1e3) as u64)
    }

    /// Returns the bytes expected to be dirty at the freeze, given the bytes that a round found and the time
    /// in which they changed.
    pub(super) fn dirty_at_freeze(
        &self,
        strategy: SocketStrategy,
        found: u64,
        duration: Duration,
    ) -> u64 {
        let micros = (duration.as_secs_f64() * 1e6).max(1.0);
        let found = found as f64;
        let all = found + found * self.scan_to_freeze / micros.max(self.scan_to_freeze);
        (all * self.sent_share[strategy_index(strategy)]) as u64
    }

    /// Learns the share of the `expected` bytes that a freeze sent.
    pub(super) fn learn_dirty(&mut self, strategy: SocketStrategy, expected: u64, sent: u64) {
        if expected >= SENT_SHARE_BYTES_MIN {
            let share_estimate = &mut self.sent_share[strategy_index(strategy)];
            let share = (sent as f64 / expected as f64).min(SAMPLE_MAX);
            *share_estimate = (*share_estimate * (1.0 + SENT_SHARE_WEIGHT * (share - 1.0)))
                .clamp(SENT_SHARE_MIN, SAMPLE_MAX);
        }
    }

    /// Returns the predicted time to transfer `bytes`.
    pub(super) fn predict_transfer(&self, bytes: u64) -> Duration {
        Duration::from_nanos((bytes as f64 / self.rate * 1e3) as u64)
    }

    /// Learns the send rate from a round of copying.
    pub(super) fn learn_round(&mut self, bytes: u64, duration: Duration) {
        let micros = duration.as_secs_f64() * 1e6;
        if bytes >= BULK_BYTES_MIN && micros > 0.0 {
            let sample = (bytes as f64 / micros).min(self.rate * SAMPLE_MAX);
            self.rate = (self.rate + SAMPLE_WEIGHT * (sample - self.rate)).max(0.01);
        }
    }

    /// Learns the time from the last round to the freeze.
    pub(super) fn learn_scan_to_freeze(&mut self, gap: Duration) {
        let sample = (gap.as_secs_f64() * 1e6).min(self.scan_to_freeze * SAMPLE_MAX);
        self.scan_to_freeze += SAMPLE_WEIGHT * (sample - self.scan_to_freeze);
    }

    /// Learns the costs from a measured freeze.
    pub(super) fn learn_freeze(
        &mut self,
        strategy: SocketStrategy,
        load: FreezeLoad,
        duration: Duration,
    ) {
        let plane = &mut self.cost_planes[strategy_index(strategy)];
        let sample_max = plane.evaluate(load, self.rate) * SAMPLE_MAX;
        plane.learn(load, (duration.as_secs_f64() * 1e6).min(sample_max));
    }
}

fn strategy_index(strategy: SocketStrategy) -> usize {
    match strategy {
        SocketStrategy::Iterative => 0,
        SocketStrategy::Collective => 1,
        SocketStrategy::Incremental => 2,
    }
}

/// Number of costs: once, per socket, per process, per thread, per mapping, per [`UNIT_BYTES`] shared, per
/// [`UNIT_BYTES`] sent.
const TERM_COUNT: usize = 7;

type CostTerms = [f64; TERM_COUNT];

/// Sums over the samples: products of the terms, and of the terms with the time.
#[derive(Debug, Clone, Copy, Default)]
struct RegressionSums {
    products: [CostTerms; TERM_COUNT],
    times: CostTerms,
}

impl RegressionSums {
    fn fade(&mut self) {
        let products = self.products.iter_mut().flatten();
        products
            .chain(&mut self.times)
            .for_each(|sum| *sum *= FADE_FACTOR);
    }

    fn add(&mut self, terms: CostTerms, time: f64) {
        for ((row, sum), term) in self.products.iter_mut().zip(&mut self.times).zip(terms) {
            for (product, other) in row.iter_mut().zip(terms) {
                *product += term * other;
            }
            *sum += term * time;
        }
    }

    /// Adds the guess of each cost, which decides as far as samples leave the cost open.
    fn add_guess(&mut self, guess: CostTerms) {
        for (index, guess) in guess.into_iter().enumerate() {
            let weight = (NOISE_US / guess).powi(2);
            self.products[index][index] += weight;
            self.times[index] += weight * guess;
        }
    }
}

/// The learned costs of a freeze, one for each term.
#[derive(Debug, Clone)]
struct CostRegression {
    /// First guess of all costs but the one of bytes sent.
    guess: [f64; TERM_COUNT - 1],
    samples: RegressionSums,
}

impl CostRegression {
    fn new(guess: [f64; TERM_COUNT - 1]) -> CostRegression {
        CostRegression {
            guess,
            samples: RegressionSums::default(),
        }
    }

    fn evaluate(&self, load: FreezeLoad, rate: f64) -> f64 {
        dot(self.costs(rate), load_terms(load))
    }

    fn learn(&mut self, load: FreezeLoad, micros: f64) {
        self.samples.fade();
        self.samples.add(load_terms(load), micros);
    }

    /// Returns the costs, with `rate` as the first guess for bytes sent.
    fn costs(&self, rate: f64) -> CostTerms {
        let mut guess = [UNIT_BYTES / rate; TERM_COUNT];
        guess[..TERM_COUNT - 1].copy_from_slice(&self.guess);
        let mut sums = self.samples;
        sums.add_guess(guess);
        // Noise may tilt the plane beyond the possible: a negative cost is set to zero, and the others take its part.
        let mut is_free = [true; TERM_COUNT];
        loop {
            let costs = solve(sums, is_free);
            let Some(negative) = costs.iter().position(|cost| *cost < 0.0) else {
                return costs;
            };
            is_free[negative] = false;
        }
    }
}

fn load_terms(load: FreezeLoad) -> CostTerms {
    let tree = load.tree;
    [
        1.0,
        f64::from(load.sockets),
        f64::from(tree.processes),
        f64::from(tree.threads),
        f64::from(tree.mappings),
        tree.shared_bytes as f64 / UNIT_BYTES,
        load.dirty_bytes as f64 / UNIT_BYTES,
    ]
}

fn dot(a: CostTerms, b: CostTerms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Solves the normal equations for the costs that are free; the others are 0.
fn solve(sums: RegressionSums, is_free: [bool; TERM_COUNT]) -> CostTerms {
    let RegressionSums {
        mut products,
        mut times,
    } = sums;
    for (index, _) in is_free.iter().enumerate().filter(|(_, free)| !**free) {
        for row in &mut products {
            row[index] = 0.0;
        }
        products[index] = CostTerms::default();
        products[index][index] = 1.0;
        times[index] = 0.0;
    }
    // The guess makes the matrix positive definite: no rows need exchanging.
    for pivot in 0..TERM_COUNT {
        for row in pivot + 1..TERM_COUNT {
            let factor = products[row][pivot] / products[pivot][pivot];
            let above = products[pivot];
            for (product, above) in products[row].iter_mut().zip(above).skip(pivot) {
                *product -= factor * above;
            }
            times[row] -= factor * times[pivot];
        }
    }
    let mut costs = CostTerms::default();
    for row in (0..TERM_COUNT).rev() {
        let solved_sum: f64 = (row + 1..TERM_COUNT)
            .map(|column| products[row][column] * costs[column])
            .sum();
        costs[row] = (times[row] - solved_sum) / products[row][row];
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRATEGY: SocketStrategy = SocketStrategy::Incremental;

    fn load(dirty: u64, sockets: u32, threads: u32) -> FreezeLoad {
        FreezeLoad {
            dirty_bytes: dirty,
            sockets,
            tree: ProcessTree {
                processes: 1,
                threads,
                mappings: 60,
                shared_bytes: 0,
            },
        }
    }

    #[test]
    fn process_trees_are_predicted_after_a_few_moves() {
        let tree = |processes, threads, mappings, shared| FreezeLoad {
            tree: ProcessTree {
                processes,
                threads,
                mappings,
                shared_bytes: shared,
            },
            ..load(64 << 10, 20, 1)
        };
        let true_freeze = |load: FreezeLoad| {
            let tree = load.tree;
            let micros = 1_200 + 250 * tree.processes + 55 * tree.threads + tree.mappings / 2;
            Duration::from_micros(u64::from(micros) + tree.shared_bytes / 3_000)
        };
        let trees = [
            tree(27, 27, 4_000, 32 << 20),
            tree(1, 300, 700, 0),
            tree(1, 1, 65_526, 0),
            tree(1, 4, 60, 0),
        ];
        let mut model = FreezeCostModel::new();
        for load in trees.into_iter().cycle().take(12) {
            model.learn_freeze(STRATEGY, load, true_freeze(load));
        }
        for load in trees {
            let (predicted, actual) = (model.predict(STRATEGY, load), true_freeze(load));
            let error = predicted.abs_diff(actual);
            assert!(
                error * 10 < actual * 3,
                "{load:?}: {predicted:?}, not {actual:?}"
            );
        }
    }

    #[test]
    fn model_separates_costs_of_sockets_threads_and_bytes() {
        let mut model = FreezeCostModel::new();
        for _ in 0..40 {
            model.learn_round(100 << 20, Duration::from_millis(100));
        }
        assert!((1_000_000_000..1_100_000_000).contains(&model.rate()));
        let true_freeze = |load: FreezeLoad| {
            let micros = 700 + 2 * u64::from(load.sockets) + 15 * u64::from(load.tree.threads);
            Duration::from_micros(micros + load.dirty_bytes / 1_049)
        };
        for round in 0..60 {
            let sockets = [16, 256, 1_024, 10_000][round % 4];
            let load = load([0, 4 << 20][round % 2], sockets, [1, 4, 32][round % 3]);
            model.learn_freeze(STRATEGY, load, true_freeze(load));
        }
        for load in [load(0, 16, 1), load(8 << 20, 1_024, 4), load(0, 10_000, 64)] {
            let (predicted, actual) = (model.predict(STRATEGY, load), true_freeze(load));
            let error = predicted.abs_diff(actual);
            assert!(
                error * 10 < actual,
                "{load:?}: {predicted:?}, not {actual:?}"
            );
        }
        // The other strategies have learned nothing.
        let one = load(0, 1_000, 1);
        let other = model.predict(SocketStrategy::Iterative, one);
        assert_eq!(
            other,
            FreezeCostModel::new().predict(SocketStrategy::Iterative, one)
        );
    }

    #[test]
    fn constant_load_is_predicted_after_few_samples() {
        let mut model = FreezeCostModel::new();
        let constant_load = load(0, 24, 3);
        for _ in 0..5 {
            model.learn_freeze(STRATEGY, constant_load, Duration::from_micros(900));
        }
        let predicted = model.predict(STRATEGY, constant_load);
        assert!(
            predicted.abs_diff(Duration::from_micros(900)) < Duration::from_micros(150),
            "{predicted:?}"
        );
        assert!(model.predict(STRATEGY, load(0, 1_024, 3)) > predicted);
    }

    #[test]
    fn cost_per_byte_is_learned_from_freezes() {
        let mut model = FreezeCostModel::new();
        // These rounds share the processor with the program, and bring pages that the acceptor does not have.
        for _ in 0..10 {
            model.learn_round(50 << 20, Duration::from_millis(500));
        }
        for round in 0..10_u64 {
            let dirty = (round % 4) << 18;
            let elapsed = Duration::from_micros(2_000 + dirty / 1_000);
            model.learn_freeze(STRATEGY, load(dirty, 24, 1), elapsed);
        }
        let (predicted, actual) = (model.predict(STRATEGY, load(600_000, 24, 1)), 2_600);
        let error = predicted.abs_diff(Duration::from_micros(actual));
        assert!(error < Duration::from_micros(260), "{predicted:?}");
    }

    #[test]
    fn noisy_samples_keep_costs_nonnegative() {
        let mut model = FreezeCostModel::new();
        for (sockets, micros) in [(1, 9_000), (1_000, 100), (1, 8_000), (2_000, 50)] {
            model.learn_freeze(STRATEGY, load(0, sockets, 1), Duration::from_micros(micros));
        }
        for load in [load(0, 0, 0), load(0, 100_000, 0), load(0, 0, 10_000)] {
            let predicted = model.predict(STRATEGY, load);
            assert!(predicted < Duration::from_secs(60), "{predicted:?}");
        }
    }

    #[test]
    fn dirty_estimate_includes_changes_before_freeze() {
        let mut model = FreezeCostModel::new();
        for _ in 0..40 {
            model.learn_scan_to_freeze(Duration::from_millis(1));
        }
        let dirty = model.dirty_at_freeze(
            SocketStrategy::Collective,
            10 << 20,
            Duration::from_millis(100),
        );
        assert!((10_590_000..10_595_000).contains(&dirty), "{dirty}");
        // A round shorter than the gap: each of its bytes may change once more, but no more than that.
        let dirty =
            model.dirty_at_freeze(SocketStrategy::Collective, 4_096, Duration::from_micros(1));
        assert_eq!(dirty, 8_192);
    }

    #[test]
    fn dirty_estimate_excludes_bytes_sent_before_freeze() {
        let mut model = FreezeCostModel::new();
        let (strategy, duration) = (SocketStrategy::Incremental, Duration::from_millis(100));
        for _ in 0..8 {
            let expected = model.dirty_at_freeze(strategy, 10 << 20, duration);
            model.learn_dirty(strategy, expected, 1 << 20);
        }
        let expected = model.dirty_at_freeze(strategy, 10 << 20, duration);
        assert!(expected.abs_diff(1 << 20) < 1 << 17, "{expected}");
        // Each strategy learns by itself, and nothing from a few bytes.
        let other = model.dirty_at_freeze(SocketStrategy::Collective, 10 << 20, duration);
        assert!(other >= 10 << 20, "{other}");
        model.learn_dirty(strategy, 1, 1 << 30);
        assert_eq!(
            model.dirty_at_freeze(strategy, 10 << 20, duration),
            expected
        );
    }
}
