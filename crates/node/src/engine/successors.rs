//! Other nodes that have, or had, the server of a service (`c/awaited.h` of the data plane).
//!
//! | this node | role of the other |
//! | --- | --- |
//! | donor, from the release until all handshakes have ended that had begun here | alone: new clients go there |
//! | donor, afterwards | serves: new clients go there, unless somebody listens here |
//! | acceptor, from the first listener on until the process runs | alone: what listens here does not run yet |
//! | acceptor, for some time afterwards | before: handshakes that had begun there end there |

use std::collections::BTreeMap;

use holdfast_bpf::shared::{SUCCESSOR_ALONE, SUCCESSOR_BEFORE, SUCCESSOR_SERVES, Successor};
use holdfast_wire::{MoveId, NodeId, Protocol};

use super::Engine;
use crate::config::Service;
use crate::dataplane::monotonic_s;
use crate::migration::Place;

/// For how long handshakes go on where the server was, seconds: longer than the donor waits for them.
const BEFORE_S: u32 = 12;

/// What is remembered of the services of processes that come and have come.
#[derive(Default)]
pub struct Successors {
    /// Of each move under way to this node: the places of services, in the configuration, and what was known of their successors.
    expected: BTreeMap<MoveId, BTreeMap<usize, Option<Successor>>>,
    /// When handshakes end no longer where the server was.
    before_until_s: BTreeMap<usize, u32>,
}

impl Engine {
    /// A process has left for another node, and what listens with it.
    pub(super) fn servers_left(&self, id: MoveId, to: NodeId) {
        for (_, service) in self.services_at(self.moves.places(id)) {
            let role = match service.protocol {
                Protocol::Tcp => SUCCESSOR_ALONE,
                _ => SUCCESSOR_SERVES,
            };
            self.set_successor(service, Some(Successor { node: to.0, role }));
        }
    }

    /// All handshakes have ended that had begun with it here.
    pub(super) fn servers_drained(&self, to: NodeId, places: &[Place]) {
        for (index, service) in self.services_at(places) {
            let drained = Successor {
                node: to.0,
                role: SUCCESSOR_ALONE,
            };
            // A process that is on its way back waits alone too.
            let mut expected = self.successors.expected.values();
            if self.dataplane.successor(service) == Some(drained)
                && !expected.any(|of| of.contains_key(&index))
            {
                let role = SUCCESSOR_SERVES;
                self.set_successor(service, Some(Successor { role, ..drained }));
            }
        }
    }

    /// What an earlier daemon kept open for handshakes is closed, and what it put together has come or has not.
    pub(super) fn all_servers_drained(&self) {
        for service in &self.config.services {
            if let Some(successor) = self.dataplane.successor(service) {
                self.set_successor(service, without_handshakes(successor));
            }
        }
    }

    /// Sockets of a process that is on its way here are about to be made: new clients go to the donor until it runs.
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

    /// It does not come, and its sockets are closed.
    pub(super) fn servers_stay(&mut self, id: MoveId) {
        for (index, known) in self.successors.expected.remove(&id).unwrap_or_default() {
            let known = known.and_then(without_handshakes);
            self.set_successor(&self.config.services[index], known);
        }
    }

    /// A process has come, and what listens with it.
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

    /// Handshakes that had begun where a server was have ended, once they have had time.
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

    /// The services whose new clients come to these sockets, with their places in the configuration.
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

/// What is left of a successor when no handshake of an earlier move is under way any more.
fn without_handshakes(successor: Successor) -> Option<Successor> {
    let role = SUCCESSOR_SERVES;
    (successor.role != SUCCESSOR_BEFORE).then_some(Successor { role, ..successor })
}
