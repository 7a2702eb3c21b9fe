//! Where servers have gone that listened here: their new clients go after them (`c/awaited.h` of the data plane).

use holdfast_bpf::shared::Successor;
use holdfast_wire::{MoveId, NodeId, Protocol};

use super::Engine;
use crate::config::Service;
use crate::migration::Place;

impl Engine {
    /// A process has left for another node, and what listens with it.
    pub(super) fn servers_left(&self, id: MoveId, to: NodeId) {
        for service in self.services_at(self.moves.places(id)) {
            let drains = u16::from(service.protocol == Protocol::Tcp);
            self.set_successor(service, Some(Successor { node: to.0, drains }));
        }
    }

    /// All handshakes have ended that had begun with it here.
    pub(super) fn servers_drained(&self, to: NodeId, places: &[Place]) {
        for service in self.services_at(places) {
            let successor = self.dataplane.successor(service);
            if successor.is_some_and(|successor| successor.node == to.0) {
                let (node, drains) = (to.0, 0);
                self.set_successor(service, Some(Successor { node, drains }));
            }
        }
    }

    /// What an earlier daemon kept open for handshakes is closed.
    pub(super) fn all_servers_drained(&self) {
        for service in &self.config.services {
            if let Some(Successor { node, .. }) = self.dataplane.successor(service) {
                self.set_successor(service, Some(Successor { node, drains: 0 }));
            }
        }
    }

    /// A process has come, and what listens with it.
    pub(super) fn servers_came(&mut self, id: MoveId) {
        let places = self.moves.take_places(id);
        for service in self.services_at(&places) {
            self.set_successor(service, None);
        }
    }

    fn services_at<'a>(&'a self, places: &'a [Place]) -> impl Iterator<Item = &'a Service> {
        let is_its = |of: &&Service| {
            let mut places = places.iter();
            places.any(|place| place.begins(of.protocol, of.address))
        };
        self.config.services.iter().filter(is_its)
    }

    fn set_successor(&self, service: &Service, to: Option<Successor>) {
        if let Err(error) = self.dataplane.set_successor(service, to) {
            tracing::warn!(at = %service.address, %error, "new clients go where the weights say");
        }
    }
}
