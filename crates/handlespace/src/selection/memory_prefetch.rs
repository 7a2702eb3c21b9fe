//! Memory prefetching for selections and for changes of a selection set, in steps: each step reads the data that the
//! previous step requested. A small pool's elements are in the pool's record, which has been prefetched already.

use super::{QueueBlocks, SelectionSet};
use crate::element::ElementCore;
use prefetch_index::prefetch_index;

impl SelectionSet {
    /// Prefetches the memory that [`remove`](Self::remove) uses for an element at this spot.
    #[inline]
    pub(crate) fn prefetch(&self, blocks: &QueueBlocks, spot: u32) {
        match self {
            SelectionSet::Ordered(order) => {
                blocks.prefetch(spot);
                order.prefetch(blocks);
            }
            SelectionSet::Weighted(weights) => {
                weights.prefetch(spot);
                weights.prefetch(weights.len());
            }
            _ => {}
        }
    }

    /// Returns true if a selection of the first elements needs neither the keys nor the weights of a small pool.
    #[inline]
    pub(crate) fn selects_without_keys(&self) -> bool {
        match self {
            SelectionSet::SmallOrdered(few) => few.knows_lowest_count(),
            SelectionSet::SmallWeighted(_) => false,
            _ => true,
        }
    }

    /// Prefetches the memory that a selection of this many elements reads first.
    #[inline]
    pub(crate) fn prefetch_selection(&self, blocks: &QueueBlocks, items: u32) {
        match self {
            SelectionSet::Ordered(order) if items == 1 || order.is_first_queue_long() => {
                order.prefetch_front(blocks)
            }
            SelectionSet::Ordered(order) => order.prefetch(blocks),
            SelectionSet::Weighted(weights) => {
                (0..items).for_each(|nth| weights.prefetch_draw(nth))
            }
            _ => {}
        }
    }

    /// Prefetches the memory that a selection reads next.
    #[inline]
    pub(crate) fn prefetch_further_keys(&self, blocks: &QueueBlocks, items: u32) {
        if let SelectionSet::Ordered(order) = self
            && !order.is_first_queue_long()
        {
            order.prefetch_next(blocks, items as usize);
        }
    }

    /// Prefetches the elements that will be selected.
    #[inline]
    pub(crate) fn prefetch_chosen(&self, blocks: &QueueBlocks, cores: &[ElementCore], items: u32) {
        let fetch = |slot| prefetch_index(cores, slot as usize);
        let items = items as usize;
        match self {
            SelectionSet::SmallOrdered(few) => few.first(items).for_each(fetch),
            SelectionSet::SmallWeighted(few) => few.peek_draws(items, fetch),
            SelectionSet::SmallUniform(few) => few.peek_draws(items, fetch),
            SelectionSet::Ordered(order) => {
                order.visit_first(blocks, items, fetch);
            }
            SelectionSet::Weighted(weights) => weights.peek_draws(items, fetch),
        }
    }

    /// Prefetches the memory that an insertion reads.
    #[inline]
    pub(crate) fn prefetch_end(&self, blocks: &QueueBlocks) {
        match self {
            SelectionSet::Ordered(order) => order.prefetch(blocks),
            SelectionSet::Weighted(weights) => weights.prefetch(weights.len()),
            _ => {}
        }
    }

    /// Prefetches the destinations of elements that get another key.
    #[inline]
    pub(crate) fn prefetch_tails(&self, blocks: &QueueBlocks) {
        if let SelectionSet::Ordered(order) = self {
            order.prefetch_tails(blocks);
        }
    }

    /// Prefetches the elements that may move when an element is added, removed or changed.
    #[inline]
    pub(crate) fn prefetch_row_ends(&self, cores: &[ElementCore]) {
        if let SelectionSet::Weighted(weights) = self {
            weights.visit_row_ends(|slot| prefetch_index(cores, slot as usize));
        }
    }
}
