//! Successors: other nodes that have, or had, the server of a service (`c/socket_lookup.h` of the data plane).
//!
//! | this node | role of the other |
//! | --- | --- |
//! | donor, from the release until all handshakes that began here have ended | alone: gets all new clients |
//! | donor, afterwards | serves: gets new clients, unless a program listens here |
//! | acceptor, from the first restored listener until the process runs | alone: the listeners here do not run yet |
//! | acceptor, for some time afterwards | before: handshakes that began there end there |

use holdfast_bpf::shared_with_c::{
    SUCCESSOR_EXCLUSIVE, SUCCESSOR_FALLBACK, SUCCESSOR_PREVIOUS, Successor,
};
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::{MoveId, NodeId, Protocol};

use super::ClientPlacement;
use crate::config::ServiceConfig;
use crate::dataplane::{Dataplane, monotonic_s};
use crate::migration::SocketEndpoint;

/// Time for which handshakes may end at the donor, in seconds; longer than the donor waits for them.
const HANDSHAKE_FORWARD_S: u32 = 12;

impl ClientPlacement {
    /// Redirects new clients of a moved process's services to the acceptor.
    pub fn redirect_to_acceptor(
        &self,
        dataplane: &Dataplane,
        to: NodeId,
        endpoints: &[SocketEndpoint],
    ) {
        for service in self.services_of_sockets(endpoints) {
            let role = match service.protocol {
                Protocol::Tcp => SUCCESSOR_EXCLUSIVE,
                _ => SUCCESSOR_FALLBACK,
            };
            set_successor(dataplane, service, Some(Successor { node: to.0, role }));
        }
    }

    /// Returns the services whose new clients these sockets receive.
    pub fn received_services(&self, endpoints: &[SocketEndpoint]) -> Vec<ServiceEndpoint> {
        let services = self.services_of_sockets(endpoints);
        services.map(ServiceConfig::endpoint).collect()
    }

    /// Ends the redirection of handshakes: all that began here have ended.
    pub fn on_handshakes_drained(
        &self,
        dataplane: &Dataplane,
        to: NodeId,
        endpoints: &[SocketEndpoint],
    ) {
        for service in self.services_of_sockets(endpoints) {
            let drained = Successor {
                node: to.0,
                role: SUCCESSOR_EXCLUSIVE,
            };
            // A process that is on its way back here also needs the role `alone`.
            let mut previous = self.previous_successors.values();
            if dataplane.successor(service) == Some(drained)
                && !previous.any(|services| services.contains_key(&service.row))
            {
                let role = SUCCESSOR_FALLBACK;
                set_successor(dataplane, service, Some(Successor { role, ..drained }));
            }
        }
    }

    /// Takes over the redirections for handshakes that an earlier daemon set. Handshakes that began at a donor end there, as
    /// without the restart; any other redirection ends, since the earlier daemon's moves have ended either way.
    pub fn adopt_handshake_redirects(&mut self, dataplane: &Dataplane) {
        for service in self.services.values() {
            match dataplane.successor(service) {
                Some(successor) if successor.role == SUCCESSOR_PREVIOUS => {
                    let until = monotonic_s() + HANDSHAKE_FORWARD_S;
                    self.forward_until_s.insert(service.row, until);
                }
                Some(successor) => set_successor(dataplane, service, without_handshakes(successor)),
                None => {}
            }
        }
    }

    /// Redirects new clients to the donor before a process's sockets are made here, until the process runs.
    pub fn redirect_to_donor(
        &mut self,
        dataplane: &Dataplane,
        id: MoveId,
        endpoints: &[SocketEndpoint],
    ) {
        let services: Vec<ServiceConfig> = self.services_of_sockets(endpoints).cloned().collect();
        for service in services {
            let successor = dataplane.successor(&service);
            let (node, role) = (id.donor.0, SUCCESSOR_EXCLUSIVE);
            set_successor(dataplane, &service, Some(Successor { node, role }));
            let previous = self.previous_successors.entry(id).or_default();
            previous.entry(service.row).or_insert(successor);
        }
    }

    /// Restores the earlier successors after a move was given up and its sockets closed.
    pub fn restore_successors(&mut self, dataplane: &Dataplane, id: MoveId) {
        let previous = self.previous_successors.remove(&id).unwrap_or_default();
        for (row, successor) in previous {
            let successor = successor.and_then(without_handshakes);
            if let Some(service) = self.services.get(&row) {
                set_successor(dataplane, service, successor);
            }
        }
    }

    /// Begins to serve new clients at this node, the acceptor, after the process has resumed. Handshakes that began at
    /// the donor are still forwarded to it.
    pub fn begin_serving_new_clients(
        &mut self,
        dataplane: &Dataplane,
        id: MoveId,
        endpoints: &[SocketEndpoint],
    ) {
        self.previous_successors.remove(&id);
        let services: Vec<ServiceConfig> = self.services_of_sockets(endpoints).cloned().collect();
        for service in services {
            let donor = Successor {
                node: id.donor.0,
                role: SUCCESSOR_PREVIOUS,
            };
            let donor = (service.protocol == Protocol::Tcp).then_some(donor);
            set_successor(dataplane, &service, donor);
            self.forward_until_s
                .insert(service.row, monotonic_s() + HANDSHAKE_FORWARD_S);
        }
    }

    /// Ends the forwarding of handshakes whose time has passed at `now_s` in seconds.
    pub fn poll_handshake_forwarding(&mut self, dataplane: &Dataplane, now_s: u32) {
        let until_s = &mut self.forward_until_s;
        let is_due = |(row, until): (&u16, &u32)| (*until <= now_s).then_some(*row);
        let due: Vec<u16> = until_s.iter().filter_map(is_due).collect();
        until_s.retain(|_, until| *until > now_s);
        for service in due.iter().filter_map(|row| self.services.get(row)) {
            let successor = dataplane.successor(service);
            if successor.is_some_and(|current| current.role == SUCCESSOR_PREVIOUS) {
                set_successor(dataplane, service, None);
            }
        }
    }

    /// Returns the services whose new clients these sockets receive.
    fn services_of_sockets<'a>(
        &'a self,
        endpoints: &'a [SocketEndpoint],
    ) -> impl Iterator<Item = &'a ServiceConfig> {
        let is_served = move |service: &&ServiceConfig| {
            let mut endpoints = endpoints.iter();
            endpoints.any(|endpoint| endpoint.receives_new_flow(service.protocol, service.address))
        };
        self.services.values().filter(is_served)
    }
}

fn set_successor(dataplane: &Dataplane, service: &ServiceConfig, to: Option<Successor>) {
    if let Err(error) = dataplane.set_successor(service, to) {
        tracing::warn!(at = %service.address, %error, "cannot redirect new clients of a service");
    }
}

/// Returns the successor without the roles that exist for handshakes of an earlier move.
fn without_handshakes(successor: Successor) -> Option<Successor> {
    let role = SUCCESSOR_FALLBACK;
    (successor.role != SUCCESSOR_PREVIOUS).then_some(Successor { role, ..successor })
}
