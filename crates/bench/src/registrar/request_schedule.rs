//! Times at which the members of a group send requests.

use std::time::{Duration, Instant};

use rand::Rng;
use rand::rngs::SmallRng;

/// Request times of the members of a group.
#[derive(Debug)]
pub(super) enum RequestSchedule {
    /// The members send no requests.
    Stopped,
    /// Each member sends its next request as soon as the previous one is answered.
    Saturating,
    /// Each member sends one request per interval.
    Regular(RegularSchedule),
}

/// Request times with a random moment in the interval for each member.
#[derive(Debug)]
pub(super) struct RegularSchedule {
    start: Instant,
    interval: Duration,
    /// Moments in the interval and their members, in order.
    moments: Vec<(Duration, usize)>,
    next: usize,
    rounds: u32,
}

impl RequestSchedule {
    pub(super) fn new(
        interval: Duration,
        members: usize,
        random: &mut SmallRng,
    ) -> RequestSchedule {
        if interval.is_zero() {
            return RequestSchedule::Saturating;
        }
        let moment = |place| (interval.mul_f64(random.random::<f64>()), place);
        let mut moments: Vec<_> = (0..members).map(moment).collect();
        moments.sort_unstable();
        RequestSchedule::Regular(RegularSchedule {
            start: Instant::now(),
            interval,
            moments,
            next: 0,
            rounds: 0,
        })
    }

    /// Returns the time of the next request that does not depend on an answer.
    pub(super) fn next(&self) -> Option<Instant> {
        match self {
            RequestSchedule::Regular(regular) => Some(regular.next_due()?.0),
            _ => None,
        }
    }

    /// Returns a member with a request due at `now`.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<usize> {
        let RequestSchedule::Regular(regular) = self else {
            return None;
        };
        let (at, place) = regular.next_due()?;
        if at > now {
            return None;
        }
        regular.next += 1;
        if regular.next == regular.moments.len() {
            regular.next = 0;
            regular.rounds += 1;
        }
        Some(place)
    }
}

impl RegularSchedule {
    fn next_due(&self) -> Option<(Instant, usize)> {
        let (moment, place) = *self.moments.get(self.next)?;
        Some((self.start + self.interval * self.rounds + moment, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn each_member_is_due_once_per_interval() {
        let interval = Duration::from_millis(100);
        let mut pace = RequestSchedule::new(interval, 50, &mut SmallRng::seed_from_u64(1));
        let RequestSchedule::Regular(regular) = &pace else {
            panic!("{pace:?}");
        };
        let start = regular.start;
        let mut request_counts = [0; 50];
        // Take every request due before the end of the third interval.
        while let Some(place) = pace.pop_due(start + interval * 3 - Duration::from_nanos(1)) {
            request_counts[place] += 1;
        }
        assert_eq!(request_counts, [3; 50]);
        let next = pace.next().unwrap();
        assert!(next >= start + interval * 3 && next < start + interval * 4);
    }

    #[test]
    fn zero_interval_sends_after_each_answer() {
        let mut pace = RequestSchedule::new(Duration::ZERO, 5, &mut SmallRng::seed_from_u64(1));
        assert!(matches!(pace, RequestSchedule::Saturating));
        assert_eq!((pace.next(), pace.pop_due(Instant::now())), (None, None));
    }
}
