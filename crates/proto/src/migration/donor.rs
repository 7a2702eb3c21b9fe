//! The donor's first half: from a request until the acceptor accepts the offer.
//!
//! Nothing has been touched until then, and a failure costs nothing.

use super::command::{CheckReport, Command, ProcessId};
use super::copy_rounds::CopyRounds;
use super::donor_divert::{OutboundFlow, outbound_flow};
use super::event::{Event, MoveMeasurements, MoveOutcome, ProcessKeptReason};
use super::freeze_cost::FreezeLoad;
use super::migration_core::{CommandPurpose, MoveTimer};
use super::{Migration, MoveRequest, MoveRequestError, MoveRequestOptions};
use core::time::Duration;
use holdfast_wire::failure::{Failure, MigrationStep};
use holdfast_wire::frame::ENTRIES_MAX;
use holdfast_wire::move_frames::{MoveFrame, MoveOffer, PeerConnections};
use holdfast_wire::{Epoch, Flow, MoveId, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// Stage of a move from this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutboundMoveStage {
    Checking,
    Offering,
    Copying,
    /// Waiting for the acceptor to be ready, after a round.
    AwaitingAcceptor,
    Arming,
    SavingFlows,
    Diverting,
    Freezing,
    Transferring,
    /// Waiting for the holder's decision.
    Settling,
    Thawing,
    Releasing,
    /// The outcome is reported; the holder still has the process's record.
    Removing,
}

/// A move that this node gives.
#[derive(Debug)]
pub(super) struct OutboundMove {
    pub process: ProcessId,
    pub to: NodeId,
    pub options: MoveRequestOptions,
    pub stage: OutboundMoveStage,
    /// Start of the move; from the preparation of the freeze on, start of the stage.
    pub since: Duration,
    pub deadline: Option<Duration>,
    /// Time at which to repeat the divert of flows that the holder did not divert.
    pub divert_due: Option<Duration>,
    /// The open request to the holder.
    pub holder_request: Option<u64>,
    pub hops: u32,
    pub flows: BTreeMap<Flow, OutboundFlow>,
    pub peers: Vec<PeerConnections>,
    pub forwarded: Vec<Flow>,
    /// Peers that have not reported their preparation yet.
    pub unprepared_peers: BTreeSet<NodeId>,
    /// Number of `Arm`s sent; only an answer to the last one counts.
    pub arm_count: u32,
    pub armed: bool,
    pub acceptor_ready: bool,
    /// True if the holder was, or may have been, asked to divert.
    pub divert_requested: bool,
    /// True if the process's record is, or may be, in transit.
    pub maybe_diverted: bool,
    /// True if the process was, or may have been, stopped.
    pub maybe_stopped: bool,
    pub rounds: CopyRounds,
    /// True if the remaining pages may be sent by post-copy.
    pub post_copy_allowed: bool,
    pub load: FreezeLoad,
    /// Reason reported if the process stays.
    pub reason: ProcessKeptReason,
    /// Epoch at which this node owns the process's record again.
    pub record_epoch: Option<Epoch>,
    /// True if a clone of the process runs.
    pub clone_runs: bool,
    /// True if the holder has, or had, no record of the process.
    pub in_doubt: bool,
    /// True if the acceptor has said in the doubt that it will never run the process.
    pub acceptor_gave_up: bool,
    /// True if the holder has committed the process.
    pub is_committed: bool,
    /// True if the acceptor has said that it knows of the commit.
    pub acceptor_runs: bool,
    /// Bytes that compression saved during the freeze.
    pub freeze_saved_bytes: u64,
    pub summary: MoveMeasurements,
}

impl OutboundMove {
    pub(super) fn new(
        process: ProcessId,
        to: NodeId,
        options: MoveRequestOptions,
        now: Duration,
    ) -> OutboundMove {
        OutboundMove {
            process,
            to,
            options,
            stage: OutboundMoveStage::Checking,
            since: now,
            deadline: None,
            divert_due: None,
            holder_request: None,
            hops: 0,
            flows: BTreeMap::new(),
            peers: Vec::new(),
            forwarded: Vec::new(),
            unprepared_peers: BTreeSet::new(),
            arm_count: 0,
            armed: false,
            acceptor_ready: false,
            divert_requested: false,
            maybe_diverted: false,
            maybe_stopped: false,
            rounds: CopyRounds::default(),
            post_copy_allowed: false,
            load: FreezeLoad::default(),
            reason: ProcessKeptReason::Restarted,
            record_epoch: None,
            clone_runs: false,
            in_doubt: false,
            acceptor_gave_up: false,
            is_committed: false,
            acceptor_runs: false,
            freeze_saved_bytes: 0,
            summary: MoveMeasurements::default(),
        }
    }

    /// Finishes the current stage and enters `next`; returns the duration of the finished stage.
    pub(super) fn finish_stage(&mut self, now: Duration, next: OutboundMoveStage) -> Duration {
        let elapsed = now.saturating_sub(self.since);
        self.since = now;
        self.stage = next;
        elapsed
    }
}

impl Migration {
    pub(super) fn outbound_in_stage(
        &mut self,
        id: MoveId,
        stage: OutboundMoveStage,
    ) -> Option<&mut OutboundMove> {
        self.outbound_moves
            .get_mut(&id)
            .filter(|outbound| outbound.stage == stage)
    }

    pub(super) fn set_deadline(&mut self, id: MoveId, deadline: Option<Duration>) {
        if let Some(outbound) = self.outbound_moves.get_mut(&id) {
            self.core.set_timer(
                MoveTimer::OutboundMove(id),
                &mut outbound.deadline,
                deadline,
            );
        }
    }

    pub(super) fn start_request(
        &mut self,
        now: Duration,
        request: MoveRequest,
    ) -> Result<MoveId, MoveRequestError> {
        let MoveRequest {
            process,
            to,
            options,
        } = request;
        let config = &self.core.config;
        if to == config.node {
            return Err(MoveRequestError::ToSelf(to));
        }
        if !self.core.view.contains(to) {
            return Err(MoveRequestError::UnknownNode(to));
        }
        match options {
            MoveRequestOptions {
                post_copy: true,
                clone: true,
                ..
            } => return Err(MoveRequestError::CloneByPostCopy),
            MoveRequestOptions {
                post_copy: true,
                verify: true,
                ..
            } => return Err(MoveRequestError::VerifyByPostCopy),
            _ => {}
        }
        if self
            .outbound_moves
            .values()
            .any(|outbound| outbound.process == process)
        {
            return Err(MoveRequestError::AlreadyMoving(process));
        }
        let (donor, boot) = (config.node, config.boot);
        let seq = self.core.next_number();
        let id = MoveId { donor, boot, seq };
        let clone = options.clone;
        self.outbound_moves
            .insert(id, OutboundMove::new(process, to, options, now));
        self.core
            .push_command(CommandPurpose::Check(id), |token| Command::Check {
                token,
                process,
                clone,
            });
        Ok(id)
    }

    pub(super) fn on_checked(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<CheckReport, Vec<Failure>>,
    ) {
        let model = &self.model;
        let checking = |outbound: &&mut OutboundMove| outbound.stage == OutboundMoveStage::Checking;
        let Some(outbound) = self.outbound_moves.get_mut(&id).filter(checking) else {
            return;
        };
        let report = match result {
            Ok(report) => report,
            Err(blockers) => return self.end_untouched(id, ProcessKeptReason::Blocked(blockers)),
        };
        let options = outbound.options;
        outbound.hops = report.hops;
        if !options.clone {
            outbound.flows = report.flows.iter().map(outbound_flow).collect();
            outbound.peers = report.peers;
            outbound.forwarded = report.forwarded;
        }
        outbound.load = FreezeLoad {
            dirty_bytes: 0,
            sockets: options.sockets_in_freeze(report.sockets),
            tree: report.tree,
        };
        // No round makes a freeze shorter than one that sends no memory. With post-copy the freeze is that short in any
        // case, so the limit does not apply here.
        let predicted = model.predict(options.sockets, outbound.load);
        outbound.summary.predicted = predicted;
        let max = options.max_freeze.filter(|_| !options.post_copy);
        if let Some(max) = max.filter(|max| predicted > *max) {
            return self.end_untouched(id, ProcessKeptReason::FreezeTooLong { predicted, max });
        }
        let (to, flows) = (outbound.to, outbound.flows.len());
        if let Err(reason) = self.check_sockets(id) {
            return self.end_untouched(id, reason);
        }
        let offer = MoveOffer {
            clone: options.clone,
            sockets: options.sockets,
            post_copy: options.post_copy,
            hops: report.hops,
            memory_bytes: report.memory,
            flow_count: flows as u32,
            description: report.description,
        };
        self.core.send(to, id, MoveFrame::Offer(offer));
        if let Some(outbound) = self.outbound_moves.get_mut(&id) {
            outbound.stage = OutboundMoveStage::Offering;
        }
        self.set_deadline(id, Some(now + self.core.config.offer_timeout));
    }

    /// Checks that the current sockets can move, and marks their flows as moving.
    pub(super) fn check_sockets(&mut self, id: MoveId) -> Result<(), ProcessKeptReason> {
        let Some(outbound) = self.outbound_moves.get(&id) else {
            return Ok(());
        };
        // A request has two more changes, for the process itself.
        if outbound.flows.len() > ENTRIES_MAX - 2 {
            return Err(ProcessKeptReason::TooManyFlows(outbound.flows.len()));
        }
        for connection in outbound.peers.iter().flat_map(|peer| &peer.connections) {
            if self.has_prepared_translation(connection) {
                return Err(ProcessKeptReason::PeerMoving(*connection));
            }
        }
        let flows = outbound.flows.keys().copied();
        self.core
            .begin_flows(id, flows)
            .map_err(ProcessKeptReason::FlowMoving)
    }

    pub(super) fn on_offered(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        refusals: Vec<Failure>,
    ) {
        if self
            .outbound_in_stage(id, OutboundMoveStage::Offering)
            .is_none()
        {
            return self.core.outputs.report_ignored(
                from,
                "OfferResponse",
                "unexpected in this state",
            );
        }
        if !refusals.is_empty() {
            let (by, whys) = (from, refusals);
            return self.end_untouched(id, ProcessKeptReason::Refused { by, whys });
        }
        self.set_deadline(id, Some(now + self.core.config.build_timeout));
        self.copy_round(id);
    }

    /// Ends a move before anything was touched.
    pub(super) fn end_untouched(&mut self, id: MoveId, reason: ProcessKeptReason) {
        let Some(outbound) = self.outbound_moves.get(&id) else {
            return;
        };
        let owned_flows = outbound.flows.iter().map(|(flow, at)| (*flow, at.epoch));
        let owned_flows = owned_flows.collect();
        self.end_flows(id, &owned_flows, |_| false);
        self.end_outbound(id, MoveOutcome::Kept { reason });
    }

    /// Ends a move that has no saved state.
    pub(super) fn end_outbound(&mut self, id: MoveId, outcome: MoveOutcome) {
        self.report_outcome(id, outcome);
        self.outbound_moves.remove(&id);
    }

    pub(super) fn report_outcome(&mut self, id: MoveId, outcome: MoveOutcome) {
        self.set_deadline(id, None);
        self.cancel_outbound_request(id);
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        self.core
            .set_timer(MoveTimer::RepeatDivert(id), &mut outbound.divert_due, None);
        let summary = Box::new(std::mem::take(&mut outbound.summary));
        self.core.outputs.push_event(Event::Outcome {
            id,
            outcome,
            summary,
        });
    }

    /// Handles the timeout of a step.
    pub(super) fn on_outbound_timeout(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.deadline = None;
        let (to, holder) = (outbound.to, self.core.holder_client.holder());
        let (peer, step) = match outbound.stage {
            OutboundMoveStage::Offering => (to, MigrationStep::Offer),
            OutboundMoveStage::Copying | OutboundMoveStage::AwaitingAcceptor => {
                (to, MigrationStep::Copy)
            }
            OutboundMoveStage::Arming if outbound.armed => return self.forward_unprepared(now, id),
            OutboundMoveStage::Arming => (to, MigrationStep::Arm),
            OutboundMoveStage::Diverting | OutboundMoveStage::SavingFlows => {
                (holder, MigrationStep::Divert)
            }
            OutboundMoveStage::Transferring => (to, MigrationStep::Transfer),
            OutboundMoveStage::Settling if outbound.in_doubt || outbound.is_committed => {
                return self.request_rollback(now, id);
            }
            _ => return,
        };
        self.fail_move(now, id, ProcessKeptReason::TimedOut { peer, step });
    }

    /// Handles the loss of a channel: moves to that node fail, or the holder decides them.
    pub(super) fn on_acceptor_lost(&mut self, now: Duration, peer: NodeId) {
        let moves = self
            .outbound_moves
            .iter()
            .filter(|(_, outbound)| outbound.to == peer);
        let moves: Vec<MoveId> = moves.map(|(id, _)| *id).collect();
        for id in moves {
            let step = match self.outbound_moves[&id].stage {
                OutboundMoveStage::Checking => continue,
                OutboundMoveStage::Offering => MigrationStep::Offer,
                OutboundMoveStage::Copying | OutboundMoveStage::AwaitingAcceptor => {
                    MigrationStep::Copy
                }
                OutboundMoveStage::Arming | OutboundMoveStage::SavingFlows => MigrationStep::Arm,
                OutboundMoveStage::Diverting => MigrationStep::Divert,
                OutboundMoveStage::Freezing => MigrationStep::Freeze,
                _ => MigrationStep::Transfer,
            };
            self.fail_move(now, id, ProcessKeptReason::PeerLost { peer, step });
        }
    }
}
