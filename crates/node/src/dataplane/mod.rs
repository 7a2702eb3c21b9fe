//! What the daemon does with the kernel maps: services, nodes, placement, and the state of each flow.
//!
//! Decides nothing about ownership: it writes what the machine of `proto::handoff` asked for.

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
    /// What is asked of many sockets at once.
    pub sockets: Sockets,
    generations: BTreeMap<u16, u8>,
    /// Rows of the placement table.
    rows: HashMap<(Protocol, SocketAddr), u16>,
    /// The node's own address, where processes move.
    home: Option<IpAddr>,
    convoys: convoys::Numbers,
}

/// What the ingress and egress filters are told about one flow.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The flow.
    pub flow: Flow,
    /// Its epoch.
    pub epoch: u32,
    /// The other node of a handoff; [`NodeId`] 0 where there is none.
    pub peer: NodeId,
    /// The hold slot of an incoming flow.
    pub hold_slot: u32,
}

impl Dataplane {
    /// Loads the programs and adopts what an earlier daemon pinned.
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

    /// Flows at this address are never another's to answer: see [`Dataplane::forget`].
    pub fn set_home(&mut self, address: IpAddr) {
        self.home = Some(address);
    }

    /// Puts flows into `state` with few system calls.
    ///
    /// # Errors
    /// The flow table is full, or the kernel refuses.
    pub fn set_flows(&self, entries: &[Entry], state: FlowState) -> Result<(), Error> {
        self.set_flows_in(entries, state, Convoy::NONE)
    }

    /// The same, of flows that join a convoy.
    ///
    /// # Errors
    /// The flow table is full, or the kernel refuses.
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

    /// What the filters know of a flow.
    #[must_use]
    pub fn flow(&self, flow: &Flow) -> Option<(FlowState, FlowValue)> {
        let value = self.programs.flows.get(&key_of(flow)).ok()??;
        let value = self.standing(value);
        Some((FlowState::from_raw(value.state)?, value))
    }

    /// Whether this node owns the flow, so that its packets belong to the stack.
    #[must_use]
    pub fn is_ours(&self, flow: &Flow) -> bool {
        use FlowState::{Closing, Flushing, Leaving, Owned, Prepared};
        matches!(
            self.flow(flow),
            Some((Owned | Prepared | Leaving | Flushing | Closing, _))
        )
    }

    /// Forgets a flow; its packets are then those of an unknown flow. One that was to come back to the node whose address it has
    /// is forwarded to its donor, as before.
    ///
    /// # Errors
    /// The kernel refuses.
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

    /// The number of the service that a flow is of.
    pub fn row(&self, flow: &Flow) -> Option<u16> {
        self.rows.get(&(flow.protocol, flow.local)).copied()
    }

    /// Every flow the filters know.
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
    /// The entry of a flow as the filters have it.
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

/// Seconds of the monotonic clock, as the programs count them.
#[must_use]
pub fn monotonic_s() -> u32 {
    u32::try_from(monotonic_ns() / 1_000_000_000).unwrap_or(u32::MAX)
}

/// Nanoseconds of the monotonic clock.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
