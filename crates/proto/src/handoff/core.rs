//! State that the roles share: outputs, timers, tokens, and the flows that are moving.

use super::command::{Command, FlowEpoch, Token};
use super::config::Config;
use super::event::Event;
use super::recover::RestartedTake;
use super::repeat::Repeat;
use super::settle::Settling;
use super::{Output, RequestId};
use core::time::Duration;
use holdfast_wire::frame::BatchId;
use holdfast_wire::{Change, ChangeKind, Flow, Frame, NodeId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Purpose of a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A batch given, by its number.
    Given(u64),
    /// A batch taken.
    Taken(BatchId),
    /// A request to the holder, by its number.
    Ask(u64),
    /// A failed command to repeat.
    Again(Token),
    /// The end of the donor's rest.
    Rest,
}

/// Purpose of a command, kept until its completion.
#[derive(Debug)]
pub(super) enum Purpose {
    /// Static state of a lane's next flows, requested at `since`.
    Read {
        acceptor: NodeId,
        since: Duration,
    },
    Drain(u64),
    Freeze(u64),
    Resume(Repeat<(Settling, FlowEpoch)>),
    Close(Repeat<(Settling, FlowEpoch)>),
    Prepare(BatchId),
    Restore(BatchId),
    Activate(Option<BatchId>, Repeat<FlowEpoch>),
    Discard(Vec<Flow>),
    /// Requested by a peer.
    ArbitrateFor {
        asker: NodeId,
        request: u64,
    },
    /// Requested by this node.
    ArbitrateOwn {
        request: u64,
    },
    Lookup {
        asker: NodeId,
        request: u64,
    },
}

/// An open request to the holder.
#[derive(Debug)]
pub(super) struct Ask {
    pub changes: Vec<Change>,
    pub purpose: AskPurpose,
    /// Time of the next repetition, and the wait after that.
    pub due: Duration,
    pub wait: Duration,
    pub times: u32,
}

/// Operation that waits for the holder's answer.
#[derive(Debug)]
pub(super) enum AskPurpose {
    Divert(u64),
    Rollback(Vec<Settling>),
    Commit(BatchId),
    Restarted(Vec<RestartedTake>),
    Report,
}

/// A flow that takes part in a handoff here.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Changes reported during the move; deferred until its end.
    pub deferred: Vec<Change>,
}

/// State that the roles share.
#[derive(Debug)]
pub(super) struct Core {
    pub config: Config,
    pub outputs: VecDeque<Output>,
    /// Open commands, each with its number of expected results.
    pub commands: BTreeMap<Token, (Purpose, usize)>,
    /// Failed commands that wait for their repetition.
    pub again: BTreeMap<Token, Purpose>,
    pub asks: BTreeMap<u64, Ask>,
    pub moving: BTreeMap<Flow, Moving>,
    pub timers: BTreeSet<(Duration, Timer)>,
    /// Changes to report to the holder that are not part of an open request.
    pub reports: VecDeque<Change>,
    pub report_asked: bool,
    next: u64,
}

impl Core {
    pub(super) fn new(config: Config) -> Core {
        Core {
            config,
            outputs: VecDeque::new(),
            commands: BTreeMap::new(),
            again: BTreeMap::new(),
            asks: BTreeMap::new(),
            moving: BTreeMap::new(),
            timers: BTreeSet::new(),
            reports: VecDeque::new(),
            report_asked: false,
            next: 0,
        }
    }

    /// Returns a number that this machine has not used: for tokens, requests and holder requests.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn request_id(&mut self) -> RequestId {
        RequestId(self.number())
    }

    pub(super) fn send(&mut self, to: NodeId, frame: Frame) {
        self.outputs.push_back(Output::Send { to, frame });
    }

    pub(super) fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    pub(super) fn ignored(&mut self, from: NodeId, what: &'static str, why: &'static str) {
        self.event(Event::Ignored { from, what, why });
    }

    /// Emits a command; `make` gets its token.
    pub(super) fn command(&mut self, purpose: Purpose, make: impl FnOnce(Token) -> Command) {
        let token = Token(self.number());
        let command = make(token);
        self.commands.insert(token, (purpose, command.results()));
        self.outputs.push_back(Output::Do(command));
    }

    /// Schedules a failed command for repetition.
    pub(super) fn later(&mut self, now: Duration, purpose: Purpose) {
        let token = Token(self.number());
        self.again.insert(token, purpose);
        let due = now + self.config.command_retry;
        self.timers.insert((due, Timer::Again(token)));
    }

    /// Ends the flow's move and reports its deferred changes.
    ///
    /// If this node owns the flow, at `epoch`, all of them are reported; if not (none), only the changes after its
    /// removal.
    pub(super) fn end_move(&mut self, flow: &Flow, epoch: Option<u32>) {
        let Some(moving) = self.moving.remove(flow) else {
            return;
        };
        let mut ours = epoch;
        for mut change in moving.deferred {
            if change.kind == ChangeKind::Remove {
                match ours.take() {
                    Some(epoch) => change.epoch = epoch,
                    None => continue,
                }
            }
            self.reports.push_back(change);
        }
    }

    /// Ends the move of a flow that was not touched; its deferred changes are reported unchanged.
    pub(super) fn end_unread(&mut self, flow: &Flow) {
        if let Some(moving) = self.moving.remove(flow) {
            self.reports.extend(moving.deferred);
        }
    }
}
