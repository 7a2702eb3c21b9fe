//! Reports to the operator about replicated services.

use holdfast_api::control::{
    Divergence, DroppedLeg, LegEntry, LegStanding, ReplicationEntry, ReplicationState,
};
use holdfast_proto::replication::{LegReport, LegStanding as MachineStanding, Protection};
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::ServiceEndpoint;

use super::ReplicationDriver;
use super::replicated_service::{Phase, ReplicatedService};
use crate::config::{ReplicationConfig, ServiceConfig};

/// Returns the entry of a service that another node replicates, that no node replicates any more, or that this node, `own`, is about
/// to replicate.
pub(crate) fn unreplicated_report(
    service: &ServiceConfig,
    replication: &ReplicationConfig,
    (own, contact): (NodeId, NodeId),
    name_of: impl Fn(NodeId) -> String,
) -> ReplicationEntry {
    let is_interrupted = replication.replicator != Some(contact);
    let legs = expected_legs(replication.legs.iter().copied(), &name_of);
    let is_beginning = !is_interrupted && own == contact;
    let mut problems = Vec::new();
    if is_interrupted {
        let primary = replication
            .legs
            .first()
            .map_or_else(|| "no node".to_owned(), |node| name_of(*node));
        problems.push(format!(
            "the contact node that replicated {0} is gone: its replicated connections are lost, and new clients get the server at \
             {primary} alone; give all servers its state, then run `holdfast replicate {0}` again on the contact node",
            service.pool
        ));
    }
    if is_beginning {
        problems.push(format!(
            "the replication of {} has not begun here: its programs are being loaded, or nodes of its servers have not joined again \
             since this daemon started; new clients wait, and the daemon's log says more",
            service.pool
        ));
    }
    ReplicationEntry {
        service: service.pool.clone(),
        address: service.address,
        state: match is_interrupted {
            true => ReplicationState::Interrupted,
            false if is_beginning => ReplicationState::Preparing,
            false => ReplicationState::Elsewhere,
        },
        replicator: replication.replicator.map(&name_of),
        wanted_replicas: replication.replicas,
        legs,
        connections: 0,
        unreplicated_connections: 0,
        promotions: 0,
        dropped: Vec::new(),
        divergence_count: 0,
        divergences: Vec::new(),
        problems,
    }
}

impl ReplicationDriver {
    /// Returns the entry of a service that this node replicates.
    pub fn report(&self, endpoint: &ServiceEndpoint) -> Option<ReplicationEntry> {
        let service = self.services.get(endpoint)?;
        let legs = match &service.phase {
            Phase::Running(machine) => machine.leg_reports(),
            Phase::Preparing { .. } => Vec::new(),
        };
        let connections = match &service.phase {
            Phase::Running(machine) => machine.connection_count() as u64,
            Phase::Preparing { .. } => 0,
        };
        let mut legs: Vec<LegEntry> = match &service.phase {
            Phase::Running(_) => legs.iter().map(|leg| self.leg_entry(leg)).collect(),
            Phase::Preparing { .. } => expected_legs(
                service.legs.iter().flatten().map(|(node, _)| *node),
                |node| self.name_of(node),
            ),
        };
        legs.sort_by_key(|leg| !leg.primary);
        let history = &service.history;
        let state = state_of(service);
        Some(ReplicationEntry {
            service: service.name.clone(),
            address: endpoint.address,
            state,
            replicator: Some(self.name_of(self.own)),
            wanted_replicas: service.replicas,
            legs,
            connections,
            unreplicated_connections: 0,
            promotions: history.promotions,
            dropped: (history.dropped.iter())
                .map(|(node, reason)| DroppedLeg {
                    node: self.name_of(*node),
                    reason: reason.to_string(),
                })
                .collect(),
            divergence_count: history.divergence_count,
            divergences: (history.divergences.iter())
                .map(|(node, client, position)| Divergence {
                    node: self.name_of(*node),
                    client: *client,
                    position: *position,
                })
                .collect(),
            problems: self.problems_of(service, state),
        })
    }

    fn name_of(&self, node: NodeId) -> String {
        match self.nodes.get(&node) {
            Some((name, _)) => name.clone(),
            None => format!("node {node}"),
        }
    }

    fn leg_entry(&self, leg: &LegReport) -> LegEntry {
        LegEntry {
            node: self.name_of(leg.node),
            primary: leg.is_primary,
            standing: Some(match leg.standing {
                MachineStanding::Sound => LegStanding::Sound,
                MachineStanding::Suspected => LegStanding::Suspected,
                MachineStanding::CatchingUp => LegStanding::CatchingUp,
                MachineStanding::Uncompared => LegStanding::Uncompared,
                MachineStanding::Diverged => LegStanding::Diverged,
            }),
            lag_bytes: leg.behind_bytes,
        }
    }

    fn problems_of(&self, service: &ReplicatedService, state: ReplicationState) -> Vec<String> {
        let name = &service.name;
        match state {
            ReplicationState::Preparing => {
                let is_missing = |node: &NodeId| service.answers.get(node) != Some(&true);
                let missing = service.leg_nodes().into_iter().filter(is_missing);
                let missing: Vec<String> = missing.map(|node| self.name_of(node)).collect();
                vec![format!(
                    "the replication of {name} waits for the servers at {}; new clients wait",
                    missing.join(", ")
                )]
            }
            ReplicationState::Reduced | ReplicationState::Alone => vec![format!(
                "{name} has fewer sound replicas than wanted; a dropped server lacks input: to use it again, stop the replication, \
                 give all servers the primary's state, and begin anew"
            )],
            ReplicationState::Dead => vec![format!(
                "no server of {name} is left; start one, run `holdfast replicate stop {name}`, and begin anew"
            )],
            _ => Vec::new(),
        }
    }

    /// Brings the gauges of all services up to date.
    pub(super) fn publish_metrics(&self) {
        for service in self.services.values() {
            let Phase::Running(machine) = &service.phase else {
                continue;
            };
            let reports = machine.leg_reports();
            let sound = reports
                .iter()
                .filter(|leg| leg.standing == MachineStanding::Sound);
            let sound = sound.count() as i64;
            let doubted = reports.len() as i64 - sound;
            let lag = reports
                .iter()
                .map(|leg| leg.behind_bytes)
                .max()
                .unwrap_or(0);
            let connections = machine.connection_count();
            self.metrics
                .set_replication(&service.name, (sound, doubted), lag, connections);
        }
    }

    /// Copies the counters of the replication programs into the metrics.
    pub fn publish_packet_counts(&self) {
        if let Some(programs) = &self.programs {
            for (kind, count) in programs.replicator.counters() {
                self.metrics.set_replication_packets(kind, count);
            }
        }
    }
}

/// Returns the entries of legs of which nothing is known yet, the primary first.
fn expected_legs(
    nodes: impl Iterator<Item = NodeId>,
    name_of: impl Fn(NodeId) -> String,
) -> Vec<LegEntry> {
    let entry = |(index, node)| LegEntry {
        node: name_of(node),
        primary: index == 0,
        standing: None,
        lag_bytes: 0,
    };
    nodes.enumerate().map(entry).collect()
}

fn state_of(service: &ReplicatedService) -> ReplicationState {
    let Phase::Running(machine) = &service.phase else {
        return ReplicationState::Preparing;
    };
    match machine.protection() {
        Protection::Dead => ReplicationState::Dead,
        _ if service.replicas == 0 => ReplicationState::Ending,
        Protection::Full => ReplicationState::Full,
        Protection::Reduced { .. } => ReplicationState::Reduced,
        Protection::Alone => ReplicationState::Alone,
    }
}
