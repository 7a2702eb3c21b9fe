//! Replicated services in the event loop: settings, frames, and the requests of the operator.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_api::control::{
    ErrorBody, ReplicationAccepted, ReplicationEntry, ReplicationList, ReplicationRequest,
};
use holdfast_bpf::shared_with_c::NODE_ENCAP;
use holdfast_wire::group_data::{GroupChange, ServiceName, ServiceReplication};
use holdfast_wire::membership_frames::NodeName;
use holdfast_wire::replication_frames::LEGS_MAX;
use holdfast_wire::{NodeId, Protocol};
use tokio::net::TcpStream;

use super::Engine;
use super::group_services::random_change_id;
use super::operator_view::error_body;
use crate::config::{ReplicationConfig, ServiceConfig};
use crate::control::ReplySender;
use crate::reach::reach_of;
use crate::replication::unreplicated_report;

/// Longest wait for a server that is to become a leg.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// A server that is to become a leg.
struct NewLeg {
    node: NodeName,
    server: SocketAddr,
}

impl Engine {
    /// Tells the replication that services, view or nodes have changed.
    pub(super) fn update_replication(&mut self) {
        if !self.group.has_view() || !self.group_services.are_known() {
            return;
        }
        let now = self.now();
        let nodes = self.group.nodes();
        let nodes = nodes.map(|(id, node)| (id, (node.name.clone(), node.address)));
        let nodes = nodes.collect();
        self.replication.apply(
            now,
            &self.config.services,
            (self.group.view(), nodes),
            &mut self.dataplane,
        );
        let replicated = self.replication.leg_servers();
        self.migrations.addresses().set_replicated(replicated);
        self.propose_replication_changes();
    }

    /// Handles events of the replication programs, or the end of their loading.
    pub(super) fn read_replication_events(&mut self) {
        if self.replication.attach_loaded() {
            self.update_replication();
        }
        let now = self.now();
        self.replication.read_events(now);
        self.propose_replication_changes();
    }

    /// Does what is due for the replicated services.
    pub(super) fn poll_replication(&mut self) {
        let now = self.now();
        if self.replication.end_return_waits(now) {
            self.update_replication();
        }
        self.replication.poll(now, &self.dataplane);
        self.propose_replication_changes();
    }

    /// Requests the changes of the group's settings that follow from decisions about legs.
    pub(super) fn propose_replication_changes(&mut self) {
        while let Some(change) = self.replication.take_proposal() {
            self.request_group_change(random_change_id(), change, None, |_| ());
        }
    }

    /// Returns the replicated services as this node knows them.
    pub(super) fn replication_list(&self) -> ReplicationList {
        let replicated = self.config.services.iter().filter_map(|service| {
            let replication = service.replication.as_ref()?;
            Some(self.replication_entry(service, replication))
        });
        let mut services: Vec<ReplicationEntry> = replicated.collect();
        services.sort_by(|a, b| a.service.cmp(&b.service));
        ReplicationList { services }
    }

    fn replication_entry(
        &self,
        service: &ServiceConfig,
        replication: &ReplicationConfig,
    ) -> ReplicationEntry {
        let Some(mut entry) = self.replication.report(&service.endpoint()) else {
            let nodes = (self.group.own(), self.group.contact());
            let name_of = |node| self.node_name(node);
            return unreplicated_report(service, replication, nodes, name_of);
        };
        let holder = self.holder.as_ref();
        let unreplicated = holder.map_or(0, |holder| holder.record_count(service));
        entry.unreplicated_connections = u64::from(unreplicated);
        if unreplicated > 0 {
            entry.problems.push(format!(
                "{unreplicated} connections of {} began before its replication and are not replicated: what they change is at one \
                 server only",
                service.pool
            ));
        }
        entry
    }

    /// Returns the problems of replicated services, for the status.
    pub(super) fn replication_problems(&self) -> Vec<String> {
        let entries = self.replication_list().services.into_iter();
        entries.flat_map(|entry| entry.problems).collect()
    }

    /// Carries out a request of the operator.
    pub(super) fn change_replication(
        &mut self,
        request: ReplicationRequest,
        uid: Option<u32>,
        reply: ReplySender<ReplicationAccepted>,
    ) {
        let refusal = match request {
            ReplicationRequest::Start {
                service,
                replicas,
                nodes,
            } => match self.new_replication(&service, replicas, &nodes) {
                Ok((change, legs)) => return self.start_replication(change, legs, uid, reply),
                Err(refusal) => refusal,
            },
            ReplicationRequest::Stop { service } => match self.stopped_replication(&service) {
                Ok(change) => {
                    return self.request_group_change(random_change_id(), change, uid, |result| {
                        let accepted = result.map(|_| ReplicationAccepted { service });
                        let _ = reply.send(accepted);
                    });
                }
                Err(refusal) => refusal,
            },
            ReplicationRequest::Promote { service, node } => {
                let promoted = self.promote_replica(service.clone(), &node);
                if promoted.is_ok() {
                    tracing::info!(target: "audit", ?uid, service, node, "an operator makes a replica the primary");
                }
                return drop(reply.send(promoted));
            }
        };
        let _ = reply.send(Err(refusal));
    }

    fn promote_replica(
        &mut self,
        service: String,
        node: &str,
    ) -> Result<ReplicationAccepted, ErrorBody> {
        let (config, _) = self.replicated_service(&service)?;
        let endpoint = config.endpoint();
        let id = self.known_node(node)?;
        let now = self.now();
        let promoted = self.replication.promote(now, &endpoint, id);
        self.propose_replication_changes();
        match promoted {
            Ok(()) => Ok(ReplicationAccepted { service }),
            Err(text) => Err(super::group_services::error_of_text(&text)),
        }
    }

    /// Returns the settings with which the primary serves alone.
    fn stopped_replication(&self, name: &str) -> Result<GroupChange, ErrorBody> {
        let (service, replication) = self.replicated_service(name)?;
        let service_name = service_name(name)?;
        if !self.is_replicated_here(replication) {
            return Ok(GroupChange::EndReplication(service_name));
        }
        let primary = self.replication.report(&service.endpoint());
        let primary = primary.and_then(|entry| {
            let mut legs = entry.legs.into_iter();
            legs.find(|leg| leg.primary).map(|leg| leg.node)
        });
        let recorded = replication.legs.first().map(|node| self.node_name(*node));
        let primary = primary.or(recorded).and_then(|name| name.parse().ok());
        let Some((primary, replicator)) = primary.zip(self.config.node.name.parse().ok()) else {
            return Ok(GroupChange::EndReplication(service_name));
        };
        Ok(GroupChange::SetReplication(ServiceReplication {
            service: service_name,
            replicator,
            legs: vec![primary],
            replicas: 0,
        }))
    }

    /// Returns true if this node replicates a service, or is about to continue the replication of its former daemon.
    fn is_replicated_here(&self, replication: &ReplicationConfig) -> bool {
        self.group.is_contact() && replication.replicator == Some(self.group.own())
    }

    /// Checks a request to replicate a service. Returns the settings, and the servers that must listen.
    fn new_replication(
        &self,
        name: &str,
        replicas: u8,
        nodes: &[String],
    ) -> Result<(GroupChange, Vec<NewLeg>), ErrorBody> {
        self.check_replicator()?;
        let service = self.replicable_service(name)?;
        let wanted = usize::from(replicas) + 1;
        if !(2..=LEGS_MAX).contains(&wanted) {
            return Err(error_body(
                format!("{replicas} replicas are out of range"),
                format!("use 1 to {}", LEGS_MAX - 1),
            ));
        }
        let chosen = match nodes.is_empty() {
            true => self.well_nodes(service, wanted)?,
            false => self.named_nodes(nodes, wanted)?,
        };
        let legs = chosen.into_iter().map(|id| self.new_leg(service, id));
        let legs: Vec<NewLeg> = legs.collect::<Result<_, _>>()?;
        let replicator = self.config.node.name.parse::<NodeName>();
        let replicator = replicator.map_err(|error| error_body(error.to_string(), ""))?;
        let change = GroupChange::SetReplication(ServiceReplication {
            service: service_name(name)?,
            replicator,
            legs: legs.iter().map(|leg| leg.node.clone()).collect(),
            replicas,
        });
        Ok((change, legs))
    }

    /// Checks that this node can replicate.
    fn check_replicator(&self) -> Result<(), ErrorBody> {
        if self.membership.is_none() {
            return Err(error_body(
                "a group of files cannot replicate: the legs of a service change at run time",
                "use a group that runs itself (docs/group.md)",
            ));
        }
        if !reach_of(self.config.group.reach).has_contact_node() {
            return Err(error_body(
                "only a group with reach steer can replicate: all packets of a client must pass the contact node",
                "set group.reach to steer in every node's file",
            ));
        }
        if !self.group.is_contact() {
            let contact = self.node_name(self.group.contact());
            return Err(error_body(
                "this node is not the contact node, which replicates",
                format!("give the command on {contact}"),
            ));
        }
        Ok(())
    }

    /// Returns the service of this name if it can be replicated from now on.
    fn replicable_service(&self, name: &str) -> Result<&ServiceConfig, ErrorBody> {
        let mut services = self.config.services.iter();
        let service = services.find(|service| service.pool == name);
        let service = service.ok_or_else(|| {
            error_body(
                format!("there is no service {name}"),
                "`holdfast service list` shows those there are",
            )
        })?;
        let others = self
            .config
            .services
            .iter()
            .filter(|other| other.pool == name);
        if service.protocol != Protocol::Tcp || others.count() > 1 {
            return Err(error_body(
                format!(
                    "service {name} cannot be replicated: only a TCP service with one address can"
                ),
                "add a service with one address, of TCP",
            ));
        }
        let replication = service.replication.as_ref();
        if replication.is_some_and(|replication| self.is_replicated_here(replication)) {
            return Err(error_body(
                format!("service {name} is replicated already"),
                format!(
                    "`holdfast replicate status` shows how; `holdfast replicate stop {name}` ends it"
                ),
            ));
        }
        let flows = self
            .holder
            .as_ref()
            .map_or(0, |holder| holder.record_count(service));
        if flows > 0 {
            return Err(error_body(
                format!("service {name} has {flows} connections, which would not be replicated"),
                "end them first: what they change would be at one server only",
            ));
        }
        Ok(service)
    }

    /// Returns nodes whose servers of a service are well, server nodes before backups, which may become contact node.
    fn well_nodes(&self, service: &ServiceConfig, wanted: usize) -> Result<Vec<NodeId>, ErrorBody> {
        let own = self.group.own();
        let nodes = self.health.nodes_of(&service.endpoint()).into_iter();
        let well = nodes.filter(|health| health.exclusion.is_none() && health.node != own);
        let mut well: Vec<NodeId> = well.map(|health| health.node).collect();
        well.sort_by_key(|node| (self.group.view().backups.contains(node), *node));
        if well.len() < wanted {
            let names: Vec<String> = well.iter().map(|node| self.node_name(*node)).collect();
            return Err(error_body(
                format!(
                    "{} replicas need {wanted} nodes with a server beside the contact node, and there are {}: {}",
                    wanted - 1,
                    well.len(),
                    names.join(", ")
                ),
                format!(
                    "start servers of {} at further nodes, or wish for fewer replicas",
                    service.pool
                ),
            ));
        }
        well.truncate(wanted);
        Ok(well)
    }

    fn named_nodes(&self, names: &[String], wanted: usize) -> Result<Vec<NodeId>, ErrorBody> {
        let distinct: BTreeSet<&String> = names.iter().collect();
        if names.len() != wanted || distinct.len() != names.len() {
            return Err(error_body(
                format!(
                    "{} replicas need {wanted} different nodes, the primary's first",
                    wanted - 1
                ),
                format!("name {wanted} nodes with --on"),
            ));
        }
        names.iter().map(|name| self.known_node(name)).collect()
    }

    fn known_node(&self, name: &str) -> Result<NodeId, ErrorBody> {
        self.group.id_of(name).ok_or_else(|| {
            error_body(
                format!("there is no node {name} in this group"),
                "`holdfast status` shows those there are",
            )
        })
    }

    /// Returns the server at a node if its packets can pass this contact node.
    fn new_leg(&self, service: &ServiceConfig, id: NodeId) -> Result<NewLeg, ErrorBody> {
        let name = self.node_name(id);
        if id == self.group.own() {
            return Err(error_body(
                format!("{name} is the contact node, which cannot have a leg"),
                "name other nodes",
            ));
        }
        let address = self.group.nodes().find(|(known, _)| *known == id);
        let address = address.map_or(service.address, |(_, node)| node.address);
        let server = SocketAddr::new(address.ip(), service.address.port());
        if server.is_ipv4() != service.address.is_ipv4() {
            return Err(error_body(
                format!(
                    "{name} has an address of another family than service {}",
                    service.pool
                ),
                "give the service an address of the nodes' family",
            ));
        }
        let path = self.dataplane.programs.nodes.get(&u32::from(id.0));
        if path
            .ok()
            .flatten()
            .is_some_and(|node| node.flags & NODE_ENCAP != 0)
        {
            return Err(error_body(
                format!(
                    "{name} is behind a router, and a leg must be on the contact node's segment"
                ),
                "name nodes on the same segment",
            ));
        }
        let node = name
            .parse()
            .map_err(|_| error_body(format!("{name} has no name"), ""))?;
        Ok(NewLeg { node, server })
    }

    /// Changes the settings once all servers listen.
    fn start_replication(
        &self,
        change: GroupChange,
        legs: Vec<NewLeg>,
        uid: Option<u32>,
        reply: ReplySender<ReplicationAccepted>,
    ) {
        let Some(membership) = self.membership.clone() else {
            return;
        };
        tokio::task::spawn_local(async move {
            for leg in legs {
                if let Err(refusal) = check_listens(&leg).await {
                    return drop(reply.send(Err(refusal)));
                }
            }
            let GroupChange::SetReplication(replication) = &change else {
                return;
            };
            let service = replication.service.to_string();
            let result = super::group_services::decide_change(&membership, change, uid).await;
            let _ = reply.send(result.map(|_| ReplicationAccepted { service }));
        });
    }

    fn replicated_service(
        &self,
        name: &str,
    ) -> Result<(&ServiceConfig, &ReplicationConfig), ErrorBody> {
        self.check_replicator()?;
        let mut services = self
            .config
            .services
            .iter()
            .filter(|service| service.pool == name);
        let found = services.find_map(|service| Some((service, service.replication.as_ref()?)));
        found.ok_or_else(|| {
            error_body(
                format!("there is no replicated service {name}"),
                "`holdfast replicate status` shows those there are",
            )
        })
    }

    /// Returns the replicated service at this address.
    pub(super) fn replicated_service_at(&self, address: SocketAddr) -> Option<&ServiceConfig> {
        let mut services = self.config.services.iter();
        services.find(|service| service.address == address && service.replication.is_some())
    }
}

fn service_name(name: &str) -> Result<ServiceName, ErrorBody> {
    name.parse()
        .map_err(|_| error_body(format!("{name} is not the name of a service"), ""))
}

/// Checks that a server takes connections at its node's own address.
async fn check_listens(leg: &NewLeg) -> Result<(), ErrorBody> {
    let connect = tokio::time::timeout(CONNECT_MAX, TcpStream::connect(leg.server));
    let problem = match connect.await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer".to_owned(),
    };
    Err(error_body(
        format!(
            "no server takes connections at {} ({}): {problem}",
            leg.server, leg.node
        ),
        "start the server there, bound to all addresses or to this one",
    ))
}
