//! The steering table, and the cache of it that the steering program keeps (`c/cache.h`).

use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::MapHandle;
use zerocopy::IntoBytes;

use crate::batch_setter::BatchSetter;
use crate::mapped_array::MappedArray;
use crate::shared_with_c::{FlowKey, Record};
use crate::{Error, KernelMap};

/// Number of sets in the cache, and of ways in a set (`c/shared.h`).
const CACHE_SETS: usize = 1 << 14;
const CACHE_WAYS: usize = 8;
/// Bits of a way that hold the node; the others identify the flow.
const NODE_BITS: u64 = 0xffff;
const HASH_MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;

/// The steering table. Each change of a record also clears the program's cache entry of the flow.
pub struct SteeringTable {
    table: KernelMap<FlowKey, Record>,
    setter: BatchSetter,
    sets: MappedArray<[AtomicU64; CACHE_WAYS]>,
    seed: u64,
}

impl SteeringTable {
    pub(crate) fn new(
        table: KernelMap<FlowKey, Record>,
        setter: BatchSetter,
        cache: &MapHandle,
        seeds: &KernelMap<u32, u64>,
    ) -> Result<Self, Error> {
        // The seed is secret, because otherwise a client could choose flows that collide in the cache.
        let mut seed = seeds.get(&0)?.unwrap_or(0);
        if seed == 0 {
            seed = random_u64()? | 1;
            seeds.set(&0, &seed)?;
        }
        let sets = MappedArray::map(cache, "destinations")?;
        assert_eq!(sets.len(), CACHE_SETS);
        Ok(Self {
            table,
            setter,
            sets,
            seed,
        })
    }

    /// Returns the record of a flow, if it has one.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn get(&self, flow: &FlowKey) -> Result<Option<Record>, Error> {
        self.table.get(flow)
    }

    /// Sets the record of a flow.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses.
    pub fn set(&self, flow: &FlowKey, record: &Record) -> Result<(), Error> {
        let set = self.table.set(flow, record);
        self.clear_cached(flow);
        set
    }

    /// Sets many records with few system calls.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses; some records may have been set.
    pub fn set_many(&self, flows: &[FlowKey], records: &[Record]) -> Result<(), Error> {
        let set = self.setter.set(flows, records);
        for flow in flows {
            self.clear_cached(flow);
        }
        set
    }

    /// Removes the record of a flow. A flow without a record is no error.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&self, flow: &FlowKey) -> Result<(), Error> {
        let removed = self.table.remove(flow);
        self.clear_cached(flow);
        removed
    }

    /// Returns all records; the table may change meanwhile.
    pub fn entries(&self) -> Vec<(FlowKey, Record)> {
        self.table.entries()
    }

    /// Removes the ownership records of all flows.
    ///
    /// # Errors
    /// The kernel's error; some records may have been removed.
    pub fn clear(&self) -> Result<(), Error> {
        let keys: Vec<FlowKey> = self.table.entries().iter().map(|(key, _)| *key).collect();
        let removed = self.table.remove_many(&keys);
        for index in 0..self.sets.len() {
            // SAFETY: the mapping lives as long as self; atomics tolerate the kernel's writes.
            for way in unsafe { self.sets.value_ptr(index).as_ref() } {
                way.store(0, Ordering::SeqCst);
            }
        }
        removed
    }

    /// Clears the cache entry of a flow, so that the program reads the table again. The record was changed before,
    /// and that system call is a barrier.
    fn clear_cached(&self, flow: &FlowKey) {
        let hash = hash(flow, self.seed);
        let set = self.sets.value_ptr(hash as usize & (CACHE_SETS - 1));
        // SAFETY: the mapping lives as long as self; atomics tolerate the kernel's writes.
        for way in unsafe { set.as_ref() } {
            let cached = way.load(Ordering::SeqCst);
            if cached != 0 && (cached ^ hash) <= NODE_BITS {
                // An entry that has replaced it meanwhile may be cleared too: the program finds that flow in the table
                // again.
                way.store(0, Ordering::SeqCst);
            }
        }
    }
}
fn hash(flow: &FlowKey, seed: u64) -> u64 {
    let mut hash = seed;
    for word in flow.as_bytes().chunks_exact(8) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        hash = (hash ^ u64::from_ne_bytes(bytes)).wrapping_mul(HASH_MULTIPLIER);
        hash ^= hash >> 32;
    }
    hash = hash.wrapping_mul(HASH_MULTIPLIER);
    hash ^ (hash >> 29)
}

fn random_u64() -> Result<u64, Error> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is writable for its length.
    let result = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if result != 8 {
        let reason = std::io::Error::last_os_error().to_string();
        return Err(Error::Map {
            name: "seed",
            reason,
        });
    }
    Ok(u64::from_ne_bytes(bytes))
}
