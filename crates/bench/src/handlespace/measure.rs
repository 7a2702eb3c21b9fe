//! How an operation is timed: in batches, prepared outside the time, for as long as asked. What counts is the processor's
//! time of this thread: nothing here waits, and what else the host does is not the operation's cost.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

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
        let start = processor_time();
        batch();
        let spent = processor_time().saturating_sub(start);
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

/// What this thread has had of a processor.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap_or_default()
}
