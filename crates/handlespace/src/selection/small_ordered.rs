//! A small pool's elements in a policy's sorting order, in the pool's record itself.
//!
//! A structure that is fast with a million elements has a separate piece of memory for each of its parts. For a pool of
//! ten, an operation would fetch most of them, and with many pools none is in a cache. Here all are in three lines
//! after the pool's first one.

use super::small_array::{self, FREE, SMALL_SIZE};
use crate::policy::EXCLUDED_KEY;

/// Elements by key, and in order of arrival within a key. Free places come last.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct SmallOrdered {
    /// Number of elements with the lowest key; 0 if not computed since the last change.
    lowest_count: u64,
    slots: [u32; SMALL_SIZE],
    /// Separate from the slots, because a selection from the lowest key does not read the keys.
    keys: [u64; SMALL_SIZE],
}

impl SmallOrdered {
    pub(super) fn new() -> SmallOrdered {
        SmallOrdered {
            lowest_count: 0,
            slots: [FREE; SMALL_SIZE],
            keys: [EXCLUDED_KEY; SMALL_SIZE],
        }
    }

    /// Returns the lowest key, 0 if there is no element.
    #[inline]
    pub(super) fn lowest(&self) -> u64 {
        if self.keys[0] == EXCLUDED_KEY {
            0
        } else {
            self.keys[0]
        }
    }

    /// Inserts an element after all elements with keys up to its own, which is not [`EXCLUDED_KEY`]. Returns false if all places
    /// are taken.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, slot: u32) -> bool {
        if self.slots[SMALL_SIZE - 1] != FREE {
            return false;
        }
        let place = small_array::count_up_to(&self.keys, key);
        small_array::insert_at(&mut self.slots, place, slot);
        small_array::insert_at(&mut self.keys, place, key);
        self.lowest_count = 0;
        true
    }

    /// Removes an element, which must be in the set.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let place = small_array::index_of(&self.slots, slot);
        small_array::remove_at(&mut self.slots, place, FREE);
        small_array::remove_at(&mut self.keys, place, EXCLUDED_KEY);
        self.lowest_count = 0;
    }

    /// Gives an element of the set another key, and moves it after all elements with keys up to that key.
    #[inline]
    pub(super) fn set_key(&mut self, key: u64, slot: u32) {
        let from = small_array::index_of(&self.slots, slot);
        let before = small_array::count_up_to(&self.keys, key);
        let to = before - usize::from(self.keys[from] <= key);
        small_array::move_to(&mut self.slots, from, to, slot);
        small_array::move_to(&mut self.keys, from, to, key);
        self.lowest_count = 0;
    }

    /// Returns the first elements, up to `items`.
    #[inline]
    pub(crate) fn first(&self, items: usize) -> impl Iterator<Item = u32> {
        let slots = self.slots.iter().take(items);
        slots.copied().take_while(|&slot| slot != FREE)
    }

    /// Moves the first element after the others with the same key.
    #[inline]
    pub(crate) fn rotate(&mut self) {
        if self.lowest_count == 0 {
            self.lowest_count = small_array::count_up_to(&self.keys, self.keys[0]) as u64;
        }
        small_array::rotate(&mut self.slots, self.lowest_count as usize);
    }

    /// Returns true if [`rotate`](Self::rotate) does not need the keys.
    #[inline]
    pub(super) fn knows_lowest_count(&self) -> bool {
        self.lowest_count > 0
    }

    /// Returns elements and their keys, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.keys.into_iter().zip(self.first(SMALL_SIZE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares the set with a vector that is sorted after each step; equal keys stay in order of arrival.
        #[test]
        fn set_behaves_like_a_sorted_vector(steps in prop::collection::vec((0u8..4, 0u64..5, 0u32..24), 1..200)) {
            let mut few = SmallOrdered::new();
            let mut model: Vec<(u64, u32)> = Vec::new();
            for (what, key, slot) in steps {
                let at = model.iter().position(|&(_, other)| other == slot);
                match (what, at) {
                    (0, _) => {
                        few.rotate();
                        if !model.is_empty() {
                            let first = model.remove(0);
                            model.push(first);
                        }
                    }
                    (1 | 2, None) => {
                        prop_assert_eq!(few.insert(key, slot), model.len() < SMALL_SIZE);
                        if model.len() < SMALL_SIZE {
                            model.push((key, slot));
                        }
                    }
                    (1, Some(at)) => {
                        few.set_key(key, slot);
                        model.remove(at);
                        model.push((key, slot));
                    }
                    (3, Some(at)) => {
                        few.remove(slot);
                        model.remove(at);
                    }
                    _ => {}
                }
                model.sort_by_key(|&(key, _)| key);
                prop_assert_eq!(few.iter().collect::<Vec<_>>(), model.clone());
                prop_assert_eq!(few.lowest(), model.first().map_or(0, |&(key, _)| key));
            }
        }
    }
}
