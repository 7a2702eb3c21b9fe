//! Requests to the holder, repeated until it answers.
//!
//! The epochs of a process's record are always the same: established at [`OWNED_EPOCH`] by the request that diverts it, in
//! transit at [`TRANSIT_EPOCH`]. Therefore a request can name them without a query.

use super::Migration;
use super::command::Command;
use super::event::Event;
use super::migration_core::{CommandPurpose, MoveTimer};
pub(super) use crate::holder_client::HolderAnswers;
use crate::holder_client::{AnswerShape, HolderRequestBody};
use core::time::Duration;
use holdfast_wire::{ChangeKind, Epoch, Flow, MoveId, NodeId, OwnershipChange, OwnershipRecord};

/// Epoch at which the donor owns the process's record.
pub(super) const OWNED_EPOCH: Epoch = 1;
/// Epoch of the record's transit.
pub(super) const TRANSIT_EPOCH: Epoch = 2;

/// Operation that waits for the holder's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HolderRequestPurpose {
    Divert(MoveId),
    Rollback(MoveId),
    Commit(MoveId),
    CommitAll(MoveId),
    Recovery(MoveId),
    /// None: flows that did not move with their process belong to the donor again.
    ReturnFlows,
    /// Removal of a record that is not needed any more.
    Remove(MoveId),
    /// Proof that no earlier request about the move is under way any more.
    Flush(MoveId),
    /// Outcome of a move that this node prepared a translation for.
    OutcomeQuery(MoveId),
}

impl Migration {
    /// Asks the holder (which may be this node) to change records; returns the request's number.
    pub(super) fn request_changes(
        &mut self,
        now: Duration,
        changes: Vec<OwnershipChange>,
        purpose: HolderRequestPurpose,
    ) -> u64 {
        self.request_holder(now, HolderRequestBody::Change(changes), purpose)
    }

    /// Asks the holder for a record.
    pub(super) fn request_lookup(
        &mut self,
        now: Duration,
        flow: Flow,
        purpose: HolderRequestPurpose,
    ) {
        self.request_holder(now, HolderRequestBody::Lookup(vec![flow]), purpose);
    }

    fn request_holder(
        &mut self,
        now: Duration,
        body: HolderRequestBody,
        purpose: HolderRequestPurpose,
    ) -> u64 {
        let request = self.core.next_request_number();
        let due = self
            .core
            .holder_client
            .open(now, request, body.clone(), purpose);
        self.submit_request(request, body, due);
        request
    }

    /// Sends an open request, or decides it if this node is the holder.
    fn submit_request(&mut self, request: u64, body: HolderRequestBody, due: Duration) {
        let asker = self.core.config.node;
        if !self.core.holder_client.is_holder() {
            let timer = (due, MoveTimer::HolderRequest(request));
            self.core.timers.insert(timer);
            return self.send_holder_request(request, body);
        }
        self.core
            .push_command(CommandPurpose::HolderRequest(request), |token| match body {
                HolderRequestBody::Change(changes) => Command::Arbitrate {
                    token,
                    asker,
                    changes,
                },
                HolderRequestBody::Lookup(flows) => Command::Lookup { token, flows },
            });
    }

    fn send_holder_request(&mut self, request: u64, body: HolderRequestBody) {
        let to = self.core.holder_client.holder();
        let frame = body.into_frame(request);
        self.core.outputs.send(to, frame);
    }

    /// Cancels a request; a later answer is ignored.
    pub(super) fn cancel_request_to_holder(&mut self, request: u64) {
        if let Some(open) = self.core.holder_client.cancel(request) {
            self.core
                .timers
                .remove(&(open.due, MoveTimer::HolderRequest(request)));
        }
    }

    /// Sends a request to the holder again, because no answer has come in time.
    pub(super) fn repeat_request_to_holder(&mut self, now: Duration, request: u64) {
        if self.core.holder_client.is_holder() {
            return;
        }
        let Some(repetition) = self.core.holder_client.repeat(now, request) else {
            return;
        };
        let timer = MoveTimer::HolderRequest(request);
        self.core.timers.remove(&(repetition.previous_due, timer));
        self.core.timers.insert((repetition.due, timer));
        self.send_holder_request(request, repetition.body);
        if repetition.is_holder_silent {
            let holder = self.core.holder_client.holder();
            self.core.outputs.push_event(Event::HolderSilent { holder });
        }
    }

    /// Repeats all requests at once over a new channel to the holder, and starts their waits from the beginning.
    pub(super) fn repeat_all_requests_to_holder(&mut self, now: Duration) {
        for request in self.core.holder_client.restart_waits() {
            self.repeat_request_to_holder(now, request);
        }
    }

    /// Submits all open requests to the holder of a new view. The requests get new numbers, because an earlier term of
    /// that node may have answered the former ones: the answer may still be under way, and others have decided since.
    pub(super) fn redirect_requests_to_holder(&mut self, now: Duration, holder: NodeId) {
        self.core.holder_client.set_holder(holder);
        for former in self.core.holder_client.restart_waits() {
            let request = self.core.next_request_number();
            self.core.holder_client.renumber(former, request);
            for outbound in self.outbound_moves.values_mut() {
                if outbound.holder_request == Some(former) {
                    outbound.holder_request = Some(request);
                }
            }
            if let Some(repetition) = self.core.holder_client.repeat(now, request) {
                let timer = MoveTimer::HolderRequest(former);
                self.core.timers.remove(&(repetition.previous_due, timer));
                self.submit_request(request, repetition.body, repetition.due);
            }
        }
    }

    /// Handles the holder's answer.
    pub(super) fn on_holder_answer(
        &mut self,
        now: Duration,
        from: NodeId,
        request: u64,
        answers: HolderAnswers,
    ) {
        let shape = AnswerShape::Changes(answers.len());
        let Some(purpose) = self.take_answered(from, request, "ChangeResponse", shape) else {
            return;
        };
        match purpose {
            HolderRequestPurpose::Divert(id) => self.on_diverted(now, id, answers),
            HolderRequestPurpose::Rollback(id) => self.on_rolled_back(now, id, answers),
            HolderRequestPurpose::Commit(id) => self.on_committed(now, id, answers),
            HolderRequestPurpose::CommitAll(id) => self.on_committed_all(now, id, answers),
            HolderRequestPurpose::Recovery(id) => self.on_recovery_answered(now, id, answers),
            HolderRequestPurpose::Remove(id) => self.on_removed(id),
            HolderRequestPurpose::Flush(id) => self.on_flushed(id),
            HolderRequestPurpose::ReturnFlows | HolderRequestPurpose::OutcomeQuery(_) => {}
        }
    }

    pub(super) fn on_looked_up(
        &mut self,
        now: Duration,
        from: NodeId,
        request: u64,
        records: Vec<Option<OwnershipRecord>>,
    ) {
        let shape = AnswerShape::Records(records.len());
        let purpose = self.take_answered(from, request, "QueryAnswer", shape);
        if let (Some(HolderRequestPurpose::OutcomeQuery(id)), [record]) = (purpose, &records[..]) {
            self.on_outcome_answered(now, id, *record);
        }
    }

    /// Removes the request that an answer belongs to, and returns its purpose.
    fn take_answered(
        &mut self,
        from: NodeId,
        request: u64,
        frame: &'static str,
        answer: AnswerShape,
    ) -> Option<HolderRequestPurpose> {
        match self.core.holder_client.take_answered(from, request, answer) {
            Ok(open) => {
                self.core
                    .timers
                    .remove(&(open.due, MoveTimer::HolderRequest(request)));
                Some(open.purpose)
            }
            Err(reason) => {
                self.core.outputs.report_ignored(from, frame, reason);
                None
            }
        }
    }
}

/// Returns a change of the process's own record.
pub(super) fn process_change(id: MoveId, kind: ChangeKind, epoch: Epoch) -> OwnershipChange {
    let flow = Flow::process_key(id);
    OwnershipChange { flow, kind, epoch }
}
