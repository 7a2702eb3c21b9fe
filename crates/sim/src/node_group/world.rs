//! The events of a group, independent of the kind of its state machines.

use super::group_core::{Event, GroupCore};
use super::protocol_machine::{MachineOutput, ProtocolMachine};
use super::{GroupAction, GroupRunConfig, node_id, node_index};
use crate::random::Random;
use crate::time::Time;
use holdfast_wire::Frame;
use std::fmt::Debug;
use std::time::Duration;

/// A group with daemons that run one kind of state machine.
pub(crate) trait GroupWorld: Sized {
    /// The specific part of its configs.
    type Specific;
    type Machine: ProtocolMachine;
    /// An action of a daemon for its state machine.
    type Event: Debug;

    /// Creates the group with all daemons running and their channels up.
    fn new(config: &GroupRunConfig<Self::Specific>, seed: u64) -> Self;

    fn core(&mut self) -> &mut GroupCore<Self::Machine, Self::Event>;

    fn timers_fire(&self) -> bool;

    /// Handles a frame sent by a state machine.
    fn send(&mut self, from: usize, to: usize, frame: Frame);

    /// Handles the arrival of a frame at a live daemon.
    fn deliver(&mut self, from: usize, to: usize, frame: Frame);

    /// Starts a command of a state machine.
    fn start_command(&mut self, node: usize, command: <Self::Machine as ProtocolMachine>::Command);

    /// Handles an event reported by a state machine.
    fn handle_event(&mut self, node: usize, event: <Self::Machine as ProtocolMachine>::Event);

    /// Executes an action of a daemon.
    fn execute_action(&mut self, node: usize, event: Self::Event);

    /// Handles the death of a live daemon.
    fn crash(&mut self, node: usize);

    /// Restarts a dead daemon.
    fn restart(&mut self, node: usize);

    fn request(&mut self, random: &mut Random);
    fn cancel(&mut self);
    fn serve_all(&mut self);
    fn close(&mut self, random: &mut Random);
    fn open(&mut self, random: &mut Random);
    fn change_contact(&mut self, random: &mut Random);
    fn kill(&mut self, random: &mut Random);

    /// Checks the invariants that hold after every event.
    fn check(&mut self) -> Result<(), String>;

    /// Checks the invariants that hold after the end of all faults and activity.
    fn check_end(&mut self) -> Result<(), String>;

    /// Returns true if no live state machine has work left.
    #[cfg(test)]
    fn is_idle(&mut self) -> bool {
        let mut daemons = self.core().daemons.iter();
        let idle = |machine: &Self::Machine| machine.is_idle();
        daemons.all(|daemon| daemon.machine.as_ref().is_none_or(idle))
    }

    /// Gives a live daemon's state machine an input, and executes its outputs.
    fn drive_machine(&mut self, node: usize, give: impl FnOnce(&mut Self::Machine, Duration)) {
        let now = Duration::from(self.core().now);
        let Some(machine) = self.core().daemons[node].machine.as_mut() else {
            return;
        };
        give(machine, now);
        let next_output = |core: &mut GroupCore<Self::Machine, Self::Event>| {
            let machine = core.daemons[node].machine.as_mut();
            machine.and_then(ProtocolMachine::next_output)
        };
        while let Some(output) = next_output(self.core()) {
            self.core()
                .add_to_trace(|| format!("node {}: {output:?}", node_id(node)));
            match output {
                MachineOutput::Send { to, frame } => self.send(node, node_index(to), frame),
                MachineOutput::Do(command) => self.start_command(node, command),
                MachineOutput::Event(event) => self.handle_event(node, event),
            }
        }
        let core = self.core();
        let daemon = &mut core.daemons[node];
        let due = daemon
            .machine
            .as_ref()
            .and_then(ProtocolMachine::next_timeout);
        if let Some(at) = due
            && due != daemon.next_timeout
        {
            daemon.next_timeout = due;
            let incarnation = daemon.incarnation;
            core.queue
                .push(Time::from(at), Event::Wake { node, incarnation });
        }
    }

    /// Sets the channel up, if possible.
    fn connect(&mut self, a: usize, b: usize) {
        let core = self.core();
        let alive = core.is_alive(a) && core.is_alive(b);
        let now = core.now;
        let channel = core.channels.between(a, b);
        if channel.up || channel.is_cut || !alive {
            return;
        }
        if !channel.not_notified.is_empty() {
            return core.schedule(Time::from_micros(10_000), Event::Connect { a, b });
        }
        channel.set_up(now);
        for (node, peer) in [(a, b), (b, a)] {
            self.drive_machine(node, |machine, now| {
                machine.peer_connected(now, node_id(peer))
            });
        }
    }

    fn execute_planned(&mut self, action: GroupAction) {
        match action {
            GroupAction::Crash(node) if self.core().is_alive(node) => self.crash(node),
            GroupAction::Restart(node) if !self.core().is_alive(node) => self.restart(node),
            GroupAction::Crash(_) | GroupAction::Restart(_) => {}
            GroupAction::Cut(a, b) => {
                let core = self.core();
                core.channels.between(a, b).is_cut = true;
                core.break_channel(a, b, 300_000);
            }
            GroupAction::Mend(a, b) => {
                let core = self.core();
                core.channels.between(a, b).is_cut = false;
                core.schedule(Time::from_micros(1_000), Event::Connect { a, b });
            }
            GroupAction::Request { draw } => self.request(&mut Random::new(draw)),
            GroupAction::Cancel => self.cancel(),
            GroupAction::Serve => self.serve_all(),
            GroupAction::Close { draw } => self.close(&mut Random::new(draw)),
            GroupAction::Open { draw } => self.open(&mut Random::new(draw)),
            GroupAction::ChangeContact { draw } => self.change_contact(&mut Random::new(draw)),
            GroupAction::Kill { draw } => self.kill(&mut Random::new(draw)),
        }
    }

    /// Handles the next event, if it is not after `until`; returns true if there was one.
    fn handle_next(&mut self, until: Time) -> bool {
        let core = self.core();
        if core.violation.is_some() {
            return false;
        }
        let Some(event) = core.pop(until) else {
            return false;
        };
        core.add_to_trace(|| format!("{event:?}"));
        self.handle(event);
        if let Err(what) = self.check() {
            self.core().set_violation(what);
        }
        true
    }

    fn handle(&mut self, event: Event<Self::Event>) {
        match event {
            Event::Deliver {
                from,
                to,
                incarnation: life,
                frame,
            } => {
                let channel = self.core().channels.between(from, to);
                let is_delivered = channel.up && channel.incarnation == life;
                if is_delivered && self.core().is_alive(to) {
                    self.deliver(from, to, frame);
                }
            }
            Event::Wake {
                node,
                incarnation: life,
            } if self.core().incarnation(node) == life => {
                self.core().daemons[node].next_timeout = None;
                if self.timers_fire() {
                    self.drive_machine(node, ProtocolMachine::timeout);
                }
            }
            Event::DaemonAction {
                node,
                incarnation: life,
                event,
            } if self.core().incarnation(node) == life => {
                self.execute_action(node, event);
            }
            Event::Wake { .. } | Event::DaemonAction { .. } => {}
            Event::PeerLost { node, peer } => {
                let channel = self.core().channels.between(node, peer);
                channel.not_notified.retain(|other| *other != node);
                self.drive_machine(node, |machine, now| machine.peer_lost(now, node_id(peer)));
            }
            Event::Connect { a, b } => self.connect(a, b),
            Event::Planned(action) => self.execute_planned(action),
            Event::Heal => self.core().heal(),
        }
    }
}
