//! Random numbers that cannot be guessed without the secret seed.

use sha2::{Digest, Sha256};

/// Generator by SHA-256 of a seed and a counter: the same seed gives the same numbers.
#[derive(Debug)]
pub(crate) struct SecretSeedRng {
    seed: [u8; 32],
    counter: u64,
}

impl SecretSeedRng {
    pub(crate) fn new(seed: [u8; 32]) -> SecretSeedRng {
        SecretSeedRng { seed, counter: 0 }
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        self.counter += 1;
        let digest = Sha256::new()
            .chain_update(self.seed)
            .chain_update(self.counter.to_be_bytes())
            .finalize();
        digest
            .iter()
            .take(4)
            .fold(0, |number, byte| (number << 8) | u32::from(*byte))
    }

    /// Returns a number from 0 to `end`, the latter excluded; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u64::from(self.next_u32()) * end as u64) >> 32) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_below_end_are_uniform() {
        let mut random = SecretSeedRng::new([7; 32]);
        let mut drawn = [0; 5];
        for _ in 0..5_000 {
            drawn[random.below(5)] += 1;
        }
        assert!(drawn.iter().all(|count| (850..1150).contains(count)));
        assert_eq!(random.below(0), 0);
    }
}
