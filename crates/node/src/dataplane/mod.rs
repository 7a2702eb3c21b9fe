//! The daemon's access to the kernel maps: services, nodes, placement, and the state of each flow.
//!
//! This module decides nothing about ownership; it writes the states that the machine of `proto::handoff` commands.

mod config_maps;
mod descriptor_lister;
mod flow_groups;
mod hold_device;
mod map_conversion;
mod placement;
mod replay_order;
pub mod retransmission_timeouts;
pub mod shared_ports;
mod socket_observer;
mod tcp_observer;

pub use config_maps::{NodeRoute, initial_shares};
pub use descriptor_lister::ProcessDescriptorLister;
pub use flow_groups::FlowGroup;
pub use hold_device::{HoldDevice, HoldDeviceError};
pub use map_conversion::{flow_from_key, flow_key, record_from_map, record_to_map};
pub use replay_order::{HeldPacket, sort_for_replay};
pub use socket_observer::SocketObserver;
pub use tcp_observer::{ConnectionSnapshot, SnapshotResult, TcpObserver};

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use holdfast_bpf::shared_with_c::{FlowKey, FlowState, FlowValue};
use holdfast_bpf::{Dataplane as Programs, Error};
use holdfast_wire::{Flow, NodeId, Protocol};

/// The kernel side of one node.
pub struct Dataplane {
    /// The loaded programs and their maps.
    pub programs: Programs,
    /// Snapshots of many sockets in one pass.
    pub sockets: SocketObserver,
    generations: BTreeMap<u16, u8>,
    /// Rows of the placement table, by service.
    service_rows: HashMap<(Protocol, SocketAddr), u16>,
    /// Rows of the services whose packets without a record the replicator takes.
    replicated_rows: BTreeSet<u16>,
    own_id: NodeId,
    /// The node's own address; set if processes move.
    own_address: Option<IpAddr>,
    free_group_numbers: flow_groups::FreeGroupNumbers,
}

/// State of one flow for the ingress and egress filters.
#[derive(Clone, Copy, Debug)]
pub struct FilterEntry {
    /// Flow whose packets the filters judge by this entry.
    pub flow: Flow,
    /// Epoch of the flow.
    pub epoch: u32,
    /// The other node of a handoff; [`NodeId`] 0 if there is none.
    pub peer: NodeId,
    /// Hold slot of an incoming flow.
    pub hold_slot: u32,
}

impl Dataplane {
    /// Loads the programs of node `own_id` and adopts the maps that an earlier daemon pinned.
    ///
    /// # Errors
    /// The kernel refuses the programs.
    pub fn load(own_id: NodeId, pins: &Path, flows_max: u32) -> Result<Self, Error> {
        shared_ports::set_pin_directory(pins);
        let dataplane = Self {
            programs: Programs::load(pins, flows_max)?,
            sockets: SocketObserver::new(),
            generations: BTreeMap::new(),
            service_rows: HashMap::new(),
            replicated_rows: BTreeSet::new(),
            own_id,
            own_address: None,
            free_group_numbers: flow_groups::FreeGroupNumbers::new(),
        };
        dataplane.reset_all_groups()?;
        Ok(dataplane)
    }

    /// Sets the node's own address. A flow at this address is never left to another node: see [`Dataplane::remove_flow`].
    pub fn set_own_address(&mut self, address: IpAddr) {
        self.own_address = Some(address);
    }

    /// Puts flows into `state` with few system calls.
    ///
    /// # Errors
    /// The flow table is full, or the kernel refuses the change.
    pub fn set_flows(&self, entries: &[FilterEntry], state: FlowState) -> Result<(), Error> {
        self.set_flows_in_group(entries, state, FlowGroup::NONE)
    }

    /// Puts flows into `state` and adds them to a flow group.
    ///
    /// # Errors
    /// The flow table is full, or the kernel refuses the change.
    pub fn set_flows_in_group(
        &self,
        entries: &[FilterEntry],
        state: FlowState,
        group: FlowGroup,
    ) -> Result<(), Error> {
        let now_s = monotonic_s();
        let keys: Vec<FlowKey> = entries.iter().map(|entry| flow_key(&entry.flow)).collect();
        let values: Vec<FlowValue> = entries
            .iter()
            .map(|entry| FlowValue {
                epoch: entry.epoch,
                state: state as u8,
                flow_group: group.number(),
                peer: entry.peer.0,
                hold_slot: entry.hold_slot,
                last_packet_s: now_s,
            })
            .collect();
        self.programs.set_flows(&keys, &values)
    }

    /// Returns the filters' entry for a flow.
    #[must_use]
    pub fn flow(&self, flow: &Flow) -> Option<(FlowState, FlowValue)> {
        let value = self.programs.flows.get(&flow_key(flow)).ok()??;
        let value = self.effective_value(value);
        Some((FlowState::from_raw(value.state)?, value))
    }

    /// Returns true if this node owns the flow, so that its packets belong to the stack.
    #[must_use]
    pub fn is_owned_here(&self, flow: &Flow) -> bool {
        use FlowState::{Closing, Flushing, Owned, Prepared, RedirectingData};
        matches!(
            self.flow(flow),
            Some((Owned | Prepared | RedirectingData | Flushing | Closing, _))
        )
    }

    /// Removes a flow's entry, so that the flow counts as unknown. A flow that was to move back to the node with its
    /// local address is instead forwarded to its donor again.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn remove_flow(&self, flow: &Flow) -> Result<(), Error> {
        if self.own_address == Some(flow.local.ip())
            && let Some((FlowState::TransitIn, value)) = self.flow(flow)
        {
            let entry = FilterEntry {
                hold_slot: 0,
                ..FilterEntry::from_value(*flow, &value)
            };
            return self.set_flows(&[entry], FlowState::Moved);
        }
        self.programs.flows.remove(&flow_key(flow))?;
        if let Some(row) = self.service_index(flow) {
            self.programs.flow_quota.release_flow(row);
        }
        Ok(())
    }

    /// Returns the row of the flow's service.
    pub fn service_index(&self, flow: &Flow) -> Option<u16> {
        self.service_rows.get(&(flow.protocol, flow.local)).copied()
    }

    /// Returns all flows with an entry.
    #[must_use]
    pub fn flows(&self) -> Vec<(Flow, FlowState, FlowValue)> {
        self.programs
            .flows
            .entries()
            .into_iter()
            .filter_map(|(key, value)| {
                let value = self.effective_value(value);
                Some((
                    flow_from_key(&key)?,
                    FlowState::from_raw(value.state)?,
                    value,
                ))
            })
            .collect()
    }
}

impl FilterEntry {
    /// Returns a flow's entry as the filters have it.
    #[must_use]
    pub fn from_value(flow: Flow, value: &FlowValue) -> Self {
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

/// Returns the clock of leases (`CLOCK_BOOTTIME`, which counts suspended time) in nanoseconds.
#[must_use]
pub fn boot_time_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Returns the monotonic clock in nanoseconds.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
