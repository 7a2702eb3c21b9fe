//! The events of a group, independent of the kind of its state machines.

use super::core::{Core, Event};
use super::machine::{Machine, Said};
use super::{Action, Config, id, index};
use crate::random::Random;
use crate::time::Time;
use holdfast_wire::Frame;
use std::fmt::Debug;
use std::time::Duration;

/// A group with daemons that run one kind of state machine.
pub(crate) trait World: Sized {
    /// The specific part of its configs.
    type Own;
    type Machine: Machine;
    /// An action of a daemon for its state machine.
    type Event: Debug;

    /// Creates the group with all daemons running and their channels up.
    fn new(config: &Config<Self::Own>, seed: u64) -> Self;

    fn core(&mut self) -> &mut Core<Self::Machine, Self::Event>;

    fn timers_fire(&self) -> bool;

    /// Handles a frame sent by a state machine.
    fn send(&mut self, from: usize, to: usize, frame: Frame);

    /// Handles the arrival of a frame at a live daemon.
    fn deliver(&mut self, from: usize, to: usize, frame: Frame);

    /// Starts a command of a state machine.
    fn begin(&mut self, node: usize, command: <Self::Machine as Machine>::Command);

    /// Handles an event reported by a state machine.
    fn event(&mut self, node: usize, event: <Self::Machine as Machine>::Event);

    /// Executes an action of a daemon.
    fn step(&mut self, node: usize, event: Self::Event);

    /// Handles the death of a live daemon.
    fn crash(&mut self, node: usize);

    /// Restarts a dead daemon.
    fn restart(&mut self, node: usize);

    fn request(&mut self, random: &mut Random);
    fn cancel(&mut self);
    fn work(&mut self);
    fn close(&mut self, random: &mut Random);
    fn open(&mut self, random: &mut Random);
    fn kill(&mut self, random: &mut Random);

    /// Checks the invariants that hold after every event.
    fn check(&mut self) -> Result<(), String>;

    /// Checks the invariants that hold after the end of all faults and activity.
    fn check_end(&mut self) -> Result<(), String>;

    /// Returns true if no live state machine has work left.
    #[cfg(test)]
    fn is_at_rest(&mut self) -> bool {
        let mut daemons = self.core().daemons.iter();
        let idle = |machine: &Self::Machine| machine.is_at_rest();
        daemons.all(|daemon| daemon.machine.as_ref().is_none_or(idle))
    }

    /// Gives a live daemon's state machine an input, and executes its outputs.
    fn input(&mut self, node: usize, give: impl FnOnce(&mut Self::Machine, Duration)) {
        let now = Duration::from(self.core().now);
        let Some(machine) = self.core().daemons[node].machine.as_mut() else {
            return;
        };
        give(machine, now);
        let said = |core: &mut Core<Self::Machine, Self::Event>| {
            let machine = core.daemons[node].machine.as_mut();
            machine.and_then(Machine::said)
        };
        while let Some(said) = said(self.core()) {
            self.core().note(|| format!("node {}: {said:?}", id(node)));
            match said {
                Said::Send { to, frame } => self.send(node, index(to), frame),
                Said::Do(command) => self.begin(node, command),
                Said::Event(event) => self.event(node, event),
            }
        }
        let core = self.core();
        let daemon = &mut core.daemons[node];
        let due = daemon.machine.as_ref().and_then(Machine::due);
        if let Some(at) = due
            && due != daemon.wake
        {
            daemon.wake = due;
            let life = daemon.life;
            core.queue.push(Time::from(at), Event::Wake { node, life });
        }
    }

    /// Sets the channel up, if possible.
    fn connect(&mut self, a: usize, b: usize) {
        let core = self.core();
        let alive = core.is_alive(a) && core.is_alive(b);
        let now = core.now;
        let channel = core.channels.between(a, b);
        if channel.up || channel.cut || !alive {
            return;
        }
        if !channel.unaware.is_empty() {
            return core.at(Time::from_micros(10_000), Event::Connect { a, b });
        }
        channel.begin(now);
        for (node, peer) in [(a, b), (b, a)] {
            self.input(node, |machine, now| machine.peer_connected(now, id(peer)));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Crash(node) if self.core().is_alive(node) => self.crash(node),
            Action::Restart(node) if !self.core().is_alive(node) => self.restart(node),
            Action::Crash(_) | Action::Restart(_) => {}
            Action::Cut(a, b) => {
                let core = self.core();
                core.channels.between(a, b).cut = true;
                core.break_channel(a, b, 300_000);
            }
            Action::Mend(a, b) => {
                let core = self.core();
                core.channels.between(a, b).cut = false;
                core.at(Time::from_micros(1_000), Event::Connect { a, b });
            }
            Action::Request { draw } => self.request(&mut Random::new(draw)),
            Action::Cancel => self.cancel(),
            Action::Work => self.work(),
            Action::Close { draw } => self.close(&mut Random::new(draw)),
            Action::Open { draw } => self.open(&mut Random::new(draw)),
            Action::Kill { draw } => self.kill(&mut Random::new(draw)),
        }
    }

    /// Handles the next event, if it is not after `until`; returns true if there was one.
    fn next(&mut self, until: Time) -> bool {
        let core = self.core();
        if core.violation.is_some() {
            return false;
        }
        let Some(event) = core.pop(until) else {
            return false;
        };
        core.note(|| format!("{event:?}"));
        self.happen(event);
        if let Err(what) = self.check() {
            self.core().violated(what);
        }
        true
    }

    fn happen(&mut self, event: Event<Self::Event>) {
        match event {
            Event::Deliver {
                from,
                to,
                life,
                frame,
            } => {
                let channel = self.core().channels.between(from, to);
                let arrives = channel.up && channel.life == life;
                if arrives && self.core().is_alive(to) {
                    self.deliver(from, to, frame);
                }
            }
            Event::Wake { node, life } if self.core().life(node) == life => {
                self.core().daemons[node].wake = None;
                if self.timers_fire() {
                    self.input(node, Machine::timeout);
                }
            }
            Event::Own { node, life, event } if self.core().life(node) == life => {
                self.step(node, event);
            }
            Event::Wake { .. } | Event::Own { .. } => {}
            Event::Lost { node, peer } => {
                let channel = self.core().channels.between(node, peer);
                channel.unaware.retain(|other| *other != node);
                self.input(node, |machine, now| machine.peer_lost(now, id(peer)));
            }
            Event::Connect { a, b } => self.connect(a, b),
            Event::Act(action) => self.act(action),
            Event::Heal => self.core().heal(),
        }
    }
}
