//! The handlespace: registration, deregistration, timers, and what can be asked.

use crate::checksum::Checksum;
use crate::element::{ElementKey, ElementRef, Elements};
use crate::expect::Expected;
use crate::index::Index;
use crate::ownership::{Ownership, mix};
use crate::policy::Standing;
use crate::pool::Pool;
use crate::renew::fits;
use crate::selection::{Blocks, Selection};
use crate::timers::Timers;
use bytes::Bytes;
use foldhash::fast::FixedState;
use holdfast_wire::rserpool::{ElementId, Policy, PolicyKind, PoolHandle, RegistrarId};
use prefetch_index::prefetch_index;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::hash::{BuildHasher, Hasher};

/// Pools, their elements, and what a registrar does with them.
#[derive(Debug)]
pub struct Handlespace<T> {
    pub(crate) elements: Elements<T>,
    pub(crate) pools: Vec<Pool>,
    free_pools: Vec<u32>,
    /// Pools by the hash of the handle, elements by that of handle and id.
    pub(crate) pool_index: Index,
    pub(crate) element_index: Index,
    pub(crate) blocks: Blocks,
    pub(crate) ownership: Ownership,
    pub(crate) timers: Timers,
    hasher: FixedState,
    pub(crate) random: SmallRng,
    /// The elements of one selection; kept so that none allocates.
    pub(crate) chosen: Vec<u32>,
    pub(crate) expected: Expected,
}

/// What is registered.
#[derive(Debug, Clone)]
pub struct Registration<'a, T> {
    /// The pool; made if it does not exist. Its bytes are copied then.
    pub handle: &'a PoolHandle,
    /// The element's number in the pool.
    pub id: ElementId,
    /// Its home registrar.
    pub home: RegistrarId,
    /// What it says of itself for the pool's policy.
    pub policy: Policy,
    /// What else all elements of a pool must have in common, as a number: the transport protocol and its use, say.
    pub class: u32,
    /// What the caller keeps with it.
    pub payload: T,
}

/// What became of a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered<T> {
    /// Names the registration.
    pub key: ElementKey,
    /// The payload it had, if the element was registered already.
    pub previous: Option<T>,
}

/// Why an element cannot be in a pool: it is not like those that are (RFC 5352 section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// Another policy.
    #[error("the pool's policy is {pool:?}, not {element:?}")]
    Policy {
        /// That of the pool.
        pool: PolicyKind,
        /// That of the element.
        element: PolicyKind,
    },
    /// Another class.
    #[error("the pool's class is {pool}, not {element}")]
    Class {
        /// That of the pool.
        pool: u32,
        /// That of the element.
        element: u32,
    },
}

impl<T> Handlespace<T> {
    /// An empty one. The seed is of its random choices, and keeps those who choose handles from choosing hashes too.
    pub fn new(seed: u64) -> Handlespace<T> {
        Handlespace {
            elements: Elements::new(),
            pools: Vec::new(),
            free_pools: Vec::new(),
            pool_index: Index::new(),
            element_index: Index::new(),
            blocks: Blocks::new(),
            ownership: Ownership::new(seed),
            timers: Timers::new(),
            hasher: FixedState::with_seed(seed),
            random: SmallRng::seed_from_u64(seed),
            chosen: Vec::new(),
            expected: Expected::default(),
        }
    }

    /// Registers an element, or renews its registration with what is different. A timer that is set stays set; an element
    /// that stands where it stood keeps its turn.
    ///
    /// # Errors
    /// The pool's elements have another policy or class. Nothing has changed then.
    pub fn register(
        &mut self,
        registration: Registration<'_, T>,
    ) -> Result<Registered<T>, RegisterError> {
        match self.find_slot(&registration.handle.0, registration.id) {
            Some(slot) => self.renew(slot, registration),
            None => self.add(registration),
        }
    }

    /// Removes an element; a pool without elements goes too. Returns the payload, none if there is no such element.
    pub fn deregister(&mut self, handle: &PoolHandle, id: ElementId) -> Option<T> {
        let slot = self.find_slot(&handle.0, id)?;
        self.remove_slot(slot)
    }

    /// Removes the element of a registration. None if it is gone already.
    pub fn remove(&mut self, key: ElementKey) -> Option<T> {
        let slot = self.elements.slot_of(key)?;
        self.remove_slot(slot)
    }

    /// The registration of an element.
    #[inline]
    pub fn find(&self, handle: &PoolHandle, id: ElementId) -> Option<ElementKey> {
        let slot = self.find_slot(&handle.0, id)?;
        Some(self.elements.key_of(slot))
    }

    /// The element of a registration; none if it is gone.
    #[inline]
    pub fn get(&self, key: ElementKey) -> Option<ElementRef<'_, T>> {
        Some(self.view(self.elements.slot_of(key)?))
    }

    /// What the caller keeps with an element.
    pub fn payload_mut(&mut self, key: ElementKey) -> Option<&mut T> {
        let slot = self.elements.slot_of(key)?;
        self.elements.rests[slot as usize].payload.as_mut()
    }

    /// Gives an element's policy other figures than it has said itself, as its distance is one. What selections have added to its load
    /// stays, and an element that stands where it stood keeps its turn. False if the registration is gone, or has another policy.
    pub fn adjust(&mut self, key: ElementKey, policy: Policy) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        let core = &self.elements.cores[slot as usize];
        let pool = &mut self.pools[core.pool as usize];
        if pool.kind != policy.kind() {
            return false;
        }
        self.elements.rests[slot as usize].policy = policy;
        let adjusted = core.standing.adjusted(&policy, pool.procedure);
        if adjusted.value != core.standing.value {
            let cores = &mut self.elements.cores;
            pool.selection
                .update(&mut self.blocks, cores, slot, adjusted);
        }
        true
    }

    /// Makes a registrar the element's home. False if the registration is gone.
    pub fn set_home(&mut self, key: ElementKey, home: RegistrarId) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        self.rehome(slot, home);
        true
    }

    /// The checksum over the elements whose home a registrar is (RFC 5353 section 3.6.2).
    pub fn checksum(&self, home: RegistrarId) -> u16 {
        let owner = self.ownership.owner(home);
        owner
            .map_or(Checksum::default(), |owner| owner.checksum)
            .value()
    }

    /// How many elements have a registrar as their home.
    pub fn elements_owned_by(&self, home: RegistrarId) -> usize {
        self.ownership.owner(home).map_or(0, |owner| owner.elements)
    }

    /// How many elements there are in all pools.
    pub fn elements(&self) -> usize {
        self.elements.len()
    }

    /// How many pools there are. Each has at least one element.
    pub fn pools(&self) -> usize {
        self.pool_index.len()
    }

    /// Bytes on the heap, without what payloads have there.
    pub fn heap_bytes(&self) -> usize {
        let pools = self.pools.iter().filter(|pool| pool.len > 0);
        let of_pools: usize = pools
            .map(|pool| pool.handle.0.len() + pool.selection.heap_bytes())
            .sum();
        of_pools
            + self.pools.capacity() * size_of::<Pool>()
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
        self.expected_pool(handle).or_else(|| {
            let hash = self.hash(handle);
            self.pool_index
                .find(hash, |pool| self.pools[pool as usize].is(handle))
        })
    }

    #[inline]
    pub(crate) fn view(&self, slot: u32) -> ElementRef<'_, T> {
        ElementRef {
            space: self,
            core: &self.elements.cores[slot as usize],
            slot,
        }
    }

    /// The element's own hash needs no look at its pool: what the index says is checked against the record.
    #[inline]
    fn find_slot(&self, handle: &[u8], id: ElementId) -> Option<u32> {
        if let Some(slot) = self.expected_slot(handle, id) {
            return Some(slot);
        }
        let hash = match self.expected_pool(handle) {
            Some(pool) => self.pools[pool as usize].hash,
            None => self.hash(handle),
        };
        self.element_index.find(mix(hash, id.0), |slot| {
            // Whoever changes the registration needs both lines.
            prefetch_index(&self.elements.rests, slot as usize);
            self.is_element(slot, handle, id)
        })
    }

    /// Whether a record that is in use is this element's.
    #[inline]
    pub(crate) fn is_element(&self, slot: u32, handle: &[u8], id: ElementId) -> bool {
        let core = &self.elements.cores[slot as usize];
        core.id == id.0 && self.pools[core.pool as usize].is(handle)
    }

    fn add(&mut self, registration: Registration<'_, T>) -> Result<Registered<T>, RegisterError> {
        let policy = registration.policy;
        let number = match self.find_pool(&registration.handle.0) {
            Some(number) => {
                fits(&self.pools[number as usize], &policy, registration.class)?;
                number
            }
            None => self.add_pool(&registration),
        };
        let Registration {
            id, home, payload, ..
        } = registration;
        let slot = self.elements.insert(id, number, policy, payload);
        let pool = &mut self.pools[number as usize];
        self.element_index.insert(mix(pool.hash, id.0), slot);
        pool.len += 1;
        let block = self.elements.checksum_block(slot, pool.handle_block);
        let cores = &mut self.elements.cores;
        let standing = Standing::registered(&policy, || pool.selection.lowest());
        pool.selection
            .insert(&mut self.blocks, cores, slot, standing);
        self.ownership
            .insert(cores, slot, home, block, &mut pool.group);
        let key = self.elements.key_of(slot);
        Ok(Registered {
            key,
            previous: None,
        })
    }

    fn add_pool(&mut self, registration: &Registration<'_, T>) -> u32 {
        let hash = self.hash(&registration.handle.0);
        let kind = registration.policy.kind();
        let mut pool = Pool::new(registration.handle, hash, kind, registration.class);
        pool.selection.sow(self.random.random());
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
        let hash = mix(pool.hash, core.id);
        pool.selection.fetch(&self.blocks, core.spot);
        self.ownership.fetch(&self.elements.cores, core);
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
            pool.selection = Selection::new(PolicyKind::RoundRobin);
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
