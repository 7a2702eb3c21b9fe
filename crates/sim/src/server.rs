//! A server's capacity.

use crate::time::Time;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A server that works on all its requests concurrently, each with the same share of its capacity: "A PE can handle
/// multiple requests simultaneously, in a processor sharing mode" (paper 004 section 4).
///
/// `J` names a request; of two that end at the same time the lower one ends first.
#[derive(Debug)]
pub struct Server<J> {
    /// Capacity in calculations per second.
    capacity: f64,
    /// Calculations that a request present from the beginning would have received.
    given: f64,
    /// Time of that value.
    updated: Time,
    /// The value of `given` at which each request ends.
    jobs: BinaryHeap<Reverse<(Work, J)>>,
    /// Total of the calculations done.
    done: f64,
}

/// A number of calculations: never negative and never NaN, so the order of the bits is the order of the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Work(u64);

impl Work {
    fn new(amount: f64) -> Work {
        Work(amount.max(0.0).to_bits())
    }

    fn amount(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl<J: Ord + Copy> Server<J> {
    /// Creates a server without requests.
    #[must_use]
    pub fn new(capacity: f64) -> Server<J> {
        Server {
            capacity,
            given: 0.0,
            updated: Time::ZERO,
            jobs: BinaryHeap::new(),
            done: 0.0,
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
    pub fn done(&mut self, now: Time) -> f64 {
        self.update(now);
        self.done
    }

    /// Adds a request of `size` calculations.
    pub fn add(&mut self, now: Time, job: J, size: f64) {
        self.update(now);
        self.jobs.push(Reverse((Work::new(self.given + size), job)));
    }

    /// Removes and returns the next request that has ended, if any.
    pub fn pop(&mut self, now: Time) -> Option<J> {
        self.update(now);
        let Reverse((work, job)) = self.jobs.peek().copied()?;
        // Times are whole nanoseconds: a request that ends within the next one has ended.
        if self.ends(work) > now {
            return None;
        }
        self.jobs.pop();
        Some(job)
    }

    /// Returns the end of the next request, if no other arrives.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        self.jobs.peek().map(|Reverse((work, _))| self.ends(*work))
    }

    /// Stops the server; returns its requests, which are lost.
    pub fn clear(&mut self, now: Time) -> Vec<J> {
        self.update(now);
        let lost = std::mem::take(&mut self.jobs).into_sorted_vec();
        lost.into_iter().map(|Reverse((_, job))| job).collect()
    }

    fn ends(&self, work: Work) -> Time {
        let left = (work.amount() - self.given).max(0.0) * self.jobs.len() as f64;
        self.updated + Time((left / self.capacity * 1e9) as u64)
    }

    fn update(&mut self, now: Time) {
        let jobs = self.jobs.len();
        if jobs > 0 {
            let work = now.since(self.updated).as_secs_f64() * self.capacity;
            self.given += work / jobs as f64;
            self.done += work;
        } else {
            // No request depends on the value: reset it to keep it small, and exact.
            self.given = 0.0;
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
        let mut server = Server::new(10.0);
        let mut ended = Vec::new();
        let mut coming = requests.iter().enumerate().peekable();
        loop {
            let arrival = coming.peek().map(|(_, (time, _))| at(*time));
            let next = server.next();
            if let Some(time) = next.filter(|next| arrival.is_none_or(|arrival| *next <= arrival)) {
                let job = server.pop(time).unwrap();
                ended.push((job, time.as_secs_f64()));
            } else if let Some((job, (time, size))) = coming.next() {
                server.add(at(*time), job, *size);
            } else {
                return ended;
            }
        }
    }

    #[test]
    fn capacity_is_shared_alike() {
        let near = |got: Vec<(usize, f64)>, wanted: &[(usize, f64)]| {
            assert_eq!(got.len(), wanted.len());
            for (got, wanted) in got.iter().zip(wanted) {
                assert_eq!(got.0, wanted.0);
                assert!((got.1 - wanted.1).abs() < 1e-6, "{got:?}, not {wanted:?}");
            }
        };
        near(serve(&[(1.0, 20.0)]), &[(0, 3.0)]);
        // Alone for a second, then shared by two; the shorter ends at 3, and the other has 5 left.
        near(serve(&[(0.0, 25.0), (1.0, 10.0)]), &[(1, 3.0), (0, 3.5)]);
        // One starts when another ends.
        near(serve(&[(0.0, 10.0), (1.0, 10.0)]), &[(0, 1.0), (1, 2.0)]);
        // Two at the same time.
        near(serve(&[(0.0, 10.0), (0.0, 10.0)]), &[(0, 2.0), (1, 2.0)]);
    }

    #[test]
    fn what_was_done_is_counted_and_what_is_lost_named() {
        let mut server = Server::new(10.0);
        server.add(at(1.0), 7, 100.0);
        server.add(at(2.0), 3, 5.0);
        assert!((server.done(at(2.5)) - 15.0).abs() < 1e-6);
        assert_eq!(server.clear(at(4.0)), [7, 3]);
        assert!((server.done(at(9.0)) - 30.0).abs() < 1e-6);
        assert_eq!((server.jobs(), server.next()), (0, None));
    }
}
