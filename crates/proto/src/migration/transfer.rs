//! The freeze at the donor: the process is stopped, the rest is sent, and the acceptor reports the result.

use super::asks::AskPurpose;
use super::command::{Command, FlowEpoch, FreezeReport};
use super::core::Purpose;
use super::donor::Stage;
use super::event::{Event, Outcome, Reason, Step};
use super::give::{At, place};
use super::predict::Load;
use super::{Migration, asks};
use core::time::Duration;
use holdfast_wire::frame::AcceptorTimes;
use holdfast_wire::migration::{FlowAt, MoveFrame, StepTime};
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, MoveId, NodeId};
use std::collections::{BTreeMap, BTreeSet};

impl Migration {
    /// Commands the freeze once everything is diverted; a repeated freeze sends the flows that appeared late.
    pub(super) fn freeze(&mut self, now: Duration, id: MoveId) {
        self.set_deadline(id, None);
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Freezing;
        let clone = given.options.clone;
        if !given.frozen {
            given.summary.phases.divert = given.enter(now, Stage::Freezing);
            self.model.learn_gap(now.saturating_sub(given.rounds.ended));
        }
        // The original of a clone continues, whatever becomes of the clone.
        given.frozen = !clone;
        let post_copy = given.may_follow;
        let flows = given.flows_at(At::Diverted).map(|flow| FlowEpoch {
            flow: flow.flow,
            epoch: flow.epoch.saturating_add(1),
        });
        let flows = flows.collect();
        self.core
            .command(Purpose::Freeze(id), |token| Command::Freeze {
                token,
                id,
                flows,
                post_copy,
                clone,
            });
    }

    pub(super) fn frozen(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<FreezeReport, String>,
    ) {
        let Some(given) = self.given_in(id, Stage::Freezing) else {
            return;
        };
        let report = match result {
            Ok(report) => report,
            Err(why) => {
                let step = Step::Freeze;
                return self.fail(now, id, Reason::Failed { step, why });
            }
        };
        // The process continued to run for a while after the command.
        let ahead = now.saturating_sub(given.since + report.stands);
        given.since += ahead;
        given.summary.phases.divert += ahead;
        given.summary.bytes += report.bytes;
        given.summary.saved += report.saved;
        given.summary.follows = report.follows;
        given.summary.post_copy = given.summary.follows > 0;
        given.frozen_saved += report.saved;
        given.summary.steps[0] = report.steps;
        let gone: BTreeSet<Flow> = report.gone.iter().copied().collect();
        let mut kept = Vec::new();
        for (flow, place) in &mut given.flows {
            match place.at {
                At::Diverted if gone.contains(flow) => {
                    kept.push(Change {
                        flow: *flow,
                        kind: ChangeKind::Rollback,
                        epoch: place.epoch.saturating_add(1),
                    });
                    place.epoch = place.epoch.saturating_add(asks::TRANSIT);
                    place.at = At::Gone;
                }
                At::Diverted => place.at = At::Frozen,
                _ => {}
            }
        }
        // Flows closed before the freeze return to this node, whether or not the process moves.
        if !kept.is_empty() {
            self.ask(now, kept, AskPurpose::Keep);
        }
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        if given.options.clone || report.late.is_empty() {
            return self.send_final(now, id);
        }
        for late in &report.late {
            let (flow, late) = place(late);
            given.flows.entry(flow).or_insert(late);
        }
        if let Err(reason) = self.check_sockets(id) {
            return self.fail(now, id, reason);
        }
        self.set_deadline(id, Some(now + self.core.config.divert_timeout));
        self.arm(id);
    }

    /// Tells the acceptor that the whole process has been sent.
    fn send_final(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.summary.phases.extract = given.enter(now, Stage::Transferring);
        let (to, bytes) = (given.to, given.summary.bytes);
        let frame = MoveFrame::Final {
            flows: given.flows_at(At::Frozen).collect(),
            peers: given.peers.clone(),
            forwarded: given.forwarded.clone(),
            bytes,
        };
        self.core.send(to, id, frame);
        let bytes_take = self.model.transfer(bytes) * 4;
        let deadline = now + self.core.config.transfer_timeout + bytes_take;
        self.set_deadline(id, Some(deadline));
    }

    /// Handles the acceptor's report on the end of the move.
    pub(super) fn done(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        result: Result<Epoch, String>,
        (times, ran_at, steps): (AcceptorTimes, Duration, Vec<StepTime>),
    ) {
        let Some(given) = self.donor.get_mut(&id) else {
            // Nothing of the move is left here: this node released it before a restart, or the frame is a repetition.
            if result.is_ok() {
                self.core.send(from, id, MoveFrame::Released);
            }
            return self.core.ignored(from, "MoveDone", "the move is not known");
        };
        if given.to != from {
            return (self.core).ignored(from, "MoveDone", "it is not the acceptor's");
        }
        match (given.stage, result) {
            (Stage::Transferring, Ok(_)) => {
                given.summary.steps[1] = steps;
                self.learn(ran_at, id, times);
                self.moved(id);
            }
            // Otherwise the donor waits for the holder, which also tells the flows that did not move.
            (Stage::Settling, Ok(_)) if given.in_doubt => self.moved(id),
            (Stage::Settling, Err(_)) if given.in_doubt => self.thaw_in_doubt(now, id),
            (Stage::Checking | Stage::Settling | Stage::Removing, _) | (_, Ok(_)) => {
                self.core.ignored(from, "MoveDone", "it is not waited for");
            }
            (_, Err(why)) => self.fail(now, id, Reason::Aborted { by: from, why }),
        }
    }

    /// Learns the cost of the freeze, which ended at `ran_at` at the latest.
    fn learn(&mut self, ran_at: Duration, id: MoveId, times: AcceptorTimes) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let took = ran_at.saturating_sub(given.since);
        let phases = &mut given.summary.phases;
        phases.restore = Duration::from_micros(times.restore_us.into());
        phases.commit = Duration::from_micros(times.commit_us.into());
        phases.transfer = took.saturating_sub(phases.restore + phases.commit);
        let load = Load {
            dirty: given.summary.bytes + given.frozen_saved,
            ..given.load
        };
        let freeze = phases.freeze();
        // The original of a clone continues before the acceptor restores anything.
        if given.options.clone {
            return;
        }
        let expected = given.load.dirty;
        (self.model).learn_dirty(given.options.sockets, expected, load.dirty);
        self.model.learn_freeze(given.options.sockets, load, freeze);
    }

    /// Ends a committed move: releases the original, or resumes it if it was cloned.
    pub(super) fn moved(&mut self, id: MoveId) {
        self.set_deadline(id, None);
        self.cancel_given_question(id);
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.cloned = given.options.clone;
        let (cloned, bytes) = (given.cloned, given.summary.follows);
        if bytes > 0 {
            self.core.event(Event::Follows { id, bytes });
        }
        match cloned {
            true => self.command_thaw(id, 1),
            false => self.command_release(id, 1),
        }
    }

    pub(super) fn command_release(&mut self, id: MoveId, attempt: u32) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Releasing;
        let (to, forwarded) = (given.to, given.forwarded.clone());
        let flows = given.flows_at(At::Frozen);
        let flows = flows.chain(given.flows_at(At::Unrecorded));
        let flows = flows.map(|FlowAt { flow, epoch }| FlowEpoch {
            flow,
            epoch: epoch.saturating_add(asks::TRANSIT),
        });
        let flows = flows.collect();
        let kept = given.flows_at(At::Gone);
        let kept = kept.map(|FlowAt { flow, epoch }| FlowEpoch { flow, epoch });
        let kept = kept.collect();
        let purpose = Purpose::Release(id, attempt);
        self.core.command(purpose, |token| Command::Release {
            token,
            id,
            to,
            flows,
            kept,
            forwarded,
        });
    }

    pub(super) fn released(
        &mut self,
        now: Duration,
        id: MoveId,
        attempt: u32,
        result: Result<(), String>,
    ) {
        if self.given_in(id, Stage::Releasing).is_none() {
            return;
        }
        if let Err(why) = result {
            if self.core.later(now, Purpose::Release(id, attempt), attempt) {
                return;
            }
            let command = "Release";
            self.core.event(Event::Failed { id, command, why });
        }
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Removing;
        let moved = given.flows_at(At::Frozen);
        let moved: BTreeSet<Flow> = moved.map(|flow| flow.flow).collect();
        let kept = given.flows_at(At::Gone).map(|of| (of.flow, of.epoch));
        let kept: BTreeMap<Flow, Epoch> = kept.collect();
        self.core.end_flows(id, &kept, |flow| moved.contains(flow));
        self.tell_outcome(id, Outcome::Moved);
        self.flush(now, id);
    }

    /// Sends the holder one more request, without effect, to flush out earlier ones.
    ///
    /// Once the acceptor hears that all is released, it has the record removed. A repeated request of this node that
    /// arrived behind the removal would make a new record. Requests of one channel arrive in order, so the answer
    /// to this one proves that no earlier one is under way.
    pub(super) fn flush(&mut self, now: Duration, id: MoveId) {
        let nothing = asks::of_process(id, ChangeKind::Rollback, asks::TRANSIT);
        self.ask(now, vec![nothing], AskPurpose::Flush(id));
    }

    /// Reports to the acceptor that nothing of the move is left here.
    pub(super) fn flushed(&mut self, id: MoveId) {
        if let Some(given) = self.given_in(id, Stage::Removing) {
            let to = given.to;
            self.core.send(to, id, MoveFrame::Released);
            self.removed(id);
        }
    }
}
