//! Private flows: connections at the address of a single node, such as a process's session with a database. A private
//! flow moves with its process (paper 002, section III).
//!
//! Private flows are not steered: their packets go to the node that has the address, the *home*. A moved process keeps
//! the address of its connections at the other node, and the home forwards their packets for as long as the connections
//! live. A remote host that runs the daemon sends directly, by its translation table; any other remote host needs no
//! support.
//!
//! The entry of a private flow is made when its process is about to move, and the holder's record gives the flow's
//! location. Periodically the node asks the holder for the location of moved flows and of the remote ends of flows that
//! are here. So a node that missed a switch learns the new location, and flows that were closed elsewhere are
//! forgotten.

mod sweep;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{SystemTime, UNIX_EPOCH};

use holdfast_api::control::{BlockerEntry, ProcessCheck};
use holdfast_bpf::shared_with_c::{FlowState, Translation};
use holdfast_wire::failure::{Failure, OperatorFault, ProtocolViolation};
use holdfast_wire::move_frames::{PeerConnections, TranslationStep};
use holdfast_wire::{ChangeKind, Flow, NodeId, OwnershipChange};

use self::sweep::QuerySubject;
use super::Engine;
use crate::config::Config;
use crate::dataplane::{Dataplane, FilterEntry, flow_key};
use crate::failure_conversion::IntoFailure;
use crate::migration::{MovableAddresses, SocketEndpoint};
use crate::peer_channel::Peers;

/// State of private flows outside the filters' maps.
pub struct PrivateFlows {
    /// Number of this node in the group.
    own_id: NodeId,
    /// Address of this node.
    own_address: IpAddr,
    /// Service and node addresses of the group.
    addresses: MovableAddresses,
    /// Number of the last query to the holder.
    last_query: u64,
    /// Queries that the holder has not answered.
    open_queries: BTreeMap<u64, Vec<QuerySubject>>,
    /// Sockets bound to the addresses of moved flows, so that no new connection from this host reuses their ports.
    reserved: BTreeMap<SocketAddr, OwnedFd>,
}

/// Locations of the remote ends of a process's private flows.
#[derive(Debug, Default)]
pub struct RemoteEnds {
    /// Remote ends at nodes with a daemon.
    pub peers: Vec<PeerConnections>,
    /// Flows with remote ends elsewhere.
    pub forwarded: Vec<Flow>,
}

impl PrivateFlows {
    /// Returns the state without flows.
    pub fn new(config: &Config, addresses: MovableAddresses) -> Self {
        Self {
            own_id: config.node.id,
            own_address: config.node.address,
            addresses,
            last_query: 0,
            open_queries: BTreeMap::new(),
            reserved: BTreeMap::new(),
        }
    }

    /// Returns true if the flow is a connection at the address of a single node.
    pub fn is_private(&self, flow: &Flow) -> bool {
        self.addresses.is_private(flow)
    }

    /// Creates entries for connections at this node's address that have none. Returns the changes to report to the
    /// holder.
    ///
    /// # Errors
    /// The kernel refuses the change.
    fn create_entries(
        &self,
        dataplane: &Dataplane,
        flows: impl IntoIterator<Item = Flow>,
    ) -> Result<Vec<OwnershipChange>, Failure> {
        let new_flows = flows.into_iter().filter(|flow| {
            let is_here = flow.local.ip() == self.own_address && self.is_private(flow);
            is_here && dataplane.flow(flow).is_none()
        });
        let new_flows: Vec<Flow> = new_flows.collect();
        if new_flows.is_empty() {
            return Ok(Vec::new());
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let epoch = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        let entry = |flow: &Flow| FilterEntry {
            flow: *flow,
            epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        let entries: Vec<FilterEntry> = new_flows.iter().map(entry).collect();
        let set = dataplane.set_flows(&entries, FlowState::Owned);
        set.map_err(IntoFailure::into_failure)?;
        let establish = |flow| OwnershipChange {
            flow,
            kind: ChangeKind::Establish,
            epoch,
        };
        Ok(new_flows.into_iter().map(establish).collect())
    }

    /// Groups flows by the nodes that must be notified of the move, and returns the flows that are only forwarded.
    ///
    /// # Errors
    /// Both ends of a connection are at this node.
    pub fn remote_ends(
        &self,
        (dataplane, peers): (&Dataplane, &Peers),
        flows: impl IntoIterator<Item = Flow>,
    ) -> Result<RemoteEnds, Failure> {
        let mut ends = RemoteEnds::default();
        let mut by_node: BTreeMap<NodeId, Vec<Flow>> = BTreeMap::new();
        for flow in flows.into_iter().filter(|flow| self.is_private(flow)) {
            match self.remote_node(dataplane, &flow) {
                Some(node) if node == self.own_id && flow.local.ip() == self.own_address => {
                    return Err(OperatorFault::BothEndsHere(flow).into());
                }
                Some(node) if node == self.own_id || peers.is_up(node) => {
                    by_node.entry(node).or_default().push(flow);
                }
                _ => ends.forwarded.push(flow),
            }
        }
        let peers = by_node.into_iter();
        ends.peers = peers
            .map(|(node, connections)| PeerConnections { node, connections })
            .collect();
        Ok(ends)
    }

    /// Adds the fate of a process's private connections to the operator's check.
    pub fn add_to_check(
        &self,
        context: (&Dataplane, &Peers),
        check: &mut ProcessCheck,
        flows: &[Flow],
    ) {
        match self.remote_ends(context, flows.iter().copied()) {
            Ok(ends) => {
                check.forwarded = ends.forwarded.iter().map(ToString::to_string).collect();
            }
            Err(failure) => {
                check.movable = false;
                check.blockers.push(BlockerEntry {
                    pid: check.pid,
                    fd: None,
                    path: None,
                    reason: failure.to_string(),
                });
            }
        }
    }

    /// Returns the node of the remote end, as far as this node knows.
    fn remote_node(&self, dataplane: &Dataplane, flow: &Flow) -> Option<NodeId> {
        let translated = dataplane
            .programs
            .translations
            .get(&flow_key(flow))
            .ok()
            .flatten();
        translated
            .map(|translation| NodeId(translation.node))
            .or_else(|| self.addresses.node_at(flow.remote.ip()))
    }

    /// Returns the reason why a private flow cannot move here, if any.
    pub fn refuse_arrival(&self, dataplane: &Dataplane, flow: &Flow) -> Option<Failure> {
        if !self.is_private(flow) {
            return None;
        }
        let has_left = |flow: &Flow| {
            let entry = dataplane.flow(flow);
            matches!(entry, Some((FlowState::Moved | FlowState::TransitOut, _)))
        };
        if flow.local.ip() == self.own_address && !has_left(flow) {
            return Some(ProtocolViolation::NotMovedAway(*flow).into());
        }
        // Packets of the connection would not leave this host.
        (flow.remote.ip() == self.own_address && has_left(&flow.mirrored()))
            .then(|| OperatorFault::OtherEndLeft(*flow).into())
    }

    /// Handles the move of a process that has connections to this node.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn translate(
        &self,
        dataplane: &Dataplane,
        hops: u32,
        (step, to): (TranslationStep, NodeId),
        connections: &[Flow],
    ) -> Result<(), Failure> {
        // Packets from the new node are accepted in any case, so `Prepare` and `Undo` need no action.
        if step != TranslationStep::Switch {
            return Ok(());
        }
        for connection in connections.iter().filter(|flow| self.is_private(flow)) {
            let local_flow = connection.mirrored();
            let table = &dataplane.programs.translations;
            let is_newer = |translation: Translation| translation.hops > hops;
            if table
                .get(&flow_key(&local_flow))
                .ok()
                .flatten()
                .is_some_and(is_newer)
            {
                continue;
            }
            self.set_translation(dataplane, &local_flow, (to, hops))
                .map_err(IntoFailure::into_failure)?;
        }
        Ok(())
    }

    /// Directs packets that this node sends on a flow to another node.
    fn set_translation(
        &self,
        dataplane: &Dataplane,
        flow: &Flow,
        (to, hops): (NodeId, u32),
    ) -> Result<(), holdfast_bpf::Error> {
        let table = &dataplane.programs.translations;
        let key = flow_key(flow);
        if self.addresses.node_at(flow.remote.ip()) == Some(to) {
            return table.remove(&key);
        }
        let translation = Translation {
            node: to.0,
            pad: 0,
            hops,
        };
        table.set(&key, &translation)
    }
}

impl Engine {
    /// Creates entries for connections at this node's address that have none.
    pub(super) fn create_private_entries(
        &mut self,
        flows: impl IntoIterator<Item = Flow>,
    ) -> Result<(), Failure> {
        let changes = self.private_flows.create_entries(&self.dataplane, flows)?;
        if !changes.is_empty() {
            self.report_changes(changes);
        }
        Ok(())
    }

    /// Creates entries for the connections of these sockets at this node's address.
    pub(super) fn create_private_entries_of(
        &mut self,
        endpoints: &[SocketEndpoint],
    ) -> Result<(), Failure> {
        let flows: Vec<Flow> = endpoints.iter().filter_map(SocketEndpoint::flow).collect();
        self.create_private_entries(flows)
    }
}
