//! The acceptor's first half: a process is examined, the empty process made, and the packets of its flows held.

use super::Migration;
use super::command::Command;
use super::core::{Purpose, Timer};
use super::event::Event;
use core::time::Duration;
use holdfast_wire::frame::AcceptorTimes;
use holdfast_wire::migration::{FlowAt, MoveFrame, Offer, PeerConnections, StepTime};
use holdfast_wire::{Epoch, Flow, MoveId, NodeId};
use std::collections::BTreeSet;

/// Number of ended moves to remember, to tell a repeated `Offer` from a new one.
const ENDED_MAX: usize = 64;

/// Stage of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Examining,
    Building,
    /// Waiting for flows, and then for the process.
    Waiting,
    Restoring,
    Committing,
    Going,
    /// The process runs; donor and peers are told until they have answered.
    Gone,
    Forgetting,
}

/// A move that this node takes.
#[derive(Debug)]
pub(super) struct Taken {
    pub stage: Stage,
    /// Start of the stage.
    pub since: Duration,
    pub deadline: Option<Duration>,
    pub offer: Option<Offer>,
    pub hops: u32,
    /// Flows whose packets are held, or will be.
    pub held: BTreeSet<Flow>,
    /// Number of the donor's `Arm` frames.
    pub arms: u32,
    pub flows: Vec<FlowAt>,
    /// Flows that the holder has committed with the process, without their names.
    pub committed_unnamed: Vec<FlowAt>,
    pub peers: Vec<PeerConnections>,
    /// Epoch at which this node owns the process's record.
    pub epoch: Epoch,
    /// Flows of the running process, and their epochs.
    pub ours: Vec<(Flow, Epoch)>,
    pub lost: Vec<Flow>,
    pub times: AcceptorTimes,
    pub steps: Vec<StepTime>,
    /// Wait until the next `Done`.
    pub wait: Duration,
    /// True if nothing of the process is left at the donor.
    pub released: bool,
}

impl Taken {
    pub(super) fn new(stage: Stage, now: Duration) -> Taken {
        Taken {
            stage,
            since: now,
            deadline: None,
            offer: None,
            hops: 0,
            held: BTreeSet::new(),
            arms: 0,
            flows: Vec::new(),
            committed_unnamed: Vec::new(),
            peers: Vec::new(),
            epoch: 0,
            ours: Vec::new(),
            lost: Vec::new(),
            times: AcceptorTimes::default(),
            steps: Vec::new(),
            wait: Duration::ZERO,
            released: false,
        }
    }

    /// Enters `stage`; returns the duration of the previous one, in microseconds.
    pub(super) fn enter(&mut self, now: Duration, stage: Stage) -> u32 {
        let took = self.stayed(now);
        self.since = now;
        self.stage = stage;
        took
    }

    /// Returns the time since the start of the stage, in microseconds.
    pub(super) fn stayed(&self, now: Duration) -> u32 {
        let took = now.saturating_sub(self.since);
        u32::try_from(took.as_micros()).unwrap_or(u32::MAX)
    }
}

impl Migration {
    pub(super) fn taken_in(&mut self, id: MoveId, stage: Stage) -> Option<&mut Taken> {
        self.acceptor
            .get_mut(&id)
            .filter(|taken| taken.stage == stage)
    }

    pub(super) fn set_taken_deadline(&mut self, id: MoveId, deadline: Option<Duration>) {
        if let Some(taken) = self.acceptor.get_mut(&id) {
            self.core
                .set_timer(Timer::Taken(id), &mut taken.deadline, deadline);
        }
    }

    /// Handles a donor's offer of a process.
    pub(super) fn offer_arrived(&mut self, now: Duration, from: NodeId, id: MoveId, offer: Offer) {
        if id.donor != from {
            return self.core.ignored(from, "Offer", "the move is another's");
        }
        if self.acceptor.contains_key(&id) || self.ended.contains(&id) {
            return self.core.ignored(from, "Offer", "it is repeated");
        }
        let running = |stage| matches!(stage, Stage::Gone | Stage::Forgetting);
        let taking = self.acceptor.values().filter(|taken| !running(taken.stage));
        if taking.count() >= self.core.config.incoming_max {
            let refusals = vec!["it is taking another process; try again when it has".to_owned()];
            return self.core.send(from, id, MoveFrame::Offered { refusals });
        }
        let mut taken = Taken::new(Stage::Examining, now);
        taken.hops = offer.hops;
        taken.offer = Some(offer.clone());
        self.acceptor.insert(id, taken);
        self.core
            .command(Purpose::Examine(id), |token| Command::Examine {
                token,
                id,
                offer,
            });
    }

    pub(super) fn examined(&mut self, now: Duration, id: MoveId, result: Result<(), Vec<String>>) {
        let Some(taken) = self.taken_in(id, Stage::Examining) else {
            return;
        };
        let offer = taken.offer.take();
        taken.enter(now, Stage::Building);
        let refusals = result.err().unwrap_or_default();
        let refused = !refusals.is_empty();
        self.core
            .send(id.donor, id, MoveFrame::Offered { refusals });
        let Some(offer) = offer.filter(|_| !refused) else {
            return self.end_taken(id);
        };
        let deadline = now + self.core.config.take_timeout;
        self.set_taken_deadline(id, Some(deadline));
        self.core
            .command(Purpose::Build(id), |token| Command::Build {
                token,
                id,
                offer,
            });
    }

    pub(super) fn built(&mut self, now: Duration, id: MoveId, result: Result<(), String>) {
        let Some(taken) = self.taken_in(id, Stage::Building) else {
            return;
        };
        taken.enter(now, Stage::Waiting);
        let failed = result.clone().err();
        self.core.send(id.donor, id, MoveFrame::Ready(result));
        if let Some(why) = failed {
            self.discard(id, &why);
        }
    }

    /// Handles `Arm`: flows are about to be diverted to this node.
    pub(super) fn arm_asked(&mut self, from: NodeId, id: MoveId, part: u32, flows: Vec<FlowAt>) {
        let Some(taken) = self.acceptor.get_mut(&id) else {
            return self.refuse_unknown(from, id, "Arm");
        };
        if id.donor != from || taken.stage != Stage::Waiting {
            return self.core.ignored(from, "Arm", "it does not fit the move");
        }
        let named = flows.iter().map(|flow| flow.flow);
        if let Err(flow) = self.core.begin_flows(id, named.clone()) {
            let result = Err(format!("{flow} takes part in another move there"));
            return self.core.send(from, id, MoveFrame::Armed { part, result });
        }
        taken.held.extend(named);
        taken.arms += 1;
        let purpose = Purpose::Arm(id, part);
        self.core
            .command(purpose, |token| Command::Arm { token, id, flows });
    }

    pub(super) fn hold_armed(&mut self, id: MoveId, part: u32, result: Result<(), String>) {
        if self.taken_in(id, Stage::Waiting).is_some() {
            self.core
                .send(id.donor, id, MoveFrame::Armed { part, result });
        }
    }

    /// Answers a frame about a move that this node does not have, and so will never run.
    pub(super) fn refuse_unknown(&mut self, from: NodeId, id: MoveId, frame: &'static str) {
        self.core.ignored(from, frame, "the move is not known");
        if id.donor == from {
            self.say_never(id, "the move is not known, or was given up");
        }
    }

    /// Tells the donor that the process will never run here.
    pub(super) fn say_never(&mut self, id: MoveId, why: &str) {
        let frame = MoveFrame::Done {
            result: Err(why.to_owned()),
            times: AcceptorTimes::default(),
            ran_us: 0,
            steps: Vec::new(),
        };
        self.core.send(id.donor, id, frame);
    }

    /// Gives up a move for which no commit was requested, or whose commit was refused.
    pub(super) fn discard(&mut self, id: MoveId, why: &str) {
        let Some(taken) = self.acceptor.get(&id) else {
            return;
        };
        let touched = taken.stage != Stage::Examining;
        self.core.end_flows(id, &Default::default(), |_| true);
        self.end_taken(id);
        if touched {
            self.core
                .command(Purpose::Discard(id), |token| Command::Discard { token, id });
            let why = why.to_owned();
            self.core.event(Event::Discarded { id, why });
        }
    }

    pub(super) fn end_taken(&mut self, id: MoveId) {
        self.set_taken_deadline(id, None);
        self.acceptor.remove(&id);
        self.ended.push_back(id);
        if self.ended.len() > ENDED_MAX {
            self.ended.pop_front();
        }
    }

    /// Handles the donor's abort. A move with a requested commit continues: the holder decides.
    pub(super) fn abort_arrived(&mut self, from: NodeId, id: MoveId, why: &str) {
        if id.donor != from {
            return self
                .core
                .ignored(from, "MoveAbort", "the move is another's");
        }
        match self.acceptor.get(&id).map(|taken| taken.stage) {
            None => self.refuse_unknown(from, id, "MoveAbort"),
            Some(Stage::Examining | Stage::Building | Stage::Waiting | Stage::Restoring) => {
                self.discard(id, &format!("the donor gave up: {why}"));
                self.say_never(id, "it was given up");
            }
            Some(_) => {}
        }
    }

    /// Handles the loss of the channel to a donor. A move with the whole process continues: the holder decides.
    pub(super) fn donor_lost(&mut self, peer: NodeId) {
        let waiting = |stage| matches!(stage, Stage::Examining | Stage::Building | Stage::Waiting);
        let moves = self.acceptor.iter();
        let moves = moves.filter(|(id, taken)| id.donor == peer && waiting(taken.stage));
        let moves: Vec<MoveId> = moves.map(|(id, _)| *id).collect();
        for id in moves {
            self.discard(id, "the channel to the donor was lost");
        }
    }

    /// Handles the timeout of a wait for the process, or repeats `Done`.
    pub(super) fn taken_timed_out(&mut self, now: Duration, id: MoveId) {
        let Some(taken) = self.acceptor.get_mut(&id) else {
            return;
        };
        taken.deadline = None;
        match taken.stage {
            Stage::Building | Stage::Waiting => {
                self.discard(id, "it did not come in time");
                self.say_never(id, "it did not come in time");
            }
            Stage::Gone => self.say_done(now, id),
            _ => {}
        }
    }
}
