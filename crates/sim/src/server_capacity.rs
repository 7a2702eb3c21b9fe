//! A server that shares its capacity among concurrent requests.

use crate::time::Time;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A server that works on all its requests concurrently, each with the same share of its capacity: "A PE can handle
/// multiple requests simultaneously, in a processor sharing mode" (paper 004 section 4).
///
/// `J` names a request; of two that end at the same time the lower one ends first.
#[derive(Debug)]
pub struct SharedCapacityServer<J> {
    /// Capacity in calculations per second.
    capacity: f64,
    /// Calculations that a request present from the beginning would have received.
    share_received: f64,
    /// Time of that value.
    updated: Time,
    /// The value of `share_received` at which each request ends.
    jobs: BinaryHeap<Reverse<(WorkAmount, J)>>,
    /// Total of the calculations done.
    work_done: f64,
}

/// A number of calculations: never negative and never NaN, so the order of the bits is the order of the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct WorkAmount(u64);

impl WorkAmount {
    fn new(amount: f64) -> WorkAmount {
        WorkAmount(amount.max(0.0).to_bits())
    }

    fn amount(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl<J: Ord + Copy> SharedCapacityServer<J> {
    /// Creates a server without requests.
    #[must_use]
    pub fn new(capacity: f64) -> SharedCapacityServer<J> {
        SharedCapacityServer {
            capacity,
            share_received: 0.0,
            updated: Time::ZERO,
            jobs: BinaryHeap::new(),
            work_done: 0.0,
        }
    }

    /// Returns the capacity in calculations per second.
    #[must_use]
    pub fn capacity(&self) -> f64 {
        self.capacity
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Returns the number of calculations done until `now`.
    pub fn work_done(&mut self, now: Time) -> f64 {
        self.update(now);
        self.work_done
    }

    /// Adds a request of `size` calculations.
    pub fn add(&mut self, now: Time, job: J, size: f64) {
        self.update(now);
        self.jobs
            .push(Reverse((WorkAmount::new(self.share_received + size), job)));
    }

    /// Removes and returns the next request that has ended, if any.
    pub fn pop(&mut self, now: Time) -> Option<J> {
        self.update(now);
        let Reverse((work, job)) = self.jobs.peek().copied()?;
        // Times are whole nanoseconds: a request that ends within the next one has ended.
        if self.end_of(work) > now {
            return None;
        }
        self.jobs.pop();
        Some(job)
    }

    /// Returns the end of the next request, if no other arrives.
    #[must_use]
    pub fn next_end(&self) -> Option<Time> {
        self.jobs
            .peek()
            .map(|Reverse((work, _))| self.end_of(*work))
    }

    /// Stops the server; returns its requests, which are lost.
    pub fn clear(&mut self, now: Time) -> Vec<J> {
        self.update(now);
        let lost_jobs = std::mem::take(&mut self.jobs).into_sorted_vec();
        lost_jobs.into_iter().map(|Reverse((_, job))| job).collect()
    }

    fn end_of(&self, work: WorkAmount) -> Time {
        let work_left = (work.amount() - self.share_received).max(0.0) * self.jobs.len() as f64;
        self.updated + Time((work_left / self.capacity * 1e9) as u64)
    }

    fn update(&mut self, now: Time) {
        let jobs = self.jobs.len();
        if jobs > 0 {
            let work = now.since(self.updated).as_secs_f64() * self.capacity;
            self.share_received += work / jobs as f64;
            self.work_done += work;
        } else {
            // No request depends on the value: reset it to keep it small, and exact.
            self.share_received = 0.0;
        }
        self.updated = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    /// Returns the end of each request.
    fn serve(requests: &[(f64, f64)]) -> Vec<(usize, f64)> {
        let mut server = SharedCapacityServer::new(10.0);
        let mut ended = Vec::new();
        let mut arrivals = requests.iter().enumerate().peekable();
        loop {
            let arrival = arrivals.peek().map(|(_, (time, _))| at(*time));
            let next = server.next_end();
            if let Some(time) = next.filter(|next| arrival.is_none_or(|arrival| *next <= arrival)) {
                let job = server.pop(time).unwrap();
                ended.push((job, time.as_secs_f64()));
            } else if let Some((job, (time, size))) = arrivals.next() {
                server.add(at(*time), job, *size);
            } else {
                return ended;
            }
        }
    }

    #[test]
    fn capacity_is_shared_equally() {
        let assert_near = |got: Vec<(usize, f64)>, wanted: &[(usize, f64)]| {
            assert_eq!(got.len(), wanted.len());
            for (got, wanted) in got.iter().zip(wanted) {
                assert_eq!(got.0, wanted.0);
                assert!((got.1 - wanted.1).abs() < 1e-6, "{got:?}, not {wanted:?}");
            }
        };
        assert_near(serve(&[(1.0, 20.0)]), &[(0, 3.0)]);
        // Alone for a second, then shared by two; the shorter ends at 3, and the other has 5 left.
        assert_near(serve(&[(0.0, 25.0), (1.0, 10.0)]), &[(1, 3.0), (0, 3.5)]);
        // One starts when another ends.
        assert_near(serve(&[(0.0, 10.0), (1.0, 10.0)]), &[(0, 1.0), (1, 2.0)]);
        // Two at the same time.
        assert_near(serve(&[(0.0, 10.0), (0.0, 10.0)]), &[(0, 2.0), (1, 2.0)]);
    }

    #[test]
    fn work_done_is_counted_and_lost_requests_are_returned() {
        let mut server = SharedCapacityServer::new(10.0);
        server.add(at(1.0), 7, 100.0);
        server.add(at(2.0), 3, 5.0);
        assert!((server.work_done(at(2.5)) - 15.0).abs() < 1e-6);
        assert_eq!(server.clear(at(4.0)), [7, 3]);
        assert!((server.work_done(at(9.0)) - 30.0).abs() < 1e-6);
        assert_eq!((server.jobs(), server.next_end()), (0, None));
    }
}
