//! Counters of held packets, shared with the ingress program through a mapped array.

use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::MapHandle;

use crate::Error;
use crate::mapped::Mapped;

/// How many packets of each hold slot have been diverted and not yet replayed.
pub struct Holds {
    // Array values are padded to 8 bytes.
    slots: Mapped<[AtomicU32; 2]>,
}

impl Holds {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let slots = Mapped::map(map, "holds")?;
        Ok(Self { slots })
    }

    fn slot(&self, slot: u32) -> &AtomicU32 {
        // SAFETY: the mapping lives as long as self; atomics tolerate the kernel's writes.
        unsafe { &self.slots.at(slot as usize).as_ref()[0] }
    }

    /// Packets of `slot` not yet replayed.
    #[must_use]
    pub fn get(&self, slot: u32) -> u32 {
        self.slot(slot).load(Ordering::Acquire)
    }

    /// One packet of `slot` was replayed.
    pub fn replayed(&self, slot: u32) {
        // The counter may have been reset in between: it never wraps below zero.
        let _ = self
            .slot(slot)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| {
                held.checked_sub(1)
            });
    }

    /// The slot holds nothing (again).
    pub fn reset(&self, slot: u32) {
        self.slot(slot).store(0, Ordering::Release);
    }
}
