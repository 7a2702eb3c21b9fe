//! The packet hold of the engine: the device that keeps packets in transit, the slots of its counters, and the packets
//! of each flow.

use std::os::fd::{AsFd, BorrowedFd};

use holdfast_wire::Flow;

use super::hold_slots::HoldSlots;
use crate::dataplane::{Dataplane, HeldPacket, HoldDevice, sort_for_replay};

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

    /// Takes a free slot of the hold; `None` if all are in use.
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

/// Packets of a flow that arrives here, and the slot that counts the packets not yet replayed.
pub struct HeldPackets {
    /// Slot of the hold counters; 0 means none.
    slot: u32,
    /// Packets of the flow that are held so far.
    packets: Vec<HeldPacket>,
    /// True if packets are given to the stack instead of being held.
    released: bool,
}

impl HeldPackets {
    /// Takes a slot for a flow and sets its counter to zero; `None` if all slots are in use.
    pub fn start(dataplane: &Dataplane, hold: &mut PacketHold) -> Option<Self> {
        let slot = hold.slots.take()?;
        dataplane.programs.hold_counters.reset(slot);
        Some(Self::with_slot(slot))
    }

    /// Returns the value of a flow whose slot has been taken already; 0 means none.
    pub fn with_slot(slot: u32) -> Self {
        Self {
            slot,
            packets: Vec::new(),
            released: false,
        }
    }

    /// Returns the slot of the hold counters; 0 means none.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Holds a packet of the flow, or gives the packet to the stack once the flow is released.
    pub fn hold_or_replay(&mut self, dataplane: &Dataplane, hold: &PacketHold, packet: HeldPacket) {
        if self.released {
            hold.device.replay(&packet.bytes);
            dataplane.programs.hold_counters.count_replayed(self.slot);
        } else {
            self.packets.push(packet);
        }
    }

    /// Releases the flow: gives the held packets to the stack in stream order, without duplicates. Later packets go to
    /// the stack at once.
    pub fn replay(&mut self, dataplane: &Dataplane, hold: &PacketHold) {
        self.released = true;
        let mut packets = std::mem::take(&mut self.packets);
        let held_count = packets.len();
        sort_for_replay(&mut packets);
        for packet in &packets {
            hold.device.replay(&packet.bytes);
        }
        // Dropped duplicates are counted too, because the filter has counted each packet that it held.
        for _ in 0..held_count {
            dataplane.programs.hold_counters.count_replayed(self.slot);
        }
    }

    /// Frees the slot of a flow that has been flushed or given up.
    pub fn free_slot(self, hold: &mut PacketHold) {
        hold.slots.release(self.slot);
    }
}
