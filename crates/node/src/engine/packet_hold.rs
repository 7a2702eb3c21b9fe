//! The packet hold of the engine: the device that keeps packets in transit, and the slots of its counters.

use std::os::fd::{AsFd, BorrowedFd};

use holdfast_wire::Flow;

use super::hold_slots::HoldSlots;
use crate::dataplane::{Dataplane, HeldPacket, HoldDevice};

/// Keeps packets of flows in transit, and gives each such flow a slot that counts the packets not yet replayed.
pub struct PacketHold {
    device: HoldDevice,
    slots: HoldSlots,
}

impl PacketHold {
    /// Returns the hold of a device; all slots are free.
    pub fn new(device: HoldDevice) -> Self {
        Self {
            device,
            slots: HoldSlots::new(),
        }
    }

    /// Returns the device, which gives packets to the stack.
    pub fn device(&self) -> &HoldDevice {
        &self.device
    }

    /// Returns the next packet and its flow; `None` if no packet is waiting.
    pub fn read(&mut self) -> Option<(Flow, HeldPacket)> {
        self.device.read()
    }

    /// Gives a held packet to the stack, and counts the packet in the flow's slot.
    pub fn replay_counted(&self, dataplane: &Dataplane, slot: u32, packet: &HeldPacket) {
        self.device.replay(&packet.bytes);
        dataplane.programs.hold_counters.count_replayed(slot);
    }

    /// Takes a slot; `None` if all are in use.
    pub fn take_slot(&mut self) -> Option<u32> {
        self.slots.take()
    }

    /// Frees the slot of a flow that has been flushed or given up; slot 0 means none.
    pub fn release_slot(&mut self, slot: u32) {
        self.slots.release(slot);
    }

    /// Returns the number of slots in use.
    pub fn slots_in_use(&self) -> usize {
        self.slots.in_use()
    }
}

impl AsFd for PacketHold {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}
