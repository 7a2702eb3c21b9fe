//! SplitMix64: the whole run follows from one seed.

#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from `low` to `high`, the latter excluded.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low)
    }

    pub fn index(&mut self, length: usize) -> usize {
        self.range(0, length as u64) as usize
    }

    pub fn percent(&mut self, chance: u64) -> bool {
        self.range(0, 100) < chance
    }
}

/// Returns the seeds of a run: `HOLDFAST_SEED` alone, or the first `HOLDFAST_SEEDS`, or else so many.
pub fn seeds(default_count: u64) -> std::ops::Range<u64> {
    let number = |name| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    match (number("HOLDFAST_SEED"), number("HOLDFAST_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(default_count),
    }
}
