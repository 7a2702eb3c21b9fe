//! Timing of an operation: in batches, with their preparation outside the measured time, until a given total. The
//! measure is the processor time of this thread: the operations never wait, and other work of the host is not part of
//! their cost.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Times of the batches of one operation.
#[derive(Debug, Default)]
pub struct BatchTimes {
    /// Nanoseconds per operation, one entry per batch.
    ns: Vec<f64>,
    operations: u64,
    measured: Duration,
}

impl BatchTimes {
    /// Times a batch of `operations` operations.
    #[inline]
    pub fn time_batch(&mut self, operations: usize, batch: impl FnOnce()) {
        let start = processor_time();
        batch();
        let spent = processor_time().saturating_sub(start);
        self.measured += spent;
        self.operations += operations as u64;
        self.ns
            .push(spent.as_nanos() as f64 / operations.max(1) as f64);
    }

    /// Returns true if the batches have taken `duration` in total.
    pub fn has_lasted(&self, duration: Duration) -> bool {
        self.measured >= duration
    }

    /// Returns the operations per second.
    pub fn per_second(&self) -> f64 {
        self.operations as f64 / self.measured.as_secs_f64()
    }

    /// Returns the median over the batches of the nanoseconds per operation.
    pub fn ns_median(&mut self) -> f64 {
        self.ns.sort_by(f64::total_cmp);
        self.ns[self.ns.len() / 2]
    }
}

/// Returns the processor time that this thread has used.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap_or_default()
}
