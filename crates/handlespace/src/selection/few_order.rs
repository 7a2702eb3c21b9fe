//! A small pool's elements in a policy's sorting order, in the pool's record itself.
//!
//! A structure that is fast with a million elements has a separate piece of memory for each of its parts. For a pool of
//! ten, an operation would fetch most of them, and with many pools none is in a cache. Here all are in three lines
//! after the pool's first one.

use super::few::{self, FEW, FREE};
use crate::policy::OUT;

/// Elements by key, and in order of arrival within a key. Free places come last.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct FewInOrder {
    /// Number of elements with the lowest key; 0 if not computed since the last change.
    equals: u64,
    slots: [u32; FEW],
    /// Separate from the slots, because a selection from the lowest key does not read the keys.
    keys: [u64; FEW],
}

impl FewInOrder {
    pub(super) fn new() -> FewInOrder {
        FewInOrder {
            equals: 0,
            slots: [FREE; FEW],
            keys: [OUT; FEW],
        }
    }

    /// Returns the lowest key, 0 if there is no element.
    #[inline]
    pub(super) fn lowest(&self) -> u64 {
        if self.keys[0] == OUT { 0 } else { self.keys[0] }
    }

    /// Inserts an element after all elements with keys up to its own, which is not [`OUT`]. Returns false if all places
    /// are taken.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, slot: u32) -> bool {
        if self.slots[FEW - 1] != FREE {
            return false;
        }
        let place = few::up_to(&self.keys, key);
        few::open(&mut self.slots, place, slot);
        few::open(&mut self.keys, place, key);
        self.equals = 0;
        true
    }

    /// Removes an element, which must be in the set.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let place = few::place(&self.slots, slot);
        few::close(&mut self.slots, place, FREE);
        few::close(&mut self.keys, place, OUT);
        self.equals = 0;
    }

    /// Gives an element of the set another key, and moves it after all elements with keys up to that key.
    #[inline]
    pub(super) fn set(&mut self, key: u64, slot: u32) {
        let from = few::place(&self.slots, slot);
        let before = few::up_to(&self.keys, key);
        let to = before - usize::from(self.keys[from] <= key);
        few::shift(&mut self.slots, from, to, slot);
        few::shift(&mut self.keys, from, to, key);
        self.equals = 0;
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
        if self.equals == 0 {
            self.equals = few::up_to(&self.keys, self.keys[0]) as u64;
        }
        few::rotate(&mut self.slots, self.equals as usize);
    }

    /// Returns true if [`rotate`](Self::rotate) does not need the keys.
    #[inline]
    pub(super) fn knows_equals(&self) -> bool {
        self.equals > 0
    }

    /// Returns elements and their keys, in order.
    pub(super) fn each(&self) -> impl Iterator<Item = (u64, u32)> {
        self.keys.into_iter().zip(self.first(FEW))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares the set with a vector that is sorted after each step; equal keys stay in order of arrival.
        #[test]
        fn it_is_a_sorted_vector(steps in prop::collection::vec((0u8..4, 0u64..5, 0u32..24), 1..200)) {
            let mut few = FewInOrder::new();
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
                        prop_assert_eq!(few.insert(key, slot), model.len() < FEW);
                        if model.len() < FEW {
                            model.push((key, slot));
                        }
                    }
                    (1, Some(at)) => {
                        few.set(key, slot);
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
                prop_assert_eq!(few.each().collect::<Vec<_>>(), model.clone());
                prop_assert_eq!(few.lowest(), model.first().map_or(0, |&(key, _)| key));
            }
        }
    }
}
