//! Registrars: the state machine, and its daemon's actions.

use super::associations::{Name, id, of_id};
use super::node::{self, Role};
use super::world::{Event, World};
use crate::time::Time;
use holdfast_proto::registrar::{Allow, Config, LifeUnit, Output, Protocol, Registrar};
use std::time::Duration;

/// Delay before a daemon's first measurement of the distance to a peer, and interval between further ones.
const MEASURE: Duration = Duration::from_millis(250);
const MEASURE_AGAIN: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct RegistrarNode {
    /// The state machine; none if the registrar is dead.
    pub(super) machine: Option<Registrar>,
    pub(super) lives: u32,
    pub(super) wake: Option<Time>,
}

impl World<'_> {
    /// Starts or restarts a registrar. The registrars before it are its mentors: so the first one starts alone, and all
    /// others have a mentor.
    pub(super) fn start_registrar(&mut self, index: usize) {
        if self.registrars[index].machine.is_some() {
            return;
        }
        let registrar = &mut self.registrars[index];
        registrar.lives += 1;
        registrar.wake = None;
        let (node, again) = (index as u32, registrar.lives > 1);
        let id = node::registrar_id(index, registrar.lives);
        let transport = node::sctp(node, Protocol::Enrp);
        let mut config = Config::new(id, self.random.number(), transport);
        config.settings = self.config.registrar.clone();
        if self.config.choice.is_users() {
            config.settings.resolution_items = config.settings.resolution_items_max;
        }
        config.settings.life_unit = LifeUnit::Seconds;
        config.settings.access.registrar = Allow::Only(
            (0..self.nodes.registrars() as u32)
                .map(|other| node::endpoint(other, Protocol::Enrp).ip().to_string())
                .filter_map(|address| address.parse().ok())
                .collect(),
        );
        config.mentors = (0..self.nodes.registrars() as u32)
            .filter(|other| *other < node || again && *other != node)
            .map(|other| vec![node::endpoint(other, Protocol::Enrp)])
            .collect();
        self.registrars[index].machine = Some(Registrar::new(self.now.into(), config));
        self.registrar(index, |_, _| ());
    }

    pub(super) fn kill_registrar(&mut self, index: usize) {
        if self.registrars[index].machine.take().is_some() {
            self.registrars[index].wake = None;
            let node = index as u32;
            self.directory.retain(|(end, ..), _| *end != node);
            self.close_all(node);
        }
    }

    /// Gives a registrar's state machine an input, and executes its outputs.
    #[inline]
    pub(super) fn registrar(&mut self, index: usize, input: impl FnOnce(&mut Registrar, Duration)) {
        let now = self.now.into();
        let Some(machine) = &mut self.registrars[index].machine else {
            return;
        };
        input(machine, now);
        while let Some(output) = self.registrars[index]
            .machine
            .as_mut()
            .and_then(Registrar::poll_output)
        {
            self.carry_out(index, output);
        }
        let registrar = &mut self.registrars[index];
        let due = registrar.machine.as_ref().and_then(Registrar::poll_timeout);
        let wake = &mut registrar.wake;
        super::timers::rearm(&mut self.queue, index as u32, wake, due);
    }

    #[inline]
    fn carry_out(&mut self, index: usize, output: Output) {
        match output {
            Output::Send { to, message, .. } => {
                let (association, side) = of_id(to);
                self.send(association, side, message);
            }
            Output::SendMany { to, message, .. } => {
                for to in to.iter() {
                    let (association, side) = of_id(*to);
                    self.send(association, side, message.clone());
                }
            }
            Output::Connect {
                dial,
                protocol,
                addresses,
            } => {
                let node = index as u32;
                let to = addresses.first().and_then(|at| node::node_at(at.ip()));
                let Some(to) = to.filter(|to| *to != node) else {
                    return self.queue.push(self.now, Event::DialFailed { index, dial });
                };
                match self.directory.get(&(node, to, protocol)) {
                    // An association exists already.
                    Some(&(association, side)) => {
                        let id = id(association, side);
                        let up = Event::DialledAgain {
                            index,
                            dial,
                            protocol,
                            id,
                        };
                        self.queue.push(self.now, up);
                    }
                    None => {
                        self.connect(node, to, protocol, Name::Dial(dial));
                    }
                }
            }
            Output::Multicast { .. } | Output::Event(_) => {}
            Output::Measure(to) => {
                let (association, side) = of_id(to);
                let measure = Event::Measure { association, side };
                self.queue.push(self.now + MEASURE.into(), measure);
            }
            Output::Abort(to) => {
                let (association, side) = of_id(to);
                self.close(association, side);
                let down = Event::Aborted { association, side };
                self.queue.push(self.now, down);
            }
        }
    }

    /// Tells a registrar the distance to the other end; repeatedly, if delays vary.
    pub(super) fn tell_round_trip(&mut self, association: u32, side: u8) {
        let known = &self.associations[association as usize];
        let Role::Registrar(index) = self.nodes.role(known.ends[usize::from(side)]) else {
            return;
        };
        if !known.up[usize::from(side)] {
            return;
        }
        let (id, round_trip) = (id(association, side), known.round_trip());
        let mut goes_on = self.delays_vary;
        self.registrar(index, |machine, now| {
            goes_on &= machine.measures(id);
            machine.handle_round_trip(now, id, round_trip);
        });
        if goes_on {
            let measure = Event::Measure { association, side };
            self.queue.push(self.now + MEASURE_AGAIN.into(), measure);
        }
    }

    /// Handles the end of an association that its registrar aborted.
    pub(super) fn aborted(&mut self, association: u32, side: u8) {
        let known = &self.associations[association as usize];
        let (node, other) = (
            known.ends[usize::from(side)],
            known.ends[usize::from(1 - side)],
        );
        let protocol = known.protocol;
        if let Role::Registrar(index) = self.nodes.role(node) {
            let key = (node, other, protocol);
            if self.directory.get(&key) == Some(&(association, side)) {
                self.directory.remove(&key);
            }
            let id = id(association, side);
            self.registrar(index, |machine, now| machine.handle_down(now, id));
        }
    }
}
