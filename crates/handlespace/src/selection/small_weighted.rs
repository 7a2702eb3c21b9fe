//! A small pool's elements by weight, in the pool's record itself: see [`small_ordered`](super::small_ordered).

use super::small_array::{self, FREE, SMALL_SIZE};
use super::splitmix;

/// Number of vain draws, of elements that were already drawn; beyond it, the drawn elements are excluded.
const WASTED_DRAWS_MAX: usize = 2;

/// Elements and their weights. Free places come last, with weight 0.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct SmallWeighted {
    /// State of the random number generator.
    random: u64,
    slots: [u32; SMALL_SIZE],
    /// Cumulative weights: the end of each element's part of the line.
    ends: [u64; SMALL_SIZE],
}

impl SmallWeighted {
    pub(super) fn new() -> SmallWeighted {
        SmallWeighted {
            random: 0,
            slots: [FREE; SMALL_SIZE],
            ends: [0; SMALL_SIZE],
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
    pub(super) fn insert(&mut self, weight: u32, slot: u32) -> bool {
        let len = small_array::len(&self.slots);
        let Some(place) = self.slots.get_mut(len) else {
            return false;
        };
        *place = slot;
        small_array::add_from(&mut self.ends, len, weight.into());
        true
    }

    /// Removes an element, which must be in the set.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let place = small_array::index_of(&self.slots, slot);
        let weight = weight(&self.ends, place);
        small_array::remove_at(&mut self.slots, place, FREE);
        let sum = self.ends[SMALL_SIZE - 1];
        small_array::remove_at(&mut self.ends, place, sum);
        small_array::add_from(&mut self.ends, place, weight.wrapping_neg());
    }

    /// Changes the weight of an element, which must be in the set.
    #[inline]
    pub(super) fn set_weight(&mut self, new: u32, slot: u32) {
        let place = small_array::index_of(&self.slots, slot);
        let more = u64::from(new).wrapping_sub(weight(&self.ends, place));
        small_array::add_from(&mut self.ends, place, more);
    }

    /// Draws different elements until there are `items`, or no others.
    #[inline]
    pub(crate) fn draw(&mut self, items: usize, chosen: &mut Vec<u32>) {
        let sum = self.ends[SMALL_SIZE - 1];
        for _ in 0..items + WASTED_DRAWS_MAX {
            if chosen.len() == items || sum == 0 {
                return;
            }
            self.random = splitmix::next_state(self.random);
            let slot = self.slot_at(splitmix::below(self.random, sum));
            if !chosen.contains(&slot) {
                chosen.push(slot);
            }
        }
        self.draw_others(items, chosen);
    }

    /// Passes the elements that will be drawn next to `show`: usually `items` of them.
    #[inline]
    pub(super) fn peek_draws(&self, items: usize, mut show: impl FnMut(u32)) {
        let sum = self.ends[SMALL_SIZE - 1];
        if sum > 0 {
            for nth in 1..=items as u32 {
                show(self.slot_at(splitmix::below(
                    splitmix::state_after(self.random, nth),
                    sum,
                )));
            }
        }
    }

    /// Returns elements and their weights.
    pub(super) fn each(&self) -> impl Iterator<Item = (u32, u32)> {
        let slots = self.slots.iter().enumerate();
        let members = slots.map(|(place, &slot)| (weight(&self.ends, place) as u32, slot));
        members.take_while(|&(_, slot)| slot != FREE)
    }

    /// Draws after excluding the elements already drawn.
    #[cold]
    fn draw_others(&mut self, items: usize, chosen: &mut Vec<u32>) {
        let mut others = self.clone();
        for &slot in &*chosen {
            others.set_weight(0, slot);
        }
        while chosen.len() < items && others.ends[SMALL_SIZE - 1] > 0 {
            self.random = splitmix::next_state(self.random);
            let slot = others.slot_at(splitmix::below(self.random, others.ends[SMALL_SIZE - 1]));
            others.set_weight(0, slot);
            chosen.push(slot);
        }
    }

    /// Returns the element with the part of the line that contains `number`, which is below the line's end.
    #[inline]
    fn slot_at(&self, number: u64) -> u32 {
        self.slots[small_array::count_up_to(&self.ends, number) % SMALL_SIZE]
    }
}

#[inline]
fn weight(ends: &[u64; SMALL_SIZE], place: usize) -> u64 {
    let before = ends[place.wrapping_sub(1) % SMALL_SIZE];
    ends[place] - if place == 0 { 0 } else { before }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn each_element_keeps_its_weight(steps in prop::collection::vec((0u32..24, prop::option::of(0u32..9)), 1..200)) {
            let mut few = SmallWeighted::new();
            let mut model = BTreeMap::new();
            for (slot, weight) in steps {
                match (weight, model.contains_key(&slot)) {
                    (Some(weight), false) => {
                        let has_room = model.len() < SMALL_SIZE;
                        prop_assert_eq!(few.insert(weight, slot), has_room);
                        if has_room {
                            model.insert(slot, weight);
                        }
                    }
                    (Some(weight), true) => {
                        few.set_weight(weight, slot);
                        model.insert(slot, weight);
                    }
                    (None, true) => {
                        few.remove(slot);
                        model.remove(&slot);
                    }
                    (None, false) => {}
                }
                let members = few.each().map(|(weight, slot)| (slot, weight));
                prop_assert_eq!(members.collect::<BTreeMap<_, _>>(), model.clone());
                let mut shares = BTreeMap::new();
                for number in 0..few.ends[SMALL_SIZE - 1] {
                    *shares.entry(few.slot_at(number)).or_insert(0) += 1;
                }
                let weighty = model.iter().filter(|&(_, &weight)| weight > 0);
                prop_assert_eq!(shares, weighty.map(|(&slot, &weight)| (slot, weight)).collect());
            }
        }
    }

    /// The heavy element is drawn repeatedly before the others are.
    #[test]
    fn heavy_element_does_not_exclude_others() {
        let mut few = SmallWeighted::new();
        for (slot, weight) in [(1, 1), (2, u32::MAX), (3, 0), (4, 1)] {
            assert!(few.insert(weight, slot));
        }
        let mut chosen = Vec::new();
        few.draw(SMALL_SIZE, &mut chosen);
        chosen.sort_unstable();
        assert_eq!(chosen, [1, 2, 4]);
    }
}
