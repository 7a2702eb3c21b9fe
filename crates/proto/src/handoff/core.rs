//! What the roles share: outputs, timers, tokens, and which flows are moving.

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

/// What a timer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A batch given; by its number.
    Given(u64),
    /// A batch taken.
    Taken(BatchId),
    /// A question to the holder; by its number.
    Ask(u64),
    /// A failed command that is due again.
    Again(Token),
    /// The donor goes on.
    Rest,
}

/// What a command was for, kept until its completion.
#[derive(Debug)]
pub(super) enum Purpose {
    /// Static state of a lane's next flows, asked at that time.
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
    /// Asked by a peer.
    ArbitrateFor {
        asker: NodeId,
        request: u64,
    },
    /// Asked by this node.
    ArbitrateOwn {
        request: u64,
    },
    Lookup {
        asker: NodeId,
        request: u64,
    },
}

/// A question to the holder.
#[derive(Debug)]
pub(super) struct Ask {
    pub changes: Vec<Change>,
    pub purpose: AskPurpose,
    /// When it is due again, and how long it waits after that.
    pub due: Duration,
    pub wait: Duration,
    pub times: u32,
}

/// Who waits for the holder's answer.
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
    /// Changes reported meanwhile; they wait for its end.
    pub deferred: Vec<Change>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Core {
    pub config: Config,
    pub outputs: VecDeque<Output>,
    /// Open commands, and how many results each is to have.
    pub commands: BTreeMap<Token, (Purpose, usize)>,
    /// Failed commands that wait to be given again.
    pub again: BTreeMap<Token, Purpose>,
    pub asks: BTreeMap<u64, Ask>,
    pub moving: BTreeMap<Flow, Moving>,
    pub timers: BTreeSet<(Duration, Timer)>,
    /// Changes to report to the holder, and the question that carries the first of them.
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

    /// A number this machine has not used: for tokens, requests and questions.
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

    /// Gives a command; `make` gets its token.
    pub(super) fn command(&mut self, purpose: Purpose, make: impl FnOnce(Token) -> Command) {
        let token = Token(self.number());
        let command = make(token);
        self.commands.insert(token, (purpose, command.results()));
        self.outputs.push_back(Output::Do(command));
    }

    /// Keeps a failed command until it is due again.
    pub(super) fn later(&mut self, now: Duration, purpose: Purpose) {
        let token = Token(self.number());
        self.again.insert(token, purpose);
        let due = now + self.config.command_retry;
        self.timers.insert((due, Timer::Again(token)));
    }

    /// The flow no longer moves. What was reported about it meanwhile is reported now: of a flow that is ours at
    /// `epoch` all of it, of one that is not (none) only what came after its removal.
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

    /// The flow does not move after all, nothing was touched: what was reported about it is reported as it was.
    pub(super) fn end_unread(&mut self, flow: &Flow) {
        if let Some(moving) = self.moving.remove(flow) {
            self.reports.extend(moving.deferred);
        }
    }
}
