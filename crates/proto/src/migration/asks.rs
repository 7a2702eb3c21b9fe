//! Requests to the holder, repeated until it answers.
//!
//! The epochs of a process's record are always the same: established at [`OWNED`] by the request that diverts it, in
//! transit at [`TRANSIT`]. Therefore a request can name them without a query.

use super::command::Command;
use super::core::{Purpose, Timer};
use super::event::Event;
use super::{Migration, Output};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, Frame, MoveId, NodeId, Record, Refusal};

/// The holder's answer to each change.
pub(super) type Answers = Vec<Result<Option<Record>, Refusal>>;

/// Epoch at which the donor owns the process's record.
pub(super) const OWNED: Epoch = 1;
/// Epoch of the record's transit.
pub(super) const TRANSIT: Epoch = 2;
/// Number of transmissions without an answer after which the holder is reported as silent.
const TIMES_UNTIL_SILENT: u32 = 4;

/// Bit in the numbers of this machine's requests; the handoff's numbers do not have it.
pub(super) const REQUESTS: u64 = 1 << 63;

/// An open request to the holder.
#[derive(Debug)]
pub(super) struct Question {
    what: What,
    pub purpose: AskPurpose,
    due: Duration,
    wait: Duration,
    times: u32,
}

#[derive(Debug, Clone)]
enum What {
    Change(Vec<Change>),
    Look(Vec<Flow>),
}

/// Operation that waits for the holder's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AskPurpose {
    Divert(MoveId),
    Rollback(MoveId),
    Commit(MoveId),
    CommitAll(MoveId),
    Restarted(MoveId),
    /// None: flows that did not move with their process belong to the donor again.
    Keep,
    /// Removal of a record that is not needed any more.
    Remove(MoveId),
    /// Proof that no earlier request about the move is under way any more.
    Flush(MoveId),
    /// Outcome of a move that this node prepared a translation for.
    Doubt(MoveId),
}

impl Migration {
    /// Asks the holder (which may be this node) to change records; returns the request's number.
    pub(super) fn ask(&mut self, now: Duration, changes: Vec<Change>, purpose: AskPurpose) -> u64 {
        self.question(now, What::Change(changes), purpose)
    }

    /// Asks the holder for a record.
    pub(super) fn look_up(&mut self, now: Duration, flow: Flow, purpose: AskPurpose) {
        self.question(now, What::Look(vec![flow]), purpose);
    }

    fn question(&mut self, now: Duration, what: What, purpose: AskPurpose) -> u64 {
        let request = self.core.number() | REQUESTS;
        let wait = self.core.config.ask_retry_min;
        let due = now + wait;
        let question = Question {
            what: what.clone(),
            purpose,
            due,
            wait,
            times: 1,
        };
        self.core.questions.insert(request, question);
        let asker = self.core.config.node;
        if self.core.config.holder != asker {
            self.core.timers.insert((due, Timer::Ask(request)));
            self.send_question(request, what);
            return request;
        }
        self.core
            .command(Purpose::Holder(request), |token| match what {
                What::Change(changes) => Command::Arbitrate {
                    token,
                    asker,
                    changes,
                },
                What::Look(flows) => Command::Lookup { token, flows },
            });
        request
    }

    fn send_question(&mut self, request: u64, what: What) {
        let frame = match what {
            What::Change(changes) => Frame::Ask { request, changes },
            What::Look(flows) => Frame::Query { request, flows },
        };
        let to = self.core.config.holder;
        self.core.outputs.push_back(Output::Send { to, frame });
    }

    /// Cancels a request; a later answer is ignored.
    pub(super) fn cancel_question(&mut self, request: u64) {
        if let Some(question) = self.core.questions.remove(&request) {
            self.core
                .timers
                .remove(&(question.due, Timer::Ask(request)));
        }
    }

    /// Repeats a request.
    pub(super) fn ask_again(&mut self, now: Duration, request: u64) {
        let max = self.core.config.ask_retry_max;
        let holder = self.core.config.holder;
        if holder == self.core.config.node {
            return;
        }
        let Some(question) = self.core.questions.get_mut(&request) else {
            return;
        };
        self.core
            .timers
            .remove(&(question.due, Timer::Ask(request)));
        question.wait = (question.wait * 2).min(max);
        question.due = now + question.wait;
        question.times += 1;
        let (due, times, what) = (question.due, question.times, question.what.clone());
        self.core.timers.insert((due, Timer::Ask(request)));
        self.send_question(request, what);
        if times == TIMES_UNTIL_SILENT {
            self.core.event(Event::HolderSilent { holder });
        }
    }

    /// Repeats all requests at once over a new channel to the holder, and starts their waits from the beginning.
    pub(super) fn ask_all_again(&mut self, now: Duration) {
        let requests: Vec<u64> = self.core.questions.keys().copied().collect();
        for request in requests {
            if let Some(question) = self.core.questions.get_mut(&request) {
                question.wait = self.core.config.ask_retry_min / 2;
            }
            self.ask_again(now, request);
        }
    }

    /// Handles the holder's answer.
    pub(super) fn answered(&mut self, now: Duration, from: NodeId, request: u64, answers: Answers) {
        let count = |what: &What| match what {
            What::Change(changes) => Some(changes.len()),
            What::Look(_) => None,
        };
        let Some(purpose) = self.take_question(from, request, "Answer", answers.len(), count)
        else {
            return;
        };
        match purpose {
            AskPurpose::Divert(id) => self.diverted(now, id, answers),
            AskPurpose::Rollback(id) => self.rolled_back(now, id, answers),
            AskPurpose::Commit(id) => self.committed(now, id, answers),
            AskPurpose::CommitAll(id) => self.committed_all(now, id, answers),
            AskPurpose::Restarted(id) => self.restarted_take_answered(now, id, answers),
            AskPurpose::Remove(id) => self.removed(id),
            AskPurpose::Flush(id) => self.flushed(id),
            AskPurpose::Keep | AskPurpose::Doubt(_) => {}
        }
    }

    pub(super) fn looked_up(
        &mut self,
        now: Duration,
        from: NodeId,
        request: u64,
        records: Vec<Option<Record>>,
    ) {
        let count = |what: &What| match what {
            What::Look(flows) => Some(flows.len()),
            What::Change(_) => None,
        };
        let purpose = self.take_question(from, request, "QueryAnswer", records.len(), count);
        if let (Some(AskPurpose::Doubt(id)), [record]) = (purpose, &records[..]) {
            self.doubt_answered(now, id, *record);
        }
    }

    /// Removes the request that an answer matches, and returns its purpose.
    fn take_question(
        &mut self,
        from: NodeId,
        request: u64,
        frame: &'static str,
        results: usize,
        count: impl Fn(&What) -> Option<usize>,
    ) -> Option<AskPurpose> {
        let why = match self.core.questions.get(&request) {
            _ if from != self.core.config.holder => "it is not the holder's",
            None => "nobody waits for it",
            Some(question) if count(&question.what) != Some(results) => "it does not fit",
            Some(question) => {
                let purpose = question.purpose;
                self.cancel_question(request);
                return Some(purpose);
            }
        };
        self.core.ignored(from, frame, why);
        None
    }
}

/// Returns a change of the process's own record.
pub(super) fn of_process(id: MoveId, kind: ChangeKind, epoch: Epoch) -> Change {
    let flow = Flow::of_move(id);
    Change { flow, kind, epoch }
}
