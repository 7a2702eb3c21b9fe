//! State that the roles share: outputs, timers, tokens, and the flows that are moving.

use super::Output;
use super::asks::Question;
use super::command::{Command, Token};
use super::config::Config;
use super::event::Event;
use core::time::Duration;
use holdfast_wire::migration::{MoveFrame, TranslateStep};
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, Frame, MoveId, NodeId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Purpose of a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A move given: timeout of its step.
    Given(MoveId),
    /// A move given: repetition of its divert.
    Divert(MoveId),
    /// A move taken: timeout of its wait, or repetition of `Done`.
    Taken(MoveId),
    /// A request to the holder, by its number.
    Ask(u64),
    /// A failed command to repeat.
    Again(Token),
    /// A peer's missing answer to `Translate`.
    Tell(MoveId, NodeId),
    /// A translation prepared here without a later frame.
    Doubt(MoveId),
}

/// Purpose of a command, kept until its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Check(MoveId),
    Round(MoveId),
    Note(MoveId),
    Freeze(MoveId),
    /// With the number of the attempt.
    Thaw(MoveId, u32),
    Release(MoveId, u32),
    Examine(MoveId),
    Build(MoveId),
    Arm(MoveId, u32),
    Restore(MoveId),
    Go(MoveId, u32),
    Discard(MoveId),
    Forget(MoveId),
    /// Requested by that node; by none if this node asked the holder itself.
    Translate(MoveId, Option<NodeId>, TranslateStep),
    /// A request of this node, which is the holder.
    Holder(u64),
}

/// A flow that takes part in a move on this node.
#[derive(Debug)]
pub(super) struct Moving {
    pub id: MoveId,
    /// Changes reported during the move; deferred until its end.
    pub deferred: Vec<Change>,
}

impl Moving {
    /// Returns true if the flow was closed during the move.
    pub(super) fn is_removed(&self) -> bool {
        let mut deferred = self.deferred.iter();
        deferred.any(|change| change.kind == ChangeKind::Remove)
    }
}

/// State that the roles share.
#[derive(Debug)]
pub(super) struct Core {
    pub config: Config,
    pub outputs: VecDeque<Output>,
    pub commands: BTreeMap<Token, Purpose>,
    /// Failed commands that wait for their repetition.
    pub again: BTreeMap<Token, Purpose>,
    pub questions: BTreeMap<u64, Question>,
    pub moving: BTreeMap<Flow, Moving>,
    pub timers: BTreeSet<(Duration, Timer)>,
    next: u64,
}

impl Core {
    pub(super) fn new(config: Config) -> Core {
        Core {
            config,
            outputs: VecDeque::new(),
            commands: BTreeMap::new(),
            again: BTreeMap::new(),
            questions: BTreeMap::new(),
            moving: BTreeMap::new(),
            timers: BTreeSet::new(),
            next: 0,
        }
    }

    /// Returns a number that this machine has not used: for moves, tokens and holder requests.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn send(&mut self, to: NodeId, id: MoveId, frame: MoveFrame) {
        let frame = Frame::Move { id, frame };
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
        self.commands.insert(token, purpose);
        self.outputs.push_back(Output::Do(make(token)));
    }

    /// Schedules a failed command for repetition; returns false if it was the last attempt.
    pub(super) fn later(&mut self, now: Duration, purpose: Purpose, attempt: u32) -> bool {
        if attempt >= ATTEMPTS_MAX {
            return false;
        }
        let token = Token(self.number());
        self.again.insert(token, purpose);
        let due = now + self.config.command_retry;
        self.timers.insert((due, Timer::Again(token)));
        true
    }

    /// Resets or clears a timer.
    pub(super) fn set_timer(
        &mut self,
        timer: Timer,
        old: &mut Option<Duration>,
        due: Option<Duration>,
    ) {
        if let Some(old) = std::mem::replace(old, due) {
            self.timers.remove(&(old, timer));
        }
        if let Some(due) = due {
            self.timers.insert((due, timer));
        }
    }

    /// Marks flows as moving; on failure returns the first that takes part in another move.
    pub(super) fn begin_flows(
        &mut self,
        id: MoveId,
        flows: impl Iterator<Item = Flow> + Clone,
    ) -> Result<(), Flow> {
        let other = |flow: &Flow| self.moving.get(flow).is_some_and(|moving| moving.id != id);
        if let Some(flow) = flows.clone().find(other) {
            return Err(flow);
        }
        for flow in flows {
            let deferred = Vec::new();
            self.moving.entry(flow).or_insert(Moving { id, deferred });
        }
        Ok(())
    }

    /// Ends the move's flows and reports their deferred changes.
    ///
    /// For a flow that `moved` away, only the changes after its removal are reported. For any other flow all are, its
    /// removal with the flow's epoch in `ours`.
    pub(super) fn end_flows(
        &mut self,
        id: MoveId,
        ours: &BTreeMap<Flow, Epoch>,
        moved: impl Fn(&Flow) -> bool,
    ) {
        let mut changes = Vec::new();
        let all = std::mem::take(&mut self.moving).into_iter();
        let (ended, others): (Vec<_>, Vec<_>) = all.partition(|(_, moving)| moving.id == id);
        self.moving = others.into_iter().collect();
        let reported = |(_, moving): &(Flow, Moving)| !moving.deferred.is_empty();
        for (flow, moving) in ended.into_iter().filter(reported) {
            let mut is_ours = !moved(&flow);
            for mut change in moving.deferred {
                if change.kind == ChangeKind::Remove {
                    if !std::mem::replace(&mut is_ours, false) {
                        continue;
                    }
                    change.epoch = ours.get(&flow).copied().unwrap_or(change.epoch);
                }
                changes.push(change);
            }
        }
        if !changes.is_empty() {
            self.event(Event::Report { changes });
        }
    }
}

/// Most attempts of a command that must succeed.
const ATTEMPTS_MAX: u32 = 5;
