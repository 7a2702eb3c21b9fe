//! State that the roles share: outputs, timers, tokens, and the flows that are moving.

use super::command::{Command, CommandToken};
use super::config::MigrationMachineConfig;
use super::event::Event;
use super::requests_to_holder::HolderRequestPurpose;
use crate::holder_client::{HolderClient, MIGRATION_REQUEST_BIT, request_number};
use crate::machine_output::OutputQueue;
use crate::view::View;
use core::time::Duration;
use holdfast_wire::failure::Failure;
use holdfast_wire::move_frames::{MoveFrame, TranslationStep};
use holdfast_wire::{ChangeKind, Epoch, Flow, Frame, MoveId, NodeId, OwnershipChange};
use std::collections::{BTreeMap, BTreeSet};

/// Purpose of a timer of the migration machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MoveTimer {
    /// A move given: timeout of its step.
    OutboundMove(MoveId),
    /// A move given: repetition of its divert.
    RepeatDivert(MoveId),
    /// A move taken: timeout of its wait, or repetition of `Done`.
    InboundMove(MoveId),
    /// A request to the holder, by its number.
    HolderRequest(u64),
    /// A failed command to repeat.
    RetryCommand(CommandToken),
    /// A peer's missing answer to `Translate`.
    TranslateRequest(MoveId, NodeId),
    /// A translation prepared here without a later frame.
    OutcomeQuery(MoveId),
}

/// Purpose of a command, kept until its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommandPurpose {
    Check(MoveId),
    CopyRound(MoveId),
    SaveFlows(MoveId),
    Freeze(MoveId),
    /// Thaw of a process, with the number of the attempt.
    Thaw(MoveId, u32),
    Release(MoveId, u32),
    Examine(MoveId),
    Build(MoveId),
    Arm(MoveId, u32),
    Restore(MoveId),
    Resume(MoveId, u32),
    Discard(MoveId),
    Forget(MoveId),
    /// Requested by that node; by none if this node asked the holder itself.
    Translate(MoveId, Option<NodeId>, TranslationStep),
    /// A request of this node, which is the holder.
    HolderRequest(u64),
}

/// A flow that takes part in a move on this node.
#[derive(Debug)]
pub(super) struct MovingFlow {
    pub id: MoveId,
    /// Changes reported during the move; deferred until its end.
    pub deferred: Vec<OwnershipChange>,
}

impl MovingFlow {
    /// Returns true if the flow was closed during the move.
    pub(super) fn is_closed(&self) -> bool {
        let mut deferred = self.deferred.iter();
        deferred.any(|change| change.kind == ChangeKind::Remove)
    }
}

/// State that the roles in a move share.
#[derive(Debug)]
pub(super) struct MigrationCore {
    pub config: MigrationMachineConfig,
    /// The newest view of the group.
    pub view: View,
    pub outputs: OutputQueue<Command, Event>,
    pub open_commands: BTreeMap<CommandToken, CommandPurpose>,
    /// Failed commands that wait for their repetition.
    pub failed_commands: BTreeMap<CommandToken, CommandPurpose>,
    pub holder_client: HolderClient<HolderRequestPurpose>,
    pub moving_flows: BTreeMap<Flow, MovingFlow>,
    pub timers: BTreeSet<(Duration, MoveTimer)>,
    last_number: u64,
}

impl MigrationCore {
    pub(super) fn new(config: MigrationMachineConfig, view: View) -> MigrationCore {
        let holder_client = HolderClient::new(
            config.node,
            view.contact_node,
            config.retry_min,
            config.retry_max,
        );
        MigrationCore {
            holder_client,
            config,
            view,
            outputs: OutputQueue::new(),
            open_commands: BTreeMap::new(),
            failed_commands: BTreeMap::new(),
            moving_flows: BTreeMap::new(),
            timers: BTreeSet::new(),
            last_number: 0,
        }
    }

    /// Returns a number that this machine has not used: for moves and tokens.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns a number for a request to the holder.
    pub(super) fn next_request_number(&mut self) -> u64 {
        request_number(self.config.boot, self.next_number()) | MIGRATION_REQUEST_BIT
    }

    pub(super) fn send(&mut self, to: NodeId, id: MoveId, frame: MoveFrame) {
        let frame = Frame::Move { id, frame };
        self.outputs.send(to, frame);
    }

    /// Emits a command; `make` gets its token.
    pub(super) fn push_command(
        &mut self,
        purpose: CommandPurpose,
        make: impl FnOnce(CommandToken) -> Command,
    ) {
        let token = CommandToken(self.next_number());
        self.open_commands.insert(token, purpose);
        self.outputs.execute(make(token));
    }

    /// Schedules a failed command for repetition, or reports the failure of the last attempt. Returns true if the command
    /// is repeated.
    pub(super) fn retry_or_report(
        &mut self,
        now: Duration,
        (id, command): (MoveId, &'static str),
        purpose: CommandPurpose,
        attempt: u32,
        error: Failure,
    ) -> bool {
        if self.schedule_command_retry(now, purpose, attempt) {
            return true;
        }
        self.outputs
            .push_event(Event::CommandFailed { id, command, error });
        false
    }

    /// Schedules a failed command for repetition; returns false if it was the last attempt.
    fn schedule_command_retry(
        &mut self,
        now: Duration,
        purpose: CommandPurpose,
        attempt: u32,
    ) -> bool {
        if attempt >= ATTEMPTS_MAX {
            return false;
        }
        let token = CommandToken(self.next_number());
        self.failed_commands.insert(token, purpose);
        let due = now + self.config.command_retry_interval;
        self.timers.insert((due, MoveTimer::RetryCommand(token)));
        true
    }

    /// Resets or clears a timer.
    pub(super) fn set_timer(
        &mut self,
        timer: MoveTimer,
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
        let is_in_other_move = |flow: &Flow| {
            self.moving_flows
                .get(flow)
                .is_some_and(|moving| moving.id != id)
        };
        if let Some(flow) = flows.clone().find(is_in_other_move) {
            return Err(flow);
        }
        for flow in flows {
            let deferred = Vec::new();
            self.moving_flows
                .entry(flow)
                .or_insert(MovingFlow { id, deferred });
        }
        Ok(())
    }

    /// Ends the move's flows and reports their deferred changes. Returns the flows that are gone from this node.
    ///
    /// For a flow that `has_moved` away, only the changes after its removal are reported. For any other flow all are, its
    /// removal with the flow's epoch in `owned_flows`.
    pub(super) fn end_flows(
        &mut self,
        id: MoveId,
        owned_flows: &BTreeMap<Flow, Epoch>,
        has_moved: impl Fn(&Flow) -> bool,
    ) -> Vec<Flow> {
        let (mut changes, mut gone) = (Vec::new(), Vec::new());
        let all = std::mem::take(&mut self.moving_flows).into_iter();
        let (ended, others): (Vec<_>, Vec<_>) = all.partition(|(_, moving)| moving.id == id);
        self.moving_flows = others.into_iter().collect();
        for (flow, moving) in ended {
            let mut is_owned = !has_moved(&flow);
            for mut change in moving.deferred {
                if change.kind == ChangeKind::Remove {
                    if !std::mem::replace(&mut is_owned, false) {
                        continue;
                    }
                    change.epoch = owned_flows.get(&flow).copied().unwrap_or(change.epoch);
                }
                changes.push(change);
            }
            if !is_owned {
                gone.push(flow);
            }
        }
        if !changes.is_empty() {
            self.outputs.push_event(Event::ReportChanges { changes });
        }
        gone
    }
}

/// Most attempts of a command that must succeed.
const ATTEMPTS_MAX: u32 = 5;
