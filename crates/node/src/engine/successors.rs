//! Successors: other nodes that have, or had, the server of a service (`c/socket_lookup.h` of the data plane).
//!
//! | this node | role of the other |
//! | --- | --- |
//! | donor, from the release until all handshakes that began here have ended | alone: gets all new clients |
//! | donor, afterwards | serves: gets new clients, unless a program listens here |
//! | acceptor, from the first restored listener until the process runs | alone: the listeners here do not run yet |
//! | acceptor, for some time afterwards | before: handshakes that began there end there |

use std::collections::BTreeMap;

use holdfast_bpf::shared_with_c::{
    SUCCESSOR_EXCLUSIVE, SUCCESSOR_FALLBACK, SUCCESSOR_PREVIOUS, Successor,
};
use holdfast_wire::{MoveId, NodeId, Protocol};

use super::Engine;
use crate::config::ServiceConfig;
use crate::dataplane::monotonic_s;
use crate::migration::SocketEndpoint;

/// Time for which handshakes may end at the donor, in seconds; longer than the donor waits for them.
const HANDSHAKE_FORWARD_S: u32 = 12;

/// Services of processes that are being moved here or have been moved here.
#[derive(Default)]
pub struct Successors {
    /// Services of each move to this node, by index in the configuration, with the successor known before the move.
    previous: BTreeMap<MoveId, BTreeMap<usize, Option<Successor>>>,
    /// Times in seconds at which handshakes no longer end at the donor, by service index.
    forward_until_s: BTreeMap<usize, u32>,
}

impl Engine {
    /// Redirects new clients of a moved process's services to the acceptor.
    pub(super) fn redirect_clients_to_acceptor(&self, id: MoveId, to: NodeId) {
        for (_, service) in self.services_of_sockets(self.migrations.endpoints(id)) {
            let role = match service.protocol {
                Protocol::Tcp => SUCCESSOR_EXCLUSIVE,
                _ => SUCCESSOR_FALLBACK,
            };
            self.set_successor(service, Some(Successor { node: to.0, role }));
        }
    }

    /// Ends the redirection of handshakes: all that began here have ended.
    pub(super) fn on_handshakes_drained(&self, to: NodeId, endpoints: &[SocketEndpoint]) {
        for (index, service) in self.services_of_sockets(endpoints) {
            let drained = Successor {
                node: to.0,
                role: SUCCESSOR_EXCLUSIVE,
            };
            // A process that is on its way back here also needs the role `alone`.
            let mut previous = self.successors.previous.values();
            if self.dataplane.successor(service) == Some(drained)
                && !previous.any(|services| services.contains_key(&index))
            {
                let role = SUCCESSOR_FALLBACK;
                self.set_successor(service, Some(Successor { role, ..drained }));
            }
        }
    }

    /// Ends the redirections for handshakes that an earlier daemon set; its moves have ended either way.
    pub(super) fn end_handshake_redirects(&self) {
        for service in &self.config.services {
            if let Some(successor) = self.dataplane.successor(service) {
                self.set_successor(service, without_handshakes(successor));
            }
        }
    }

    /// Redirects new clients to the donor before a process's sockets are made here, until the process runs.
    pub(super) fn redirect_clients_to_donor(&mut self, id: MoveId, endpoints: &[SocketEndpoint]) {
        let services: Vec<usize> = self
            .services_of_sockets(endpoints)
            .map(|(index, _)| index)
            .collect();
        for index in services {
            let service = &self.config.services[index];
            let successor = self.dataplane.successor(service);
            let (node, role) = (id.donor.0, SUCCESSOR_EXCLUSIVE);
            self.set_successor(service, Some(Successor { node, role }));
            let previous = self.successors.previous.entry(id).or_default();
            previous.entry(index).or_insert(successor);
        }
    }

    /// Restores the earlier successors after a move was given up and its sockets closed.
    pub(super) fn restore_successors(&mut self, id: MoveId) {
        for (index, successor) in self.successors.previous.remove(&id).unwrap_or_default() {
            let successor = successor.and_then(without_handshakes);
            self.set_successor(&self.config.services[index], successor);
        }
    }

    /// Begins to serve new clients at this node, the acceptor, after the process has resumed. Handshakes that began at
    /// the donor are still forwarded to it.
    pub(super) fn begin_serving_clients(&mut self, id: MoveId) {
        self.successors.previous.remove(&id);
        let endpoints = self.migrations.take_endpoints(id);
        let services: Vec<usize> = self
            .services_of_sockets(&endpoints)
            .map(|(index, _)| index)
            .collect();
        for index in services {
            let service = &self.config.services[index];
            let donor = Successor {
                node: id.donor.0,
                role: SUCCESSOR_PREVIOUS,
            };
            let donor = (service.protocol == Protocol::Tcp).then_some(donor);
            self.set_successor(service, donor);
            (self.successors.forward_until_s).insert(index, monotonic_s() + HANDSHAKE_FORWARD_S);
        }
    }

    /// Ends the forwarding of handshakes whose time has passed.
    pub(super) fn poll_handshake_forwarding(&mut self, now_s: u32) {
        let until_s = &mut self.successors.forward_until_s;
        let is_due = |(index, until): (&usize, &u32)| (*until <= now_s).then_some(*index);
        let due: Vec<usize> = until_s.iter().filter_map(is_due).collect();
        until_s.retain(|_, until| *until > now_s);
        for index in due {
            let service = &self.config.services[index];
            let successor = self.dataplane.successor(service);
            if successor.is_some_and(|current| current.role == SUCCESSOR_PREVIOUS) {
                self.set_successor(service, None);
            }
        }
    }

    /// Returns the services whose new clients these sockets receive, with their indexes in the configuration.
    fn services_of_sockets<'a>(
        &'a self,
        endpoints: &'a [SocketEndpoint],
    ) -> impl Iterator<Item = (usize, &'a ServiceConfig)> {
        let is_served = move |(_, service): &(usize, &ServiceConfig)| {
            let mut endpoints = endpoints.iter();
            endpoints.any(|endpoint| endpoint.receives_new_flow(service.protocol, service.address))
        };
        self.config.services.iter().enumerate().filter(is_served)
    }

    fn set_successor(&self, service: &ServiceConfig, to: Option<Successor>) {
        if let Err(error) = self.dataplane.set_successor(service, to) {
            tracing::warn!(at = %service.address, %error, "cannot redirect new clients of a service");
        }
    }
}

/// Returns the successor without the roles that exist for handshakes of an earlier move.
fn without_handshakes(successor: Successor) -> Option<Successor> {
    let role = SUCCESSOR_FALLBACK;
    (successor.role != SUCCESSOR_PREVIOUS).then_some(Successor { role, ..successor })
}
