//! Times of requests.

use std::time::{Duration, Instant};

use rand::Rng;
use rand::rngs::SmallRng;

/// Request times of the members of a group.
#[derive(Debug)]
pub(super) enum Pace {
    /// No requests.
    Still,
    /// One request of each member as soon as it has its answer.
    Saturating,
    /// One request of each member per interval.
    Regular(Regular),
}

/// Request times with a random moment in the interval for each member.
#[derive(Debug)]
pub(super) struct Regular {
    start: Instant,
    interval: Duration,
    /// Moments in the interval and their members, in order.
    moments: Vec<(Duration, usize)>,
    next: usize,
    rounds: u32,
}

impl Pace {
    pub(super) fn new(interval: Duration, members: usize, random: &mut SmallRng) -> Pace {
        if interval.is_zero() {
            return Pace::Saturating;
        }
        let moment = |place| (interval.mul_f64(random.random::<f64>()), place);
        let mut moments: Vec<_> = (0..members).map(moment).collect();
        moments.sort_unstable();
        Pace::Regular(Regular {
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
            Pace::Regular(regular) => Some(regular.due()?.0),
            _ => None,
        }
    }

    /// Returns a member with a request due at `now`.
    pub(super) fn pop(&mut self, now: Instant) -> Option<usize> {
        let Pace::Regular(regular) = self else {
            return None;
        };
        let (at, place) = regular.due()?;
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

impl Regular {
    fn due(&self) -> Option<(Instant, usize)> {
        let (moment, place) = *self.moments.get(self.next)?;
        Some((self.start + self.interval * self.rounds + moment, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn each_is_due_once_an_interval() {
        let interval = Duration::from_millis(100);
        let mut pace = Pace::new(interval, 50, &mut SmallRng::seed_from_u64(1));
        let Pace::Regular(regular) = &pace else {
            panic!("{pace:?}");
        };
        let start = regular.start;
        let mut asked = [0; 50];
        // Take every request due before the end of the third interval.
        while let Some(place) = pace.pop(start + interval * 3 - Duration::from_nanos(1)) {
            asked[place] += 1;
        }
        assert_eq!(asked, [3; 50]);
        let next = pace.next().unwrap();
        assert!(next >= start + interval * 3 && next < start + interval * 4);
    }

    #[test]
    fn without_an_interval_answers_lead_to_requests() {
        let mut pace = Pace::new(Duration::ZERO, 5, &mut SmallRng::seed_from_u64(1));
        assert!(matches!(pace, Pace::Saturating));
        assert_eq!((pace.next(), pace.pop(Instant::now())), (None, None));
    }
}
