//! The clock, the daemons, the channels and the holder's records.

use super::channels::Channels;
use super::{FaultFrequencies, GroupAction, GroupRunConfig, node_id, pairs};
use crate::Violation;
use crate::event_queue::FutureEvents;
use crate::random::Random;
use crate::time::Time;
use holdfast_wire::{ChangeRefusal, Flow, Frame, OwnershipRecord};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A queued event; `E` is an action of a daemon for its state machine.
#[derive(Debug)]
pub(crate) enum Event<E> {
    Deliver {
        from: usize,
        to: usize,
        incarnation: u64,
        frame: Frame,
    },
    Wake {
        node: usize,
        incarnation: u64,
    },
    /// One side learns that a channel broke.
    PeerLost {
        node: usize,
        peer: usize,
    },
    Connect {
        a: usize,
        b: usize,
    },
    Planned(GroupAction),
    /// All faults end.
    Heal,
    DaemonAction {
        node: usize,
        incarnation: u64,
        event: E,
    },
}

impl<E> Event<E> {
    /// Returns a key that mostly distinguishes events at the same time.
    fn key(&self) -> u64 {
        let (kind, a, b) = match self {
            Event::Deliver { from, to, .. } => (0, *from, *to),
            Event::Wake { node, .. } => (1, *node, 0),
            Event::PeerLost { node, peer } => (2, *node, *peer),
            Event::Connect { a, b } => (3, *a, *b),
            Event::Planned(GroupAction::Restart(node)) => (4, *node, 0),
            Event::Planned(_) | Event::Heal => (5, 0, 0),
            Event::DaemonAction { node, .. } => (6, *node, 0),
        };
        kind << 40 | (a as u64) << 20 | b as u64
    }
}

/// The simulated daemon of one node.
#[derive(Debug)]
pub(crate) struct Daemon<M> {
    /// The daemon's state machine; none if the daemon is dead.
    pub(crate) machine: Option<M>,
    /// Incarnation of the daemon: number of its deaths.
    pub(crate) incarnation: u64,
    pub(super) next_timeout: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct GroupCore<M, E> {
    pub(crate) now: Time,
    pub(crate) random: Random,
    pub(crate) daemons: Vec<Daemon<M>>,
    pub(crate) holder: usize,
    pub(crate) steering: BTreeMap<Flow, OwnershipRecord>,
    /// Flows that the oracle must check.
    pub(crate) changed_flows: Vec<Flow>,
    /// True if channels were hostile before all faults ended.
    pub(crate) was_hostile: bool,
    pub(crate) violation: Option<Violation>,
    pub(crate) counts: BTreeMap<String, u64>,
    pub(super) hostile: bool,
    pub(super) failing: bool,
    pub(super) faults: FaultFrequencies,
    pub(super) queue: FutureEvents<Event<E>>,
    pub(super) channels: Channels,
    pub(super) events: u64,
    pub(super) digest: u64,
    seed: u64,
    pub(super) trace: Option<Vec<String>>,
    /// Requests sent to the holder: node, incarnation, request number.
    sent_requests: BTreeSet<(usize, u64, u64)>,
}

impl<M, E> GroupCore<M, E> {
    pub(crate) fn new<K>(config: &GroupRunConfig<K>, seed: u64) -> GroupCore<M, E> {
        let daemon = |_| Daemon {
            machine: None,
            incarnation: 0,
            next_timeout: None,
        };
        GroupCore {
            now: Time::ZERO,
            random: Random::new(seed),
            daemons: (0..config.nodes).map(daemon).collect(),
            holder: config.holder,
            steering: BTreeMap::new(),
            changed_flows: Vec::new(),
            was_hostile: config.hostile,
            violation: None,
            counts: BTreeMap::new(),
            hostile: config.hostile,
            failing: config.failing,
            faults: config.faults,
            queue: FutureEvents::default(),
            channels: Channels::default(),
            events: 0,
            digest: 0,
            seed,
            trace: None,
            sent_requests: BTreeSet::new(),
        }
    }

    pub(crate) fn nodes(&self) -> usize {
        self.daemons.len()
    }

    pub(crate) fn is_alive(&self, node: usize) -> bool {
        self.daemons[node].machine.is_some()
    }

    pub(crate) fn incarnation(&self, node: usize) -> u64 {
        self.daemons[node].incarnation
    }

    /// Returns the number of a daemon's start for its machines; far above that of the node's previous daemon, as a clock is.
    pub(crate) fn boot(&self, node: usize) -> u64 {
        self.incarnation(node) << 32
    }

    /// Returns the next event, if it is not after `until`. The event's random numbers depend on its time and kind, not
    /// on the number of earlier events: omitting a step of a plan changes only events that the step causes.
    pub(super) fn pop(&mut self, until: Time) -> Option<Event<E>> {
        let (at, event) = self.queue.pop_until(until)?;
        self.now = at;
        self.events += 1;
        let mixed = self.digest.rotate_left(5) ^ at.0;
        self.digest = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed_key = event.key().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let time = at.0.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.random = Random::new(self.seed ^ mixed_key.rotate_left(23) ^ time);
        Some(event)
    }

    pub(super) fn schedule(&mut self, delay: Time, event: Event<E>) {
        self.queue.push(self.now + delay, event);
    }

    /// Schedules an action of a daemon, which is dropped if the daemon dies before.
    pub(crate) fn schedule_action(&mut self, node: usize, at: Time, event: E) {
        let incarnation = self.incarnation(node);
        self.queue.push(
            at,
            Event::DaemonAction {
                node,
                incarnation,
                event,
            },
        );
    }

    /// Returns a random time of `low` to `high` microseconds, the latter excluded.
    pub(crate) fn micros(&mut self, low: u64, high: u64) -> Time {
        Time::from_micros(self.random.between(low, high))
    }

    /// Returns the duration of a command: rarely much longer than usual.
    pub(crate) fn command_duration(&mut self, usual_us: u64) -> Time {
        let slow = self.random.chance(self.faults.slow_commands);
        self.micros(1, if slow { 400_000 } else { usual_us })
    }

    /// Returns true if a command fails.
    pub(crate) fn command_fails(&mut self) -> bool {
        self.failing && self.random.chance(self.faults.failed)
    }

    pub(crate) fn count(&mut self, what: &str) {
        match self.counts.get_mut(what) {
            Some(count) => *count += 1,
            None => {
                self.counts.insert(what.to_owned(), 1);
            }
        }
    }

    pub(crate) fn set_violation(&mut self, what: String) {
        let at = self.now;
        self.violation.get_or_insert(Violation {
            at,
            description: what,
        });
    }

    /// Adds a line to the trace, if there is one.
    pub(crate) fn add_to_trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:.6} {}", self.now.as_secs_f64(), line()));
        }
    }

    /// Records that a request was sent; returns true if it had been sent before.
    pub(crate) fn is_repeated_request(&mut self, node: usize, request: u64) -> bool {
        let life = self.incarnation(node);
        !self.sent_requests.insert((node, life, request))
    }

    /// Stores the result of the ownership rules.
    pub(crate) fn record_result(
        &mut self,
        flow: Flow,
        result: &Result<Option<OwnershipRecord>, ChangeRefusal>,
    ) {
        match result {
            Ok(Some(record)) => self.steering.insert(flow, *record),
            Ok(None) => self.steering.remove(&flow),
            Err(_) => return,
        };
        self.changed_flows.push(flow);
    }

    /// Returns true if the channel between two nodes is up.
    pub(crate) fn is_up(&mut self, a: usize, b: usize) -> bool {
        self.channels.between(a, b).up
    }

    /// Sends a frame, which arrives if the channel stays up.
    pub(crate) fn transmit(&mut self, from: usize, to: usize, frame: &Frame) {
        if from == to {
            return self.set_violation(format!("node {} sends to itself", node_id(from)));
        }
        if !self.is_up(from, to) {
            return;
        }
        let faults = self.faults;
        let copies = match self.hostile {
            true if self.random.chance(faults.lost) => 0,
            true if self.random.chance(faults.repeated) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let slow = self.random.chance(faults.slow_frames);
            let mut arrival = self.now + self.micros(50, if slow { 200_000 } else { 600 });
            let overtakes = self.hostile && self.random.chance(faults.reordered);
            let channel = self.channels.between(from, to);
            let incarnation = channel.incarnation;
            if !overtakes {
                arrival = channel.arrival_in_order((from, to), arrival);
            }
            let frame = frame.clone();
            let event = Event::Deliver {
                from,
                to,
                incarnation,
                frame,
            };
            self.queue.push(arrival, event);
        }
    }

    /// Breaks a channel: frames in transit are lost, and the sides learn of it within `slow_us` microseconds.
    pub(super) fn break_channel(&mut self, a: usize, b: usize, slow_us: u64) {
        let channel = self.channels.between(a, b);
        if !channel.up {
            return;
        }
        channel.up = false;
        channel.incarnation += 1;
        channel.not_notified = vec![a, b];
        for (node, peer) in [(a, b), (b, a)] {
            let delay = self.micros(10, slow_us);
            self.schedule(delay, Event::PeerLost { node, peer });
        }
        self.schedule(Time::from_micros(5_000), Event::Connect { a, b });
    }

    /// Kills a daemon, with its scheduled actions.
    pub(crate) fn kill(&mut self, node: usize) {
        let daemon = &mut self.daemons[node];
        (daemon.machine, daemon.next_timeout) = (None, None);
        daemon.incarnation += 1;
        for peer in (0..self.nodes()).filter(|peer| *peer != node) {
            self.break_channel(node, peer, 2_000);
        }
    }

    /// Connects a restarted daemon to the others.
    pub(crate) fn connect_to_others(&mut self, node: usize) {
        for peer in (0..self.nodes()).filter(|peer| *peer != node) {
            let delay = self.micros(100, 20_000);
            self.schedule(delay, Event::Connect { a: node, b: peer });
        }
    }

    /// Ends all faults: restarts daemons and mends channels.
    pub(super) fn heal(&mut self) {
        (self.hostile, self.failing) = (false, false);
        for node in 0..self.nodes() {
            self.schedule(Time::ZERO, Event::Planned(GroupAction::Restart(node)));
        }
        for (a, b) in pairs(self.nodes()) {
            self.schedule(Time::ZERO, Event::Planned(GroupAction::Mend(a, b)));
        }
        for second in [1.0, 50.0, 100.0] {
            self.schedule(
                Time::from_secs_f64(second),
                Event::Planned(GroupAction::Serve),
            );
        }
    }
}
