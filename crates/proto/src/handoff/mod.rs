//! Handoff: how connections move from node to node. One machine per node has the three roles of ARCHITECTURE.md
//! ("A handoff"): donor, acceptor, holder.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//! The daemon drops frames to a node without a channel: the machine asks again or gives up by itself, and learns of a
//! lost channel from `handle_peer_lost`. Frames of one channel are passed on in order; frames of a replaced channel are
//! never passed on after frames of the new one. (Otherwise no flow would get two owners or none, but a closed flow
//! could stay in the holder's table: an establish repeated behind its removal.)
//!
//! Safety: two nodes never speak for one flow, whatever frames are lost, late or repeated, and whatever daemons crash.
//! Liveness: once nodes and holder reach each other, each flow has one owner, and the owner speaks.
//!
//! `Hello`, `Ping`, `Pong` and `DatagramAuthenticationKey` belong to the channel, `Move`, `Membership`, `FlowReport`,
//! `ConfiguredServices`, `NodeLoad`, `Conductor` and `Replication` to other parts; this one ignores them.

mod acceptor;
mod acceptor_commit;
mod batch_cost;
mod command;
mod command_retry;
mod config;
mod crash_recovery;
mod donor;
mod donor_divert;
mod donor_lane;
mod donor_resume_or_close;
mod donor_transfer;
mod drain_prediction;
mod event;
mod handoff_core;
mod holder;
mod ownership_claims;
mod requests_to_holder;

pub use command::{
    Command, CommandToken, Completion, FlowEpoch, FlowToRestore, FrozenFlow, Results,
    SendQueueInfo, StaticFlow,
};
pub use config::HandoffMachineConfig;
pub use event::{BatchPhaseTimes, Event, FlowHandoffOutcome, FlowKeptReason};
pub use holdfast_wire::failure::HandoffStep;

use self::acceptor::Acceptor;
use self::donor::Donor;
use self::handoff_core::{CommandPurpose, HandoffCore, HandoffTimer};
use self::holder::Holder;
use crate::machine_output::MachineOutput;
use crate::view::{NO_NODE, View};
use holdfast_wire::failure::{Context, Failure};
use holdfast_wire::{Epoch, Flow, Frame, NodeId, OwnershipChange};
use std::time::Duration;

/// Identifies a request of this node, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Policy for emptying send queues before the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainPolicy {
    /// Move queued data along.
    No,
    /// Wait, at most [`HandoffMachineConfig::drain_wait_max`].
    Yes,
    /// Wait, at most this long. The machine does not wait for a flow that is predicted to need longer.
    Within(Duration),
}

/// A request to hand flows to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowHandoffRequest {
    /// The flows, in the order in which they are to move.
    pub flows: Vec<Flow>,
    /// Node that takes the flows.
    pub to: NodeId,
    /// Policy for draining send queues first.
    pub drain: DrainPolicy,
}

/// Reason for refusing a request as a whole; nothing was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlowHandoffRequestError {
    /// The target is this node.
    #[error("node {0} is this node; name another")]
    ToSelf(NodeId),
    /// The target is not a node of the configuration.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(NodeId),
    /// The request names no flows.
    #[error("the request names no flow; name at least one")]
    NoFlows,
}

/// State of a flow in the pinned map, as a restarted daemon finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecoveredFlowRole {
    /// Owned, and read for a handoff (`PrepareResponse` in the map). The epoch is the owner's.
    DonorPrepared,
    /// "Transit out". The epoch is the transit's.
    Donor,
    /// "Transit in", or flushing its hold. The epoch is the transit's (one less than the owner's, if flushing).
    Acceptor,
}

/// A flow in the middle of a handoff that a restarted daemon found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveredFlow {
    /// Flow that was found in a handoff.
    pub flow: Flow,
    /// The epoch; see [`RecoveredFlowRole`] for its meaning.
    pub epoch: Epoch,
    /// State of the flow in the map.
    pub role: RecoveredFlowRole,
    /// The other node of the handoff, from the map (the destination of stragglers, if the flow turns out to have
    /// moved).
    pub peer: NodeId,
}

/// An action that the handoff machine asks of the daemon.
pub type Output = MachineOutput<Command, Event>;

/// The handoff machine of a node; see the module documentation.
#[derive(Debug)]
pub struct Handoff {
    core: HandoffCore,
    donor: Donor,
    acceptor: Acceptor,
    holder: Holder,
}

impl Handoff {
    /// Returns an idle machine in a group with this view.
    pub fn new(config: HandoffMachineConfig, view: View) -> Handoff {
        Handoff {
            core: HandoffCore::new(config, view),
            donor: Donor::new(),
            acceptor: Acceptor::default(),
            holder: Holder::default(),
        }
    }

    /// Begins to hand flows off. The end of each flow follows as [`Event::Outcome`]; [`Event::RequestFinished`] follows
    /// the last one.
    ///
    /// # Errors
    /// If no flow of the request could move; nothing was touched.
    pub fn handle_request(
        &mut self,
        now: Duration,
        request: FlowHandoffRequest,
    ) -> Result<RequestId, FlowHandoffRequestError> {
        let id = self.start_request(now, request)?;
        self.start_possible_actions(now);
        Ok(id)
    }

    /// Handles a frame from the node `from` (as named by the channel's certificate).
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: Frame) {
        match frame {
            Frame::Prepare { batch, flows } => self.on_prepare(now, from, batch, flows),
            Frame::State { batch, flows, last } => self.on_state(now, from, batch, flows, last),
            Frame::PrepareResponse { batch, results } if self.is_own_batch(batch) => {
                self.on_prepared(now, from, batch.seq, results);
            }
            Frame::Done {
                batch,
                results,
                times,
            } if self.is_own_batch(batch) => {
                self.on_done(now, from, batch.seq, results, times);
            }
            Frame::Abort { batch, reason } => self.on_abort(now, from, batch, reason.from_peer()),
            Frame::ChangeRequest { request, changes } => {
                self.on_change_request(from, request, changes)
            }
            Frame::ChangeResponse { request, results } => {
                self.on_holder_answer(now, from, request, results)
            }
            Frame::Query { request, flows } => self.on_query(from, request, flows),
            Frame::Hello { .. }
            | Frame::Refused { .. }
            | Frame::Ping { .. }
            | Frame::Pong { .. }
            | Frame::Move { .. }
            | Frame::Membership(_)
            | Frame::Health(_)
            | Frame::Credentials(_)
            | Frame::FlowReport(_)
            | Frame::ConfiguredServices { .. }
            | Frame::NodeLoad { .. }
            | Frame::DatagramAuthenticationKey { .. }
            | Frame::Conductor(_)
            | Frame::Replication(_)
            | Frame::Drain(_) => {}
            Frame::PrepareResponse { .. } | Frame::Done { .. } => {
                self.core.outputs.report_ignored(
                    from,
                    frame.name(),
                    "the batch does not belong to this daemon",
                );
            }
            Frame::QueryResponse { .. } => {
                self.core.outputs.report_ignored(
                    from,
                    frame.name(),
                    "the handoff machine sends no queries",
                );
            }
        }
        self.start_possible_actions(now);
    }

    /// Handles the completion of a command.
    /// # Panics
    /// If the results belong to another kind of command, or are too many or too few: the daemon is at fault, and flows
    /// would hang.
    pub fn handle_completion(&mut self, now: Duration, completion: Completion) {
        let Completion { token, results } = completion;
        match self.core.open_commands.remove(&token) {
            Some((purpose, count)) => {
                assert_eq!(results.len(), count, "results of {results:?}");
                self.on_completed(now, purpose, results);
            }
            None => {
                let node = self.core.config.node;
                self.core.outputs.report_ignored(
                    node,
                    "completion",
                    "no open command has this token",
                );
            }
        }
        self.start_possible_actions(now);
    }

    /// Reports flows established or closed on this node to the holder, in this order and reliably: the request is
    /// repeated until it is answered, across lost channels. [`Event::ReportAnswered`] follows for each change.
    ///
    /// A change of a flow that is moving waits. If the flow stays, its removal is requested with the epoch it has then;
    /// if the flow moves, the removal is dropped.
    ///
    /// Only [`holdfast_wire::ChangeKind::Establish`] and `Remove` are accepted; the machine makes the other kinds
    /// itself.
    pub fn handle_changes(&mut self, now: Duration, changes: Vec<OwnershipChange>) {
        self.queue_reports(changes);
        self.start_possible_actions(now);
    }

    /// Handles the loss of the channel to `peer`, and of frames on their way. The daemon also calls this function when
    /// a channel was replaced.
    pub fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.on_donor_lost(peer);
        self.on_acceptor_lost(now, peer);
        self.start_possible_actions(now);
    }

    /// Handles a new view of the group; an older one is ignored. Requests that the holder has not answered go to the new
    /// holder at once.
    pub fn handle_view(&mut self, now: Duration, view: View) {
        if !view.is_newer_than(&self.core.view) {
            return;
        }
        let holder = view.contact_node;
        self.core.view = view;
        if holder != self.core.holder_client.holder() {
            self.redirect_requests_to_holder(now, holder);
        }
        self.start_possible_actions(now);
    }

    /// Handles the removal of this node from the group: there is no holder and no other node until a newer view comes.
    /// Requests to the holder wait for that view.
    pub fn handle_removal(&mut self, now: Duration) {
        self.core.view = self.core.view.without_nodes();
        self.redirect_requests_to_holder(now, NO_NODE);
    }

    /// Handles a new channel to `peer`. If `peer` is the holder, open requests to it are repeated at once.
    pub fn handle_peer_connected(&mut self, now: Duration, peer: NodeId) {
        if peer == self.core.holder_client.holder() {
            self.repeat_all_requests_to_holder(now);
        }
        self.start_possible_actions(now);
    }

    /// Takes over flows that the daemon found in the middle of a handoff at its start; must be called before any other
    /// handler. The machine asks the holder and then commands `Resume`, `Close`, `Activate` or `Discard`.
    pub fn handle_recovered(&mut self, now: Duration, flows: Vec<RecoveredFlow>) {
        self.on_recovered(now, flows);
        self.start_possible_actions(now);
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some(&(due, timer)) = self.core.timers.first() {
            if due > now {
                break;
            }
            self.core.timers.pop_first();
            match timer {
                HandoffTimer::OutboundBatch(seq) => self.on_outbound_timeout(now, seq),
                HandoffTimer::InboundBatch(batch) => self.on_inbound_timeout(batch),
                HandoffTimer::HolderRequest(request) => self.repeat_request_to_holder(now, request),
                HandoffTimer::RetryCommand(token) => self.retry_command(token),
                HandoffTimer::YieldPauseEnd => self.end_yield_pause(now),
            }
        }
        self.start_possible_actions(now);
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.core.timers.first().map(|(due, _)| *due)
    }

    /// Sets whether a donor of many batches pauses after each one, for half as long as it was busy. On a node without
    /// spare processor time, its servers and their clients get the processors then. False at first.
    pub fn set_pause_between_batches(&mut self, is_yielding: bool) {
        self.donor.is_yielding = is_yielding;
    }

    /// Returns how many connections with empty queues a batch may have, as currently predicted. A program should be
    /// asked for at most so many connections ahead: further ones only wait, and are not served.
    pub fn batch_size(&self) -> usize {
        let config = &self.core.config;
        let model = &self.donor.model;
        model.flows_that_fit(config.freeze_max, config.batch_flows_max)
    }

    /// Returns true if the flow takes part in a handoff on this node.
    pub fn is_moving(&self, flow: &Flow) -> bool {
        self.core.moving_flows.contains_key(flow)
    }

    /// Returns true if no flow moves, no request or command is open, and no output waits.
    pub fn is_idle(&self) -> bool {
        let core = &self.core;
        core.outputs.is_empty()
            && core.moving_flows.is_empty()
            && core.open_commands.is_empty()
            && core.holder_client.is_idle()
            && core.timers.is_empty()
            && core.reports.is_empty()
            && self.donor.is_idle()
            && self.acceptor.batches.is_empty()
    }

    /// Starts actions that an input may have made possible.
    fn start_possible_actions(&mut self, now: Duration) {
        self.start_next_freeze(now);
        self.send_reports(now);
    }

    fn is_own_batch(&self, batch: holdfast_wire::BatchId) -> bool {
        batch.donor == self.core.config.node && batch.boot == self.core.config.boot
    }

    fn on_abort(
        &mut self,
        now: Duration,
        from: NodeId,
        batch: holdfast_wire::BatchId,
        reason: Failure,
    ) {
        if batch.donor == from {
            return self.abort_inbound(batch, reason.within(Context::DonorAborted), false);
        }
        let acceptor = self
            .donor
            .batches
            .get(&batch.seq)
            .map(|batch| batch.acceptor);
        if self.is_own_batch(batch) && acceptor == Some(from) {
            return self.fail_batch(
                now,
                batch.seq,
                FlowKeptReason::Aborted {
                    by: from,
                    why: reason,
                },
            );
        }
        self.core
            .outputs
            .report_ignored(from, "Abort", "unknown batch");
    }

    fn on_completed(&mut self, now: Duration, purpose: CommandPurpose, results: Results) {
        match (purpose, results) {
            (CommandPurpose::ReadStatic { acceptor, since }, Results::ReadStatic(results)) => {
                self.on_static_read(now, acceptor, since, results);
            }
            (CommandPurpose::Drain(seq), Results::Drained(queues)) => {
                self.on_drained(now, seq, queues)
            }
            (CommandPurpose::Freeze(seq), Results::Frozen(results)) => {
                self.on_frozen(now, seq, results)
            }
            (CommandPurpose::Resume(repeat), Results::Resumed(results)) => {
                self.on_resumed(now, repeat, results)
            }
            (CommandPurpose::Close(repeat), Results::Closed(results)) => {
                self.on_closed(now, repeat, results)
            }
            (CommandPurpose::Prepare(batch), Results::PreparedSockets(results)) => {
                self.on_sockets_prepared(now, batch, results);
            }
            (CommandPurpose::Restore(batch), Results::Restored(results)) => {
                self.on_restored(now, batch, results)
            }
            (CommandPurpose::Activate(batch, repeat), Results::Activated(results)) => {
                self.on_activated(now, batch, repeat, results);
            }
            (CommandPurpose::Discard(flows), Results::Discarded) => self.on_discarded(flows),
            (CommandPurpose::ArbitrateForPeer { asker, request }, Results::Arbitrated(results)) => {
                self.on_arbitrated_for_peer(asker, request, results);
            }
            (CommandPurpose::ArbitrateOwn { request }, Results::Arbitrated(results)) => {
                self.on_arbitrated_own(now, request, results);
            }
            (CommandPurpose::Lookup { asker, request }, Results::LookedUp(records)) => {
                self.on_looked_up(asker, request, records);
            }
            (purpose, results) => panic!("{results:?} does not answer the command for {purpose:?}"),
        }
    }
}
