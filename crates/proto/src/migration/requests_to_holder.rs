//! Requests to the holder, repeated until it answers.
//!
//! The epochs of a process's record are always the same: established at [`OWNED_EPOCH`] by the request that diverts it, in
//! transit at [`TRANSIT_EPOCH`]. Therefore a request can name them without a query.

use super::command::Command;
use super::core::{CommandPurpose, MoveTimer};
use super::event::Event;
use super::{Migration, Output};
use core::time::Duration;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, Frame, MoveId, NodeId, OwnershipChange, OwnershipRecord,
};

/// The holder's answer to each change.
pub(super) type HolderAnswers = Vec<Result<Option<OwnershipRecord>, ChangeRefusal>>;

/// Epoch at which the donor owns the process's record.
pub(super) const OWNED_EPOCH: Epoch = 1;
/// Epoch of the record's transit.
pub(super) const TRANSIT_EPOCH: Epoch = 2;
/// Number of transmissions without an answer after which the holder is reported as silent.
const SILENT_AFTER_ATTEMPTS: u32 = 4;

/// Bit in the numbers of this machine's requests; the handoff's numbers do not have it.
pub(super) const REQUEST_BIT: u64 = 1 << 63;

/// An open request to the holder.
#[derive(Debug)]
pub(super) struct RequestToHolder {
    body: HolderRequestBody,
    pub purpose: HolderRequestPurpose,
    due: Duration,
    next_wait: Duration,
    transmissions: u32,
}

#[derive(Debug, Clone)]
enum HolderRequestBody {
    Change(Vec<OwnershipChange>),
    Lookup(Vec<Flow>),
}

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
        let request = self.core.next_number() | REQUEST_BIT;
        let wait = self.core.config.retry_min;
        let due = now + wait;
        let holder_request = RequestToHolder {
            body: body.clone(),
            purpose,
            due,
            next_wait: wait,
            transmissions: 1,
        };
        self.core.holder_requests.insert(request, holder_request);
        let asker = self.core.config.node;
        if self.core.config.holder != asker {
            self.core
                .timers
                .insert((due, MoveTimer::HolderRequest(request)));
            self.send_holder_request(request, body);
            return request;
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
        request
    }

    fn send_holder_request(&mut self, request: u64, body: HolderRequestBody) {
        let frame = match body {
            HolderRequestBody::Change(changes) => Frame::ChangeRequest { request, changes },
            HolderRequestBody::Lookup(flows) => Frame::Query { request, flows },
        };
        let to = self.core.config.holder;
        self.core.outputs.push_back(Output::Send { to, frame });
    }

    /// Cancels a request; a later answer is ignored.
    pub(super) fn cancel_request_to_holder(&mut self, request: u64) {
        if let Some(holder_request) = self.core.holder_requests.remove(&request) {
            self.core
                .timers
                .remove(&(holder_request.due, MoveTimer::HolderRequest(request)));
        }
    }

    /// Repeats a request.
    pub(super) fn repeat_request_to_holder(&mut self, now: Duration, request: u64) {
        let max = self.core.config.retry_max;
        let holder = self.core.config.holder;
        if holder == self.core.config.node {
            return;
        }
        let Some(holder_request) = self.core.holder_requests.get_mut(&request) else {
            return;
        };
        self.core
            .timers
            .remove(&(holder_request.due, MoveTimer::HolderRequest(request)));
        holder_request.next_wait = (holder_request.next_wait * 2).min(max);
        holder_request.due = now + holder_request.next_wait;
        holder_request.transmissions += 1;
        let (due, transmissions, body) = (
            holder_request.due,
            holder_request.transmissions,
            holder_request.body.clone(),
        );
        self.core
            .timers
            .insert((due, MoveTimer::HolderRequest(request)));
        self.send_holder_request(request, body);
        if transmissions == SILENT_AFTER_ATTEMPTS {
            self.core.push_event(Event::HolderSilent { holder });
        }
    }

    /// Repeats all requests at once over a new channel to the holder, and starts their waits from the beginning.
    pub(super) fn repeat_all_requests_to_holder(&mut self, now: Duration) {
        let requests: Vec<u64> = self.core.holder_requests.keys().copied().collect();
        for request in requests {
            if let Some(holder_request) = self.core.holder_requests.get_mut(&request) {
                holder_request.next_wait = self.core.config.retry_min / 2;
            }
            self.repeat_request_to_holder(now, request);
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
        let count = |body: &HolderRequestBody| match body {
            HolderRequestBody::Change(changes) => Some(changes.len()),
            HolderRequestBody::Lookup(_) => None,
        };
        let Some(purpose) =
            self.remove_answered_request(from, request, "ChangeResponse", answers.len(), count)
        else {
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
        let count = |body: &HolderRequestBody| match body {
            HolderRequestBody::Lookup(flows) => Some(flows.len()),
            HolderRequestBody::Change(_) => None,
        };
        let purpose =
            self.remove_answered_request(from, request, "QueryAnswer", records.len(), count);
        if let (Some(HolderRequestPurpose::OutcomeQuery(id)), [record]) = (purpose, &records[..]) {
            self.on_outcome_answered(now, id, *record);
        }
    }

    /// Removes the request that an answer matches, and returns its purpose.
    fn remove_answered_request(
        &mut self,
        from: NodeId,
        request: u64,
        frame: &'static str,
        results: usize,
        count: impl Fn(&HolderRequestBody) -> Option<usize>,
    ) -> Option<HolderRequestPurpose> {
        let mismatch = match self.core.holder_requests.get(&request) {
            _ if from != self.core.config.holder => "the sender is not the holder",
            None => "no open request with this number",
            Some(holder_request) if count(&holder_request.body) != Some(results) => {
                "the number of results does not match the request"
            }
            Some(holder_request) => {
                let purpose = holder_request.purpose;
                self.cancel_request_to_holder(request);
                return Some(purpose);
            }
        };
        self.core.report_ignored(from, frame, mismatch);
        None
    }
}

/// Returns a change of the process's own record.
pub(super) fn process_change(id: MoveId, kind: ChangeKind, epoch: Epoch) -> OwnershipChange {
    let flow = Flow::process_key(id);
    OwnershipChange { flow, kind, epoch }
}
