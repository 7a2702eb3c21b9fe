//! The handlespace: registration, deregistration, timers, and queries.

use crate::checksum::Checksum;
use crate::element::{ElementKey, ElementRecords, ElementRef};
use crate::home_registrars::{HomeRegistrars, hash_with};
use crate::policy::SelectionState;
use crate::pool::PoolRecord;
use crate::prefetch_announcements::AnnouncedOperations;
use crate::record_index::RecordIndex;
use crate::reregistration::check_pool_properties;
use crate::selection::{QueueBlocks, SelectionSet};
use crate::timers::ElementTimers;
use bytes::Bytes;
use foldhash::fast::FixedState;
use holdfast_wire::rserpool::{ElementId, Policy, PolicyKind, PoolHandle, RegistrarId};
use prefetch_index::prefetch_index;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::hash::{BuildHasher, Hasher};

/// Pools with their elements, and a registrar's operations on them.
#[derive(Debug)]
pub struct Handlespace<T> {
    pub(crate) elements: ElementRecords<T>,
    pub(crate) pools: Vec<PoolRecord>,
    free_pools: Vec<u32>,
    /// Index of pools by the hash of the handle; below, of elements by the hash of handle and id.
    pub(crate) pool_index: RecordIndex,
    pub(crate) element_index: RecordIndex,
    pub(crate) blocks: QueueBlocks,
    pub(crate) ownership: HomeRegistrars,
    pub(crate) timers: ElementTimers,
    hasher: FixedState,
    pub(crate) random: SmallRng,
    /// The elements of one selection; kept to avoid allocations.
    pub(crate) chosen: Vec<u32>,
    pub(crate) announcements: AnnouncedOperations,
}

/// The data of a registration.
#[derive(Debug, Clone)]
pub struct RegistrationData<'a, T> {
    /// The pool, created if it does not exist; then its bytes are copied.
    pub handle: &'a PoolHandle,
    /// The element's number in the pool.
    pub id: ElementId,
    /// The element's home registrar.
    pub home: RegistrarId,
    /// The element's figures for the pool's policy.
    pub policy: Policy,
    /// A number for the other properties that all elements of a pool must share, such as transport protocol and use.
    pub class: u32,
    /// The caller's data.
    pub payload: T,
}

/// Result of a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrationOutcome<T> {
    /// Key of the registration.
    pub key: ElementKey,
    /// The previous payload, if the element was registered.
    pub previous: Option<T>,
}

/// The reason that an element cannot be in a pool: it differs from the pool's elements (RFC 5352 section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The element's policy is not the pool's.
    #[error("the pool's policy is {pool:?}, not {element:?}")]
    Policy {
        /// The pool's policy.
        pool: PolicyKind,
        /// The element's policy.
        element: PolicyKind,
    },
    /// The element's class is not the pool's.
    #[error("the pool's class is {pool}, not {element}")]
    Class {
        /// The pool's class.
        pool: u32,
        /// The element's class.
        element: u32,
    },
}

impl<T> Handlespace<T> {
    /// Creates an empty handlespace. The seed drives its random choices, and prevents clients from predicting hashes of
    /// handles.
    pub fn new(seed: u64) -> Handlespace<T> {
        Handlespace {
            elements: ElementRecords::new(),
            pools: Vec::new(),
            free_pools: Vec::new(),
            pool_index: RecordIndex::new(),
            element_index: RecordIndex::new(),
            blocks: QueueBlocks::new(),
            ownership: HomeRegistrars::new(seed),
            timers: ElementTimers::new(),
            hasher: FixedState::with_seed(seed),
            random: SmallRng::seed_from_u64(seed),
            chosen: Vec::new(),
            announcements: AnnouncedOperations::default(),
        }
    }

    /// Registers an element, or updates its registration. A running timer is kept; an element with an unchanged
    /// position keeps its turn.
    ///
    /// # Errors
    /// The pool's elements have another policy or class. The handlespace is then unchanged.
    pub fn register(
        &mut self,
        registration: RegistrationData<'_, T>,
    ) -> Result<RegistrationOutcome<T>, RegisterError> {
        match self.find_slot(&registration.handle.0, registration.id) {
            Some(slot) => self.renew(slot, registration),
            None => self.add_element(registration),
        }
    }

    /// Removes an element, and its pool if it was the last one. Returns the payload, none if there is no such element.
    pub fn deregister(&mut self, handle: &PoolHandle, id: ElementId) -> Option<T> {
        let slot = self.find_slot(&handle.0, id)?;
        self.remove_slot(slot)
    }

    /// Removes the element of a registration. None if the registration has ended.
    pub fn remove(&mut self, key: ElementKey) -> Option<T> {
        let slot = self.elements.slot_of(key)?;
        self.remove_slot(slot)
    }

    /// Returns the key of an element's registration.
    #[inline]
    pub fn find(&self, handle: &PoolHandle, id: ElementId) -> Option<ElementKey> {
        let slot = self.find_slot(&handle.0, id)?;
        Some(self.elements.key_of(slot))
    }

    /// Returns the element of a registration; none if it has ended.
    #[inline]
    pub fn get(&self, key: ElementKey) -> Option<ElementRef<'_, T>> {
        Some(self.element_ref(self.elements.slot_of(key)?))
    }

    /// Returns the caller's data of an element.
    pub fn payload_mut(&mut self, key: ElementKey) -> Option<&mut T> {
        let slot = self.elements.slot_of(key)?;
        self.elements.cold_parts[slot as usize].payload.as_mut()
    }

    /// Sets figures of an element's policy that the element did not register itself, such as its distance. The load
    /// added by selections is kept, and an element with an unchanged position keeps its turn. Returns false if the
    /// registration has ended, or has another policy.
    pub fn adjust_policy(&mut self, key: ElementKey, policy: Policy) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        let core = &self.elements.cores[slot as usize];
        let pool = &mut self.pools[core.pool as usize];
        if pool.kind != policy.kind() {
            return false;
        }
        self.elements.cold_parts[slot as usize].policy = policy;
        let adjusted = core
            .selection_state
            .after_adjustment(&policy, pool.procedure);
        if adjusted.value != core.selection_state.value {
            let cores = &mut self.elements.cores;
            pool.selection
                .update(&mut self.blocks, cores, slot, adjusted);
        }
        true
    }

    /// Makes a registrar the element's home. Returns false if the registration has ended.
    pub fn set_home(&mut self, key: ElementKey, home: RegistrarId) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        self.rehome(slot, home);
        true
    }

    /// Returns the checksum over the elements with a registrar as their home (RFC 5353 section 3.6.2).
    pub fn checksum(&self, home: RegistrarId) -> u16 {
        let owner = self.ownership.owner(home);
        owner
            .map_or(Checksum::default(), |owner| owner.checksum)
            .value()
    }

    /// Returns the number of elements with a registrar as their home.
    pub fn elements_owned_by(&self, home: RegistrarId) -> usize {
        self.ownership.owner(home).map_or(0, |owner| owner.elements)
    }

    /// Returns the number of elements in all pools.
    pub fn elements(&self) -> usize {
        self.elements.len()
    }

    /// Returns the number of pools. Each has at least one element.
    pub fn pools(&self) -> usize {
        self.pool_index.len()
    }

    /// Returns the bytes on the heap, without the heap memory of payloads.
    pub fn heap_bytes(&self) -> usize {
        let pools = self.pools.iter().filter(|pool| pool.len > 0);
        let pool_bytes: usize = pools
            .map(|pool| pool.handle.0.len() + pool.selection.heap_bytes())
            .sum();
        pool_bytes
            + self.pools.capacity() * size_of::<PoolRecord>()
            + self.free_pools.capacity() * size_of::<u32>()
            + self.elements.heap_bytes()
            + self.pool_index.heap_bytes()
            + self.element_index.heap_bytes()
            + self.blocks.heap_bytes()
            + self.ownership.heap_bytes()
            + self.timers.heap_bytes()
            + self.chosen.capacity() * size_of::<u32>()
    }

    #[inline]
    pub(crate) fn hash(&self, handle: &[u8]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(handle);
        hasher.finish()
    }

    #[inline]
    pub(crate) fn find_pool(&self, handle: &[u8]) -> Option<u32> {
        self.announced_pool(handle).or_else(|| {
            let hash = self.hash(handle);
            self.pool_index
                .find(hash, |pool| self.pools[pool as usize].has_handle(handle))
        })
    }

    #[inline]
    pub(crate) fn element_ref(&self, slot: u32) -> ElementRef<'_, T> {
        ElementRef {
            space: self,
            core: &self.elements.cores[slot as usize],
            slot,
        }
    }

    /// Returns an element's slot. The hash of handle and id needs no access to the pool: the index's result is checked
    /// against the record.
    #[inline]
    fn find_slot(&self, handle: &[u8], id: ElementId) -> Option<u32> {
        if let Some(slot) = self.announced_slot(handle, id) {
            return Some(slot);
        }
        let hash = match self.announced_pool(handle) {
            Some(pool) => self.pools[pool as usize].hash,
            None => self.hash(handle),
        };
        self.element_index.find(hash_with(hash, id.0), |slot| {
            // A change of the registration needs both lines.
            prefetch_index(&self.elements.cold_parts, slot as usize);
            self.is_element(slot, handle, id)
        })
    }

    /// Returns true if a used record belongs to this element.
    #[inline]
    pub(crate) fn is_element(&self, slot: u32, handle: &[u8], id: ElementId) -> bool {
        let core = &self.elements.cores[slot as usize];
        core.id == id.0 && self.pools[core.pool as usize].has_handle(handle)
    }

    fn add_element(
        &mut self,
        registration: RegistrationData<'_, T>,
    ) -> Result<RegistrationOutcome<T>, RegisterError> {
        let policy = registration.policy;
        let number = match self.find_pool(&registration.handle.0) {
            Some(number) => {
                check_pool_properties(&self.pools[number as usize], &policy, registration.class)?;
                number
            }
            None => self.add_pool(&registration),
        };
        let RegistrationData {
            id, home, payload, ..
        } = registration;
        let slot = self.elements.insert(id, number, policy, payload);
        let pool = &mut self.pools[number as usize];
        self.element_index.insert(hash_with(pool.hash, id.0), slot);
        pool.len += 1;
        let block = self.elements.checksum_block(slot, pool.handle_block);
        let cores = &mut self.elements.cores;
        let standing = SelectionState::after_registration(&policy, || pool.selection.lowest());
        pool.selection
            .insert(&mut self.blocks, cores, slot, standing);
        self.ownership
            .insert(cores, slot, home, block, &mut pool.group);
        let key = self.elements.key_of(slot);
        Ok(RegistrationOutcome {
            key,
            previous: None,
        })
    }

    fn add_pool(&mut self, registration: &RegistrationData<'_, T>) -> u32 {
        let hash = self.hash(&registration.handle.0);
        let kind = registration.policy.kind();
        let mut pool = PoolRecord::new(registration.handle, hash, kind, registration.class);
        pool.selection.seed_random(self.random.random());
        let number = match self.free_pools.pop() {
            Some(number) => {
                self.pools[number as usize] = pool;
                number
            }
            None => {
                self.pools.push(pool);
                self.pools.len() as u32 - 1
            }
        };
        self.pool_index.insert(hash, number);
        number
    }

    fn remove_slot(&mut self, slot: u32) -> Option<T> {
        let core = &self.elements.cores[slot as usize];
        let number = core.pool;
        let pool = &mut self.pools[number as usize];
        let hash = hash_with(pool.hash, core.id);
        pool.selection.prefetch(&self.blocks, core.position);
        self.ownership.prefetch(&self.elements.cores, core);
        let block = self.elements.checksum_block(slot, pool.handle_block);
        let cores = &mut self.elements.cores;
        pool.selection.remove(&mut self.blocks, cores, slot);
        self.ownership.remove(cores, slot, block);
        self.element_index.remove(hash, slot);
        self.timers.remove(cores, slot);
        pool.len -= 1;
        if pool.len == 0 {
            self.pool_index.remove(pool.hash, number);
            pool.handle = PoolHandle(Bytes::new());
            pool.selection = SelectionSet::new(PolicyKind::RoundRobin);
            self.free_pools.push(number);
        }
        self.elements.remove(slot)
    }

    pub(crate) fn rehome(&mut self, slot: u32, home: RegistrarId) {
        let pool = self.elements.cores[slot as usize].pool;
        let pool = &mut self.pools[pool as usize];
        let block = self.elements.checksum_block(slot, pool.handle_block);
        let cores = &mut self.elements.cores;
        self.ownership.remove(cores, slot, block);
        self.ownership
            .insert(cores, slot, home, block, &mut pool.group);
    }
}
