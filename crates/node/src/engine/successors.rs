//! Successors: other nodes that have, or had, the server of a service (`c/awaited.h` of the data plane).
//!
//! | this node | role of the other |
//! | --- | --- |
//! | donor, from the release until all handshakes that began here have ended | alone: gets all new clients |
//! | donor, afterwards | serves: gets new clients, unless a program listens here |
//! | acceptor, from the first restored listener until the process runs | alone: the listeners here do not run yet |
//! | acceptor, for some time afterwards | before: handshakes that began there end there |

use std::collections::BTreeMap;

use holdfast_bpf::shared::{SUCCESSOR_ALONE, SUCCESSOR_BEFORE, SUCCESSOR_SERVES, Successor};
use holdfast_wire::{MoveId, NodeId, Protocol};

use super::Engine;
use crate::config::Service;
use crate::dataplane::monotonic_s;
use crate::migration::Place;

/// Time for which handshakes may end at the donor, in seconds; longer than the donor waits for them.
const BEFORE_S: u32 = 12;

/// Services of processes that are being moved here or have been moved here.
#[derive(Default)]
pub struct Successors {
    /// Services of each move to this node, by index in the configuration, with the successor known before the move.
    expected: BTreeMap<MoveId, BTreeMap<usize, Option<Successor>>>,
    /// Times in seconds at which handshakes no longer end at the donor, by service index.
    before_until_s: BTreeMap<usize, u32>,
}

impl Engine {
    /// Redirects new clients of a moved process's services to the acceptor.
    pub(super) fn servers_left(&self, id: MoveId, to: NodeId) {
        for (_, service) in self.services_at(self.moves.places(id)) {
            let role = match service.protocol {
                Protocol::Tcp => SUCCESSOR_ALONE,
                _ => SUCCESSOR_SERVES,
            };
            self.set_successor(service, Some(Successor { node: to.0, role }));
        }
    }

    /// Ends the redirection of handshakes: all that began here have ended.
    pub(super) fn servers_drained(&self, to: NodeId, places: &[Place]) {
        for (index, service) in self.services_at(places) {
            let drained = Successor {
                node: to.0,
                role: SUCCESSOR_ALONE,
            };
            // A process that is on its way back here also needs the role `alone`.
            let mut expected = self.successors.expected.values();
            if self.dataplane.successor(service) == Some(drained)
                && !expected.any(|of| of.contains_key(&index))
            {
                let role = SUCCESSOR_SERVES;
                self.set_successor(service, Some(Successor { role, ..drained }));
            }
        }
    }

    /// Ends the redirections for handshakes that an earlier daemon set; its moves have ended either way.
    pub(super) fn all_servers_drained(&self) {
        for service in &self.config.services {
            if let Some(successor) = self.dataplane.successor(service) {
                self.set_successor(service, without_handshakes(successor));
            }
        }
    }

    /// Redirects new clients to the donor before a process's sockets are made here, until the process runs.
    pub(super) fn servers_expected(&mut self, id: MoveId, places: &[Place]) {
        let services: Vec<usize> = self.services_at(places).map(|(index, _)| index).collect();
        for index in services {
            let service = &self.config.services[index];
            let known = self.dataplane.successor(service);
            let (node, role) = (id.donor.0, SUCCESSOR_ALONE);
            self.set_successor(service, Some(Successor { node, role }));
            let expected = self.successors.expected.entry(id).or_default();
            expected.entry(index).or_insert(known);
        }
    }

    /// Restores the earlier successors after a move was given up and its sockets closed.
    pub(super) fn servers_stay(&mut self, id: MoveId) {
        for (index, known) in self.successors.expected.remove(&id).unwrap_or_default() {
            let known = known.and_then(without_handshakes);
            self.set_successor(&self.config.services[index], known);
        }
    }

    /// Takes new clients here after a process has resumed, and forwards handshakes that began at the donor.
    pub(super) fn servers_came(&mut self, id: MoveId) {
        self.successors.expected.remove(&id);
        let places = self.moves.take_places(id);
        let services: Vec<usize> = self.services_at(&places).map(|(index, _)| index).collect();
        for index in services {
            let service = &self.config.services[index];
            let before = Successor {
                node: id.donor.0,
                role: SUCCESSOR_BEFORE,
            };
            let before = (service.protocol == Protocol::Tcp).then_some(before);
            self.set_successor(service, before);
            (self.successors.before_until_s).insert(index, monotonic_s() + BEFORE_S);
        }
    }

    /// Ends the forwarding of handshakes whose time has passed.
    pub(super) fn poll_successors(&mut self, now_s: u32) {
        let until_s = &mut self.successors.before_until_s;
        let is_due = |(index, until): (&usize, &u32)| (*until <= now_s).then_some(*index);
        let due: Vec<usize> = until_s.iter().filter_map(is_due).collect();
        until_s.retain(|_, until| *until > now_s);
        for index in due {
            let service = &self.config.services[index];
            let successor = self.dataplane.successor(service);
            if successor.is_some_and(|of| of.role == SUCCESSOR_BEFORE) {
                self.set_successor(service, None);
            }
        }
    }

    /// Returns the services whose new clients these sockets receive, with their indexes in the configuration.
    fn services_at<'a>(
        &'a self,
        places: &'a [Place],
    ) -> impl Iterator<Item = (usize, &'a Service)> {
        let is_its = move |(_, of): &(usize, &Service)| {
            let mut places = places.iter();
            places.any(|place| place.begins(of.protocol, of.address))
        };
        self.config.services.iter().enumerate().filter(is_its)
    }

    fn set_successor(&self, service: &Service, to: Option<Successor>) {
        if let Err(error) = self.dataplane.set_successor(service, to) {
            tracing::warn!(at = %service.address, %error, "new clients go where the weights say");
        }
    }
}

/// Returns the successor without the roles that exist for handshakes of an earlier move.
fn without_handshakes(successor: Successor) -> Option<Successor> {
    let role = SUCCESSOR_SERVES;
    (successor.role != SUCCESSOR_BEFORE).then_some(Successor { role, ..successor })
}
