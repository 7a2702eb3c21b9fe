//! The donor's first half: from a request until the acceptor accepts the offer.
//!
//! Nothing has been touched until then, and a failure costs nothing.

use super::command::{CheckReport, Command, ProcessId};
use super::core::{Purpose, Timer};
use super::event::{Event, Outcome, Reason, Step, Summary};
use super::give::{Place, place};
use super::predict::Load;
use super::rounds::Rounds;
use super::{Migration, Options, Request, RequestError};
use core::time::Duration;
use holdfast_wire::frame::ENTRIES_MAX;
use holdfast_wire::migration::{MoveFrame, Offer, PeerConnections};
use holdfast_wire::{Epoch, Flow, MoveId, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// Stage of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Checking,
    Offering,
    Copying,
    /// Waiting for the acceptor to be ready, after a round.
    Awaiting,
    Arming,
    Noting,
    Diverting,
    Freezing,
    Transferring,
    /// Waiting for the holder's decision.
    Settling,
    Thawing,
    Releasing,
    /// The outcome is reported; the holder still has the process's record.
    Removing,
}

/// A move that this node gives.
#[derive(Debug)]
pub(super) struct Given {
    pub process: ProcessId,
    pub to: NodeId,
    pub options: Options,
    pub stage: Stage,
    /// Start of the move; from the preparation of the freeze on, start of the stage.
    pub since: Duration,
    pub deadline: Option<Duration>,
    /// Time at which to repeat the divert of flows that the holder did not divert.
    pub divert_again: Option<Duration>,
    /// The open request to the holder.
    pub question: Option<u64>,
    pub hops: u32,
    pub flows: BTreeMap<Flow, Place>,
    pub peers: Vec<PeerConnections>,
    pub forwarded: Vec<Flow>,
    /// Peers that have not reported their preparation yet.
    pub unprepared: BTreeSet<NodeId>,
    /// Number of `Arm`s sent; only an answer to the last one counts.
    pub part: u32,
    pub armed: bool,
    pub built: bool,
    /// True if the holder was, or may have been, asked to divert.
    pub asked: bool,
    /// True if the process was, or may have been, stopped.
    pub frozen: bool,
    pub rounds: Rounds,
    /// True if the remaining pages may be sent by post-copy.
    pub may_follow: bool,
    pub load: Load,
    /// Reason reported if the process stays.
    pub reason: Reason,
    /// Epoch at which this node owns the process's record again.
    pub record: Option<Epoch>,
    /// True if a clone of the process runs.
    pub cloned: bool,
    /// True if the holder has no record of the process.
    pub in_doubt: bool,
    /// Bytes that compression saved during the freeze.
    pub frozen_saved: u64,
    pub summary: Summary,
}

impl Given {
    pub(super) fn new(process: ProcessId, to: NodeId, options: Options, now: Duration) -> Given {
        Given {
            process,
            to,
            options,
            stage: Stage::Checking,
            since: now,
            deadline: None,
            divert_again: None,
            question: None,
            hops: 0,
            flows: BTreeMap::new(),
            peers: Vec::new(),
            forwarded: Vec::new(),
            unprepared: BTreeSet::new(),
            part: 0,
            armed: false,
            built: false,
            asked: false,
            frozen: false,
            rounds: Rounds::default(),
            may_follow: false,
            load: Load::default(),
            reason: Reason::Restarted,
            record: None,
            cloned: false,
            in_doubt: false,
            frozen_saved: 0,
            summary: Summary::default(),
        }
    }

    /// Enters `stage`; returns the duration of the previous one.
    pub(super) fn enter(&mut self, now: Duration, stage: Stage) -> Duration {
        let took = now.saturating_sub(self.since);
        self.since = now;
        self.stage = stage;
        took
    }
}

impl Migration {
    pub(super) fn given_in(&mut self, id: MoveId, stage: Stage) -> Option<&mut Given> {
        self.donor.get_mut(&id).filter(|given| given.stage == stage)
    }

    pub(super) fn set_deadline(&mut self, id: MoveId, deadline: Option<Duration>) {
        if let Some(given) = self.donor.get_mut(&id) {
            self.core
                .set_timer(Timer::Given(id), &mut given.deadline, deadline);
        }
    }

    pub(super) fn requested(
        &mut self,
        now: Duration,
        request: Request,
    ) -> Result<MoveId, RequestError> {
        let Request {
            process,
            to,
            options,
        } = request;
        let config = &self.core.config;
        if to == config.node {
            return Err(RequestError::ToSelf(to));
        }
        if !config.peers.contains(&to) {
            return Err(RequestError::UnknownNode(to));
        }
        match options {
            Options {
                post_copy: true,
                clone: true,
                ..
            } => return Err(RequestError::CloneByPostCopy),
            Options {
                post_copy: true,
                verify: true,
                ..
            } => return Err(RequestError::VerifyByPostCopy),
            _ => {}
        }
        if self.donor.values().any(|given| given.process == process) {
            return Err(RequestError::AlreadyMoving(process));
        }
        let (donor, boot) = (config.node, config.boot);
        let seq = self.core.number();
        let id = MoveId { donor, boot, seq };
        let clone = options.clone;
        self.donor.insert(id, Given::new(process, to, options, now));
        self.core
            .command(Purpose::Check(id), |token| Command::Check {
                token,
                process,
                clone,
            });
        Ok(id)
    }

    pub(super) fn checked(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<CheckReport, Vec<String>>,
    ) {
        let model = &self.model;
        let checking = |given: &&mut Given| given.stage == Stage::Checking;
        let Some(given) = self.donor.get_mut(&id).filter(checking) else {
            return;
        };
        let report = match result {
            Ok(report) => report,
            Err(blockers) => return self.keep(id, Reason::Blocked(blockers)),
        };
        let options = given.options;
        given.hops = report.hops;
        if !options.clone {
            given.flows = report.flows.iter().map(place).collect();
            given.peers = report.peers;
            given.forwarded = report.forwarded;
        }
        given.load = Load {
            dirty: 0,
            sockets: options.sockets_in_freeze(report.sockets),
            shape: report.shape,
        };
        // No round makes a freeze shorter than one that sends no memory. With post-copy the freeze is that short in any
        // case, so the limit does not apply here.
        let predicted = model.predict(options.sockets, given.load);
        given.summary.predicted = predicted;
        let max = options.max_freeze.filter(|_| !options.post_copy);
        if let Some(max) = max.filter(|max| predicted > *max) {
            return self.keep(id, Reason::FreezeTooLong { predicted, max });
        }
        let (to, flows) = (given.to, given.flows.len());
        if let Err(reason) = self.check_sockets(id) {
            return self.keep(id, reason);
        }
        let offer = Offer {
            clone: options.clone,
            sockets: options.sockets,
            post_copy: options.post_copy,
            hops: report.hops,
            memory: report.memory,
            flows: flows as u32,
            description: report.description,
        };
        self.core.send(to, id, MoveFrame::Offer(offer));
        if let Some(given) = self.donor.get_mut(&id) {
            given.stage = Stage::Offering;
        }
        self.set_deadline(id, Some(now + self.core.config.offer_timeout));
    }

    /// Checks that the current sockets can move, and marks their flows as moving.
    pub(super) fn check_sockets(&mut self, id: MoveId) -> Result<(), Reason> {
        let Some(given) = self.donor.get(&id) else {
            return Ok(());
        };
        // A request has two more changes, for the process itself.
        if given.flows.len() > ENTRIES_MAX - 2 {
            return Err(Reason::TooManyFlows(given.flows.len()));
        }
        for connection in given.peers.iter().flat_map(|peer| &peer.connections) {
            if self.is_prepared(connection) {
                return Err(Reason::PeerMoving(*connection));
            }
        }
        let flows = given.flows.keys().copied();
        self.core.begin_flows(id, flows).map_err(Reason::FlowMoving)
    }

    pub(super) fn offered(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        refusals: Vec<String>,
    ) {
        if self.given_in(id, Stage::Offering).is_none() {
            return self.core.ignored(from, "Offered", "it is not waited for");
        }
        if !refusals.is_empty() {
            let (by, whys) = (from, refusals);
            return self.keep(id, Reason::Refused { by, whys });
        }
        self.set_deadline(id, Some(now + self.core.config.build_timeout));
        self.copy_round(id);
    }

    /// Ends a move before anything was touched.
    pub(super) fn keep(&mut self, id: MoveId, reason: Reason) {
        let Some(given) = self.donor.get(&id) else {
            return;
        };
        let ours = given.flows.iter().map(|(flow, at)| (*flow, at.epoch));
        let ours = ours.collect();
        self.core.end_flows(id, &ours, |_| false);
        self.end_given(id, Outcome::Kept { reason });
    }

    /// Ends a move that has no saved state.
    pub(super) fn end_given(&mut self, id: MoveId, outcome: Outcome) {
        self.tell_outcome(id, outcome);
        self.donor.remove(&id);
    }

    pub(super) fn tell_outcome(&mut self, id: MoveId, outcome: Outcome) {
        self.set_deadline(id, None);
        self.cancel_given_question(id);
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        self.core
            .set_timer(Timer::Divert(id), &mut given.divert_again, None);
        let summary = Box::new(std::mem::take(&mut given.summary));
        self.core.event(Event::Outcome {
            id,
            outcome,
            summary,
        });
    }

    /// Handles the timeout of a step.
    pub(super) fn given_timed_out(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.deadline = None;
        let (to, holder) = (given.to, self.core.config.holder);
        let (peer, step) = match given.stage {
            Stage::Offering => (to, Step::Offer),
            Stage::Copying | Stage::Awaiting => (to, Step::Copy),
            Stage::Arming if given.armed => return self.forward_unprepared(now, id),
            Stage::Arming => (to, Step::Arm),
            Stage::Diverting | Stage::Noting => (holder, Step::Divert),
            Stage::Transferring => (to, Step::Transfer),
            Stage::Settling if given.in_doubt => return self.roll_back(now, id),
            _ => return,
        };
        self.fail(now, id, Reason::TimedOut { peer, step });
    }

    /// Handles the loss of a channel: moves to that node fail, or the holder decides them.
    pub(super) fn acceptor_lost(&mut self, now: Duration, peer: NodeId) {
        let moves = self.donor.iter().filter(|(_, given)| given.to == peer);
        let moves: Vec<MoveId> = moves.map(|(id, _)| *id).collect();
        for id in moves {
            let step = match self.donor[&id].stage {
                Stage::Checking => continue,
                Stage::Offering => Step::Offer,
                Stage::Copying | Stage::Awaiting => Step::Copy,
                Stage::Arming | Stage::Noting => Step::Arm,
                Stage::Diverting => Step::Divert,
                Stage::Freezing => Step::Freeze,
                _ => Step::Transfer,
            };
            self.fail(now, id, Reason::PeerLost { peer, step });
        }
    }
}
