//! Invariants of registrars and elements.

use crate::world::{CONVERGENCE_BOUND, World};
use holdfast_proto::registrar::RemovalReason;
use holdfast_wire::rserpool::{ElementId, PoolHandle};

impl World {
    /// Checks the removal of an element: a live one must not be removed while nothing fails.
    pub fn check_removal(&self, handle: &PoolHandle, id: ElementId, reason: RemovalReason) {
        let mut elements = self.elements.iter();
        let element = elements.find(|element| element.id == id && element.handle == *handle);
        let is_alive = element.is_some_and(|element| element.alive);
        let is_quiet =
            self.now.saturating_sub(self.last_fault) > CONVERGENCE_BOUND && !self.loses_messages;
        assert!(
            !(is_alive && is_quiet),
            "{:?}: {id:?} was removed: {reason:?}",
            self.now
        );
    }

    /// Checks that each live element has one home and is in every view, unless something failed a short while ago.
    pub fn check(&mut self) {
        let is_quiet = self.now.saturating_sub(self.last_fault) > CONVERGENCE_BOUND
            && self.cut_pairs.is_empty();
        for number in 0..self.elements.len() {
            let element = &self.elements[number];
            let machines = || {
                self.registrars
                    .iter()
                    .filter_map(|node| node.machine.as_ref())
            };
            let views = machines().map(|m| m.element(&element.handle, element.id));
            let is_in_all_views = views.clone().all(|view| view.is_some());
            let homes = machines()
                .zip(views)
                .filter(|(machine, view)| view.is_some_and(|view| view.home == machine.id()));
            let homes = homes.count();
            if homes > 1 && !self.inconsistent_since.contains_key(&number) {
                self.tally.count("two homes");
            }
            let is_consistent = homes <= 1 && (is_in_all_views || !element.is_registered);
            if is_consistent {
                self.inconsistent_since.remove(&number);
                continue;
            }
            let inconsistent_since = *self.inconsistent_since.entry(number).or_insert(self.now);
            let is_too_long = self.now - inconsistent_since > CONVERGENCE_BOUND;
            assert!(
                !(is_quiet && is_too_long && !self.loses_messages),
                "{:?}: element {number} has {homes} homes, in all views: {is_in_all_views}, since {inconsistent_since:?}",
                self.now
            );
        }
    }

    /// Checks at rest that all views are equal, and right.
    pub fn check_final_state(&self) {
        let machines: Vec<_> = self
            .registrars
            .iter()
            .filter_map(|n| n.machine.as_ref())
            .collect();
        assert_eq!(machines.len(), self.registrars.len());
        for machine in &machines {
            let id = machine.id();
            assert!(machine.is_ready());
            let mut peers: Vec<_> = machine.peers().map(|peer| peer.id).collect();
            peers.push(id);
            peers.sort();
            let mut all: Vec<_> = machines.iter().map(|machine| machine.id()).collect();
            all.sort();
            assert_eq!(peers, all, "{id:?} knows exactly the live registrars");
            for peer in machine.peers() {
                assert!(peer.active && peer.connected, "{id:?}: {peer:?}");
            }
            let owned: usize = all.iter().map(|id| machine.elements_owned_by(*id)).sum();
            assert_eq!(
                owned,
                machine.elements(),
                "{id:?}: homes are live registrars"
            );
            for other in &machines {
                let own = other.checksum(other.id());
                assert_eq!(
                    machine.checksum(other.id()),
                    own,
                    "checksum at {id:?} for {:?}",
                    other.id()
                );
            }
            let live = self.elements.iter().filter(|element| element.alive);
            machine.visit_all_elements(|handle, element| {
                let mut live = live.clone();
                let lives = live.any(|live| live.handle == *handle && live.id == element.id);
                assert!(lives, "{id:?} lists the dead element {element:?}");
            });
            assert_eq!(machine.elements(), live.clone().count(), "{id:?}");
            for element in live {
                assert!(
                    machine.element(&element.handle, element.id).is_some(),
                    "{id:?}"
                );
            }
        }
    }
}
