//! The machines' outputs: carried out in the data plane, reported, and kept in the group's settings.

use std::time::Duration;

use holdfast_proto::replication::{DropReason, Event, Output};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, ServiceReplication};
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::LegIndex;

use super::ReplicationDriver;
use super::map_conversion::watch_limits;
use super::replicated_service::ReplicatedService;

impl ReplicationDriver {
    /// Carries out the outputs of all machines.
    pub(super) fn run(&mut self, now: Duration) {
        let endpoints: Vec<ServiceEndpoint> = self.services.keys().copied().collect();
        for endpoint in endpoints {
            self.run_machine(&endpoint);
            self.propose_legs(now, &endpoint);
        }
    }

    fn run_machine(&mut self, endpoint: &ServiceEndpoint) {
        loop {
            let (Some(programs), Some(service)) = (&self.programs, self.services.get_mut(endpoint))
            else {
                return;
            };
            let index = service.index;
            let Some(output) = service.machine().and_then(|machine| machine.poll_output()) else {
                return;
            };
            if let Err(error) = programs.carry_out(index, &output) {
                tracing::error!(service = service.name, ?output, %error, "a decision about replicated connections was not carried out");
            }
            match output {
                Output::SetWatchLimits(limits) => self.watch.set_limits(watch_limits(&limits)),
                Output::Probe { node } | Output::CheckServer { node } => {
                    self.query(node, *endpoint)
                }
                Output::Event(event) => self.on_event(endpoint, &event),
                _ => {}
            }
        }
    }

    fn on_event(&mut self, endpoint: &ServiceEndpoint, event: &Event) {
        let nodes = &self.nodes;
        let name_of = |node: NodeId| match nodes.get(&node) {
            Some((name, _)) => name.clone(),
            None => format!("node {node}"),
        };
        let Some(service) = self.services.get_mut(endpoint) else {
            return;
        };
        let node_of = |service: &ReplicatedService, leg: LegIndex| {
            service.legs[leg.position()].map(|(node, _)| node)
        };
        match *event {
            Event::Promoted {
                leg,
                former,
                in_doubt,
            } => {
                service.history.promotions += 1;
                let primary = node_of(service, leg).map(name_of);
                let former = node_of(service, former).map(name_of);
                self.metrics.count_replication_promotion(&service.name);
                tracing::warn!(target: "audit", service = service.name, ?primary, ?former, in_doubt, "a replica has become the primary");
            }
            Event::Dropped { node, reason, .. } => {
                service.history.add_dropped(node, reason);
                self.metrics
                    .count_dropped_leg(&service.name, drop_label(reason));
                tracing::warn!(target: "audit", service = service.name, node = name_of(node), %reason, "a leg no longer serves");
            }
            Event::Diverged {
                client,
                leg,
                position,
            } => {
                if let Some(node) = node_of(service, leg) {
                    service.history.add_divergence(node, client, position);
                    tracing::warn!(service = service.name, node = name_of(node), %client, position, "a leg's output differs from the primary's");
                }
                self.metrics.count_divergence(&service.name);
            }
            Event::LeftConnection { client, leg } => {
                let node = node_of(service, leg).map(name_of);
                tracing::info!(service = service.name, ?node, %client, "a leg has left a connection");
            }
            Event::Lagging { client, leg, bytes } => {
                let node = node_of(service, leg).map(name_of);
                tracing::warn!(service = service.name, ?node, %client, bytes, "a leg lags, and the client waits for it");
            }
            Event::Protection(protection) => {
                tracing::info!(
                    service = service.name,
                    ?protection,
                    "the protection of a service"
                );
            }
            Event::ConnectionsFull => {
                tracing::warn!(
                    service = service.name,
                    "a connection was refused: there are too many"
                );
            }
            Event::CaughtUp { .. } | Event::BackupLost { .. } | Event::BackupComplete { .. } => {}
        }
    }

    /// Proposes settings with the legs that serve, if the settings name others.
    fn propose_legs(&mut self, now: Duration, endpoint: &ServiceEndpoint) {
        let Some(service) = self.services.get_mut(endpoint) else {
            return;
        };
        let Some(serving) = service.unsaved_legs(now) else {
            return;
        };
        let name = |node: &NodeId| {
            let (name, _) = self.nodes.get(node)?;
            name.parse().ok()
        };
        let legs = serving.iter().filter_map(name).collect();
        let (Some(replicator), Ok(service_name)) = (name(&self.own), service.name.parse()) else {
            return;
        };
        service.proposed_legs = Some((now, serving));
        self.proposals
            .push_back(GroupChange::SetReplication(ServiceReplication {
                service: service_name,
                replicator,
                legs,
                replicas: service.replicas,
            }));
    }

    /// Returns the next change of the group's settings that follows from a decision.
    pub fn take_proposal(&mut self) -> Option<GroupChange> {
        self.proposals.pop_front()
    }
}

/// Returns the name of a reason in metrics.
fn drop_label(reason: DropReason) -> &'static str {
    match reason {
        DropReason::Refused => "refused",
        DropReason::NoAnswer => "no_answer",
        DropReason::Silent => "silent",
        DropReason::Unresponsive => "unresponsive",
        DropReason::Stalled => "stalled",
        DropReason::Lagging => "lagging",
        DropReason::Diverged => "diverged",
        DropReason::MissedInput => "missed_input",
        DropReason::ServerEnded => "server_ended",
        DropReason::NodeRemoved => "node_removed",
        DropReason::NeverCaughtUp => "never_caught_up",
        DropReason::Stopped => "stopped",
    }
}
