//! Failures, the elements' actions, and the invariants.

use crate::element::{PATIENCE, RENEWAL};
use crate::net::{End, address};
use crate::world::{BOUND, What, World, encoded};
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, Gone, Protocol};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle};
use std::time::Duration;

impl World {
    pub fn is_up(&self, end: End) -> bool {
        match end.checked_sub(self.nodes.len()) {
            None => self.nodes[end].machine.is_some(),
            Some(element) => self.elements[element].alive,
        }
    }

    pub fn crash(&mut self, node: usize) {
        if self.nodes[node].machine.take().is_some() {
            self.trouble = self.now;
            self.gone(node);
        }
    }

    pub fn kill(&mut self, element: usize) {
        if self.elements[element].alive {
            self.trouble = self.now;
            let element = &mut self.elements[element];
            element.alive = false;
            element.home = None;
            element.granted = false;
            let end = element.end;
            self.gone(end);
        }
    }

    /// Handles the death of a process, which the other sides hear of soon, or of its host, which they notice by
    /// themselves.
    fn gone(&mut self, end: End) {
        let host = self.rng.percent(40);
        for link in self.net.of(end) {
            let known = self.net.links.get_mut(&link).unwrap();
            let side = usize::from(known.ends[1] == end);
            known.open[side] = false;
            let noticed = Duration::from_millis(self.rng.range(2_000, 9_000));
            let after = if host { noticed } else { self.delay() };
            let side = 1 - side;
            self.at(after, What::Break { link, side });
        }
    }

    pub fn cut(&mut self, a: End, b: End) {
        self.trouble = self.now;
        self.net.cut(a, b);
        for link in self.net.of(a) {
            if self.net.links[&link].ends.contains(&b) {
                for side in 0..2 {
                    let after = Duration::from_millis(self.rng.range(800, 3_000));
                    self.at(after, What::Break { link, side });
                }
            }
        }
    }

    /// Handles the notice of one end of a link that the link is dead.
    pub fn broken(&mut self, link: u64, side: usize) {
        let Some(known) = self.net.links.get_mut(&link) else {
            return;
        };
        let [a, b] = known.ends;
        let whole = known.open == [true; 2];
        if !known.open[side] || (whole && !self.net.is_cut(a, b)) {
            return;
        }
        let known = self.net.links.get_mut(&link).unwrap();
        known.open[side] = false;
        let (end, other) = (known.ends[side], 1 - side);
        if known.open[other] {
            // The abort reaches the other side, or the other side notices by itself.
            let after = self.delay() + Duration::from_millis(100);
            self.at(after, What::Break { link, side: other });
        } else {
            self.net.links.remove(&link);
        }
        if end < self.nodes.len() {
            let association = AssociationId(link);
            self.feed(end, |machine, now| machine.handle_down(now, association));
        } else {
            let element = end - self.nodes.len();
            if self.elements[element].home == Some(link) {
                self.hunt(element);
            }
        }
    }

    pub fn dialled(&mut self, node: usize, dial: DialId, to: End, protocol: Protocol) {
        if !self.is_up(to) || self.net.is_cut(node, to) {
            return self.feed(node, |machine, now| machine.handle_dial_failed(now, dial));
        }
        let registrars = self.nodes.len();
        let there = address(to, registrars, protocol);
        let known = self.net.between(node, to, protocol);
        let link = known.unwrap_or_else(|| self.net.open([node, to], protocol));
        let association = AssociationId(link);
        if known.is_none() && to < registrars {
            let here = address(node, registrars, protocol);
            self.feed(to, |machine, now| {
                machine.handle_up(now, association, protocol, &[here], None);
            });
        }
        self.feed(node, |machine, now| {
            machine.handle_up(now, association, protocol, &[there], Some(dial));
        });
    }

    fn hunt(&mut self, element: usize) {
        self.elements[element].home = None;
        self.elements[element].asked = None;
        let after = Duration::from_millis(self.rng.range(1, 60));
        self.elements[element].next = self.now + after;
        self.at(after, What::Element { element });
    }

    /// Lets an element register, or seek a registrar.
    pub fn element_turn(&mut self, number: usize) {
        let registrars = self.nodes.len();
        let element = &mut self.elements[number];
        if !element.alive || self.now < element.next {
            return;
        }
        if element.asked.take().is_some() {
            // Without an answer the element turns to another registrar.
            return self.hunt(number);
        }
        let end = element.end;
        if element.home.is_none() {
            let to = self.rng.index(registrars);
            if !self.is_up(to) || self.net.is_cut(end, to) {
                return self.hunt(number);
            }
            let known = self.net.between(end, to, Protocol::Asap);
            let link = known.unwrap_or_else(|| self.net.open([end, to], Protocol::Asap));
            self.elements[number].home = Some(link);
            if known.is_none() {
                let here = address(end, registrars, Protocol::Asap);
                self.feed(to, |machine, now| {
                    let association = AssociationId(link);
                    machine.handle_up(now, association, Protocol::Asap, &[here], None);
                });
            }
        }
        let element = &mut self.elements[number];
        let message = element.registration(registrars);
        let link = element.home.unwrap();
        element.asked = Some(self.now);
        element.next = self.now + PATIENCE;
        self.at(PATIENCE, What::Element { element: number });
        self.say(number, link, message);
    }

    fn say(&mut self, element: usize, link: u64, message: Message) {
        if let Some(message) = self.fault.heard(message) {
            let end = self.elements[element].end;
            self.send(end, link, encoded(&message));
        }
    }

    pub fn element_hears(&mut self, number: usize, link: u64, bytes: &Bytes) {
        let now = self.now;
        let element = &mut self.elements[number];
        if !element.alive {
            return;
        }
        let message = Message::parse(bytes).unwrap().message;
        let (asked, next) = (element.asked, element.next);
        let answer = element.take(now, link, message);
        if (asked.is_some() && element.asked.is_none()) || element.next != next {
            element.next = now + RENEWAL;
            self.at(RENEWAL, What::Element { element: number });
        }
        if let Some(answer) = answer {
            self.say(number, link, answer);
        }
    }

    pub fn leave(&mut self, number: usize) {
        let element = &mut self.elements[number];
        let Some(link) = element.home.filter(|_| element.alive) else {
            return;
        };
        self.trouble = self.now;
        element.alive = false;
        element.home = None;
        element.granted = false;
        let (handle, id) = (element.handle.clone(), element.id);
        self.say(number, link, Message::Deregistration { handle, id });
    }

    /// Checks the removal of an element: a live one must not be removed while nothing fails.
    pub fn removed(&self, handle: &PoolHandle, id: ElementId, why: Gone) {
        let mut elements = self.elements.iter();
        let element = elements.find(|element| element.id == id && element.handle == *handle);
        let lives = element.is_some_and(|element| element.alive);
        let calm = self.now.saturating_sub(self.trouble) > BOUND && !self.hostile;
        assert!(
            !(lives && calm),
            "{:?}: {id:?} was removed: {why:?}",
            self.now
        );
    }

    /// Checks that each live element has one home and is in every view, unless something failed a short while ago.
    pub fn check(&mut self) {
        let calm = self.now.saturating_sub(self.trouble) > BOUND && self.net.cuts.is_empty();
        for number in 0..self.elements.len() {
            let element = &self.elements[number];
            let machines = || self.nodes.iter().filter_map(|node| node.machine.as_ref());
            let views = machines().map(|m| m.element(&element.handle, element.id));
            let in_all = views.clone().all(|view| view.is_some());
            let homes = machines()
                .zip(views)
                .filter(|(machine, view)| view.is_some_and(|view| view.home == machine.id()));
            let homes = homes.count();
            if homes > 1 && !self.odd.contains_key(&number) {
                self.tally.count("two homes");
            }
            let fine = homes <= 1 && (in_all || !element.granted);
            if fine {
                self.odd.remove(&number);
                continue;
            }
            let since = *self.odd.entry(number).or_insert(self.now);
            let long = self.now - since > BOUND;
            assert!(
                !(calm && long && !self.hostile),
                "{:?}: element {number} has {homes} homes, in all views: {in_all}, since {since:?}",
                self.now
            );
        }
    }

    /// Checks at rest that all views are equal, and right.
    pub fn check_end(&self) {
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
            assert_eq!(peers, all, "{id:?} knows the others and nobody else");
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
                    "{id:?} of {:?}",
                    other.id()
                );
            }
            let live = self.elements.iter().filter(|element| element.alive);
            machine.each_element(|handle, element| {
                let mut live = live.clone();
                let lives = live.any(|live| live.handle == *handle && live.id == element.id);
                assert!(lives, "{id:?} has the dead {element:?}");
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
