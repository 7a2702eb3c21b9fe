//! Failures, the elements' actions, and the invariants.

use crate::element::{ANSWER_TIMEOUT, REREGISTRATION_INTERVAL};
use crate::net::{NodeIndex, address};
use crate::world::{CONVERGENCE_BOUND, World, WorldEvent, encoded};
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, PoolProtocol, RemovalReason};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle};
use std::time::Duration;

impl World {
    pub fn is_up(&self, end: NodeIndex) -> bool {
        match end.checked_sub(self.nodes.len()) {
            None => self.nodes[end].machine.is_some(),
            Some(element) => self.elements[element].alive,
        }
    }

    pub fn crash_registrar(&mut self, node: usize) {
        if self.nodes[node].machine.take().is_some() {
            self.last_fault = self.now;
            self.on_process_end(node);
        }
    }

    pub fn kill_element(&mut self, element: usize) {
        if self.elements[element].alive {
            self.last_fault = self.now;
            let element = &mut self.elements[element];
            element.alive = false;
            element.home = None;
            element.is_registered = false;
            let end = element.end;
            self.on_process_end(end);
        }
    }

    /// Handles the death of a process, which the other sides hear of soon, or of its host, which they notice by
    /// themselves.
    fn on_process_end(&mut self, end: NodeIndex) {
        let host = self.rng.percent(40);
        for link in self.network.links_of(end) {
            let known = self.network.links.get_mut(&link).unwrap();
            let end_index = usize::from(known.ends[1] == end);
            known.open[end_index] = false;
            let notice_delay = Duration::from_millis(self.rng.range(2_000, 9_000));
            let after = if host { notice_delay } else { self.delay() };
            let side = 1 - end_index;
            self.schedule(after, WorldEvent::LinkBroken { link, side });
        }
    }

    pub fn cut_link(&mut self, a: NodeIndex, b: NodeIndex) {
        self.last_fault = self.now;
        self.network.cut(a, b);
        for link in self.network.links_of(a) {
            if self.network.links[&link].ends.contains(&b) {
                for side in 0..2 {
                    let after = Duration::from_millis(self.rng.range(800, 3_000));
                    self.schedule(after, WorldEvent::LinkBroken { link, side });
                }
            }
        }
    }

    /// Handles the notice of one end of a link that the link is dead.
    pub fn on_link_broken(&mut self, link: u64, side: usize) {
        let Some(known) = self.network.links.get_mut(&link) else {
            return;
        };
        let [a, b] = known.ends;
        let is_open_at_both_ends = known.open == [true; 2];
        if !known.open[side] || (is_open_at_both_ends && !self.network.is_cut(a, b)) {
            return;
        }
        let known = self.network.links.get_mut(&link).unwrap();
        known.open[side] = false;
        let (end, other) = (known.ends[side], 1 - side);
        if known.open[other] {
            // The abort reaches the other side, or the other side notices by itself.
            let after = self.delay() + Duration::from_millis(100);
            self.schedule(after, WorldEvent::LinkBroken { link, side: other });
        } else {
            self.network.links.remove(&link);
        }
        if end < self.nodes.len() {
            let association = AssociationId(link);
            self.feed(end, |machine, now| {
                machine.handle_association_down(now, association)
            });
        } else {
            let element = end - self.nodes.len();
            if self.elements[element].home == Some(link) {
                self.seek_registrar(element);
            }
        }
    }

    pub fn on_dialled(&mut self, node: usize, dial: DialId, to: NodeIndex, protocol: PoolProtocol) {
        if !self.is_up(to) || self.network.is_cut(node, to) {
            return self.feed(node, |machine, now| machine.handle_dial_failed(now, dial));
        }
        let registrars = self.nodes.len();
        let remote_address = address(to, registrars, protocol);
        let known = self.network.link_between(node, to, protocol);
        let link = known.unwrap_or_else(|| self.network.open([node, to], protocol));
        let association = AssociationId(link);
        if known.is_none() && to < registrars {
            let local_address = address(node, registrars, protocol);
            self.feed(to, |machine, now| {
                machine.handle_association_up(now, association, protocol, &[local_address], None);
            });
        }
        self.feed(node, |machine, now| {
            machine.handle_association_up(
                now,
                association,
                protocol,
                &[remote_address],
                Some(dial),
            );
        });
    }

    fn seek_registrar(&mut self, element: usize) {
        self.elements[element].home = None;
        self.elements[element].request_time = None;
        let after = Duration::from_millis(self.rng.range(1, 60));
        self.elements[element].next_action = self.now + after;
        self.schedule(after, WorldEvent::ElementWake { element });
    }

    /// Lets an element register, or seek a registrar.
    pub fn run_element(&mut self, number: usize) {
        let registrars = self.nodes.len();
        let element = &mut self.elements[number];
        if !element.alive || self.now < element.next_action {
            return;
        }
        if element.request_time.take().is_some() {
            // Without an answer the element turns to another registrar.
            return self.seek_registrar(number);
        }
        let end = element.end;
        if element.home.is_none() {
            let to = self.rng.index(registrars);
            if !self.is_up(to) || self.network.is_cut(end, to) {
                return self.seek_registrar(number);
            }
            let known = self.network.link_between(end, to, PoolProtocol::Asap);
            let link = known.unwrap_or_else(|| self.network.open([end, to], PoolProtocol::Asap));
            self.elements[number].home = Some(link);
            if known.is_none() {
                let local_address = address(end, registrars, PoolProtocol::Asap);
                self.feed(to, |machine, now| {
                    let association = AssociationId(link);
                    machine.handle_association_up(
                        now,
                        association,
                        PoolProtocol::Asap,
                        &[local_address],
                        None,
                    );
                });
            }
        }
        let element = &mut self.elements[number];
        let message = element.registration(registrars);
        let link = element.home.unwrap();
        element.request_time = Some(self.now);
        element.next_action = self.now + ANSWER_TIMEOUT;
        self.schedule(ANSWER_TIMEOUT, WorldEvent::ElementWake { element: number });
        self.send_from_element(number, link, message);
    }

    fn send_from_element(&mut self, element: usize, link: u64, message: Message) {
        if let Some(message) = self.fault.apply_to_element_message(message) {
            let end = self.elements[element].end;
            self.send(end, link, encoded(&message));
        }
    }

    pub fn on_element_message(&mut self, number: usize, link: u64, bytes: &Bytes) {
        let now = self.now;
        let element = &mut self.elements[number];
        if !element.alive {
            return;
        }
        let message = Message::parse(bytes).unwrap().message;
        let (asked, next) = (element.request_time, element.next_action);
        let answer = element.handle_message(now, link, message);
        if (asked.is_some() && element.request_time.is_none()) || element.next_action != next {
            element.next_action = now + REREGISTRATION_INTERVAL;
            self.schedule(
                REREGISTRATION_INTERVAL,
                WorldEvent::ElementWake { element: number },
            );
        }
        if let Some(answer) = answer {
            self.send_from_element(number, link, answer);
        }
    }

    pub fn deregister_element(&mut self, number: usize) {
        let element = &mut self.elements[number];
        let Some(link) = element.home.filter(|_| element.alive) else {
            return;
        };
        self.last_fault = self.now;
        element.alive = false;
        element.home = None;
        element.is_registered = false;
        let (handle, id) = (element.handle.clone(), element.id);
        self.send_from_element(number, link, Message::Deregistration { handle, id });
    }

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
            && self.network.cut_pairs.is_empty();
        for number in 0..self.elements.len() {
            let element = &self.elements[number];
            let machines = || self.nodes.iter().filter_map(|node| node.machine.as_ref());
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
            .nodes
            .iter()
            .filter_map(|n| n.machine.as_ref())
            .collect();
        assert_eq!(machines.len(), self.nodes.len());
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
