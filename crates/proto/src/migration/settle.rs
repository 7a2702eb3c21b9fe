//! The end of a failed move at its donor: the process continues here, or it moved all the same.
//!
//! A move that may have been diverted is rolled back at the holder, and the holder's answer decides; a process that may
//! be stopped remains so until then. A process that was not stopped runs on meanwhile: no node can have committed it,
//! for its state was never sent.

use super::Migration;
use super::asks::{Answers, AskPurpose, OWNED, TRANSIT, of_process};
use super::command::{Command, FlowEpoch};
use super::core::Purpose;
use super::donor::Stage;
use super::event::{Event, Outcome, Reason};
use super::give::At;
use core::time::Duration;
use holdfast_wire::migration::MoveFrame;
use holdfast_wire::{Change, ChangeKind, Flow, MoveId};
use std::collections::BTreeMap;

impl Migration {
    /// Fails a move.
    pub(super) fn fail(&mut self, now: Duration, id: MoveId, reason: Reason) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let (to, asked) = (given.to, given.asked);
        match given.stage {
            Stage::Checking => return self.keep(id, reason),
            Stage::Settling | Stage::Thawing | Stage::Releasing | Stage::Removing => return,
            _ => {}
        }
        let why = reason.to_string();
        let frame = MoveFrame::Abort { reason: why };
        self.core.send(to, id, frame);
        if given.stage == Stage::Offering {
            return self.keep(id, reason);
        }
        given.reason = reason;
        self.set_deadline(id, None);
        self.cancel_given_question(id);
        match asked {
            true => self.roll_back(now, id),
            false => self.thaw(now, id),
        }
    }

    /// Cancels the open request to the holder about the move.
    pub(super) fn cancel_given_question(&mut self, id: MoveId) {
        let question = (self.donor.get_mut(&id)).and_then(|given| given.question.take());
        if let Some(question) = question {
            self.cancel_question(question);
        }
    }

    /// Rolls back a divert that has, or may have, taken place. The request names the process itself first, as the
    /// commit does: the first of the two that reaches the holder decides everything.
    pub(super) fn roll_back(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Settling;
        let mut changes = Vec::new();
        // Unless the process was frozen, the divert may still be on its way: a record at a higher epoch fences it out.
        if !given.frozen {
            changes.push(of_process(id, ChangeKind::Establish, OWNED));
        }
        changes.push(of_process(id, ChangeKind::Rollback, TRANSIT));
        let flows = given.flows.iter();
        changes.extend(flows.map(|(flow, place)| Change {
            flow: *flow,
            kind: ChangeKind::Rollback,
            epoch: place.epoch.saturating_add(1),
        }));
        let question = self.ask(now, changes, AskPurpose::Rollback(id));
        if let Some(given) = self.donor.get_mut(&id) {
            given.question = Some(question);
        }
    }

    pub(super) fn rolled_back(&mut self, now: Duration, id: MoveId, answers: Answers) {
        let node = self.core.config.node;
        let Some(given) = self.given_in(id, Stage::Settling) else {
            return;
        };
        given.question = None;
        let records = answers.into_iter();
        let mut records = records.map(|answer| answer.unwrap_or_else(|refusal| refusal.current));
        let process = records.nth(usize::from(!given.frozen)).flatten();
        match process {
            Some(record) if record.is_owned_by(node) => {
                given.record = Some(record.epoch);
                for (place, record) in given.flows.values_mut().zip(records) {
                    place.epoch = record
                        .filter(|record| record.is_owned_by(node))
                        .map_or(place.epoch, |record| record.epoch);
                }
                self.thaw(now, id);
            }
            // A flow closed before the freeze did not move with the process: this request rolled its transit back.
            Some(_) => {
                for (place, record) in given.flows.values_mut().zip(records) {
                    match record {
                        None => place.at = At::Unrecorded,
                        Some(record) if record.is_owned_by(node) => {
                            (place.at, place.epoch) = (At::Gone, record.epoch);
                        }
                        Some(_) => {}
                    }
                }
                self.moved(id);
            }
            // The state was never sent, so the original is the only process.
            None if !given.frozen => self.thaw(now, id),
            None => self.doubt_holder(now, id),
        }
    }

    /// Asks the acceptor, because the holder lost its table, and with it the answer whether the acceptor had committed.
    fn doubt_holder(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let to = given.to;
        if !std::mem::replace(&mut given.in_doubt, true) {
            self.core.event(Event::HolderForgot { id });
        }
        let reason = "the holder does not know the move any more".to_owned();
        self.core.send(to, id, MoveFrame::Abort { reason });
        let again = now + self.core.config.ask_retry_max;
        self.set_deadline(id, Some(again));
    }

    /// Resumes the process: the acceptor will never run it, and the holder has no record.
    pub(super) fn thaw_in_doubt(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let mut changes = Vec::new();
        for (flow, place) in &mut given.flows {
            // Above the epoch of any rollback that the holder granted and forgot.
            place.epoch = place.epoch.saturating_add(TRANSIT);
            let (flow, kind, epoch) = (*flow, ChangeKind::Establish, place.epoch);
            changes.push(Change { flow, kind, epoch });
        }
        if !changes.is_empty() {
            self.core.event(Event::Report { changes });
        }
        self.thaw(now, id);
    }

    /// Resumes the process on this node.
    pub(super) fn thaw(&mut self, now: Duration, id: MoveId) {
        self.set_deadline(id, None);
        self.cancel_given_question(id);
        let Some(given) = self.donor.get(&id) else {
            return;
        };
        // Peers have heard of the move since acceptor and peers prepared for the freeze.
        if given.part > 0 {
            let peers = given.peers.clone();
            self.undo_peers(now, id, peers);
        }
        self.command_thaw(id, 1);
    }

    pub(super) fn command_thaw(&mut self, id: MoveId, attempt: u32) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Thawing;
        let flows = given.flows.iter().map(|(flow, place)| FlowEpoch {
            flow: *flow,
            epoch: place.epoch,
        });
        let flows = flows.collect();
        let purpose = Purpose::Thaw(id, attempt);
        self.core
            .command(purpose, |token| Command::Thaw { token, id, flows });
    }

    pub(super) fn thawed(
        &mut self,
        now: Duration,
        id: MoveId,
        attempt: u32,
        result: Result<(), String>,
    ) {
        if self.given_in(id, Stage::Thawing).is_none() {
            return;
        }
        if let Err(why) = result {
            if self.core.later(now, Purpose::Thaw(id, attempt), attempt) {
                return;
            }
            let command = "Thaw";
            self.core.event(Event::Failed { id, command, why });
        }
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let ours = given.flows.iter().map(|(flow, place)| (*flow, place.epoch));
        let ours: BTreeMap<Flow, _> = ours.collect();
        let (record, cloned) = (given.record, given.cloned);
        let outcome = match cloned {
            true => Outcome::Cloned,
            false => Outcome::Kept {
                reason: given.reason.clone(),
            },
        };
        given.stage = Stage::Removing;
        self.core.end_flows(id, &ours, |_| false);
        self.tell_outcome(id, outcome);
        match record {
            _ if cloned => self.flush(now, id),
            Some(epoch) => {
                let remove = of_process(id, ChangeKind::Remove, epoch);
                self.ask(now, vec![remove], AskPurpose::Remove(id));
            }
            None => self.removed(id),
        }
    }
}
