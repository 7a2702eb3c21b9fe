//! Failures, and the elements' actions.

use crate::element::{ANSWER_TIMEOUT, REREGISTRATION_INTERVAL};
use crate::world::{World, WorldEvent, encoded};
use bytes::Bytes;
use holdfast_proto::registrar::PoolProtocol;
use holdfast_sim::Time;
use holdfast_sim::associations::{
    AssociationNumber, AssociationSide, AssociationWorld, NodeNumber,
};
use holdfast_sim::pools::node_numbers::NodeRole;
use holdfast_wire::rserpool::asap::Message;
use std::time::Duration;

impl World {
    pub fn crash_registrar(&mut self, index: usize) {
        if self.registrars[index].machine.take().is_some() {
            self.last_fault = self.now;
            self.on_process_end(NodeRole::Registrar(index));
        }
    }

    pub fn kill_element(&mut self, index: usize) {
        let element = &mut self.elements[index];
        if element.alive {
            element.alive = false;
            element.home = None;
            element.is_registered = false;
            self.last_fault = self.now;
            self.on_process_end(NodeRole::Element(index));
        }
    }

    /// Handles the death of a process, of which the other sides hear soon, or of its host, which they notice by
    /// themselves.
    fn on_process_end(&mut self, role: NodeRole) {
        let is_host = self.random.chance(0.4);
        self.close_all(self.numbers.number(role), |world| match is_host {
            true => Duration::from_millis(world.random.between(2_000, 9_000)).into(),
            false => Time::ZERO,
        });
    }

    /// Cuts the network between two nodes. After too long a cut their associations break, on both sides and at
    /// different times.
    pub fn cut(&mut self, a: NodeNumber, b: NodeNumber) {
        self.last_fault = self.now;
        self.cut_pairs.insert((a.min(b), a.max(b)));
        for association in self.associations_between(a, b) {
            for side in 0..2 {
                let after = Duration::from_millis(self.random.between(800, 3_000));
                self.schedule(after, WorldEvent::GiveUp { association, side });
            }
        }
    }

    pub fn restore(&mut self, a: NodeNumber, b: NodeNumber) {
        self.last_fault = self.now;
        self.cut_pairs.remove(&(a.min(b), a.max(b)));
        self.send_queued();
    }

    /// Lets an end give up an association that is still cut. The other end notices soon after.
    pub fn give_up(&mut self, association: AssociationNumber, side: AssociationSide) {
        let [a, b] = self.association(association).ends;
        if !self.is_cut(a, b) {
            return;
        }
        let now = self.now();
        let other_notices = now + Time::from_micros(100_000) + self.delay();
        let mut notices = [Some(other_notices); 2];
        notices[usize::from(side)] = Some(now);
        self.end_association(association, notices);
    }

    pub fn seek_registrar(&mut self, index: usize) {
        let after = Duration::from_millis(self.random.between(1, 60));
        let element = &mut self.elements[index];
        element.home = None;
        element.request_time = None;
        element.next_action = self.now + after;
        self.schedule(after, WorldEvent::ElementWake { element: index });
    }

    /// Lets an element register, or seek a registrar.
    pub fn run_element(&mut self, index: usize) {
        let element = &mut self.elements[index];
        if !element.alive || self.now < element.next_action {
            return;
        }
        if element.request_time.take().is_some() {
            // Without an answer the element turns to another registrar.
            return self.seek_registrar(index);
        }
        let node = element.node;
        if element.home.is_none() {
            let to = self.random.below(self.registrars.len()) as NodeNumber;
            if !self.is_alive(to) || self.is_cut(node, to) {
                return self.seek_registrar(index);
            }
            let known = self.established_association(node, to, PoolProtocol::Asap);
            let home = known.unwrap_or_else(|| self.connect(node, to, PoolProtocol::Asap, None));
            self.elements[index].home = Some(home);
        }
        let element = &mut self.elements[index];
        let message = element.registration();
        element.request_time = Some(self.now);
        element.next_action = self.now + ANSWER_TIMEOUT;
        if let Some(home) = element.home {
            self.send_from_element(index, home, &message);
        }
        self.schedule(ANSWER_TIMEOUT, WorldEvent::ElementWake { element: index });
    }

    fn send_from_element(
        &mut self,
        index: usize,
        association: AssociationNumber,
        message: &Message,
    ) {
        let node = self.elements[index].node;
        self.send(node, association, encoded(message));
    }

    pub fn on_element_message(
        &mut self,
        index: usize,
        association: AssociationNumber,
        bytes: &Bytes,
    ) {
        let now = self.now;
        let element = &mut self.elements[index];
        if !element.alive {
            return;
        }
        let message = Message::parse(bytes).expect("a message").message;
        let (asked, next) = (element.request_time, element.next_action);
        let answer = element.handle_message(now, association, message);
        if (asked.is_some() && element.request_time.is_none()) || element.next_action != next {
            element.next_action = now + REREGISTRATION_INTERVAL;
            self.schedule(
                REREGISTRATION_INTERVAL,
                WorldEvent::ElementWake { element: index },
            );
        }
        if let Some(answer) = answer {
            self.send_from_element(index, association, &answer);
        }
    }

    pub fn start_element(&mut self, index: usize) {
        let element = &mut self.elements[index];
        if !element.alive {
            element.alive = true;
            element.next_action = self.now;
            self.last_fault = self.now;
            self.schedule(Duration::ZERO, WorldEvent::ElementWake { element: index });
        }
    }

    pub fn deregister_element(&mut self, index: usize) {
        let element = &mut self.elements[index];
        let Some(home) = element.home.filter(|_| element.alive) else {
            return;
        };
        self.last_fault = self.now;
        element.alive = false;
        element.home = None;
        element.is_registered = false;
        let (handle, id) = (element.handle.clone(), element.id);
        self.send_from_element(index, home, &Message::Deregistration { handle, id });
    }
}
