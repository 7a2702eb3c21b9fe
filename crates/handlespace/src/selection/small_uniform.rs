//! A small pool's elements without weights, in the pool's record itself: see [`small_ordered`](super::small_ordered).

use super::small_array::{self, FREE, SMALL_SIZE};
use super::splitmix;

/// Elements with equal probability. Free places come last.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct SmallUniform {
    /// State of the random number generator.
    random: u64,
    slots: [u32; SMALL_SIZE],
}

impl SmallUniform {
    pub(super) fn new() -> SmallUniform {
        SmallUniform {
            random: 0,
            slots: [FREE; SMALL_SIZE],
        }
    }

    /// Seeds the random number generator.
    pub(super) fn seed_random(&mut self, seed: u64) {
        self.random = seed;
    }

    pub(super) fn random(&self) -> u64 {
        self.random
    }

    /// Adds an element. Returns false if all places are taken.
    #[inline]
    pub(super) fn insert(&mut self, slot: u32) -> bool {
        let len = small_array::len(&self.slots);
        let Some(place) = self.slots.get_mut(len) else {
            return false;
        };
        *place = slot;
        true
    }

    /// Removes an element, which must be in the set; the last one moves to its place.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let last = small_array::len(&self.slots) - 1;
        self.slots[small_array::index_of(&self.slots, slot)] = self.slots[last];
        self.slots[last] = FREE;
    }

    /// Draws up to `items` different elements.
    #[inline]
    pub(crate) fn draw(&mut self, items: usize, chosen: &mut Vec<u32>) {
        self.random = self.sample(items, |slot| chosen.push(slot));
    }

    /// Passes up to `items` elements that will be drawn next to `show`.
    #[inline]
    pub(super) fn peek_draws(&self, items: usize, show: impl FnMut(u32)) {
        self.sample(items, show);
    }

    /// Returns the slots of all elements of the set.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.slots.into_iter().take_while(|&slot| slot != FREE)
    }

    /// Draws a sample; returns the new state of the random number generator.
    #[inline]
    fn sample(&self, items: usize, mut show: impl FnMut(u32)) -> u64 {
        let mut random = self.random;
        let mut slots = self.slots;
        let len = small_array::len(&slots);
        for left in (len.saturating_sub(items)..len).rev() {
            random = splitmix::next_state(random);
            let place = splitmix::below(random, left as u64 + 1) as usize % SMALL_SIZE;
            show(slots[place]);
            slots[place] = slots[left];
        }
        random
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peeked_draws_equal_later_draws() {
        let mut few = SmallUniform::new();
        few.seed_random(7);
        assert!((0..SMALL_SIZE as u32).all(|slot| few.insert(slot)));
        assert!(!few.insert(99));
        few.remove(3);
        for items in [0, 1, 3, SMALL_SIZE, SMALL_SIZE + 1] {
            let (mut known, mut chosen) = (Vec::new(), Vec::new());
            few.peek_draws(items, |slot| known.push(slot));
            few.draw(items, &mut chosen);
            assert_eq!(known, chosen);
            chosen.sort_unstable();
            chosen.dedup();
            assert_eq!(
                chosen.len(),
                items.min(SMALL_SIZE - 1),
                "no element is chosen twice"
            );
            assert!(!chosen.contains(&3));
        }
    }
}
