//! One simulation with many seeds.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the seeds that the environment selects: only `HOLDFAST_SEED`, or the number `HOLDFAST_SEEDS` of seeds from
/// `first` on; by default `default_count` seeds.
#[must_use]
pub fn from_environment(first: u64, default_count: u64) -> Vec<u64> {
    let number = |name| {
        let text = std::env::var(name).ok()?;
        text.parse::<u64>().ok()
    };
    match number("HOLDFAST_SEED") {
        Some(seed) => vec![seed],
        None => {
            let count = number("HOLDFAST_SEEDS").unwrap_or(default_count);
            (first..first + count).collect()
        }
    }
}

/// Runs every job, on as many threads as there are processors, and returns the results in the order of the jobs,
/// independent of the number of threads. Calls `done` after each job with the number of completed ones.
///
/// # Panics
/// When a job panics.
pub fn run_all<J: Sync, R: Send>(
    jobs: &[J],
    run: impl Fn(&J) -> R + Sync,
    done: impl Fn(usize) + Sync,
) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    let (next, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let results: Mutex<Vec<Option<R>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        let work = || {
            while let Some(job) = {
                let index = next.fetch_add(1, Ordering::Relaxed);
                jobs.get(index).map(|job| (index, job))
            } {
                let (index, job) = job;
                let result = run(job);
                if let Ok(mut results) = results.lock() {
                    results[index] = Some(result);
                }
                done(ended.fetch_add(1, Ordering::Relaxed) + 1);
            }
        };
        for _ in 1..threads.min(jobs.len()) {
            scope.spawn(work);
        }
        work();
    });
    let results = results.into_inner().unwrap_or_default();
    results.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_jobs() {
        let jobs: Vec<u64> = (0..100).collect();
        let done_calls = AtomicUsize::new(0);
        let squares = run_all(
            &jobs,
            |job| job * job,
            |_| {
                done_calls.fetch_add(1, Ordering::Relaxed);
            },
        );
        assert_eq!(
            squares,
            jobs.iter().map(|job| job * job).collect::<Vec<_>>()
        );
        assert_eq!(done_calls.into_inner(), 100);
    }
}
