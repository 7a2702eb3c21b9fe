//! The operator's queries.

use std::collections::BTreeMap;

use holdfast_api::control::{
    DropCount, DropList, ErrorBody, FlowCounts, HandoffList, HandoffStatus, NodeEntry, NodeList,
    PlacementRequest, PlacementWeights, ProgramStatus, ServiceStatus, Status,
};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_wire::{NodeId, RecordState};

use super::Engine;
use super::holder::Holder;
use crate::reach::reach_of;

/// Returns an error body with a remedy.
pub(super) fn error_body(error: impl Into<String>, what_to_do: impl Into<String>) -> ErrorBody {
    ErrorBody {
        error: error.into(),
        what_to_do: what_to_do.into(),
    }
}

impl Engine {
    pub(super) fn status(&self) -> Status {
        let mut flows = FlowCounts::default();
        for (_, state, _) in self.dataplane.flows() {
            match state {
                FlowState::Owned
                | FlowState::Prepared
                | FlowState::RedirectingData
                | FlowState::Flushing => flows.owned += 1,
                FlowState::TransitIn | FlowState::TransitOut => flows.transit += 1,
                FlowState::Moved => flows.moved += 1,
                FlowState::Closing => {}
            }
        }
        let services = self.config.services.iter().map(|service| ServiceStatus {
            pool: service.pool.clone(),
            protocol: super::api_protocol(service.protocol),
            address: service.address,
        });
        let programs = self.programs.iter().map(|program| ProgramStatus {
            name: program.name.clone(),
            pid: program.pid,
            pools: program.pools(),
            flows: program.flow_count() as u64,
        });
        let connected = self
            .peers
            .ids()
            .filter(|peer| self.peers.is_up(*peer))
            .count();
        Status {
            node: self.config.node.name.clone(),
            node_id: self.config.node.id.0,
            group: self.config.group.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs(),
            reach: reach_of(self.config.group.reach).name().to_owned(),
            contact_node: self.node_name(self.config.group.contact),
            services: services.collect(),
            programs: programs.collect(),
            flows,
            handoffs: self.statistics.metrics().handoff_counts(),
            residents: self.migrations.residents(),
            peers_connected: u32::try_from(connected).unwrap_or(u32::MAX),
            peers_total: u32::try_from(self.config.peers.len()).unwrap_or(u32::MAX),
            problems: self.statistics.problems(self.config.node.capacity),
        }
    }

    pub(super) fn nodes(&self) -> NodeList {
        let mut owned: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (_, record) in Holder::records(&self.dataplane.programs) {
            if let RecordState::Owned { owner } = record.state {
                *owned.entry(owner).or_default() += 1;
            }
        }
        let weights = self.placement().weights;
        let mut nodes: Vec<NodeEntry> = self
            .config
            .nodes()
            .map(|(id, name)| {
                let is_self = id == self.config.node.id;
                let address = self
                    .config
                    .peers
                    .iter()
                    .find(|peer| peer.id == id)
                    .map(|peer| peer.address);
                let stats = self.peers.stats(id);
                NodeEntry {
                    name: name.to_owned(),
                    id: id.0,
                    address: address.unwrap_or_else(|| self.peers.address()).to_string(),
                    this_node: is_self,
                    contact_node: id == self.config.group.contact,
                    connected: is_self || self.peers.is_up(id),
                    rtt_us: stats
                        .and_then(|stats| stats.round_trip)
                        .map(|rtt| rtt.as_secs_f64() * 1e6),
                    weight: weights.get(name).copied().unwrap_or(0),
                    flows: self
                        .config
                        .is_holder()
                        .then(|| owned.get(&id).copied().unwrap_or(0)),
                    problem: if is_self {
                        None
                    } else {
                        self.peers.problem(id)
                    },
                }
            })
            .collect();
        nodes.sort_by_key(|node| node.id);
        NodeList { nodes }
    }

    pub(super) fn handoff_status(&self, id: u64) -> Result<HandoffStatus, ErrorBody> {
        self.operations.get(id).cloned().ok_or_else(|| {
            error_body(
                format!("there is no handoff {id}"),
                "finished handoffs are kept for a limited time; list the handoffs to see them",
            )
        })
    }

    pub(super) fn handoff_list(&self) -> HandoffList {
        HandoffList {
            handoffs: self.operations.summaries(),
        }
    }

    pub(super) fn drops(&self) -> DropList {
        let counters = self.dataplane.programs.counters();
        let drops = counters.into_iter().filter_map(|(name, packets)| {
            Some(DropCount {
                reason: name.strip_prefix("drop_")?.to_owned(),
                packets,
            })
        });
        DropList {
            drops: drops.collect(),
        }
    }

    pub(super) fn placement(&self) -> PlacementWeights {
        let weights = self.placement.first_weights();
        let named = weights.map(|(id, weight)| (self.node_name(id), weight));
        PlacementWeights {
            weights: named.collect(),
            epoch: self.placement.epoch(),
        }
    }

    pub(super) fn set_placement(
        &mut self,
        request: PlacementRequest,
    ) -> Result<PlacementWeights, ErrorBody> {
        if !reach_of(self.config.group.reach).has_contact_node() || !self.config.is_holder() {
            let contact = self.node_name(self.config.group.contact);
            return Err(error_body(
                "only the contact node of a group with reach steer places new flows at run time",
                format!(
                    "send the request to {contact}; with broadcast, change the weights in every node's configuration"
                ),
            ));
        }
        let mut changes = BTreeMap::new();
        for (name, weight) in &request.weights {
            let id = self.config.id_of(name).ok_or_else(|| {
                error_body(
                    format!("there is no node {name} in this group"),
                    "`holdfast status` shows those there are",
                )
            })?;
            changes.insert(id, *weight);
        }
        self.placement
            .change_weights(&mut self.dataplane, &changes)?;
        Ok(self.placement())
    }
}
