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
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{SystemTime, UNIX_EPOCH};

use holdfast_api::control::{BlockerEntry, ProcessCheck};
use holdfast_bpf::shared::{FlowState, Translation};
use holdfast_wire::migration::{PeerConnections, TranslateStep};
use holdfast_wire::{Change, ChangeKind, Flow, NodeId};

use self::sweep::Wanted;
use super::Engine;
use crate::dataplane::{Entry, key_of};
use crate::migration::Place;

/// State of private flows outside the filters' maps.
#[derive(Default)]
pub struct Private {
    last: u64,
    /// Queries that the holder has not answered.
    open: BTreeMap<u64, Vec<Wanted>>,
    /// Sockets bound to the addresses of moved flows, so that no new connection from this host reuses their ports.
    reserved: BTreeMap<SocketAddr, OwnedFd>,
}

/// Locations of the remote ends of a process's private flows.
#[derive(Debug, Default)]
pub(super) struct OtherEnds {
    /// Remote ends at nodes with a daemon.
    pub(super) peers: Vec<PeerConnections>,
    /// Flows with remote ends elsewhere.
    pub(super) forwarded: Vec<Flow>,
}

impl Engine {
    /// Creates entries for connections at this node's address that have none.
    pub(super) fn begin_private(
        &mut self,
        flows: impl IntoIterator<Item = Flow>,
    ) -> Result<(), String> {
        let own = self.config.node.address;
        let fresh = flows.into_iter().filter(|flow| {
            let is_here = flow.local.ip() == own && self.moves.addresses().is_private(flow);
            is_here && self.dataplane.flow(flow).is_none()
        });
        let fresh: Vec<Flow> = fresh.collect();
        if fresh.is_empty() {
            return Ok(());
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let epoch = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        let entry = |flow: &Flow| Entry {
            flow: *flow,
            epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        let entries: Vec<Entry> = fresh.iter().map(entry).collect();
        let set = self.dataplane.set_flows(&entries, FlowState::Owned);
        set.map_err(|error| error.to_string())?;
        let established = |flow| Change {
            flow,
            kind: ChangeKind::Establish,
            epoch,
        };
        self.report(fresh.into_iter().map(established).collect());
        Ok(())
    }

    /// Creates entries for the connections of these sockets at this node's address.
    pub(super) fn begin_private_at(&mut self, places: &[Place]) -> Result<(), String> {
        let flows: Vec<Flow> = places.iter().filter_map(Place::flow).collect();
        self.begin_private(flows)
    }

    /// Groups flows by the nodes that must be notified of the move, and returns the flows that are only forwarded.
    pub(super) fn other_ends(
        &self,
        flows: impl IntoIterator<Item = Flow>,
    ) -> Result<OtherEnds, String> {
        let (own, self_id) = (self.config.node.address, self.config.node.id);
        let mut found = OtherEnds::default();
        let mut by_node: BTreeMap<NodeId, Vec<Flow>> = BTreeMap::new();
        let addresses = self.moves.addresses();
        for flow in flows.into_iter().filter(|flow| addresses.is_private(flow)) {
            match self.other_end(&flow) {
                Some(node) if node == self_id && flow.local.ip() == own => {
                    return Err(format!(
                        "both ends of its connection {flow} are at this node: move the process at {} first",
                        flow.remote
                    ));
                }
                Some(node) if node == self_id || self.peers.is_up(node) => {
                    by_node.entry(node).or_default().push(flow);
                }
                _ => found.forwarded.push(flow),
            }
        }
        let peers = by_node.into_iter();
        found.peers = peers
            .map(|(node, connections)| PeerConnections { node, connections })
            .collect();
        Ok(found)
    }

    /// Adds the fate of a process's private connections to the operator's check.
    pub(super) fn judge_private(&self, check: &mut ProcessCheck, flows: &[Flow]) {
        match self.other_ends(flows.iter().copied()) {
            Ok(ends) => {
                check.forwarded = ends.forwarded.iter().map(ToString::to_string).collect();
            }
            Err(reason) => {
                check.movable = false;
                check.blockers.push(BlockerEntry {
                    pid: check.pid,
                    fd: None,
                    path: None,
                    reason,
                });
            }
        }
    }

    /// Returns the node of the remote end, as far as this node knows.
    fn other_end(&self, flow: &Flow) -> Option<NodeId> {
        let translated = self
            .dataplane
            .programs
            .translations
            .get(&key_of(flow))
            .ok()
            .flatten();
        translated
            .map(|of| NodeId(of.node))
            .or_else(|| self.moves.addresses().node_at(flow.remote.ip()))
    }

    /// Returns the reason why a private flow cannot move here, if any.
    pub(super) fn refuse_private(&self, flow: &Flow) -> Option<String> {
        if !self.moves.addresses().is_private(flow) {
            return None;
        }
        let own = self.config.node.address;
        let left = |flow: &Flow| {
            let entry = self.dataplane.flow(flow);
            matches!(entry, Some((FlowState::Moved | FlowState::TransitOut, _)))
        };
        if flow.local.ip() == own && !left(flow) {
            return Some(format!("connection {flow} did not leave here"));
        }
        // Packets of the connection would not leave this host.
        (flow.remote.ip() == own && left(&flow.mirrored())).then(|| {
            format!("the other end of connection {flow} has left this node; move it back before")
        })
    }

    /// Handles the move of a process that has connections to this node.
    pub(super) fn translate(
        &self,
        hops: u32,
        (step, to): (TranslateStep, NodeId),
        connections: &[Flow],
    ) -> Result<(), String> {
        // This node accepts packets from any node, so only the switch needs action.
        if step != TranslateStep::Switch {
            return Ok(());
        }
        let addresses = self.moves.addresses();
        for connection in connections.iter().filter(|of| addresses.is_private(of)) {
            let here = connection.mirrored();
            let table = &self.dataplane.programs.translations;
            let newer = |of: Translation| of.hops > hops;
            if table.get(&key_of(&here)).ok().flatten().is_some_and(newer) {
                continue;
            }
            self.send_to(&here, to, hops)
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Directs packets that this node sends on a flow to another node.
    fn send_to(&self, here: &Flow, to: NodeId, hops: u32) -> Result<(), holdfast_bpf::Error> {
        let table = &self.dataplane.programs.translations;
        let key = key_of(here);
        if self.moves.addresses().node_at(here.remote.ip()) == Some(to) {
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
