//! What selections and changes of a selection set will touch is fetched, step by step: what one step fetches, the next reads.
//! A few elements are in the pool's record, which has been fetched already.

use super::{Blocks, Selection};
use crate::element::Core;
use prefetch_index::prefetch_index;

impl Selection {
    /// Fetches what a [`remove`](Self::remove) will touch of an element at this spot.
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

    /// Whether a selection of the first ones does without the keys, or weights, of a few.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        match self {
            Selection::FewInOrder(few) => few.knows_equals(),
            Selection::FewByWeight(_) => false,
            _ => true,
        }
    }

    /// Fetches what a selection of so many will look at first.
    #[inline]
    pub(crate) fn fetch_choice(&self, blocks: &Blocks, items: u32) {
        match self {
            Selection::Ordered(order) if items == 1 || order.is_long() => order.fetch_front(blocks),
            Selection::Ordered(order) => order.fetch(blocks),
            Selection::Weighted(weights) => (0..items).for_each(|nth| weights.fetch_draw(nth)),
            _ => {}
        }
    }

    /// Fetches what it will look at next.
    #[inline]
    pub(crate) fn fetch_further(&self, blocks: &Blocks, items: u32) {
        if let Selection::Ordered(order) = self
            && !order.is_long()
        {
            order.fetch_next(blocks, items as usize);
        }
    }

    /// Fetches the elements that will be selected.
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

    /// Fetches what an insertion will look at.
    #[inline]
    pub(crate) fn fetch_end(&self, blocks: &Blocks) {
        match self {
            Selection::Ordered(order) => order.fetch(blocks),
            Selection::Weighted(weights) => weights.fetch(weights.len()),
            _ => {}
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
}
