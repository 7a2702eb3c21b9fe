//! The group's settings: which services this node replicates, and for which it has a leg.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_bpf::replication::shared_with_c::{
    MAX_REPLICATED_SERVICES, ReplicatedService as MapService,
};
use holdfast_proto::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::ServiceEndpoint;

use super::map_conversion::{connection_record, ended_legs, service_roles};
use super::programs::LoadingPrograms;
use super::replicated_service::ReplicatedService;
use super::{ReplicationDriver, ReturnWait};
use crate::config::{ReplicationConfig, ServiceConfig};
use crate::dataplane::Dataplane;

/// Longest wait for the nodes of the legs of an earlier daemon. Server nodes join again within some seconds.
const RETURN_MAX: Duration = Duration::from_secs(10);

/// A service with its replication.
type Replicated<'a> = (&'a ServiceConfig, &'a ReplicationConfig);

impl ReplicationDriver {
    /// Takes the group's services, view and nodes after any of them has changed.
    pub fn apply(
        &mut self,
        now: Duration,
        services: &[ServiceConfig],
        (view, nodes): (&View, BTreeMap<NodeId, (String, SocketAddr)>),
        dataplane: &mut Dataplane,
    ) {
        self.set_view(view, nodes);
        let replicated: Vec<Replicated<'_>> = services
            .iter()
            .filter(|service| !service.is_ending)
            .filter_map(|service| Some((service, service.replication.as_ref()?)))
            .collect();
        self.route_legs(&replicated);
        let here = self.services_here(&replicated);
        if !here.is_empty() && self.programs.is_none() {
            // Meanwhile the connections of an earlier daemon go on.
            self.loading
                .get_or_insert_with(|| LoadingPrograms::begin(&self.pins));
            return;
        }
        self.remove_others(&here);
        self.returning
            .retain(|endpoint, _| here.contains_key(endpoint));
        for service in services {
            let is_here = here.contains_key(&service.endpoint());
            if let Err(error) = dataplane.set_replicated(service, is_here) {
                tracing::error!(service = service.pool, %error, "cannot set whether a service is replicated here");
            }
        }
        for (endpoint, (service, replication)) in here {
            if !self.services.contains_key(&endpoint) {
                self.add(now, service, replication);
            }
            if let Some(known) = self.services.get_mut(&endpoint) {
                known.saved_legs.clone_from(&replication.legs);
            }
            if replication.replicas == 0 {
                self.stop(now, &endpoint);
            }
        }
        self.refresh_paths(dataplane);
        let view = self.view.clone();
        for service in self.services.values_mut() {
            if let Some(machine) = service.machine() {
                machine.handle_view(now, &view);
            }
        }
        self.run(now);
    }

    /// Takes the view without its backups: these have no copy of the connections, and a machine that knew one would wait for its
    /// acknowledgements.
    fn set_view(&mut self, view: &View, nodes: BTreeMap<NodeId, (String, SocketAddr)>) {
        let mut view = view.clone();
        view.server_nodes.extend(std::mem::take(&mut view.backups));
        self.view = view;
        self.nodes = nodes;
    }

    /// Routes the answers of the servers at this node that are legs.
    fn route_legs(&mut self, replicated: &[Replicated<'_>]) {
        let (own, contact) = (self.own, self.view.contact_node);
        let is_leg = |(_, replication): &&Replicated<'_>| {
            replication.legs.contains(&own) && replication.replicator == Some(contact)
        };
        let legs = replicated.iter().filter(is_leg);
        let legs: Vec<ServiceEndpoint> = legs.map(|(service, _)| service.endpoint()).collect();
        let contact_address = self.nodes.get(&contact).map(|(_, address)| address.ip());
        self.leg_routes
            .set(&legs, self.own_address, contact_address);
    }

    /// Returns the services that this node replicates.
    fn services_here<'a>(
        &self,
        replicated: &[Replicated<'a>],
    ) -> BTreeMap<ServiceEndpoint, Replicated<'a>> {
        let own = self.own;
        let is_contact = self.view.contact_node == own;
        let is_here =
            |(_, replication): &&Replicated<'_>| is_contact && replication.replicator == Some(own);
        let here = replicated.iter().filter(is_here);
        here.map(|(service, replication)| (service.endpoint(), (*service, *replication)))
            .collect()
    }

    /// Ends the replication of all other services, also that of an earlier daemon.
    fn remove_others(&mut self, here: &BTreeMap<ServiceEndpoint, Replicated<'_>>) {
        let known = self.services.keys();
        let others = known.filter(|known| !here.contains_key(known));
        for endpoint in others.copied().collect::<Vec<_>>() {
            self.remove(&endpoint);
        }
        if !here.is_empty() {
            return self.forget_others(here);
        }
        match self.programs.take() {
            Some(programs) => programs.replicator.detach(),
            None if self.loading.is_none() => self.remove_pins(),
            None => {}
        }
    }

    /// Removes the services of an earlier daemon that are not replicated here any more.
    fn forget_others(&self, here: &BTreeMap<ServiceEndpoint, Replicated<'_>>) {
        let services = self.programs.as_ref();
        let services = services.map(|programs| programs.replicator.services());
        for (index, service) in services.into_iter().flatten() {
            let address = service.endpoint.socket_address();
            if !here.keys().any(|known| known.address == address) {
                self.forget_service(index);
            }
        }
    }

    /// Detaches the programs of an earlier daemon: nothing is replicated here.
    fn remove_pins(&self) {
        match std::fs::remove_dir_all(&self.pins) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, "cannot detach the replication programs of an earlier daemon");
            }
            _ => {}
        }
    }

    /// Begins the replication of a service, or continues that of an earlier daemon of this node as soon as the nodes of its legs
    /// are in the group's list again.
    fn add(&mut self, now: Duration, service: &ServiceConfig, wanted: &ReplicationConfig) {
        let endpoint = service.endpoint();
        let Some(programs) = &self.programs else {
            return;
        };
        let known = programs.replicator.services();
        let adopted = known
            .iter()
            .find(|(_, known)| known.endpoint.socket_address() == endpoint.address);
        let is_free = |index: &u16| {
            let in_use = self
                .services
                .values()
                .any(|service| service.index == *index);
            !in_use && !known.iter().any(|(known, _)| known == index)
        };
        let Some(index) = adopted.map_or_else(
            || (0..MAX_REPLICATED_SERVICES as u16).find(is_free),
            |(index, _)| Some(*index),
        ) else {
            tracing::error!(service = service.pool, "too many services are replicated");
            return;
        };
        let addresses = self.nodes.iter().map(|(id, (_, address))| (*id, *address));
        let addresses: BTreeMap<NodeId, SocketAddr> = addresses.collect();
        if let Some((_, map_service)) = adopted {
            let live = programs.replicator.roles(index).live;
            let new = || ReturnWait {
                deadline: now + RETURN_MAX,
                is_over: false,
            };
            let wait = self.returning.entry(endpoint).or_insert_with(new);
            if !wait.is_over && !are_nodes_known(map_service, live, &addresses) {
                return;
            }
            self.returning.remove(&endpoint);
        }
        let name = (service.pool.clone(), endpoint, index);
        let mut added = ReplicatedService::new(now, name, wanted, &addresses);
        if let Some((_, map_service)) = adopted {
            self.resume(now, &mut added, map_service, &addresses);
        }
        tracing::info!(service = added.name, %endpoint, "the replication of a service begins");
        self.services.insert(endpoint, added);
        (self.query_at, self.observe_at) = (now, now);
    }

    /// Continues the connections in the maps. Without any leg that serves, replication begins anew.
    fn resume(
        &self,
        now: Duration,
        service: &mut ReplicatedService,
        map_service: &MapService,
        addresses: &BTreeMap<NodeId, SocketAddr>,
    ) {
        let Some(programs) = &self.programs else {
            return;
        };
        let node_at = |address: SocketAddr| {
            let mut nodes = addresses.iter();
            nodes.find_map(|(id, known)| (known.ip() == address.ip()).then_some(*id))
        };
        let legs = map_service.legs.map(|leg| {
            let address = leg.endpoint.socket_address();
            node_at(address).map(|node| (node, address))
        });
        let map_roles = programs.replicator.roles(service.index);
        let nodes = legs.map(|leg| leg.map(|(node, _)| node));
        let Some(roles) = service_roles(map_roles, nodes) else {
            tracing::error!(
                service = service.name,
                "no server of the replicated connections is known: they are given up"
            );
            return self.forget_service(service.index);
        };
        let connections = programs.replicator.connections.entries();
        let connections: Vec<_> = (connections.into_iter())
            .filter(|(key, _)| key.service == service.index)
            .map(|(key, connection)| (key.client(), connection))
            .collect();
        let records = (connections.iter())
            .map(|(client, connection)| connection_record(*client, connection, map_roles))
            .collect();
        if let Err(error) = service.resume(now, self.own, (roles, records), &self.view) {
            tracing::error!(service = service.name, %error, "cannot continue replicated connections");
            return self.forget_service(service.index);
        }
        service.legs = legs;
        service.map_service = *map_service;
        let Some(machine) = service.machine() else {
            return;
        };
        for (client, connection) in &connections {
            for event in ended_legs(*client, connection, roles.live) {
                machine.handle_data_plane(now, event);
            }
        }
    }

    /// Removes a service from the programs, with its connections.
    fn forget_service(&self, index: u16) {
        if let Some(programs) = &self.programs
            && let Err(error) = programs.remove_service(index)
        {
            tracing::error!(index, %error, "cannot remove a replicated service");
        }
    }

    /// Ends the replication of a service at this node: its connections are given up.
    fn remove(&mut self, endpoint: &ServiceEndpoint) {
        let Some(service) = self.services.remove(endpoint) else {
            return;
        };
        tracing::info!(service = service.name, %endpoint, "the replication of a service ends here");
        self.metrics.forget_replication(&service.name);
        self.forget_service(service.index);
    }

    /// Lets the primary of a service serve alone until the last connection has ended.
    fn stop(&mut self, now: Duration, endpoint: &ServiceEndpoint) {
        let Some(service) = self.services.get_mut(endpoint) else {
            return;
        };
        service.replicas = 0;
        if let Some(machine) = service.machine()
            && let Err(error) = machine.stop(now)
        {
            tracing::error!(%error, "cannot stop the replication of a service");
        }
    }
}

/// Returns true if the group's list has the nodes of all live legs of a service.
fn are_nodes_known(
    service: &MapService,
    live: u8,
    addresses: &BTreeMap<NodeId, SocketAddr>,
) -> bool {
    let legs = service.legs.iter().enumerate();
    let mut legs = legs.filter(|(position, _)| live >> position & 1 == 1);
    legs.all(|(_, leg)| {
        let server = leg.endpoint.socket_address().ip();
        addresses.values().any(|node| node.ip() == server)
    })
}
