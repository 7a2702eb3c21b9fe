//! What is to happen, in order.

use crate::time::Time;
use std::collections::VecDeque;

/// Events by their time; those of one time in the order in which they came. It is a radix heap: an event lies in the bucket of
/// the highest bit in which its time differs from the present, and moves to lower buckets as time goes on. Nothing is
/// compared, and each bucket is read and written from its beginning to its end.
#[derive(Debug)]
pub struct Queue<E> {
    /// No event is earlier.
    present: u64,
    /// The events of the present.
    ready: VecDeque<E>,
    /// Bucket `n` has the events whose times differ from the present in bit `n` and in none above.
    buckets: Vec<Vec<(u64, E)>>,
    /// Which buckets have any.
    occupied: u64,
    length: usize,
}

impl<E> Default for Queue<E> {
    fn default() -> Queue<E> {
        Queue {
            present: 0,
            ready: VecDeque::new(),
            buckets: (0..64).map(|_| Vec::new()).collect(),
            occupied: 0,
            length: 0,
        }
    }
}

impl<E> Queue<E> {
    /// Something is to happen at that time, or now if that is past.
    #[inline]
    pub fn push(&mut self, at: Time, event: E) {
        self.length += 1;
        self.place(at.0.max(self.present), event);
    }

    #[inline]
    fn place(&mut self, at: u64, event: E) {
        let differs = at ^ self.present;
        if differs == 0 {
            return self.ready.push_back(event);
        }
        let bucket = differs.ilog2();
        self.occupied |= 1 << bucket;
        self.buckets[bucket as usize].push((at, event));
    }

    /// The next event, if it happens at `end` at the latest.
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

    /// Makes the time of the next event the present, unless it is beyond `end`.
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
        // All go to lower buckets, in the order in which they came: so events of one time stay in order.
        for (at, event) in events.drain(..) {
            self.place(at, event);
        }
        self.buckets[bucket] = events;
        Some(())
    }

    /// How many events there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing is to happen any more.
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
        /// Like a sorted map by time and order of arrival, whatever is pushed and popped when.
        #[test]
        fn events_come_in_order_of_time_and_then_of_arrival(
            steps in proptest::collection::vec((0u64..40, any::<bool>(), 0u32..20), 1..300),
        ) {
            let mut queue = Queue::default();
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
    fn what_is_late_happens_now() {
        let mut queue = Queue::default();
        queue.push(Time(9), 'a');
        assert_eq!(queue.pop_until(Time(8)), None);
        assert_eq!(queue.pop_until(Time(9)), Some((Time(9), 'a')));
        queue.push(Time(3), 'b');
        assert_eq!(queue.pop_until(Time(20)), Some((Time(9), 'b')));
        assert!(queue.is_empty());
    }
}
