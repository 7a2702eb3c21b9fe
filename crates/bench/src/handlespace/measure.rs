//! How an operation is timed: in batches, prepared outside the time, for as long as asked.

use std::time::{Duration, Instant};

/// What the batches of one operation took.
#[derive(Debug, Default)]
pub struct Samples {
    /// Nanoseconds an operation, one entry a batch.
    ns: Vec<f64>,
    operations: u64,
    spent: Duration,
}

impl Samples {
    /// Times a batch of so many operations.
    #[inline]
    pub fn time(&mut self, operations: usize, batch: impl FnOnce()) {
        let start = Instant::now();
        batch();
        let spent = start.elapsed();
        self.spent += spent;
        self.operations += operations as u64;
        self.ns
            .push(spent.as_nanos() as f64 / operations.max(1) as f64);
    }

    /// Whether it has gone on for so long.
    pub fn lasted(&self, duration: Duration) -> bool {
        self.spent >= duration
    }

    /// Operations a second.
    pub fn per_second(&self) -> f64 {
        self.operations as f64 / self.spent.as_secs_f64()
    }

    /// The median of the batches' nanoseconds an operation.
    pub fn ns_median(&mut self) -> f64 {
        self.ns.sort_by(f64::total_cmp);
        self.ns[self.ns.len() / 2]
    }
}
