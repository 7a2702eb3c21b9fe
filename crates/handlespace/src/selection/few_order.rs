//! A small pool's elements in a policy's sorting order, in the pool's record itself.
//!
//! What is fast with a million elements has a piece of memory for each of its parts: of a pool of ten, an operation would fetch
//! most of them, and with many pools none is in a cache. Here they are three lines beside the pool's first one. No loop here ends early: where it would is chance,
//! and a processor that guesses wrong loses more than it takes to look at all.

use super::few::{self, FEW, FREE};
use crate::policy::OUT;

/// Elements by key, and in order of arrival within a key. Free places come last.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct FewInOrder {
    /// How many have the lowest key, if there are any.
    equals: u64,
    slots: [u32; FEW],
    /// Apart from the slots: to select from the lowest key, these are not read.
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

    /// The lowest key, 0 if there is no element.
    #[inline]
    pub(super) fn lowest(&self) -> u64 {
        if self.keys[0] == OUT { 0 } else { self.keys[0] }
    }

    /// Puts an element behind all with keys up to its own, which is not [`OUT`]. False if there is no room.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, slot: u32) -> bool {
        if self.slots[FEW - 1] != FREE {
            return false;
        }
        let place = self.keys.partition_point(|&k| k <= key);
        few::open(&mut self.slots, place, slot);
        few::open(&mut self.keys, place, key);
        self.count();
        true
    }

    /// Takes out an element that is there.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let place = few::place(&self.slots, slot);
        few::close(&mut self.slots, place, FREE);
        few::close(&mut self.keys, place, OUT);
        self.count();
    }

    /// Gives an element that is there another key, and puts it behind all with keys up to that.
    #[inline]
    pub(super) fn set(&mut self, key: u64, slot: u32) {
        let from = few::place(&self.slots, slot);
        let before = self.keys.partition_point(|&k| k <= key);
        let to = before - usize::from(self.keys[from] <= key);
        few::shift(&mut self.slots, from, to, slot);
        few::shift(&mut self.keys, from, to, key);
        self.count();
    }

    /// The first elements, up to so many.
    #[inline]
    pub(crate) fn first(&self, items: usize) -> impl Iterator<Item = u32> {
        let slots = self.slots.iter().take(items);
        slots.copied().take_while(|&slot| slot != FREE)
    }

    /// Puts the first element behind its equals.
    #[inline]
    pub(crate) fn rotate(&mut self) {
        few::rotate(&mut self.slots, self.equals as usize);
    }

    /// Elements and their keys, in order.
    pub(super) fn each(&self) -> impl Iterator<Item = (u64, u32)> {
        self.keys.into_iter().zip(self.first(FEW))
    }

    #[inline]
    fn count(&mut self) {
        let lowest = self.keys[0];
        self.equals = self.keys.partition_point(|&key| key == lowest) as u64;
    }
}
