//! State that the roles share: outputs, timers, tokens, and the flows that are moving.

use super::RequestId;
use super::command::{Command, CommandToken, FlowEpoch};
use super::command_retry::Retryable;
use super::config::HandoffMachineConfig;
use super::crash_recovery::RecoveredInboundFlow;
use super::donor_resume_or_close::EndingFlow;
use super::event::Event;
use crate::holder_client::{HolderClient, request_number};
use crate::machine_output::OutputQueue;
use crate::view::View;
use core::time::Duration;
use holdfast_wire::frame::BatchId;
use holdfast_wire::{ChangeKind, Flow, Frame, NodeId, OwnershipChange};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Purpose of a timer of the handoff machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HandoffTimer {
    /// A batch given, by its number.
    OutboundBatch(u64),
    /// A batch taken.
    InboundBatch(BatchId),
    /// A request to the holder, by its number.
    HolderRequest(u64),
    /// A failed command to repeat.
    RetryCommand(CommandToken),
    /// The end of the donor's pause between two batches.
    YieldPauseEnd,
}

/// Purpose of a command, kept until its completion.
#[derive(Debug)]
pub(super) enum CommandPurpose {
    /// Static state of a lane's next flows, requested at `since`.
    ReadStatic {
        acceptor: NodeId,
        since: Duration,
    },
    Drain(u64),
    Freeze(u64),
    Resume(Retryable<(EndingFlow, FlowEpoch)>),
    Close(Retryable<(EndingFlow, FlowEpoch)>),
    Prepare(BatchId),
    Restore(BatchId),
    Activate(Option<BatchId>, Retryable<FlowEpoch>),
    Discard(Vec<Flow>),
    /// Changes to a holder's records that a peer requested.
    ArbitrateForPeer {
        asker: NodeId,
        request: u64,
    },
    /// Changes to a holder's records that this node requested.
    ArbitrateOwn {
        request: u64,
    },
    Lookup {
        asker: NodeId,
        request: u64,
    },
}

/// Operation that waits for the holder's answer.
#[derive(Debug)]
pub(super) enum HolderRequestPurpose {
    Divert(u64),
    Rollback(Vec<EndingFlow>),
    Commit(BatchId),
    Recovery(Vec<RecoveredInboundFlow>),
    Report,
}

/// A flow that takes part in a handoff here.
#[derive(Debug, Default)]
pub(super) struct MovingFlow {
    /// Changes reported during the move; deferred until its end.
    pub deferred: Vec<OwnershipChange>,
}

/// State that the donor, the acceptor and the holder share.
#[derive(Debug)]
pub(super) struct HandoffCore {
    pub config: HandoffMachineConfig,
    /// The newest view of the group.
    pub view: View,
    pub outputs: OutputQueue<Command, Event>,
    /// Open commands, each with its number of expected results.
    pub open_commands: BTreeMap<CommandToken, (CommandPurpose, usize)>,
    /// Failed commands that wait for their repetition.
    pub failed_commands: BTreeMap<CommandToken, CommandPurpose>,
    pub holder_client: HolderClient<HolderRequestPurpose>,
    pub moving_flows: BTreeMap<Flow, MovingFlow>,
    pub timers: BTreeSet<(Duration, HandoffTimer)>,
    /// Changes to report to the holder that are not part of an open request.
    pub reports: VecDeque<OwnershipChange>,
    pub report_in_flight: bool,
    last_number: u64,
}

impl HandoffCore {
    pub(super) fn new(config: HandoffMachineConfig, view: View) -> HandoffCore {
        let (wait_min, wait_max) = (config.holder_retry_min, config.holder_retry_max);
        HandoffCore {
            holder_client: HolderClient::new(config.node, view.contact_node, wait_min, wait_max),
            config,
            view,
            outputs: OutputQueue::new(),
            open_commands: BTreeMap::new(),
            failed_commands: BTreeMap::new(),
            moving_flows: BTreeMap::new(),
            timers: BTreeSet::new(),
            reports: VecDeque::new(),
            report_in_flight: false,
            last_number: 0,
        }
    }

    /// Returns a number that this machine has not used: for tokens, batches and requests.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns a number for a request to the holder.
    pub(super) fn next_request_number(&mut self) -> u64 {
        request_number(self.config.boot, self.next_number())
    }

    pub(super) fn next_request_id(&mut self) -> RequestId {
        RequestId(self.next_number())
    }

    pub(super) fn send(&mut self, to: NodeId, frame: Frame) {
        self.outputs.send(to, frame);
    }

    /// Emits a command; `make` gets its token.
    pub(super) fn push_command(
        &mut self,
        purpose: CommandPurpose,
        make: impl FnOnce(CommandToken) -> Command,
    ) {
        let token = CommandToken(self.next_number());
        let command = make(token);
        self.open_commands
            .insert(token, (purpose, command.result_count()));
        self.outputs.execute(command);
    }

    /// Schedules a failed command for repetition.
    pub(super) fn schedule_command_retry(&mut self, now: Duration, purpose: CommandPurpose) {
        let token = CommandToken(self.next_number());
        let due = now + self.retry_wait(&purpose);
        self.failed_commands.insert(token, purpose);
        self.timers.insert((due, HandoffTimer::RetryCommand(token)));
    }

    /// Ends the flow's move and reports its deferred changes.
    ///
    /// If this node owns the flow, at `epoch`, all of them are reported; if not (none), only the changes after its
    /// removal.
    pub(super) fn end_move(&mut self, flow: &Flow, epoch: Option<u32>) {
        let Some(moving) = self.moving_flows.remove(flow) else {
            return;
        };
        let mut own_epoch = epoch;
        for mut change in moving.deferred {
            if change.kind == ChangeKind::Remove {
                match own_epoch.take() {
                    Some(epoch) => change.epoch = epoch,
                    None => continue,
                }
            }
            self.reports.push_back(change);
        }
    }

    /// Ends the move of a flow that was not touched; its deferred changes are reported unchanged.
    pub(super) fn end_untouched_move(&mut self, flow: &Flow) {
        if let Some(moving) = self.moving_flows.remove(flow) {
            self.reports.extend(moving.deferred);
        }
    }
}
