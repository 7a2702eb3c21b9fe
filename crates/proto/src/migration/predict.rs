//! How long a process would be frozen: `fixed + sockets + threads + dirty bytes / rate`.
//!
//! The rate comes from the rounds, where it is the rate of everything on the way of a page: the scan, the copy, the link.
//! What remains of a freeze without its bytes is a plane over sockets and threads, by least squares over the last freezes
//! and a first guess that never quite goes. Each way to move sockets has a plane of its own.

use core::time::Duration;
use holdfast_wire::migration::SocketStrategy;

/// A new sample's weight in the rate.
const WEIGHT: f64 = 0.25;
/// A sample counts for at most this many times the estimate.
const SAMPLE_MAX: f64 = 4.0;
/// From so many bytes on a transfer is bound by the rate and not by its delay.
const BULK_BYTES: u64 = 256 << 10;
/// What a sample weighs when the next one has come.
const FADING: f64 = 0.9;
/// What the guess weighs.
const GUESS: f64 = 0.02;

/// What a process is, as far as its freeze goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Bytes that the freeze would send.
    pub dirty: u64,
    /// Sockets.
    pub sockets: u32,
    /// Threads.
    pub threads: u32,
}

/// What freezes cost. Times in microseconds.
#[derive(Debug, Clone)]
pub(super) struct CostModel {
    /// Bytes a microsecond, which is also MB/s.
    rate: f64,
    /// From the last scan to the freeze.
    gap: f64,
    planes: [Plane; 3],
}

impl CostModel {
    /// First guesses, on the careful side.
    pub(super) fn new() -> CostModel {
        CostModel {
            rate: 100.0,
            gap: 2_000.0,
            planes: [60.0, 8.0, 4.0].map(|socket| Plane::new([1_500.0, socket, 40.0])),
        }
    }

    /// Bytes a second.
    pub(super) fn rate(&self) -> u64 {
        (self.rate * 1e6) as u64
    }

    pub(super) fn predict(&self, strategy: SocketStrategy, load: Load) -> Duration {
        let micros = self.plane(strategy).at(load) + load.dirty as f64 / self.rate;
        Duration::from_nanos((micros * 1e3) as u64)
    }

    /// What will have been changed when the freeze comes, given what a round found and how long it took.
    pub(super) fn dirty_at_freeze(&self, found: u64, duration: Duration) -> u64 {
        let micros = (duration.as_secs_f64() * 1e6).max(1.0);
        found.saturating_add((found as f64 * self.gap / micros.max(self.gap)) as u64)
    }

    /// How long so many bytes take.
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

    /// Learns how long it is from the last round to the freeze.
    pub(super) fn learn_gap(&mut self, gap: Duration) {
        let seen = (gap.as_secs_f64() * 1e6).min(self.gap * SAMPLE_MAX);
        self.gap += WEIGHT * (seen - self.gap);
    }

    /// Learns from a freeze.
    pub(super) fn learn_freeze(&mut self, strategy: SocketStrategy, load: Load, took: Duration) {
        let micros = took.as_secs_f64() * 1e6 - load.dirty as f64 / self.rate;
        let plane = &mut self.planes[index(strategy)];
        let micros = micros.clamp(0.0, plane.at(load) * SAMPLE_MAX);
        plane.learn(load, micros);
    }

    fn plane(&self, strategy: SocketStrategy) -> &Plane {
        &self.planes[index(strategy)]
    }
}

fn index(strategy: SocketStrategy) -> usize {
    match strategy {
        SocketStrategy::Iterative => 0,
        SocketStrategy::Collective => 1,
        SocketStrategy::Incremental => 2,
    }
}

/// `fixed + socket * sockets + thread * threads`.
#[derive(Debug, Clone)]
struct Plane {
    costs: [f64; 3],
    /// Sums over the samples: products of the terms, and of the terms with the time.
    products: [[f64; 3]; 3],
    times: [f64; 3],
    guess: [[f64; 3]; 3],
    guess_times: [f64; 3],
}

impl Plane {
    fn new(costs: [f64; 3]) -> Plane {
        let mut plane = Plane {
            costs,
            products: [[0.0; 3]; 3],
            times: [0.0; 3],
            guess: [[0.0; 3]; 3],
            guess_times: [0.0; 3],
        };
        // Made of points on it; they also keep apart what samples of one size do not.
        for terms in [[1.0, 0.0, 1.0], [1.0, 100.0, 1.0], [1.0, 0.0, 20.0]] {
            let time = dot(costs, terms);
            let weight = GUESS;
            add(
                &mut plane.guess,
                &mut plane.guess_times,
                terms,
                time,
                weight,
            );
        }
        plane
    }

    fn at(&self, load: Load) -> f64 {
        dot(self.costs, terms(load))
    }

    fn learn(&mut self, load: Load, micros: f64) {
        for row in &mut self.products {
            row.iter_mut().for_each(|sum| *sum *= FADING);
        }
        self.times.iter_mut().for_each(|sum| *sum *= FADING);
        add(
            &mut self.products,
            &mut self.times,
            terms(load),
            micros,
            1.0,
        );
        let (mut products, mut times) = (self.guess, self.guess_times);
        let seen = self.products.iter().flatten();
        products
            .iter_mut()
            .flatten()
            .zip(seen)
            .for_each(|(sum, seen)| *sum += seen);
        times
            .iter_mut()
            .zip(self.times)
            .for_each(|(sum, seen)| *sum += seen);
        // Noise may tilt the plane out of what is possible: that cost is then none, and the others take its part.
        let mut free = [true; 3];
        loop {
            let costs = solve(products, times, free);
            let Some(negative) = costs.iter().position(|cost| *cost < 0.0) else {
                self.costs = costs;
                return;
            };
            free[negative] = false;
        }
    }
}

fn terms(load: Load) -> [f64; 3] {
    [1.0, f64::from(load.sockets), f64::from(load.threads)]
}

fn dot(a: [f64; 3], b: [f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(
    products: &mut [[f64; 3]; 3],
    times: &mut [f64; 3],
    terms: [f64; 3],
    time: f64,
    weight: f64,
) {
    for ((row, sum), term) in products.iter_mut().zip(times).zip(terms) {
        for (product, other) in row.iter_mut().zip(terms) {
            *product += weight * term * other;
        }
        *sum += weight * term * time;
    }
}

/// Solves the normal equations for the costs that are free; the others are 0.
fn solve(mut products: [[f64; 3]; 3], mut times: [f64; 3], free: [bool; 3]) -> [f64; 3] {
    for (index, _) in free.iter().enumerate().filter(|(_, free)| !**free) {
        for row in &mut products {
            row[index] = 0.0;
        }
        products[index] = [0.0; 3];
        products[index][index] = 1.0;
        times[index] = 0.0;
    }
    // The matrix is positive definite, thanks to the guess: no row is to be exchanged.
    for pivot in 0..3 {
        for row in pivot + 1..3 {
            let factor = products[row][pivot] / products[pivot][pivot];
            let above = products[pivot];
            for (product, above) in products[row].iter_mut().zip(above).skip(pivot) {
                *product -= factor * above;
            }
            times[row] -= factor * times[pivot];
        }
    }
    let mut costs = [0.0; 3];
    for row in (0..3).rev() {
        let known: f64 = (row + 1..3)
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
            threads,
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
            let micros = 700 + 2 * u64::from(load.sockets) + 15 * u64::from(load.threads);
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
        // The other ways have learned nothing.
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
        let dirty = model.dirty_at_freeze(10 << 20, Duration::from_millis(100));
        assert!((10_590_000..10_595_000).contains(&dirty), "{dirty}");
        // A round shorter than the gap: everything of it may change once more, not more than that.
        let dirty = model.dirty_at_freeze(4_096, Duration::from_micros(1));
        assert_eq!(dirty, 8_192);
    }
}
