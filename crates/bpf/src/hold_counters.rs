//! Counters of held packets, shared with the ingress program through a mapped array.

use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::MapHandle;

use crate::Error;
use crate::mapped_array::MappedArray;

/// Number of packets of each hold slot that have been diverted and not replayed yet.
pub struct HoldCounters {
    // Array values are padded to 8 bytes.
    slots: MappedArray<[AtomicU32; 2]>,
}

impl HoldCounters {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let slots = MappedArray::map(map, "holds")?;
        Ok(Self { slots })
    }

    fn slot(&self, slot: u32) -> &AtomicU32 {
        // SAFETY: the mapping lives as long as self; atomics tolerate the kernel's writes.
        unsafe { &self.slots.value_ptr(slot as usize).as_ref()[0] }
    }

    /// Returns the number of packets of `slot` not replayed yet.
    #[must_use]
    pub fn get(&self, slot: u32) -> u32 {
        self.slot(slot).load(Ordering::Acquire)
    }

    /// Records that one packet of `slot` was replayed.
    pub fn count_replayed(&self, slot: u32) {
        // The counter may have been reset in between; it must not wrap below zero.
        let _ = self
            .slot(slot)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| {
                held.checked_sub(1)
            });
    }

    /// Resets the counter of `slot` to zero.
    pub fn reset(&self, slot: u32) {
        self.slot(slot).store(0, Ordering::Release);
    }
}
