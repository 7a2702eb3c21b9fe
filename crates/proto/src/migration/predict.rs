//! Predicts the freeze of a process: `fixed + sockets + processes + threads + mappings + shared bytes + dirty bytes`,
//! each at its own cost.
//!
//! The costs are a plane through the last freezes, by least squares together with a permanent first guess. Each
//! strategy for sockets has a plane of its own. The cost of a byte is guessed from the rounds, whose rate covers the
//! whole path of a page: the scan, the copy, the link. In a freeze a byte costs less, since the original does not run
//! meanwhile and the acceptor has most of the pages.

use core::time::Duration;
use holdfast_wire::migration::SocketStrategy;

/// Weight of a new sample in the rate.
const WEIGHT: f64 = 0.25;
/// Bound of a sample, as a multiple of the estimate.
const SAMPLE_MAX: f64 = 4.0;
/// Weight of a new sample in `CostModel::left`, the first guess for the strategy with the least left, and the lower
/// bound.
const LEFT_WEIGHT: f64 = 0.5;
const LEFT_GUESS: f64 = 0.3;
const LEFT_MIN: f64 = 0.01;
/// Least bytes from which `left` is learned.
const LEFT_BYTES: u64 = 4096;
/// Least bytes of a transfer that is bound by the rate and not by its delay.
const BULK_BYTES: u64 = 256 << 10;
/// Factor by which each new sample reduces the weight of the earlier ones.
const FADING: f64 = 0.9;
/// Spread of freezes with the same load, in microseconds. A guess is weighted against it, as if the guess could be
/// wrong by its whole value.
const NOISE_US: f64 = 300.0;
/// Unit in which bytes are counted.
const UNIT_BYTES: f64 = 1048576.0;

/// The properties of a process that determine its freeze.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Bytes that the freeze would send.
    pub dirty: u64,
    /// Number of sockets.
    pub sockets: u32,
    /// Composition of the process tree.
    pub shape: Shape,
}

/// Composition of a tree of processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// Number of processes.
    pub processes: u32,
    /// Number of threads in all processes.
    pub threads: u32,
    /// Number of mappings in all processes.
    pub mappings: u32,
    /// Bytes of shared memory with content, which a freeze compares.
    pub shared: u64,
}

/// Cost model of freezes. Times in microseconds.
#[derive(Debug, Clone)]
pub(super) struct CostModel {
    /// Bytes a microsecond, which is also MB/s.
    rate: f64,
    /// Time from the last scan to the freeze.
    gap: f64,
    /// Share of the expected bytes that a freeze sends, for each strategy; pages written in between may be sent before.
    left: [f64; 3],
    planes: [Plane; 3],
}

impl CostModel {
    /// Returns a model with first guesses, on the careful side.
    pub(super) fn new() -> CostModel {
        CostModel {
            rate: 100.0,
            gap: 2_000.0,
            left: [1.0, 1.0, LEFT_GUESS],
            planes: [60.0, 8.0, 4.0]
                .map(|socket| Plane::new([1_600.0, socket, 400.0, 40.0, 0.8, 400.0])),
        }
    }

    /// Returns the rate in bytes a second.
    pub(super) fn rate(&self) -> u64 {
        (self.rate * 1e6) as u64
    }

    pub(super) fn predict(&self, strategy: SocketStrategy, load: Load) -> Duration {
        let micros = self.planes[index(strategy)].at(load, self.rate);
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
        let all = found + found * self.gap / micros.max(self.gap);
        (all * self.left[index(strategy)]) as u64
    }

    /// Learns the share of the `expected` bytes that a freeze sent.
    pub(super) fn learn_dirty(&mut self, strategy: SocketStrategy, expected: u64, sent: u64) {
        if expected >= LEFT_BYTES {
            let left = &mut self.left[index(strategy)];
            let share = (sent as f64 / expected as f64).min(SAMPLE_MAX);
            *left = (*left * (1.0 + LEFT_WEIGHT * (share - 1.0))).clamp(LEFT_MIN, SAMPLE_MAX);
        }
    }

    /// Returns the predicted time to transfer `bytes`.
    pub(super) fn transfer(&self, bytes: u64) -> Duration {
        Duration::from_nanos((bytes as f64 / self.rate * 1e3) as u64)
    }

    /// Learns from a round.
    pub(super) fn learn_round(&mut self, bytes: u64, duration: Duration) {
        let micros = duration.as_secs_f64() * 1e6;
        if bytes >= BULK_BYTES && micros > 0.0 {
            let seen = (bytes as f64 / micros).min(self.rate * SAMPLE_MAX);
            self.rate = (self.rate + WEIGHT * (seen - self.rate)).max(0.01);
        }
    }

    /// Learns the time from the last round to the freeze.
    pub(super) fn learn_gap(&mut self, gap: Duration) {
        let seen = (gap.as_secs_f64() * 1e6).min(self.gap * SAMPLE_MAX);
        self.gap += WEIGHT * (seen - self.gap);
    }

    /// Learns from a freeze.
    pub(super) fn learn_freeze(&mut self, strategy: SocketStrategy, load: Load, took: Duration) {
        let plane = &mut self.planes[index(strategy)];
        let most = plane.at(load, self.rate) * SAMPLE_MAX;
        plane.learn(load, (took.as_secs_f64() * 1e6).min(most));
    }
}

fn index(strategy: SocketStrategy) -> usize {
    match strategy {
        SocketStrategy::Iterative => 0,
        SocketStrategy::Collective => 1,
        SocketStrategy::Incremental => 2,
    }
}

/// Number of costs: once, per socket, per process, per thread, per mapping, per [`UNIT_BYTES`] shared, per
/// [`UNIT_BYTES`] sent.
const TERMS: usize = 7;

type Terms = [f64; TERMS];

/// Sums over the samples: products of the terms, and of the terms with the time.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    products: [Terms; TERMS],
    times: Terms,
}

impl Sums {
    fn fade(&mut self) {
        let products = self.products.iter_mut().flatten();
        products
            .chain(&mut self.times)
            .for_each(|sum| *sum *= FADING);
    }

    fn add(&mut self, terms: Terms, time: f64) {
        for ((row, sum), term) in self.products.iter_mut().zip(&mut self.times).zip(terms) {
            for (product, other) in row.iter_mut().zip(terms) {
                *product += term * other;
            }
            *sum += term * time;
        }
    }

    /// Adds the guess of each cost, which decides as far as samples leave the cost open.
    fn add_guess(&mut self, guess: Terms) {
        for (at, guess) in guess.into_iter().enumerate() {
            let weight = (NOISE_US / guess).powi(2);
            self.products[at][at] += weight;
            self.times[at] += weight * guess;
        }
    }
}

/// A cost for each term.
#[derive(Debug, Clone)]
struct Plane {
    /// First guess of all costs but the one of bytes sent.
    guess: [f64; TERMS - 1],
    seen: Sums,
}

impl Plane {
    fn new(guess: [f64; TERMS - 1]) -> Plane {
        Plane {
            guess,
            seen: Sums::default(),
        }
    }

    fn at(&self, load: Load, rate: f64) -> f64 {
        dot(self.costs(rate), terms(load))
    }

    fn learn(&mut self, load: Load, micros: f64) {
        self.seen.fade();
        self.seen.add(terms(load), micros);
    }

    /// Returns the costs, with `rate` as the first guess for bytes sent.
    fn costs(&self, rate: f64) -> Terms {
        let mut guess = [UNIT_BYTES / rate; TERMS];
        guess[..TERMS - 1].copy_from_slice(&self.guess);
        let mut sums = self.seen;
        sums.add_guess(guess);
        // Noise may tilt the plane beyond the possible: a negative cost is set to zero, and the others take its part.
        let mut free = [true; TERMS];
        loop {
            let costs = solve(sums, free);
            let Some(negative) = costs.iter().position(|cost| *cost < 0.0) else {
                return costs;
            };
            free[negative] = false;
        }
    }
}

fn terms(load: Load) -> Terms {
    let of = load.shape;
    [
        1.0,
        f64::from(load.sockets),
        f64::from(of.processes),
        f64::from(of.threads),
        f64::from(of.mappings),
        of.shared as f64 / UNIT_BYTES,
        load.dirty as f64 / UNIT_BYTES,
    ]
}

fn dot(a: Terms, b: Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Solves the normal equations for the costs that are free; the others are 0.
fn solve(sums: Sums, free: [bool; TERMS]) -> Terms {
    let Sums {
        mut products,
        mut times,
    } = sums;
    for (index, _) in free.iter().enumerate().filter(|(_, free)| !**free) {
        for row in &mut products {
            row[index] = 0.0;
        }
        products[index] = Terms::default();
        products[index][index] = 1.0;
        times[index] = 0.0;
    }
    // The guess makes the matrix positive definite: no rows need exchanging.
    for pivot in 0..TERMS {
        for row in pivot + 1..TERMS {
            let factor = products[row][pivot] / products[pivot][pivot];
            let above = products[pivot];
            for (product, above) in products[row].iter_mut().zip(above).skip(pivot) {
                *product -= factor * above;
            }
            times[row] -= factor * times[pivot];
        }
    }
    let mut costs = Terms::default();
    for row in (0..TERMS).rev() {
        let known: f64 = (row + 1..TERMS)
            .map(|column| products[row][column] * costs[column])
            .sum();
        costs[row] = (times[row] - known) / products[row][row];
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAY: SocketStrategy = SocketStrategy::Incremental;

    fn load(dirty: u64, sockets: u32, threads: u32) -> Load {
        Load {
            dirty,
            sockets,
            shape: Shape {
                processes: 1,
                threads,
                mappings: 60,
                shared: 0,
            },
        }
    }

    #[test]
    fn trees_of_many_processes_threads_and_mappings_are_predicted_after_a_few_moves() {
        let tree = |processes, threads, mappings, shared| Load {
            shape: Shape {
                processes,
                threads,
                mappings,
                shared,
            },
            ..load(64 << 10, 20, 1)
        };
        let truth = |load: Load| {
            let of = load.shape;
            let micros = 1_200 + 250 * of.processes + 55 * of.threads + of.mappings / 2;
            Duration::from_micros(u64::from(micros) + of.shared / 3_000)
        };
        let trees = [
            tree(27, 27, 4_000, 32 << 20),
            tree(1, 300, 700, 0),
            tree(1, 1, 65_526, 0),
            tree(1, 4, 60, 0),
        ];
        let mut model = CostModel::new();
        for load in trees.into_iter().cycle().take(12) {
            model.learn_freeze(WAY, load, truth(load));
        }
        for load in trees {
            let (predicted, really) = (model.predict(WAY, load), truth(load));
            let error = predicted.abs_diff(really);
            assert!(
                error * 10 < really * 3,
                "{load:?}: {predicted:?}, not {really:?}"
            );
        }
    }

    #[test]
    fn the_costs_of_sockets_threads_and_bytes_are_told_apart() {
        let mut model = CostModel::new();
        for _ in 0..40 {
            model.learn_round(100 << 20, Duration::from_millis(100));
        }
        assert!((1_000_000_000..1_100_000_000).contains(&model.rate()));
        let truth = |load: Load| {
            let micros = 700 + 2 * u64::from(load.sockets) + 15 * u64::from(load.shape.threads);
            Duration::from_micros(micros + load.dirty / 1_049)
        };
        for turn in 0..60 {
            let sockets = [16, 256, 1_024, 10_000][turn % 4];
            let load = load([0, 4 << 20][turn % 2], sockets, [1, 4, 32][turn % 3]);
            model.learn_freeze(WAY, load, truth(load));
        }
        for load in [load(0, 16, 1), load(8 << 20, 1_024, 4), load(0, 10_000, 64)] {
            let (predicted, really) = (model.predict(WAY, load), truth(load));
            let error = predicted.abs_diff(really);
            assert!(
                error * 10 < really,
                "{load:?}: {predicted:?}, not {really:?}"
            );
        }
        // The other strategies have learned nothing.
        let one = load(0, 1_000, 1);
        let other = model.predict(SocketStrategy::Iterative, one);
        assert_eq!(
            other,
            CostModel::new().predict(SocketStrategy::Iterative, one)
        );
    }

    #[test]
    fn one_size_again_and_again_is_predicted_soon() {
        let mut model = CostModel::new();
        let same = load(0, 24, 3);
        for _ in 0..5 {
            model.learn_freeze(WAY, same, Duration::from_micros(900));
        }
        let predicted = model.predict(WAY, same);
        assert!(
            predicted.abs_diff(Duration::from_micros(900)) < Duration::from_micros(150),
            "{predicted:?}"
        );
        assert!(model.predict(WAY, load(0, 1_024, 3)) > predicted);
    }

    #[test]
    fn what_a_byte_costs_is_learned_from_freezes() {
        let mut model = CostModel::new();
        // These rounds share the processor with the program, and bring pages that the acceptor does not have.
        for _ in 0..10 {
            model.learn_round(50 << 20, Duration::from_millis(500));
        }
        for turn in 0..10_u64 {
            let dirty = (turn % 4) << 18;
            let took = Duration::from_micros(2_000 + dirty / 1_000);
            model.learn_freeze(WAY, load(dirty, 24, 1), took);
        }
        let (predicted, really) = (model.predict(WAY, load(600_000, 24, 1)), 2_600);
        let error = predicted.abs_diff(Duration::from_micros(really));
        assert!(error < Duration::from_micros(260), "{predicted:?}");
    }

    #[test]
    fn noise_makes_no_cost_negative() {
        let mut model = CostModel::new();
        for (sockets, micros) in [(1, 9_000), (1_000, 100), (1, 8_000), (2_000, 50)] {
            model.learn_freeze(WAY, load(0, sockets, 1), Duration::from_micros(micros));
        }
        for load in [load(0, 0, 0), load(0, 100_000, 0), load(0, 0, 10_000)] {
            let predicted = model.predict(WAY, load);
            assert!(predicted < Duration::from_secs(60), "{predicted:?}");
        }
    }

    #[test]
    fn what_is_changed_until_the_freeze_counts() {
        let mut model = CostModel::new();
        for _ in 0..40 {
            model.learn_gap(Duration::from_millis(1));
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
    fn what_is_sent_before_is_not_expected() {
        let mut model = CostModel::new();
        let (way, took) = (SocketStrategy::Incremental, Duration::from_millis(100));
        for _ in 0..8 {
            let expected = model.dirty_at_freeze(way, 10 << 20, took);
            model.learn_dirty(way, expected, 1 << 20);
        }
        let expected = model.dirty_at_freeze(way, 10 << 20, took);
        assert!(expected.abs_diff(1 << 20) < 1 << 17, "{expected}");
        // Each strategy learns by itself, and nothing from a few bytes.
        let other = model.dirty_at_freeze(SocketStrategy::Collective, 10 << 20, took);
        assert!(other >= 10 << 20, "{other}");
        model.learn_dirty(way, 1, 1 << 30);
        assert_eq!(model.dirty_at_freeze(way, 10 << 20, took), expected);
    }
}
