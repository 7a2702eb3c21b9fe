//! The queue of future events.

use crate::time::Time;
use std::collections::VecDeque;

/// Events in the order of their times; events of the same time in the order of insertion. Implemented as a radix heap:
/// an event is in the bucket of the highest bit in which its time differs from the present, and moves to lower buckets
/// as time advances. No comparisons are needed, and each bucket is read and written sequentially.
#[derive(Debug)]
pub struct FutureEvents<E> {
    /// The present: no event is earlier.
    present: u64,
    /// The events of the present.
    ready: VecDeque<E>,
    /// Bucket `n` contains the events with times that differ from the present in bit `n` and in none above.
    buckets: Vec<Vec<(u64, E)>>,
    /// Bitmap of nonempty buckets.
    occupied: u64,
    length: usize,
}

impl<E> Default for FutureEvents<E> {
    fn default() -> FutureEvents<E> {
        FutureEvents {
            present: 0,
            ready: VecDeque::new(),
            buckets: (0..64).map(|_| Vec::new()).collect(),
            occupied: 0,
            length: 0,
        }
    }
}

impl<E> FutureEvents<E> {
    /// Adds an event for time `at`, or for the present if that is past.
    #[inline]
    pub fn push(&mut self, at: Time, event: E) {
        self.length += 1;
        self.insert(at.0.max(self.present), event);
    }

    #[inline]
    fn insert(&mut self, at: u64, event: E) {
        let differs = at ^ self.present;
        if differs == 0 {
            return self.ready.push_back(event);
        }
        let bucket = differs.ilog2();
        self.occupied |= 1 << bucket;
        self.buckets[bucket as usize].push((at, event));
    }

    /// Removes and returns the next event, if its time is at most `end`.
    #[inline]
    pub fn pop_until(&mut self, end: Time) -> Option<(Time, E)> {
        if self.ready.is_empty() {
            self.advance(end.0)?;
        } else if self.present > end.0 {
            return None;
        }
        self.length -= 1;
        let event = self.ready.pop_front()?;
        Some((Time(self.present), event))
    }

    /// Advances the present to the time of the next event, unless that is beyond `end`.
    fn advance(&mut self, end: u64) -> Option<()> {
        if self.occupied == 0 {
            return None;
        }
        let bucket = self.occupied.trailing_zeros() as usize;
        let mut events = std::mem::take(&mut self.buckets[bucket]);
        let first = events.iter().map(|(at, _)| *at).min();
        let Some(first) = first.filter(|first| *first <= end) else {
            self.buckets[bucket] = events;
            return None;
        };
        self.present = first;
        self.occupied &= !(1 << bucket);
        // All events move to lower buckets in order of insertion, so events of the same time stay in order.
        for (at, event) in events.drain(..) {
            self.insert(at, event);
        }
        self.buckets[bucket] = events;
        Some(())
    }

    /// Returns the number of events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns true if there are no events.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Compares the queue with a map sorted by time and order of insertion, for random pushes and pops.
        #[test]
        fn events_pop_by_time_then_insertion_order(
            steps in proptest::collection::vec((0u64..40, any::<bool>(), 0u32..20), 1..300),
        ) {
            let mut queue = FutureEvents::default();
            let mut model = BTreeMap::new();
            let mut now = 0;
            for (number, (wait, push, shift)) in steps.into_iter().enumerate() {
                if push {
                    let at = now + (wait << shift);
                    queue.push(Time(at), number);
                    model.insert((at, number), ());
                } else {
                    let end = now + (wait << shift);
                    let wanted = model.first_key_value().map(|(key, ())| *key).filter(|key| key.0 <= end);
                    let got = queue.pop_until(Time(end)).map(|(at, event)| (at.0, event));
                    prop_assert_eq!(got, wanted);
                    if let Some(key) = wanted {
                        model.remove(&key);
                        now = key.0;
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }

    #[test]
    fn late_event_occurs_at_the_present_time() {
        let mut queue = FutureEvents::default();
        queue.push(Time(9), 'a');
        assert_eq!(queue.pop_until(Time(8)), None);
        assert_eq!(queue.pop_until(Time(9)), Some((Time(9), 'a')));
        queue.push(Time(3), 'b');
        assert_eq!(queue.pop_until(Time(20)), Some((Time(9), 'b')));
        assert!(queue.is_empty());
    }
}
