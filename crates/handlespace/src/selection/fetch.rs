//! Prefetching for selections and for changes of a selection set, in steps: each step reads the data that the previous
//! step requested. A small pool's elements are in the pool's record, which has been prefetched already.

use super::{Blocks, Selection};
use crate::element::Core;
use prefetch_index::prefetch_index;

impl Selection {
    /// Prefetches the memory that [`remove`](Self::remove) uses for an element at this spot.
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
            _ => {}
        }
    }

    /// Returns true if a selection of the first elements needs neither the keys nor the weights of a small pool.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        match self {
            Selection::FewInOrder(few) => few.knows_equals(),
            Selection::FewByWeight(_) => false,
            _ => true,
        }
    }

    /// Prefetches the memory that a selection of this many elements reads first.
    #[inline]
    pub(crate) fn fetch_choice(&self, blocks: &Blocks, items: u32) {
        match self {
            Selection::Ordered(order) if items == 1 || order.is_long() => order.fetch_front(blocks),
            Selection::Ordered(order) => order.fetch(blocks),
            Selection::Weighted(weights) => (0..items).for_each(|nth| weights.fetch_draw(nth)),
            _ => {}
        }
    }

    /// Prefetches the memory that a selection reads next.
    #[inline]
    pub(crate) fn fetch_further(&self, blocks: &Blocks, items: u32) {
        if let Selection::Ordered(order) = self
            && !order.is_long()
        {
            order.fetch_next(blocks, items as usize);
        }
    }

    /// Prefetches the elements that will be selected.
    #[inline]
    pub(crate) fn fetch_chosen(&self, blocks: &Blocks, cores: &[Core], items: u32) {
        let fetch = |slot| prefetch_index(cores, slot as usize);
        let items = items as usize;
        match self {
            Selection::FewInOrder(few) => few.first(items).for_each(fetch),
            Selection::FewByWeight(few) => few.next_drawn(items, fetch),
            Selection::FewAlike(few) => few.next_drawn(items, fetch),
            Selection::Ordered(order) => {
                order.first(blocks, items, fetch);
            }
            Selection::Weighted(weights) => weights.next_drawn(items, fetch),
        }
    }

    /// Prefetches the memory that an insertion reads.
    #[inline]
    pub(crate) fn fetch_end(&self, blocks: &Blocks) {
        match self {
            Selection::Ordered(order) => order.fetch(blocks),
            Selection::Weighted(weights) => weights.fetch(weights.len()),
            _ => {}
        }
    }

    /// Prefetches the destinations of elements that get another key.
    #[inline]
    pub(crate) fn fetch_tails(&self, blocks: &Blocks) {
        if let Selection::Ordered(order) = self {
            order.fetch_tails(blocks);
        }
    }

    /// Prefetches the elements that may move when an element is added, removed or changed.
    #[inline]
    pub(crate) fn fetch_movers(&self, cores: &[Core]) {
        if let Selection::Weighted(weights) = self {
            weights.movers(|slot| prefetch_index(cores, slot as usize));
        }
    }
}
