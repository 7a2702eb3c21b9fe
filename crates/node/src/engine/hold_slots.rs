//! Slots of the hold counters: each held flow has one, which counts its packets in the hold.

use std::collections::VecDeque;

use holdfast_bpf::shared_with_c::NEW_CLIENTS_SLOT;

/// Free slots. A slot is reused as late as possible, so that a packet which an ingress program is still holding does
/// not count for the next flow.
pub struct HoldSlots {
    free: VecDeque<u32>,
}

impl HoldSlots {
    /// Returns all slots but 0, which means none, and the last, which counts new clients.
    pub fn new() -> Self {
        Self {
            free: (1..NEW_CLIENTS_SLOT).collect(),
        }
    }

    /// Takes a free slot of the hold; `None` if all are in use.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop_front()
    }

    /// Returns the number of the hold's slots in use.
    pub fn in_use(&self) -> usize {
        (NEW_CLIENTS_SLOT as usize - 1).saturating_sub(self.free.len())
    }

    /// Frees a slot whose flow has been flushed or given up.
    pub fn release(&mut self, slot: u32) {
        if slot != 0 {
            self.free.push_back(slot);
        }
    }
}
