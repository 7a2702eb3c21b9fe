//! The operator's queries.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::{
    DropCount, DropList, ErrorBody, FlowCounts, HandoffList, HandoffStatus, MembershipReport,
    NodeEntry, NodeList, PlacementRequest, PlacementWeights, ProgramStatus, ServiceStatus, Status,
    ViewStoreReport,
};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::flow_ownership::claimant;
use holdfast_proto::membership::{RemovalCause, Standing};
use holdfast_wire::membership_frames::{Member, NodeName};
use holdfast_wire::{NodeId, OwnershipRecord, RecordState};

use super::Engine;
use super::holder::Holder;
use crate::control::ReplySender;
use crate::membership::MembershipStatus;
use crate::reach::reach_of;

/// Silence of the contact node after which a backup says that it cannot replace the contact node: far above the time of
/// several votes.
const CONTACT_SILENCE_MAX: Duration = Duration::from_secs(3);

/// Returns an error body with a remedy.
pub(super) fn error_body(error: impl Into<String>, what_to_do: impl Into<String>) -> ErrorBody {
    ErrorBody {
        error: error.into(),
        what_to_do: what_to_do.into(),
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns what this node knows of a group that runs itself.
fn membership_report(status: &MembershipStatus) -> MembershipReport {
    let role = match status.standing {
        Standing::ContactNode => "contact node",
        Standing::Backup => "backup",
        Standing::ServerNode => "server node",
        Standing::Outside => match status.removal {
            Some(RemovalCause::Left) => "outside: this node has left",
            Some(RemovalCause::Operator) => "outside: an operator removed this node",
            Some(RemovalCause::Suspected) | None => "outside: this node joins",
        },
    };
    let names = |members: &[Member]| {
        let names = members.iter().map(|member| member.name.to_string());
        names.collect::<Vec<_>>()
    };
    MembershipReport {
        epoch: status.epoch,
        role: role.to_owned(),
        contact_node: status.contact().map(|contact| contact.name.to_string()),
        backups: names(status.voters.get(1..).unwrap_or_default()),
        server_nodes: names(&status.server_nodes),
        lease_ms: status.lease_left().map(milliseconds),
        store: status.has_store.then(|| ViewStoreReport {
            kind: "etcd".to_owned(),
            answers: status.store_answers,
        }),
    }
}

/// Returns what is wrong with this node's place in a group that runs itself.
fn membership_problems(status: &MembershipStatus) -> Vec<String> {
    let isolation = match status.standing {
        // The contact node's lease then depends on the store, and its silence has a line of its own.
        Standing::ContactNode if status.has_store => None,
        Standing::ContactNode if status.lease_left().is_none() => Some(
            "this contact node has no lease, because it reaches no majority of the voters: new clients get no answer; \
             look at the other voters and at the network between them"
                .to_owned(),
        ),
        Standing::Backup if status.contact_problem.is_none() => {
            let contact = status.contact().map(|contact| &contact.name);
            let silence = contact.and_then(|name| Some((name, status.silence(name)?)));
            let silence = silence.filter(|(_, silence)| *silence >= CONTACT_SILENCE_MAX);
            silence.map(|(contact, silence)| {
                if status.has_store {
                    return format!(
                        "contact node {contact} has been silent for {} s, and this backup cannot replace it in etcd; look at etcd",
                        silence.as_secs()
                    );
                }
                format!(
                    "contact node {contact} has been silent for {} s, and this backup reaches no majority of the voters to \
                     replace it; look at the other voters and at the network between them",
                    silence.as_secs()
                )
            })
        }
        _ => None,
    };
    status.problems().chain(isolation).collect()
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
        flows.disputed = self.table_rebuild.disputed_flow_count() as u64;
        let services = self.config.services.iter().map(|service| ServiceStatus {
            pool: service.pool.clone(),
            protocol: super::api_protocol(service.protocol),
            address: service.address,
            server: self.server_health(service),
            nodes: self.service_nodes(service),
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
            contact_node: match self.group.has_contact() {
                true => self.node_name(self.group.contact()),
                false => "none".to_owned(),
            },
            services: services.collect(),
            programs: programs.collect(),
            flows,
            handoffs: self.statistics.metrics().handoff_counts(),
            residents: self.migrations.residents(),
            peers_connected: u32::try_from(connected).unwrap_or(u32::MAX),
            peers_total: u32::try_from(self.group.others().count()).unwrap_or(u32::MAX),
            membership: self
                .membership
                .as_ref()
                .map(|membership| membership_report(&membership.status())),
            draining: self.conductor.is_draining(),
            problems: self.problems(),
        }
    }

    fn problems(&self) -> Vec<String> {
        let status = self
            .membership
            .as_ref()
            .map(|membership| membership.status());
        let mut problems = self.statistics.problems(self.config.node.capacity);
        problems.extend(status.iter().flat_map(membership_problems));
        problems.extend(self.group_services.problems());
        problems.extend(self.contact_service.problems());
        problems.extend(self.health_problems());
        problems.extend(self.replication_problems());
        problems.extend(self.credentials.problem());
        problems.extend(self.peers.disagreements());
        problems.extend(self.dispute_problem());
        problems
    }

    /// Returns what is wrong with flows that two nodes claim, with the first one as an example.
    fn dispute_problem(&self) -> Option<String> {
        let (flow, claims) = self.table_rebuild.first_dispute()?;
        let count = self.table_rebuild.disputed_flow_count();
        let name = |claim: &OwnershipRecord| self.node_name(claimant(*claim));
        let claimants: Vec<String> = claims.iter().map(name).collect();
        Some(format!(
            "{count} flows are claimed by two nodes each, such as {flow} by {}: neither node gets their packets until one of the \
             two closes the flow or leaves the group; if one of the nodes is suspect, revoke its certificate and remove it",
            claimants.join(" and ")
        ))
    }

    pub(super) fn nodes(&self) -> NodeList {
        let mut owned: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (_, record) in Holder::records(&self.dataplane.programs) {
            if let RecordState::Owned { owner } = record.state {
                *owned.entry(owner).or_default() += 1;
            }
        }
        let weights = self.placement().weights;
        let status = self
            .membership
            .as_ref()
            .map(|membership| membership.status());
        let mut nodes: Vec<NodeEntry> = self
            .group
            .nodes()
            .map(|(id, node)| {
                let is_self = id == self.group.own();
                let address = match is_self {
                    true => self.peers.address(),
                    false => node.address,
                };
                let stats = self.peers.stats(id);
                let node_name = node.name.parse::<NodeName>().ok();
                let known = status.as_ref().zip(node_name.as_ref());
                NodeEntry {
                    role: known
                        .and_then(|(status, name)| status.role_of(name))
                        .map(str::to_owned),
                    silent_ms: known
                        .and_then(|(status, name)| status.silence(name))
                        .map(milliseconds),
                    lease_ms: (status.as_ref().filter(|_| is_self))
                        .and_then(|status| status.lease_left())
                        .map(milliseconds),
                    name: node.name.clone(),
                    id: id.0,
                    address: address.to_string(),
                    this_node: is_self,
                    contact_node: id == self.group.contact(),
                    connected: is_self || self.peers.is_up(id),
                    rtt_us: stats
                        .and_then(|stats| stats.round_trip)
                        .map(|rtt| rtt.as_secs_f64() * 1e6),
                    weight: weights.get(&node.name).copied().unwrap_or(0),
                    flows: self
                        .group
                        .is_contact()
                        .then(|| owned.get(&id).copied().unwrap_or(0)),
                    problem: match is_self {
                        true => None,
                        false => self.peers.problem(id).or_else(|| self.silence_problem(id)),
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

    /// Changes the weights of all services: in the group's settings, or with files until the daemon ends.
    pub(super) fn set_placement(
        &mut self,
        request: &PlacementRequest,
        uid: Option<u32>,
        reply: ReplySender<PlacementWeights>,
    ) {
        if self.membership.is_some() {
            return self.change_group_weights(request, uid, reply);
        }
        let _ = reply.send(self.set_placement_here(request));
    }

    fn set_placement_here(
        &mut self,
        request: &PlacementRequest,
    ) -> Result<PlacementWeights, ErrorBody> {
        if !reach_of(self.config.group.reach).has_contact_node() || !self.group.is_contact() {
            let contact = self.node_name(self.group.contact());
            return Err(error_body(
                "only the contact node of a group with reach steer places new flows at run time",
                format!(
                    "send the request to {contact}; with broadcast, change the weights in every node's configuration"
                ),
            ));
        }
        let mut changes = BTreeMap::new();
        for (name, weight) in &request.weights {
            let id = self.group.id_of(name).ok_or_else(|| {
                error_body(
                    format!("there is no node {name} in this group"),
                    "`holdfast status` shows those there are",
                )
            })?;
            changes.insert(id, *weight);
        }
        let now = self.now();
        for service in self.placement.change_weights(now, &changes)? {
            (self.health.machine()).handle_weights(now, &service.endpoint(), service.weights);
        }
        self.placement.place(&mut self.dataplane);
        self.run_health_machine();
        Ok(self.placement())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contact_node_without_a_lease_says_so() {
        let status = |standing| {
            let mut status = MembershipStatus::default();
            status.standing = standing;
            status.problem = Some("the disk is full".to_owned());
            status
        };
        let problems = membership_problems(&status(Standing::ContactNode));
        assert_eq!(problems.len(), 2);
        assert!(problems[1].contains("has no lease"), "{problems:?}");
        let others = membership_problems(&status(Standing::Backup));
        assert_eq!(others, ["the disk is full"]);
    }
}
