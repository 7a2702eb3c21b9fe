//! Registrars: the state machine, and its daemon's actions.

use super::associations::{InitiatorName, association_id, from_association_id};
use super::node_numbers::{self, NodeRole};
use super::world::{PoolWorld, PoolWorldEvent};
use crate::associations::{AssociationNumber, AssociationSide, AssociationWorld};
use crate::machine_timer::MachineTimer;
use crate::time::Time;
use holdfast_proto::registrar::{
    LifeUnit, Output, PermittedHosts, PoolProtocol, Registrar, RegistrarMachineConfig,
};
use std::time::Duration;

/// Delay before a daemon's first measurement of the distance to a peer, and interval between further ones.
const FIRST_MEASUREMENT_DELAY: Duration = Duration::from_millis(250);
const MEASUREMENT_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct RegistrarNode {
    /// The state machine; none if the registrar is dead.
    pub(super) machine: Option<Registrar>,
    pub(super) incarnations: u32,
    pub(super) timer: MachineTimer,
}

impl PoolWorld<'_> {
    /// Starts or restarts a registrar. The registrars before it are its mentors: so the first one starts alone, and all
    /// others have a mentor.
    pub(super) fn start_registrar(&mut self, index: usize) {
        if self.registrars[index].machine.is_some() {
            return;
        }
        let registrar = &mut self.registrars[index];
        registrar.incarnations += 1;
        registrar.timer = MachineTimer::default();
        let (node, again) = (index as u32, registrar.incarnations > 1);
        let id = node_numbers::registrar_id(index, registrar.incarnations);
        let transport = node_numbers::sctp_transport(node, PoolProtocol::Enrp);
        let mut config = RegistrarMachineConfig::new(id, self.random.number(), transport);
        config.settings = self.config.registrar.clone();
        if self.config.choice.is_made_by_users() {
            config.settings.resolution_items = config.settings.resolution_items_max;
        }
        config.settings.life_unit = LifeUnit::Seconds;
        config.settings.access.registrar = PermittedHosts::Only(
            (0..self.nodes.registrars() as u32)
                .map(|other| {
                    node_numbers::endpoint(other, PoolProtocol::Enrp)
                        .ip()
                        .to_string()
                })
                .filter_map(|address| address.parse().ok())
                .collect(),
        );
        config.mentors = (0..self.nodes.registrars() as u32)
            .filter(|other| *other < node || again && *other != node)
            .map(|other| vec![node_numbers::endpoint(other, PoolProtocol::Enrp)])
            .collect();
        self.registrars[index].machine = Some(Registrar::new(self.now.into(), config));
        self.drive_registrar(index, |_, _| ());
    }

    pub(super) fn kill_registrar(&mut self, index: usize) {
        if self.registrars[index].machine.take().is_some() {
            self.registrars[index].timer = MachineTimer::default();
            let node = index as u32;
            self.open_associations.retain(|(end, ..), _| *end != node);
            self.close_all(node, |_| Time::ZERO);
        }
    }

    /// Gives a registrar's state machine an input, and executes its outputs.
    #[inline]
    pub(super) fn drive_registrar(
        &mut self,
        index: usize,
        input: impl FnOnce(&mut Registrar, Duration),
    ) {
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
            self.execute(index, output);
        }
        self.arm_timer(NodeRole::Registrar(index));
    }

    #[inline]
    fn execute(&mut self, index: usize, output: Output) {
        match output {
            Output::Send { to, message, .. } => {
                let (association, side) = from_association_id(to);
                self.send(association, side, message);
            }
            Output::SendMany { to, message, .. } => {
                for to in to.iter() {
                    let (association, side) = from_association_id(*to);
                    self.send(association, side, message.clone());
                }
            }
            Output::Connect {
                dial,
                protocol,
                addresses,
            } => {
                let node = index as u32;
                let to = addresses
                    .first()
                    .and_then(|at| node_numbers::node_at(at.ip()));
                let Some(to) = to.filter(|to| *to != node) else {
                    return self
                        .queue
                        .push(self.now, PoolWorldEvent::DialFailed { index, dial });
                };
                match self.open_associations.get(&(node, to, protocol)) {
                    // An association exists already.
                    Some(&(association, side)) => {
                        let id = association_id(association, side);
                        let up = PoolWorldEvent::DialledAgain {
                            index,
                            dial,
                            protocol,
                            id,
                        };
                        self.queue.push(self.now, up);
                    }
                    None => {
                        self.connect(node, to, protocol, InitiatorName::Dial(dial));
                    }
                }
            }
            Output::Multicast { .. } | Output::Event(_) => {}
            Output::Measure(to) => {
                let (association, side) = from_association_id(to);
                let measure = PoolWorldEvent::Measure { association, side };
                self.queue
                    .push(self.now + FIRST_MEASUREMENT_DELAY.into(), measure);
            }
            Output::Abort(to) => {
                let (association, side) = from_association_id(to);
                self.close(association, side);
                let down = PoolWorldEvent::Aborted { association, side };
                self.queue.push(self.now, down);
            }
        }
    }

    /// Tells a registrar the distance to the other end; repeatedly, if delays vary.
    pub(super) fn report_round_trip(
        &mut self,
        association: AssociationNumber,
        side: AssociationSide,
    ) {
        let state = &self.associations[association as usize];
        let NodeRole::Registrar(index) = self.nodes.role(state.end(side)) else {
            return;
        };
        if !state.is_up(side) {
            return;
        }
        let (id, round_trip) = (association_id(association, side), state.data.round_trip());
        let mut is_repeated = self.has_variable_delays;
        self.drive_registrar(index, |machine, now| {
            is_repeated &= machine.needs_measurement(id);
            machine.handle_round_trip(now, id, round_trip);
        });
        if is_repeated {
            let measure = PoolWorldEvent::Measure { association, side };
            self.queue
                .push(self.now + MEASUREMENT_INTERVAL.into(), measure);
        }
    }

    /// Handles the end of an association that its registrar aborted.
    pub(super) fn on_abort(&mut self, association: AssociationNumber, side: AssociationSide) {
        let state = &self.associations[association as usize];
        let (node, other) = (state.end(side), state.end(1 - side));
        let protocol = state.data.protocol;
        if let NodeRole::Registrar(index) = self.nodes.role(node) {
            let key = (node, other, protocol);
            if self.open_associations.get(&key) == Some(&(association, side)) {
                self.open_associations.remove(&key);
            }
            let id = association_id(association, side);
            self.drive_registrar(index, |machine, now| {
                machine.handle_association_down(now, id)
            });
        }
    }
}
