//! Queues by key. Most pools have few keys, whose queues lie side by side; a pool of many keys has them in a tree.

use super::blocks::Queue;
use prefetch_index::prefetch_index;
use std::collections::BTreeMap;

/// With more keys, to move half of them aside is dearer than a tree.
const FEW: usize = 32;
/// Keys a cache line.
const PER_LINE: usize = 64 / size_of::<(u64, Queue)>();

/// The queues of a pool, without that of the lowest key.
#[derive(Debug, Clone)]
pub(super) enum Keys {
    /// The lowest key last.
    Few(Vec<(u64, Queue)>),
    Many(BTreeMap<u64, Queue>),
}

impl Default for Keys {
    fn default() -> Keys {
        Keys::Few(Vec::new())
    }
}

impl Keys {
    /// The queue of a key.
    #[inline]
    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut Queue> {
        match self {
            Keys::Few(queues) => {
                let place = place(queues, key).ok()?;
                Some(&mut queues[place].1)
            }
            Keys::Many(queues) => queues.get_mut(&key),
        }
    }

    /// Adds the queue of a key that has none.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, queue: Queue) {
        match self {
            Keys::Few(queues) if queues.len() < FEW => {
                if let Err(place) = place(queues, key) {
                    queues.insert(place, (key, queue));
                }
            }
            Keys::Few(queues) => {
                let mut many: BTreeMap<u64, Queue> = queues.drain(..).collect();
                many.insert(key, queue);
                *self = Keys::Many(many);
            }
            Keys::Many(queues) => {
                queues.insert(key, queue);
            }
        }
    }

    /// Removes the queue of a key.
    #[inline]
    pub(super) fn remove(&mut self, key: u64) {
        match self {
            Keys::Few(queues) => {
                if let Ok(place) = place(queues, key) {
                    queues.remove(place);
                }
            }
            Keys::Many(queues) => {
                queues.remove(&key);
            }
        }
    }

    /// Takes the queue of the lowest key.
    #[inline]
    pub(super) fn pop_first(&mut self) -> Option<(u64, Queue)> {
        match self {
            Keys::Few(queues) => queues.pop(),
            Keys::Many(queues) => queues.pop_first(),
        }
    }

    /// The queues in the order of their keys, until `visit` says that it is enough.
    pub(super) fn each(&self, mut visit: impl FnMut(Queue) -> bool) {
        let _ = match self {
            Keys::Few(queues) => queues.iter().rev().all(|&(_, queue)| visit(queue)),
            Keys::Many(queues) => queues.values().all(|&queue| visit(queue)),
        };
    }

    /// The queues, if they are few and lie in memory side by side.
    #[inline]
    pub(super) fn few(&self) -> &[(u64, Queue)] {
        match self {
            Keys::Few(queues) => queues,
            Keys::Many(_) => &[],
        }
    }

    /// Fetches what an insertion will search, if that is in few lines.
    #[inline]
    pub(super) fn fetch(&self) {
        let queues = self.few();
        for line in 0..queues.len().div_ceil(PER_LINE) {
            prefetch_index(queues, line * PER_LINE);
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let (places, bytes) = match self {
            Keys::Few(queues) => (queues.capacity(), size_of::<(u64, Queue)>()),
            // A node of the standard library's map has eleven places, and two of three are taken.
            Keys::Many(queues) => (queues.len() * 3 / 2, size_of::<u64>() + size_of::<Queue>()),
        };
        places * bytes
    }
}

/// Where a key is, or belongs.
#[inline]
fn place(queues: &[(u64, Queue)], key: u64) -> Result<usize, usize> {
    queues.binary_search_by(|&(other, _)| key.cmp(&other))
}

#[cfg(test)]
mod tests {
    use super::super::blocks::Blocks;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a tree from the beginning, over as many keys as there may be few of, and more.
        #[test]
        fn they_are_in_order(steps in prop::collection::vec((0u8..3, 0u64..100), 1..400)) {
            let mut blocks = Blocks::new();
            let mut keys = Keys::default();
            let mut model = BTreeMap::new();
            for (what, key) in steps {
                let known = model.contains_key(&key);
                prop_assert_eq!(keys.get_mut(key).copied(), model.get(&key).copied());
                match what {
                    0 | 1 if !known => {
                        let (queue, _) = blocks.start(0);
                        keys.insert(key, queue);
                        model.insert(key, queue);
                    }
                    1 => {
                        keys.remove(key);
                        model.remove(&key);
                    }
                    2 => prop_assert_eq!(keys.pop_first(), model.pop_first()),
                    _ => {}
                }
                let mut queues = Vec::new();
                keys.each(|queue| {
                    queues.push(queue);
                    true
                });
                prop_assert_eq!(queues, model.values().copied().collect::<Vec<_>>());
            }
        }
    }
}
