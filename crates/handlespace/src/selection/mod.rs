//! A pool's selection set.

pub(crate) mod blocks;
mod keys;
mod order;
mod weights;

pub(crate) use blocks::Blocks;
use order::Order;
pub(crate) use weights::Point;
use weights::Weights;

use crate::element::Core;
use crate::policy::{OUT, Procedure, Standing};
use prefetch_index::prefetch_index;

/// The elements of a pool as its policy's procedure wants them.
#[derive(Debug, Clone)]
pub(crate) enum Selection {
    Ordered(Order),
    Weighted(Weights),
}

impl Selection {
    pub(crate) fn new(procedure: Procedure) -> Selection {
        if procedure.is_by_weight() {
            Selection::Weighted(Weights::default())
        } else {
            Selection::Ordered(Order::default())
        }
    }

    /// The lowest key.
    #[inline]
    pub(crate) fn lowest(&self) -> u64 {
        match self {
            Selection::Ordered(order) => order.lowest(),
            Selection::Weighted(_) => 0,
        }
    }

    /// Adds the element in `slot`, which is in no selection set.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        blocks: &mut Blocks,
        cores: &mut [Core],
        slot: u32,
        standing: Standing,
    ) {
        let core = &mut cores[slot as usize];
        core.standing = standing;
        match self {
            Selection::Ordered(order) if standing.value != OUT => {
                core.spot = order.insert(blocks, standing.value, slot);
            }
            Selection::Ordered(_) => {}
            Selection::Weighted(weights) => {
                weights.insert(weight(standing), slot, spots(cores));
            }
        }
    }

    /// Fetches what [`remove`](Self::remove) will touch of an element at this spot.
    #[inline]
    pub(crate) fn fetch(&self, blocks: &Blocks, spot: u32) {
        match self {
            Selection::Ordered(order) => {
                blocks.fetch(spot);
                order.fetch(blocks);
            }
            Selection::Weighted(weights) => {
                weights.fetch(spot);
                weights.fetch(weights.len());
            }
        }
    }

    /// What random choices begin with.
    pub(crate) fn sow(&mut self, seed: u64) {
        if let Selection::Weighted(weights) = self {
            weights.sow(seed);
        }
    }

    /// Fetches what a selection of so many will look at first.
    #[inline]
    pub(crate) fn fetch_choice(&self, blocks: &Blocks, items: u32) {
        match self {
            Selection::Ordered(order) if items == 1 => order.fetch_front(blocks),
            Selection::Ordered(order) => order.fetch(blocks),
            Selection::Weighted(weights) => (0..items).for_each(|nth| weights.fetch_draw(nth)),
        }
    }

    /// Fetches what it will look at next.
    #[inline]
    pub(crate) fn fetch_further(&self, blocks: &Blocks, items: u32) {
        if let Selection::Ordered(order) = self {
            order.fetch_next(blocks, items as usize);
        }
    }

    /// Fetches the elements that will be selected.
    #[inline]
    pub(crate) fn fetch_chosen(&self, blocks: &Blocks, cores: &[Core], items: u32) {
        let fetch = |slot| prefetch_index(cores, slot as usize);
        match self {
            Selection::Ordered(order) => {
                order.first(blocks, items as usize, fetch);
            }
            Selection::Weighted(weights) => {
                weights.next_drawn(items as usize, fetch);
            }
        }
    }

    /// Fetches what an insertion will look at.
    #[inline]
    pub(crate) fn fetch_end(&self, blocks: &Blocks) {
        match self {
            Selection::Ordered(order) => order.fetch(blocks),
            Selection::Weighted(weights) => weights.fetch(weights.len()),
        }
    }

    /// Fetches where those go that get another key.
    #[inline]
    pub(crate) fn fetch_tails(&self, blocks: &Blocks) {
        if let Selection::Ordered(order) = self {
            order.fetch_tails(blocks);
        }
    }

    /// Fetches the elements that may move when one comes, leaves or changes.
    #[inline]
    pub(crate) fn fetch_movers(&self, cores: &[Core]) {
        if let Selection::Weighted(weights) = self {
            weights.movers(|slot| prefetch_index(cores, slot as usize));
        }
    }

    /// Takes an element out.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut Blocks, cores: &mut [Core], slot: u32) {
        let Core { standing, spot, .. } = cores[slot as usize];
        match self {
            Selection::Ordered(order) if standing.value != OUT => {
                order.remove(blocks, standing.value, spot);
            }
            Selection::Ordered(_) => {}
            Selection::Weighted(weights) => weights.remove(spot, spots(cores)),
        }
    }

    /// Gives an element another standing, and in an order the next sequence number.
    #[inline]
    pub(crate) fn update(
        &mut self,
        blocks: &mut Blocks,
        cores: &mut [Core],
        slot: u32,
        standing: Standing,
    ) {
        match self {
            Selection::Ordered(_) => {
                self.remove(blocks, cores, slot);
                self.insert(blocks, cores, slot, standing);
            }
            Selection::Weighted(weights) => {
                let core = &mut cores[slot as usize];
                core.standing = standing;
                let spot = core.spot;
                weights.set(spot, weight(standing), spots(cores));
            }
        }
    }

    /// Keeps an element from being chosen by weight, until its next [`update`](Self::update).
    pub(crate) fn rest(&mut self, cores: &mut [Core], slot: u32) {
        if let Selection::Weighted(weights) = self {
            let spot = cores[slot as usize].spot;
            weights.set(spot, 0, spots(cores));
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Selection::Ordered(order) => order.heap_bytes(),
            Selection::Weighted(weights) => weights.heap_bytes(),
        }
    }
}

/// Writes down where elements are.
#[inline]
fn spots(cores: &mut [Core]) -> impl FnMut(u32, u32) {
    |slot, spot| cores[slot as usize].spot = spot
}

/// Weights fit 32 bits by their policies' definitions.
fn weight(standing: Standing) -> u32 {
    u32::try_from(standing.value).unwrap_or(u32::MAX)
}
