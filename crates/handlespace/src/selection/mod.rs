//! A pool's selection set.

pub(crate) mod blocks;
mod fetch;
mod few;
mod few_alike;
mod few_order;
mod few_weights;
mod keys;
mod numbers;
mod order;
mod weights;

pub(crate) use blocks::Blocks;
use few_alike::FewAlike;
use few_order::FewInOrder;
use few_weights::FewByWeight;
use order::Order;
pub(crate) use weights::Point;
use weights::Weights;

use crate::element::Core;
use crate::policy::{OUT, Procedure, Standing};
use holdfast_wire::rserpool::PolicyKind;

/// The elements of a pool in the form that its policy's procedure needs. A pool that has grown beyond a few elements
/// keeps the larger form.
#[derive(Debug, Clone)]
#[repr(C, u8)]
pub(crate) enum Selection {
    FewInOrder(FewInOrder),
    FewByWeight(FewByWeight),
    FewAlike(FewAlike),
    Ordered(Order),
    Weighted(Weights),
}

impl Selection {
    pub(crate) fn new(kind: PolicyKind) -> Selection {
        if kind == PolicyKind::Random {
            Selection::FewAlike(FewAlike::new())
        } else if Procedure::of(kind).is_by_weight() {
            Selection::FewByWeight(FewByWeight::new())
        } else {
            Selection::FewInOrder(FewInOrder::new())
        }
    }

    /// Returns the lowest key.
    #[inline]
    pub(crate) fn lowest(&self) -> u64 {
        match self {
            Selection::FewInOrder(few) => few.lowest(),
            Selection::Ordered(order) => order.lowest(),
            _ => 0,
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
        let has_room = match self {
            Selection::FewInOrder(few) => standing.value == OUT || few.insert(standing.value, slot),
            Selection::FewByWeight(few) => few.insert(weight(standing), slot),
            Selection::FewAlike(few) => few.insert(slot),
            Selection::Ordered(order) => {
                if standing.value != OUT {
                    core.spot = order.insert(blocks, standing.value, slot);
                }
                true
            }
            Selection::Weighted(weights) => {
                weights.insert(weight(standing), slot, spots(cores));
                true
            }
        };
        if !has_room {
            self.grow(blocks, cores);
            self.insert(blocks, cores, slot, standing);
        }
    }

    /// Seeds the random choices.
    pub(crate) fn sow(&mut self, seed: u64) {
        match self {
            Selection::FewByWeight(few) => few.sow(seed),
            Selection::FewAlike(few) => few.sow(seed),
            _ => {}
        }
    }

    /// Removes an element.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut Blocks, cores: &mut [Core], slot: u32) {
        let Core { standing, spot, .. } = cores[slot as usize];
        match self {
            Selection::FewInOrder(few) if standing.value != OUT => few.remove(slot),
            Selection::FewByWeight(few) => few.remove(slot),
            Selection::FewAlike(few) => few.remove(slot),
            Selection::Ordered(order) if standing.value != OUT => {
                order.remove(blocks, standing.value, spot);
            }
            Selection::FewInOrder(_) | Selection::Ordered(_) => {}
            Selection::Weighted(weights) => weights.remove(spot, spots(cores)),
        }
    }

    /// Gives an element another standing, and in an ordered set the next sequence number.
    #[inline]
    pub(crate) fn update(
        &mut self,
        blocks: &mut Blocks,
        cores: &mut [Core],
        slot: u32,
        standing: Standing,
    ) {
        match self {
            Selection::FewInOrder(few) => {
                let is_in = cores[slot as usize].standing.value != OUT;
                if is_in && standing.value != OUT {
                    cores[slot as usize].standing = standing;
                    few.set(standing.value, slot);
                } else {
                    self.remove(blocks, cores, slot);
                    self.insert(blocks, cores, slot, standing);
                }
            }
            Selection::Ordered(_) => {
                self.remove(blocks, cores, slot);
                self.insert(blocks, cores, slot, standing);
            }
            Selection::FewByWeight(few) => {
                cores[slot as usize].standing = standing;
                few.set(weight(standing), slot);
            }
            Selection::FewAlike(_) => cores[slot as usize].standing = standing,
            Selection::Weighted(weights) => {
                let core = &mut cores[slot as usize];
                core.standing = standing;
                let spot = core.spot;
                weights.set(spot, weight(standing), spots(cores));
            }
        }
    }

    /// Excludes an element from selection by weight, until its next [`update`](Self::update).
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
            _ => 0,
        }
    }

    /// Switches from the form for few elements to the form for many.
    #[cold]
    fn grow(&mut self, blocks: &mut Blocks, cores: &mut [Core]) {
        let many = match self {
            Selection::FewInOrder(few) => {
                let mut order = Order::default();
                for (key, slot) in few.each() {
                    cores[slot as usize].spot = order.insert(blocks, key, slot);
                }
                Selection::Ordered(order)
            }
            Selection::FewByWeight(few) => {
                let mut weights = Weights::sown(few.random());
                for (weight, slot) in few.each() {
                    weights.insert(weight, slot, spots(cores));
                }
                Selection::Weighted(weights)
            }
            Selection::FewAlike(few) => {
                let mut weights = Weights::sown(few.random());
                for slot in few.each() {
                    weights.insert(1, slot, spots(cores));
                }
                Selection::Weighted(weights)
            }
            Selection::Ordered(_) | Selection::Weighted(_) => return,
        };
        *self = many;
    }
}

/// Returns a closure that stores the positions of elements.
#[inline]
fn spots(cores: &mut [Core]) -> impl FnMut(u32, u32) {
    |slot, spot| cores[slot as usize].spot = spot
}

/// Returns the weight, which fits 32 bits by the policies' definitions.
fn weight(standing: Standing) -> u32 {
    u32::try_from(standing.value).unwrap_or(u32::MAX)
}
