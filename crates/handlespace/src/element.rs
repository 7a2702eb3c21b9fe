//! A pool element's record, and its public view.

use crate::checksum;
use crate::handlespace::Handlespace;
use crate::policy::SelectionState;
use crate::timers::{ElementTimer, TimerKind};
use holdfast_wire::rserpool::{ElementId, Policy, PoolHandle, RegistrarId};
use prefetch_index::prefetch_index;

/// Identifies one registration: an element that registers again after a deregistration gets another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ElementKey {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// A registered pool element. Each method reads only the data that it returns.
pub struct ElementRef<'a, T> {
    pub(crate) space: &'a Handlespace<T>,
    pub(crate) core: &'a ElementCore,
    pub(crate) slot: u32,
}

impl<T> Clone for ElementRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ElementRef<'_, T> {}

impl<'a, T> ElementRef<'a, T> {
    /// Returns the key of the registration.
    pub fn key(&self) -> ElementKey {
        ElementKey {
            slot: self.slot,
            generation: self.core.generation,
        }
    }

    /// Returns the handle of the element's pool.
    pub fn handle(&self) -> &'a PoolHandle {
        &self.space.pools[self.core.pool as usize].handle
    }

    /// Returns the element's number in the pool.
    pub fn id(&self) -> ElementId {
        ElementId(self.core.id)
    }

    /// Returns the element's home registrar.
    pub fn home(&self) -> RegistrarId {
        self.core.home
    }

    /// Returns the element's figures for the pool's policy.
    pub fn policy(&self) -> &'a Policy {
        &self.space.elements.cold_parts[self.slot as usize].policy
    }

    /// Returns the caller's data, as registered with the element.
    pub fn payload(&self) -> &'a T {
        let payload = &self.space.elements.cold_parts[self.slot as usize].payload;
        let Some(payload) = payload else {
            unreachable!("only a free record has no payload");
        };
        payload
    }
}

/// Number of registrations by which a free record is prefetched ahead of its use.
const PREFETCH_DISTANCE: usize = 8;

/// The element is in no group and its record is free.
const FREE: u32 = u32::MAX;

/// The part of an element's record that most operations use: one cache line.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(crate) struct ElementCore {
    pub(crate) id: u32,
    pub(crate) pool: u32,
    pub(crate) generation: u32,
    /// The group of the pool's elements with the same home registrar; below, the element's index in the group.
    pub(crate) group: u32,
    pub(crate) index_in_group: u32,
    /// Position in the pool's selection set.
    pub(crate) position: u32,
    pub(crate) selection_state: SelectionState,
    pub(crate) timer: ElementTimer,
    pub(crate) timer_kind: TimerKind,
    pub(crate) home: RegistrarId,
}

/// The part of an element's record that few operations use: a second cache line, if the payload is small.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct ElementColdPart<T> {
    /// Start address, for prefetching.
    begin: [u32; 0],
    pub(crate) policy: Policy,
    pub(crate) payload: Option<T>,
}

/// The records of all elements, by slot. The slot freed last is reused first, because its lines are still in a cache.
#[derive(Debug, Clone)]
pub(crate) struct ElementRecords<T> {
    pub(crate) cores: Vec<ElementCore>,
    pub(crate) cold_parts: Vec<ElementColdPart<T>>,
    free: Vec<u32>,
}

impl<T> ElementRecords<T> {
    pub(crate) fn new() -> Self {
        ElementRecords {
            cores: Vec::new(),
            cold_parts: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.cores.len() - self.free.len()
    }

    /// Creates a record for an element that is in no set yet; returns its slot.
    pub(crate) fn insert(&mut self, id: ElementId, pool: u32, policy: Policy, payload: T) -> u32 {
        let rest = ElementColdPart {
            begin: [],
            policy,
            payload: Some(payload),
        };
        let core = |generation| ElementCore {
            id: id.0,
            pool,
            generation,
            group: 0,
            index_in_group: 0,
            position: 0,
            selection_state: SelectionState::default(),
            timer: ElementTimer::default(),
            timer_kind: TimerKind::default(),
            home: RegistrarId(0),
        };
        if let Some(slot) = self.free.pop() {
            if let Some(&next_free) = self
                .free
                .len()
                .checked_sub(PREFETCH_DISTANCE)
                .and_then(|at| self.free.get(at))
            {
                self.prefetch(next_free, true);
            }
            let old = &mut self.cores[slot as usize];
            *old = core(old.generation);
            self.cold_parts[slot as usize] = rest;
            return slot;
        }
        let slot = u32::try_from(self.cores.len()).ok();
        let slot = slot.filter(|&slot| slot < FREE);
        let slot = slot.expect("the number of elements exceeds 32 bits");
        self.cores.push(core(0));
        self.cold_parts.push(rest);
        slot
    }

    /// Prefetches a record: the core only, or all of it.
    #[inline]
    pub(crate) fn prefetch(&self, slot: u32, all: bool) {
        prefetch_index(&self.cores, slot as usize);
        if let Some(rest) = self.cold_parts.get(slot as usize).filter(|_| all) {
            for line in 0..size_of::<ElementColdPart<T>>() / 64 {
                prefetch_index(rest.begin.as_slice(), line * 16);
            }
        }
    }

    /// Frees the record of an element that has been removed from all sets.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<T> {
        let core = &mut self.cores[slot as usize];
        core.group = FREE;
        core.generation = core.generation.wrapping_add(1);
        core.timer = ElementTimer::default();
        self.free.push(slot);
        self.cold_parts[slot as usize].payload.take()
    }

    /// Returns the slot of a registration; none if the registration has ended.
    #[inline]
    pub(crate) fn slot_of(&self, key: ElementKey) -> Option<u32> {
        let core = self.cores.get(key.slot as usize)?;
        (core.generation == key.generation && core.group != FREE).then_some(key.slot)
    }

    #[inline]
    pub(crate) fn key_of(&self, slot: u32) -> ElementKey {
        ElementKey {
            slot,
            generation: self.cores[slot as usize].generation,
        }
    }

    /// Returns true if the slot contains an element.
    #[inline]
    pub(crate) fn is_used(&self, slot: u32) -> bool {
        self.cores[slot as usize].group != FREE
    }

    /// Returns the element's block in its home registrar's checksum; `handle_block` is its pool's part.
    pub(crate) fn checksum_block(&self, slot: u32, handle_block: u16) -> u64 {
        u64::from(handle_block) + checksum::id_block(self.cores[slot as usize].id)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.cores.capacity() * size_of::<ElementCore>()
            + self.cold_parts.capacity() * size_of::<ElementColdPart<T>>()
            + self.free.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_fits_one_cache_line() {
        assert_eq!(size_of::<ElementCore>(), 64);
    }
}
