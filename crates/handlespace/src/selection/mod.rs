//! A pool's selection set.

mod key_queues;
mod memory_prefetch;
mod ordered_set;
pub(crate) mod queue_blocks;
mod small_array;
mod small_ordered;
mod small_uniform;
mod small_weighted;
mod splitmix;
mod weighted_set;

use ordered_set::OrderedSet;
pub(crate) use queue_blocks::QueueBlocks;
use small_ordered::SmallOrdered;
use small_uniform::SmallUniform;
use small_weighted::SmallWeighted;
pub(crate) use weighted_set::WeightLinePoint;
use weighted_set::WeightedSet;

use crate::element::ElementCore;
use crate::policy::{EXCLUDED_KEY, SelectionProcedure, SelectionState};
use holdfast_wire::rserpool::PolicyKind;

/// The elements of a pool in the form that its policy's procedure needs. A pool that has grown beyond a few elements
/// keeps the larger form.
#[derive(Debug, Clone)]
#[repr(C, u8)]
pub(crate) enum SelectionSet {
    SmallOrdered(SmallOrdered),
    SmallWeighted(SmallWeighted),
    SmallUniform(SmallUniform),
    Ordered(OrderedSet),
    Weighted(WeightedSet),
}

impl SelectionSet {
    pub(crate) fn new(kind: PolicyKind) -> SelectionSet {
        if kind == PolicyKind::Random {
            SelectionSet::SmallUniform(SmallUniform::new())
        } else if SelectionProcedure::of(kind).is_by_weight() {
            SelectionSet::SmallWeighted(SmallWeighted::new())
        } else {
            SelectionSet::SmallOrdered(SmallOrdered::new())
        }
    }

    /// Returns the lowest key.
    #[inline]
    pub(crate) fn lowest(&self) -> u64 {
        match self {
            SelectionSet::SmallOrdered(few) => few.lowest(),
            SelectionSet::Ordered(order) => order.lowest(),
            _ => 0,
        }
    }

    /// Adds the element in `slot`, which is in no selection set.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        blocks: &mut QueueBlocks,
        cores: &mut [ElementCore],
        slot: u32,
        standing: SelectionState,
    ) {
        let core = &mut cores[slot as usize];
        core.selection_state = standing;
        let has_room = match self {
            SelectionSet::SmallOrdered(few) => {
                standing.value == EXCLUDED_KEY || few.insert(standing.value, slot)
            }
            SelectionSet::SmallWeighted(few) => few.insert(weight_of(standing), slot),
            SelectionSet::SmallUniform(few) => few.insert(slot),
            SelectionSet::Ordered(order) => {
                if standing.value != EXCLUDED_KEY {
                    core.position = order.insert(blocks, standing.value, slot);
                }
                true
            }
            SelectionSet::Weighted(weights) => {
                weights.insert(weight_of(standing), slot, position_writer(cores));
                true
            }
        };
        if !has_room {
            self.grow(blocks, cores);
            self.insert(blocks, cores, slot, standing);
        }
    }

    /// Seeds the random choices.
    pub(crate) fn seed_random(&mut self, seed: u64) {
        match self {
            SelectionSet::SmallWeighted(few) => few.seed_random(seed),
            SelectionSet::SmallUniform(few) => few.seed_random(seed),
            _ => {}
        }
    }

    /// Removes an element from the selection set.
    #[inline]
    pub(crate) fn remove(
        &mut self,
        blocks: &mut QueueBlocks,
        cores: &mut [ElementCore],
        slot: u32,
    ) {
        let ElementCore {
            selection_state: standing,
            position: spot,
            ..
        } = cores[slot as usize];
        match self {
            SelectionSet::SmallOrdered(few) if standing.value != EXCLUDED_KEY => few.remove(slot),
            SelectionSet::SmallWeighted(few) => few.remove(slot),
            SelectionSet::SmallUniform(few) => few.remove(slot),
            SelectionSet::Ordered(order) if standing.value != EXCLUDED_KEY => {
                order.remove(blocks, standing.value, spot);
            }
            SelectionSet::SmallOrdered(_) | SelectionSet::Ordered(_) => {}
            SelectionSet::Weighted(weights) => weights.remove(spot, position_writer(cores)),
        }
    }

    /// Gives an element another standing, and in an ordered set the next sequence number.
    #[inline]
    pub(crate) fn update(
        &mut self,
        blocks: &mut QueueBlocks,
        cores: &mut [ElementCore],
        slot: u32,
        standing: SelectionState,
    ) {
        match self {
            SelectionSet::SmallOrdered(few) => {
                let is_in = cores[slot as usize].selection_state.value != EXCLUDED_KEY;
                if is_in && standing.value != EXCLUDED_KEY {
                    cores[slot as usize].selection_state = standing;
                    few.set_key(standing.value, slot);
                } else {
                    self.remove(blocks, cores, slot);
                    self.insert(blocks, cores, slot, standing);
                }
            }
            SelectionSet::Ordered(_) => {
                self.remove(blocks, cores, slot);
                self.insert(blocks, cores, slot, standing);
            }
            SelectionSet::SmallWeighted(few) => {
                cores[slot as usize].selection_state = standing;
                few.set_weight(weight_of(standing), slot);
            }
            SelectionSet::SmallUniform(_) => cores[slot as usize].selection_state = standing,
            SelectionSet::Weighted(weights) => {
                let core = &mut cores[slot as usize];
                core.selection_state = standing;
                let spot = core.position;
                weights.set_weight(spot, weight_of(standing), position_writer(cores));
            }
        }
    }

    /// Excludes an element from selection by weight, until its next [`update`](Self::update).
    pub(crate) fn exclude(&mut self, cores: &mut [ElementCore], slot: u32) {
        if let SelectionSet::Weighted(weights) = self {
            let spot = cores[slot as usize].position;
            weights.set_weight(spot, 0, position_writer(cores));
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            SelectionSet::Ordered(order) => order.heap_bytes(),
            SelectionSet::Weighted(weights) => weights.heap_bytes(),
            _ => 0,
        }
    }

    /// Switches from the form for few elements to the form for many.
    #[cold]
    fn grow(&mut self, blocks: &mut QueueBlocks, cores: &mut [ElementCore]) {
        let many = match self {
            SelectionSet::SmallOrdered(few) => {
                let mut order = OrderedSet::default();
                for (key, slot) in few.iter() {
                    cores[slot as usize].position = order.insert(blocks, key, slot);
                }
                SelectionSet::Ordered(order)
            }
            SelectionSet::SmallWeighted(few) => {
                let mut weights = WeightedSet::with_random_state(few.random());
                for (weight, slot) in few.each() {
                    weights.insert(weight, slot, position_writer(cores));
                }
                SelectionSet::Weighted(weights)
            }
            SelectionSet::SmallUniform(few) => {
                let mut weights = WeightedSet::with_random_state(few.random());
                for slot in few.iter() {
                    weights.insert(1, slot, position_writer(cores));
                }
                SelectionSet::Weighted(weights)
            }
            SelectionSet::Ordered(_) | SelectionSet::Weighted(_) => return,
        };
        *self = many;
    }
}

/// Returns a closure that stores the positions of elements.
#[inline]
fn position_writer(cores: &mut [ElementCore]) -> impl FnMut(u32, u32) {
    |slot, spot| cores[slot as usize].position = spot
}

/// Returns the weight, which fits 32 bits by the policies' definitions.
fn weight_of(standing: SelectionState) -> u32 {
    u32::try_from(standing.value).unwrap_or(u32::MAX)
}
