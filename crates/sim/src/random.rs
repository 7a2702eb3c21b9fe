//! Random numbers of a simulation, all from one seed.

use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

/// The random number generator of one simulation: the same seed gives the same numbers.
#[derive(Debug, Clone)]
pub struct Random(SmallRng);

impl Random {
    /// Creates the generator from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(SmallRng::seed_from_u64(seed))
    }

    /// Returns a random 64-bit number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a seed for a state machine.
    pub fn seed(&mut self) -> [u8; 32] {
        let mut seed = [0; 32];
        self.0.fill_bytes(&mut seed);
        seed
    }

    /// Returns a number from 0 to `end`, the latter excluded; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 {
            return 0;
        }
        self.0.random_range(0..end)
    }

    /// Returns a number from `low` to `high`, the latter excluded; `low` if the range is empty.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        if high <= low {
            return low;
        }
        self.0.random_range(low..high)
    }

    /// Returns a number that is at least 0 and less than 1.
    pub fn fraction(&mut self) -> f64 {
        self.0.random()
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.fraction() < probability
    }

    /// Returns a number with a negative exponential distribution.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        // The argument is at most 1 and never 0, so the logarithm is finite.
        -mean * (1.0 - self.fraction()).ln()
    }

    /// Returns a number with a normal distribution, by the method of Box and Muller.
    pub fn normal(&mut self, mean: f64, deviation: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.fraction()).ln()).sqrt();
        mean + deviation * radius * (std::f64::consts::TAU * self.fraction()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_have_expected_moments() {
        let mut random = Random::new(1);
        let count = 200_000;
        let draws: Vec<f64> = (0..count).map(|_| random.exponential(3.0)).collect();
        let mean = draws.iter().sum::<f64>() / f64::from(count);
        let square = draws.iter().map(|draw| draw * draw).sum::<f64>() / f64::from(count);
        assert!((mean - 3.0).abs() < 0.05 && (square - 18.0).abs() < 0.6);
        let normal: Vec<f64> = (0..count).map(|_| random.normal(5.0, 2.0)).collect();
        let mean = normal.iter().sum::<f64>() / f64::from(count);
        let spread = normal.iter().map(|x| (x - 5.0).powi(2)).sum::<f64>() / f64::from(count);
        assert!((mean - 5.0).abs() < 0.03 && (spread - 4.0).abs() < 0.1);
    }
}
