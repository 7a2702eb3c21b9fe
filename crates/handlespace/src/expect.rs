//! Prefetching: memory for announced operations is fetched while others are executed.
//!
//! A registrar that handles a message usually has many more waiting. Without prefetching, an operation waits for its
//! bucket of the index, then for the record named in the bucket, then for the data named in the record. If it is
//! announced some operations ahead, it waits for none of them: each [`expect`](Handlespace::expect) makes one step for
//! every operation announced before, and the steps of one operation are so far apart that each finds the data that the
//! previous step requested.

use crate::ownership::mix;
use crate::policy::Procedure;
use crate::pool;
use crate::space::Handlespace;
use holdfast_wire::rserpool::ElementId;
use std::ops::Range;

/// An announced operation, with its pool's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coming<'a> {
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
enum Deed {
    Registration,
    Deregistration,
    Timer,
}

/// Number of operations between two steps.
const APART: usize = 6;
const STEPS: usize = 5;
const ITEMS_MAX: usize = 4;
const RING: usize = (APART * STEPS).next_power_of_two();

/// State of the lookup for an announced operation.
#[derive(Debug, Clone, Copy, Default)]
enum Sight {
    #[default]
    Nothing,
    /// Hashes of the element and of its handle.
    Element(u64, u64, Deed),
    Slot(u32, Deed),
    /// The pool of an element that is not registered.
    Newcomer(u32),
    Handle(u64, u32),
    /// A pool, and the number of elements to select.
    Pool(u32, u32),
}

/// The announced operations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    ring: [Sight; RING],
    next: usize,
}

impl Expected {
    /// Returns the lookup state of the current operation.
    #[inline]
    fn present(&self) -> Sight {
        self.ring[self.next.wrapping_sub(1 + APART * STEPS) % RING]
    }
}

impl<T> Handlespace<T> {
    /// Distance in operations at which an operation is best announced.
    pub const AHEAD: usize = APART * STEPS;

    /// Announces the operation that is executed [`AHEAD`](Self::AHEAD) operations after the next one, if known. A wrong
    /// announcement is harmless. Must be called once for each operation.
    #[inline]
    pub fn expect(&mut self, coming: Option<Coming<'_>>) {
        let next = self.expected.next;
        self.expected.next = next.wrapping_add(1);
        let place = |steps: usize| next.wrapping_sub(steps * APART) % RING;
        self.expected.ring[place(0)] = match coming {
            Some(coming) => self.sight(coming),
            None => Sight::Nothing,
        };
        self.expected.ring[place(1)] = self.find_record(self.expected.ring[place(1)]);
        self.fetch_sets(self.expected.ring[place(2)]);
        self.fetch_places(self.expected.ring[place(3)]);
        self.fetch_neighbours(self.expected.ring[place(4)]);
    }

    /// Returns the slot found for the current operation's announcement, if it belongs to this element.
    #[inline]
    pub(crate) fn expected_slot(&self, handle: &[u8], id: ElementId) -> Option<u32> {
        let Sight::Slot(slot, _) = self.expected.present() else {
            return None;
        };
        let is_its = self.elements.is_used(slot) && self.is_element(slot, handle, id);
        is_its.then_some(slot)
    }

    /// Returns the pool found for the current operation's announcement, if it has this handle.
    #[inline]
    pub(crate) fn expected_pool(&self, handle: &[u8]) -> Option<u32> {
        let (Sight::Pool(number, _) | Sight::Newcomer(number)) = self.expected.present() else {
            return None;
        };
        let pool = &self.pools[number as usize];
        (pool.len > 0 && pool.is(handle)).then_some(number)
    }

    #[inline]
    fn sight(&self, coming: Coming<'_>) -> Sight {
        let (handle, id, deed) = match coming {
            Coming::Registration(handle, id) => (handle, id, Deed::Registration),
            Coming::Deregistration(handle, id) => (handle, id, Deed::Deregistration),
            Coming::Timer(handle, id) => (handle, id, Deed::Timer),
            Coming::Resolution(handle, items) => {
                let hash = self.hash(handle);
                self.pool_index.fetch(hash);
                return Sight::Handle(hash, items.min(ITEMS_MAX) as u32);
            }
        };
        let of_pool = self.hash(handle);
        let hash = mix(of_pool, id.0);
        self.element_index.fetch(hash);
        if deed == Deed::Registration {
            // An unregistered element needs the pool's index too.
            self.pool_index.fetch(of_pool);
        }
        Sight::Element(hash, of_pool, deed)
    }

    #[inline]
    fn find_record(&self, sight: Sight) -> Sight {
        let pool = |hash: u64, lines: Range<usize>| {
            let number = self.pool_index.guess(hash)?;
            pool::fetch(&self.pools, number, lines);
            Some(number)
        };
        match sight {
            Sight::Element(hash, of_pool, deed) => match self.element_index.guess(hash) {
                Some(slot) => {
                    self.elements.fetch(slot, deed != Deed::Timer);
                    Sight::Slot(slot, deed)
                }
                None => pool(of_pool, pool::ALL).map_or(Sight::Nothing, Sight::Newcomer),
            },
            Sight::Handle(hash, items) => {
                let found = pool(hash, pool::CHOICE);
                found.map_or(Sight::Nothing, |number| Sight::Pool(number, items))
            }
            _ => Sight::Nothing,
        }
    }

    #[inline]
    fn fetch_sets(&self, sight: Sight) {
        match sight {
            Sight::Slot(slot, deed) => {
                let core = &self.elements.cores[slot as usize];
                if deed == Deed::Deregistration {
                    pool::fetch(&self.pools, core.pool, pool::ALL);
                    self.ownership.fetch_group(core.group);
                } else {
                    pool::fetch(&self.pools, core.pool, pool::HEADER);
                }
            }
            Sight::Newcomer(pool) => {
                let pool = &self.pools[pool as usize];
                pool.selection.fetch_end(&self.blocks);
                self.ownership.fetch_group(pool.group);
            }
            Sight::Pool(number, items) => {
                let pool = &self.pools[number as usize];
                // The selected elements, if their values change, move to another key.
                let further = u32::from(pool.procedure != Procedure::First);
                if further > 0 && !pool.is_alike() || !pool.selection.is_plain() {
                    pool::fetch(&self.pools, number, pool::KEYS);
                }
                pool.selection.fetch_choice(&self.blocks, items + further);
            }
            _ => {}
        }
    }

    #[inline]
    fn fetch_places(&self, sight: Sight) {
        match sight {
            Sight::Slot(_, Deed::Timer) => {}
            Sight::Slot(slot, deed) => {
                let core = &self.elements.cores[slot as usize];
                let pool = &self.pools[core.pool as usize];
                if deed == Deed::Deregistration {
                    self.ownership.fetch_member(core);
                } else if pool.is_alike() {
                    return;
                } else {
                    pool::fetch(&self.pools, core.pool, pool::ALL);
                }
                pool.selection.fetch(&self.blocks, core.spot);
            }
            Sight::Newcomer(pool) => {
                self.ownership.fetch_end(self.pools[pool as usize].group);
            }
            Sight::Pool(pool, items) => {
                let pool = &self.pools[pool as usize];
                pool.selection.fetch_further(&self.blocks, items);
                if pool.procedure != Procedure::First {
                    pool.selection.fetch_tails(&self.blocks);
                }
            }
            _ => {}
        }
    }

    #[inline]
    fn fetch_neighbours(&self, sight: Sight) {
        let cores = &self.elements.cores;
        match sight {
            Sight::Slot(_, Deed::Timer) => {}
            Sight::Slot(slot, deed) => {
                let core = &cores[slot as usize];
                let pool = &self.pools[core.pool as usize];
                if deed == Deed::Deregistration {
                    self.ownership.fetch_last(cores, core.group);
                } else if pool.is_alike() {
                    return;
                } else {
                    pool.selection.fetch_tails(&self.blocks);
                }
                pool.selection.fetch_movers(cores);
            }
            Sight::Newcomer(pool) => {
                let selection = &self.pools[pool as usize].selection;
                selection.fetch_tails(&self.blocks);
                selection.fetch_movers(cores);
            }
            Sight::Pool(pool, items) => {
                let selection = &self.pools[pool as usize].selection;
                selection.fetch_chosen(&self.blocks, cores, items);
            }
            _ => {}
        }
    }
}
