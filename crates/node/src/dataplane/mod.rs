//! The daemon's access to the kernel maps: services, nodes, placement, and the state of each flow.
//!
//! This module decides nothing about ownership; it writes the states that the machine of `proto::handoff` commands.

mod convert;
mod convoys;
mod descriptors;
mod followed;
mod group;
mod hold;
mod observe;
mod order;
mod placement;
pub mod shared_ports;
pub mod timeouts;

pub use convert::{flow_of, key_of, record_from_map, record_to_map};
pub use convoys::Convoy;
pub use descriptors::Descriptors;
pub use followed::{Followed, Look, Sight};
pub use group::NodePath;
pub use hold::{Hold, HoldError};
pub use observe::Sockets;
pub use order::{HeldPacket, in_order};

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use holdfast_bpf::shared::{FlowKey, FlowState, FlowValue};
use holdfast_bpf::{Dataplane as Programs, Error};
use holdfast_wire::{Flow, NodeId, Protocol};

/// The kernel side of one node.
pub struct Dataplane {
    /// The loaded programs and their maps.
    pub programs: Programs,
    /// Snapshots of many sockets in one pass.
    pub sockets: Sockets,
    generations: BTreeMap<u16, u8>,
    /// Rows of the placement table, by service.
    rows: HashMap<(Protocol, SocketAddr), u16>,
    /// The node's own address; set if processes move.
    home: Option<IpAddr>,
    convoys: convoys::Numbers,
}

/// State of one flow for the ingress and egress filters.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The flow.
    pub flow: Flow,
    /// Epoch of the flow.
    pub epoch: u32,
    /// The other node of a handoff; [`NodeId`] 0 if there is none.
    pub peer: NodeId,
    /// Hold slot of an incoming flow.
    pub hold_slot: u32,
}

impl Dataplane {
    /// Loads the programs and adopts the maps that an earlier daemon pinned.
    ///
    /// # Errors
    /// The kernel refuses the programs.
    pub fn load(pins: &Path, flows_max: u32) -> Result<Self, Error> {
        shared_ports::keep_at(pins);
        let dataplane = Self {
            programs: Programs::load(pins, flows_max)?,
            sockets: Sockets::new(),
            generations: BTreeMap::new(),
            rows: HashMap::new(),
            home: None,
            convoys: convoys::Numbers::new(),
        };
        dataplane.dissolve_all()?;
        Ok(dataplane)
    }

    /// Sets the node's own address. A flow at this address is never left to another node: see [`Dataplane::forget`].
    pub fn set_home(&mut self, address: IpAddr) {
        self.home = Some(address);
    }

    /// Puts flows into `state` with few system calls.
    ///
    /// # Errors
    /// The flow table is full, or the kernel refuses the change.
    pub fn set_flows(&self, entries: &[Entry], state: FlowState) -> Result<(), Error> {
        self.set_flows_in(entries, state, Convoy::NONE)
    }

    /// Puts flows into `state` and adds them to a flow group.
    ///
    /// # Errors
    /// The flow table is full, or the kernel refuses the change.
    pub fn set_flows_in(
        &self,
        entries: &[Entry],
        state: FlowState,
        convoy: Convoy,
    ) -> Result<(), Error> {
        let seen_s = monotonic_s();
        let keys: Vec<FlowKey> = entries.iter().map(|entry| key_of(&entry.flow)).collect();
        let values: Vec<FlowValue> = entries
            .iter()
            .map(|entry| FlowValue {
                epoch: entry.epoch,
                state: state as u8,
                convoy: convoy.number(),
                peer: entry.peer.0,
                hold_slot: entry.hold_slot,
                seen_s,
            })
            .collect();
        self.programs.set_flows(&keys, &values)
    }

    /// Returns the filters' entry for a flow.
    #[must_use]
    pub fn flow(&self, flow: &Flow) -> Option<(FlowState, FlowValue)> {
        let value = self.programs.flows.get(&key_of(flow)).ok()??;
        let value = self.standing(value);
        Some((FlowState::from_raw(value.state)?, value))
    }

    /// Returns true if this node owns the flow, so that its packets belong to the stack.
    #[must_use]
    pub fn is_ours(&self, flow: &Flow) -> bool {
        use FlowState::{Closing, Flushing, Leaving, Owned, Prepared};
        matches!(
            self.flow(flow),
            Some((Owned | Prepared | Leaving | Flushing | Closing, _))
        )
    }

    /// Removes a flow's entry, so that the flow counts as unknown. A flow that was to move back to the node with its
    /// local address is instead forwarded to its donor again.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn forget(&self, flow: &Flow) -> Result<(), Error> {
        if self.home == Some(flow.local.ip())
            && let Some((FlowState::TransitIn, value)) = self.flow(flow)
        {
            let entry = Entry {
                hold_slot: 0,
                ..Entry::of(*flow, &value)
            };
            return self.set_flows(&[entry], FlowState::Moved);
        }
        self.programs.flows.remove(&key_of(flow))?;
        if let Some(row) = self.row(flow) {
            self.programs.room.freed(row);
        }
        Ok(())
    }

    /// Returns the row of the flow's service.
    pub fn row(&self, flow: &Flow) -> Option<u16> {
        self.rows.get(&(flow.protocol, flow.local)).copied()
    }

    /// Returns all flows with an entry.
    #[must_use]
    pub fn flows(&self) -> Vec<(Flow, FlowState, FlowValue)> {
        self.programs
            .flows
            .entries()
            .into_iter()
            .filter_map(|(key, value)| {
                let value = self.standing(value);
                Some((flow_of(&key)?, FlowState::from_raw(value.state)?, value))
            })
            .collect()
    }
}

impl Entry {
    /// Returns a flow's entry as the filters have it.
    #[must_use]
    pub fn of(flow: Flow, value: &FlowValue) -> Self {
        Self {
            flow,
            epoch: value.epoch,
            peer: NodeId(value.peer),
            hold_slot: value.hold_slot,
        }
    }
}

/// Returns the monotonic clock in seconds, as the eBPF programs count them.
#[must_use]
pub fn monotonic_s() -> u32 {
    u32::try_from(monotonic_ns() / 1_000_000_000).unwrap_or(u32::MAX)
}

/// Returns the monotonic clock in nanoseconds.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
