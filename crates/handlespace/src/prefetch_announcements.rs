//! Prefetching: memory for announced operations is fetched while others are executed.
//!
//! A registrar that handles a message usually has many more waiting. Without prefetching, an operation waits for its
//! bucket of the index, then for the record named in the bucket, then for the data named in the record. If it is
//! announced some operations ahead, it waits for none of them: each
//! [`announce_operation`](Handlespace::announce_operation) makes one step for every operation announced
//! before, and the steps of one operation are so far apart that each finds the data that the previous step requested.

use crate::handlespace::Handlespace;
use crate::home_registrars::hash_with;
use crate::policy::SelectionProcedure;
use crate::pool;
use holdfast_wire::rserpool::ElementId;
use std::ops::Range;

/// An announced operation, with its pool's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnnouncedOperation<'a> {
    /// An element registers or re-registers.
    Registration(&'a [u8], ElementId),
    /// An element is deregistered.
    Deregistration(&'a [u8], ElementId),
    /// An element is looked up, and its timer set.
    Timer(&'a [u8], ElementId),
    /// A pool's handle is resolved to this number of elements.
    Resolution(&'a [u8], usize),
}

/// Kind of operation on an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElementOperation {
    Registration,
    Deregistration,
    Timer,
}

/// Number of operations between two steps.
const STEP_DISTANCE: usize = 6;
const STEPS: usize = 5;
const ITEMS_MAX: usize = 4;
const RING_SIZE: usize = (STEP_DISTANCE * STEPS).next_power_of_two();

/// Progress of prefetching for an announced operation.
#[derive(Debug, Clone, Copy, Default)]
enum PrefetchState {
    #[default]
    Idle,
    /// Hashes of the element and of its handle.
    ElementHash(u64, u64, ElementOperation),
    Slot(u32, ElementOperation),
    /// The pool of an element that is not registered.
    NewElement(u32),
    HandleHash(u64, u32),
    /// A pool, and the number of elements to select.
    Pool(u32, u32),
}

/// The announced operations.
#[derive(Debug, Clone, Default)]
pub(crate) struct AnnouncedOperations {
    ring: [PrefetchState; RING_SIZE],
    next: usize,
}

impl AnnouncedOperations {
    /// Returns the progress of prefetching for the operation that is executed now.
    #[inline]
    fn current_prefetch(&self) -> PrefetchState {
        self.ring[self.next.wrapping_sub(1 + STEP_DISTANCE * STEPS) % RING_SIZE]
    }
}

impl<T> Handlespace<T> {
    /// Distance in operations at which an operation is best announced.
    pub const ANNOUNCE_DISTANCE: usize = STEP_DISTANCE * STEPS;

    /// Announces the operation that is executed [`ANNOUNCE_DISTANCE`](Self::ANNOUNCE_DISTANCE) operations after the next one, if known. A wrong
    /// announcement is harmless. Must be called once for each operation.
    #[inline]
    pub fn announce_operation(&mut self, operation: Option<AnnouncedOperation<'_>>) {
        let next = self.announcements.next;
        self.announcements.next = next.wrapping_add(1);
        let place = |steps: usize| next.wrapping_sub(steps * STEP_DISTANCE) % RING_SIZE;
        self.announcements.ring[place(0)] = match operation {
            Some(coming) => self.begin_lookup(coming),
            None => PrefetchState::Idle,
        };
        self.announcements.ring[place(1)] = self.find_record(self.announcements.ring[place(1)]);
        self.prefetch_sets(self.announcements.ring[place(2)]);
        self.prefetch_positions(self.announcements.ring[place(3)]);
        self.prefetch_neighbours(self.announcements.ring[place(4)]);
    }

    /// Returns the slot found for the current operation's announcement, if it belongs to this element.
    #[inline]
    pub(crate) fn announced_slot(&self, handle: &[u8], id: ElementId) -> Option<u32> {
        let PrefetchState::Slot(slot, _) = self.announcements.current_prefetch() else {
            return None;
        };
        let is_its = self.elements.is_used(slot) && self.is_element(slot, handle, id);
        is_its.then_some(slot)
    }

    /// Returns the pool found for the current operation's announcement, if it has this handle.
    #[inline]
    pub(crate) fn announced_pool(&self, handle: &[u8]) -> Option<u32> {
        let (PrefetchState::Pool(number, _) | PrefetchState::NewElement(number)) =
            self.announcements.current_prefetch()
        else {
            return None;
        };
        let pool = &self.pools[number as usize];
        (pool.len > 0 && pool.has_handle(handle)).then_some(number)
    }

    #[inline]
    fn begin_lookup(&self, coming: AnnouncedOperation<'_>) -> PrefetchState {
        let (handle, id, deed) = match coming {
            AnnouncedOperation::Registration(handle, id) => {
                (handle, id, ElementOperation::Registration)
            }
            AnnouncedOperation::Deregistration(handle, id) => {
                (handle, id, ElementOperation::Deregistration)
            }
            AnnouncedOperation::Timer(handle, id) => (handle, id, ElementOperation::Timer),
            AnnouncedOperation::Resolution(handle, items) => {
                let hash = self.hash(handle);
                self.pool_index.prefetch(hash);
                return PrefetchState::HandleHash(hash, items.min(ITEMS_MAX) as u32);
            }
        };
        let handle_hash = self.hash(handle);
        let hash = hash_with(handle_hash, id.0);
        self.element_index.prefetch(hash);
        if deed == ElementOperation::Registration {
            // An unregistered element needs the pool's index too.
            self.pool_index.prefetch(handle_hash);
        }
        PrefetchState::ElementHash(hash, handle_hash, deed)
    }

    #[inline]
    fn find_record(&self, state: PrefetchState) -> PrefetchState {
        let pool = |hash: u64, lines: Range<usize>| {
            let number = self.pool_index.guess(hash)?;
            pool::prefetch(&self.pools, number, lines);
            Some(number)
        };
        match state {
            PrefetchState::ElementHash(hash, of_pool, deed) => match self.element_index.guess(hash)
            {
                Some(slot) => {
                    self.elements
                        .prefetch(slot, deed != ElementOperation::Timer);
                    PrefetchState::Slot(slot, deed)
                }
                None => pool(of_pool, pool::ALL_LINES)
                    .map_or(PrefetchState::Idle, PrefetchState::NewElement),
            },
            PrefetchState::HandleHash(hash, items) => {
                let found = pool(hash, pool::SELECTION_LINES);
                found.map_or(PrefetchState::Idle, |number| {
                    PrefetchState::Pool(number, items)
                })
            }
            _ => PrefetchState::Idle,
        }
    }

    #[inline]
    fn prefetch_sets(&self, state: PrefetchState) {
        match state {
            PrefetchState::Slot(slot, deed) => {
                let core = &self.elements.cores[slot as usize];
                if deed == ElementOperation::Deregistration {
                    pool::prefetch(&self.pools, core.pool, pool::ALL_LINES);
                    self.ownership.prefetch_group(core.group);
                } else {
                    pool::prefetch(&self.pools, core.pool, pool::HEADER_LINES);
                }
            }
            PrefetchState::NewElement(pool) => {
                let pool = &self.pools[pool as usize];
                pool.selection.prefetch_end(&self.blocks);
                self.ownership.prefetch_group(pool.group);
            }
            PrefetchState::Pool(number, items) => {
                let pool = &self.pools[number as usize];
                // The selected elements, if their values change, move to another key.
                let further = u32::from(pool.procedure != SelectionProcedure::First);
                if further > 0 && !pool.has_no_figures() || !pool.selection.selects_without_keys() {
                    pool::prefetch(&self.pools, number, pool::KEY_LINES);
                }
                pool.selection
                    .prefetch_selection(&self.blocks, items + further);
            }
            _ => {}
        }
    }

    #[inline]
    fn prefetch_positions(&self, state: PrefetchState) {
        match state {
            PrefetchState::Slot(_, ElementOperation::Timer) => {}
            PrefetchState::Slot(slot, deed) => {
                let core = &self.elements.cores[slot as usize];
                let pool = &self.pools[core.pool as usize];
                if deed == ElementOperation::Deregistration {
                    self.ownership.prefetch_member(core);
                } else if pool.has_no_figures() {
                    return;
                } else {
                    pool::prefetch(&self.pools, core.pool, pool::ALL_LINES);
                }
                pool.selection.prefetch(&self.blocks, core.position);
            }
            PrefetchState::NewElement(pool) => {
                self.ownership.prefetch_end(self.pools[pool as usize].group);
            }
            PrefetchState::Pool(pool, items) => {
                let pool = &self.pools[pool as usize];
                pool.selection.prefetch_further_keys(&self.blocks, items);
                if pool.procedure != SelectionProcedure::First {
                    pool.selection.prefetch_tails(&self.blocks);
                }
            }
            _ => {}
        }
    }

    #[inline]
    fn prefetch_neighbours(&self, state: PrefetchState) {
        let cores = &self.elements.cores;
        match state {
            PrefetchState::Slot(_, ElementOperation::Timer) => {}
            PrefetchState::Slot(slot, deed) => {
                let core = &cores[slot as usize];
                let pool = &self.pools[core.pool as usize];
                if deed == ElementOperation::Deregistration {
                    self.ownership.prefetch_last(cores, core.group);
                } else if pool.has_no_figures() {
                    return;
                } else {
                    pool.selection.prefetch_tails(&self.blocks);
                }
                pool.selection.prefetch_row_ends(cores);
            }
            PrefetchState::NewElement(pool) => {
                let selection = &self.pools[pool as usize].selection;
                selection.prefetch_tails(&self.blocks);
                selection.prefetch_row_ends(cores);
            }
            PrefetchState::Pool(pool, items) => {
                let selection = &self.pools[pool as usize].selection;
                selection.prefetch_chosen(&self.blocks, cores, items);
            }
            _ => {}
        }
    }
}
