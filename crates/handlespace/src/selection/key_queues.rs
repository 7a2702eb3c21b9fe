//! Queues by key. Most pools have few keys, with queues in one array; a pool of many keys has the queues in a tree.

use super::queue_blocks::{BlockQueue, QueueBlocks};
use prefetch_index::prefetch_index;
use std::collections::{BTreeMap, btree_map::Entry};

/// With more keys, moving half of the array costs more than a tree.
const ARRAY_MAX: usize = 32;
/// Number of keys per cache line.
const PER_LINE: usize = 64 / size_of::<(u64, BlockQueue)>();

/// The queues of a pool, without the queue of the lowest key.
#[derive(Debug, Clone)]
pub(super) enum KeyQueues {
    /// Sorted array, lowest key last.
    Array(Vec<(u64, BlockQueue)>),
    Tree(BTreeMap<u64, BlockQueue>),
}

impl Default for KeyQueues {
    fn default() -> KeyQueues {
        KeyQueues::Array(Vec::new())
    }
}

impl KeyQueues {
    /// Appends an element to a key's queue, which is created if missing; returns its spot.
    #[inline]
    pub(super) fn push(&mut self, blocks: &mut QueueBlocks, key: u64, slot: u32) -> u32 {
        match self {
            KeyQueues::Array(queues) => match search(queues, key) {
                Ok(place) => blocks.push(&mut queues[place].1, slot),
                Err(place) => {
                    let (queue, spot) = blocks.start(slot);
                    self.insert_into_array(place, key, queue);
                    spot
                }
            },
            KeyQueues::Tree(queues) => match queues.entry(key) {
                Entry::Occupied(mut entry) => blocks.push(entry.get_mut(), slot),
                Entry::Vacant(entry) => {
                    let (queue, spot) = blocks.start(slot);
                    entry.insert(queue);
                    spot
                }
            },
        }
    }

    /// Adds the queue of a key that has none.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, queue: BlockQueue) {
        match self {
            KeyQueues::Array(queues) => {
                if let Err(place) = search(queues, key) {
                    self.insert_into_array(place, key, queue);
                }
            }
            KeyQueues::Tree(queues) => {
                queues.insert(key, queue);
            }
        }
    }

    fn insert_into_array(&mut self, place: usize, key: u64, queue: BlockQueue) {
        let KeyQueues::Array(queues) = self else {
            unreachable!("the queues are an array here");
        };
        if queues.len() < ARRAY_MAX {
            queues.insert(place, (key, queue));
        } else {
            let mut many: BTreeMap<u64, BlockQueue> = queues.drain(..).collect();
            many.insert(key, queue);
            *self = KeyQueues::Tree(many);
        }
    }

    /// Removes the element at `spot` from a key's queue, and the queue with its last element.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut QueueBlocks, key: u64, spot: u32) {
        match self {
            KeyQueues::Array(queues) => {
                let Ok(place) = search(queues, key) else {
                    unreachable!("an element's key has a queue");
                };
                if !blocks.remove(&mut queues[place].1, spot) {
                    queues.remove(place);
                }
            }
            KeyQueues::Tree(queues) => {
                let Entry::Occupied(mut entry) = queues.entry(key) else {
                    unreachable!("an element's key has a queue");
                };
                if !blocks.remove(entry.get_mut(), spot) {
                    entry.remove();
                }
            }
        }
    }

    /// Removes and returns the queue of the lowest key.
    #[inline]
    pub(super) fn pop_first(&mut self) -> Option<(u64, BlockQueue)> {
        match self {
            KeyQueues::Array(queues) => queues.pop(),
            KeyQueues::Tree(queues) => queues.pop_first(),
        }
    }

    /// Visits the queues in the order of their keys, until `visit` returns false.
    pub(super) fn visit(&self, mut visit: impl FnMut(BlockQueue) -> bool) {
        let _ = match self {
            KeyQueues::Array(queues) => queues.iter().rev().all(|&(_, queue)| visit(queue)),
            KeyQueues::Tree(queues) => queues.values().all(|&queue| visit(queue)),
        };
    }

    /// Returns the queues, if they are in one array.
    #[inline]
    pub(super) fn array(&self) -> &[(u64, BlockQueue)] {
        match self {
            KeyQueues::Array(queues) => queues,
            KeyQueues::Tree(_) => &[],
        }
    }

    /// Prefetches the lines that an insertion searches, if the queues are in one array.
    #[inline]
    pub(super) fn prefetch(&self) {
        let queues = self.array();
        for line in 0..queues.len().div_ceil(PER_LINE) {
            prefetch_index(queues, line * PER_LINE);
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let (places, bytes) = match self {
            KeyQueues::Array(queues) => (queues.capacity(), size_of::<(u64, BlockQueue)>()),
            // A node of the standard library's map has eleven places, of which two thirds are used.
            KeyQueues::Tree(queues) => (
                queues.len() * 3 / 2,
                size_of::<u64>() + size_of::<BlockQueue>(),
            ),
        };
        places * bytes
    }
}

/// Returns a key's place, or the place to insert it.
#[inline]
fn search(queues: &[(u64, BlockQueue)], key: u64) -> Result<usize, usize> {
    queues.binary_search_by(|&(other, _)| key.cmp(&other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares the queues with a tree, with few enough keys for the array and with more.
        #[test]
        fn queues_stay_sorted_by_key(steps in prop::collection::vec((0u8..4, 0u64..100), 1..400)) {
            let mut blocks = QueueBlocks::new();
            let mut keys = KeyQueues::default();
            let mut model: BTreeMap<u64, Vec<(u32, u32)>> = BTreeMap::new();
            for (number, (what, key)) in (0..).zip(steps) {
                match what {
                    0 | 1 => {
                        let spot = keys.push(&mut blocks, key, number);
                        model.entry(key).or_default().push((number, spot));
                    }
                    2 if model.contains_key(&key) => {
                        let queue = model.get_mut(&key).expect("is there");
                        let (_, spot) = queue.remove(queue.len() / 2);
                        if queue.is_empty() {
                            model.remove(&key);
                        }
                        keys.remove(&mut blocks, key, spot);
                    }
                    3 => {
                        let first = keys.pop_first();
                        let wanted = model.pop_first();
                        prop_assert_eq!(first.map(|(key, _)| key), wanted.as_ref().map(|(key, _)| *key));
                        if let Some((key, queue)) = first.filter(|_| number % 2 == 0) {
                            keys.insert(key, queue);
                            model.extend(wanted);
                        }
                    }
                    _ => {}
                }
                let mut slots = Vec::new();
                keys.visit(|queue| blocks.visit_first(queue, usize::MAX, &mut |slot| slots.push(slot)) > 0);
                let wanted: Vec<_> = model.values().flatten().map(|&(slot, _)| slot).collect();
                prop_assert_eq!(slots, wanted);
            }
        }
    }
}
