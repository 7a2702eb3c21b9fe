//! The acceptor's first half: a process is examined, the stub process made, and the packets of its flows held.

use super::Migration;
use super::command::Command;
use super::event::Event;
use super::migration_core::{CommandPurpose, MoveTimer};
use core::time::Duration;
use holdfast_wire::failure::{Context, Failure, NodeFault, PeerFault};
use holdfast_wire::frame::AcceptorPhaseTimes;
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveFrame, MoveOffer, PeerConnections, StepTime};
use holdfast_wire::{Epoch, Flow, MoveId, NodeId};
use std::collections::BTreeSet;

/// Number of ended moves to remember, to tell a repeated `Offer` from a new one.
const ENDED_MOVES_MAX: usize = 64;

/// Stage of a move to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InboundMoveStage {
    Examining,
    Building,
    /// Waiting for flows, and then for the process.
    Waiting,
    Restoring,
    Committing,
    Resuming,
    /// The process runs; donor and peers are told until they have answered.
    Running,
    Forgetting,
}

/// A move that this node takes.
#[derive(Debug)]
pub(super) struct InboundMove {
    pub stage: InboundMoveStage,
    /// Time at which the stage began.
    pub since: Duration,
    pub deadline: Option<Duration>,
    pub offer: Option<MoveOffer>,
    pub hops: u32,
    /// Flows whose packets are held, or will be.
    pub held_flows: BTreeSet<Flow>,
    /// Number of the donor's `Arm` frames.
    pub arm_count: u32,
    pub flows: Vec<DonorFlowEpoch>,
    /// Flows that the holder has committed with the process, without their names.
    pub committed_unnamed: Vec<DonorFlowEpoch>,
    pub peers: Vec<PeerConnections>,
    /// Epoch at which this node owns the process's record.
    pub epoch: Epoch,
    /// True if an earlier daemon knew of the commit.
    pub is_committed: bool,
    /// Flows of the running process, and their epochs.
    pub owned_flows: Vec<(Flow, Epoch)>,
    pub lost_flows: Vec<Flow>,
    /// Flows that were closed here, or have moved on, since the commit.
    pub gone_flows: BTreeSet<Flow>,
    pub times: AcceptorPhaseTimes,
    pub steps: Vec<StepTime>,
    /// Wait until the next `Done`.
    pub done_retry_wait: Duration,
    /// True if nothing of the process is left at the donor.
    pub donor_released: bool,
}

impl InboundMove {
    pub(super) fn new(stage: InboundMoveStage, now: Duration) -> InboundMove {
        InboundMove {
            stage,
            since: now,
            deadline: None,
            offer: None,
            hops: 0,
            held_flows: BTreeSet::new(),
            arm_count: 0,
            flows: Vec::new(),
            committed_unnamed: Vec::new(),
            peers: Vec::new(),
            epoch: 0,
            is_committed: false,
            owned_flows: Vec::new(),
            lost_flows: Vec::new(),
            gone_flows: BTreeSet::new(),
            times: AcceptorPhaseTimes::default(),
            steps: Vec::new(),
            done_retry_wait: Duration::ZERO,
            donor_released: false,
        }
    }

    /// Finishes the current stage and enters `next`; returns the duration of the finished stage, in microseconds.
    pub(super) fn finish_stage(&mut self, now: Duration, next: InboundMoveStage) -> u32 {
        let elapsed = self.micros_in_stage(now);
        self.since = now;
        self.stage = next;
        elapsed
    }

    /// Returns the time since the start of the stage, in microseconds.
    pub(super) fn micros_in_stage(&self, now: Duration) -> u32 {
        let elapsed = now.saturating_sub(self.since);
        u32::try_from(elapsed.as_micros()).unwrap_or(u32::MAX)
    }
}

impl Migration {
    pub(super) fn inbound_in_stage(
        &mut self,
        id: MoveId,
        stage: InboundMoveStage,
    ) -> Option<&mut InboundMove> {
        self.inbound_moves
            .get_mut(&id)
            .filter(|inbound| inbound.stage == stage)
    }

    pub(super) fn set_inbound_deadline(&mut self, id: MoveId, deadline: Option<Duration>) {
        if let Some(inbound) = self.inbound_moves.get_mut(&id) {
            self.core
                .set_timer(MoveTimer::InboundMove(id), &mut inbound.deadline, deadline);
        }
    }

    /// Handles a donor's offer of a process.
    pub(super) fn on_offer(&mut self, now: Duration, from: NodeId, id: MoveId, offer: MoveOffer) {
        if id.donor != from {
            return self.core.outputs.report_ignored(
                from,
                "Offer",
                "the move belongs to another donor",
            );
        }
        if self.inbound_moves.contains_key(&id) || self.ended_moves.contains(&id) {
            return self
                .core
                .outputs
                .report_ignored(from, "Offer", "repeated frame");
        }
        let running = |stage| {
            matches!(
                stage,
                InboundMoveStage::Running | InboundMoveStage::Forgetting
            )
        };
        let incoming = self
            .inbound_moves
            .values()
            .filter(|inbound| !running(inbound.stage));
        if incoming.count() >= self.core.config.incoming_max {
            let refusals = vec![NodeFault::ReceivingOtherProcess.into()];
            return self
                .core
                .send(from, id, MoveFrame::OfferResponse { refusals });
        }
        let mut inbound = InboundMove::new(InboundMoveStage::Examining, now);
        inbound.hops = offer.hops;
        inbound.offer = Some(offer.clone());
        self.inbound_moves.insert(id, inbound);
        self.core
            .push_command(CommandPurpose::Examine(id), |token| Command::Examine {
                token,
                id,
                offer,
            });
    }

    pub(super) fn on_examined(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<(), Vec<Failure>>,
    ) {
        let Some(inbound) = self.inbound_in_stage(id, InboundMoveStage::Examining) else {
            return;
        };
        let offer = inbound.offer.take();
        inbound.finish_stage(now, InboundMoveStage::Building);
        let refusals = result.err().unwrap_or_default();
        let refused = !refusals.is_empty();
        self.core
            .send(id.donor, id, MoveFrame::OfferResponse { refusals });
        let Some(offer) = offer.filter(|_| !refused) else {
            return self.end_inbound(id);
        };
        let deadline = now + self.core.config.inbound_timeout;
        self.set_inbound_deadline(id, Some(deadline));
        self.core
            .push_command(CommandPurpose::Build(id), |token| Command::Build {
                token,
                id,
                offer,
            });
    }

    pub(super) fn on_built(&mut self, now: Duration, id: MoveId, result: Result<(), Failure>) {
        let Some(inbound) = self.inbound_in_stage(id, InboundMoveStage::Building) else {
            return;
        };
        inbound.finish_stage(now, InboundMoveStage::Waiting);
        let failed = result.clone().err();
        self.core.send(id.donor, id, MoveFrame::Ready(result));
        if let Some(error) = failed {
            self.discard(id, error);
        }
    }

    /// Handles `Arm`: flows are about to be diverted to this node.
    pub(super) fn on_arm(
        &mut self,
        from: NodeId,
        id: MoveId,
        part: u32,
        flows: Vec<DonorFlowEpoch>,
    ) {
        let Some(inbound) = self.inbound_moves.get_mut(&id) else {
            return self.refuse_unknown_move(from, id, "Arm");
        };
        if id.donor != from || inbound.stage != InboundMoveStage::Waiting {
            return self.core.outputs.report_ignored(
                from,
                "Arm",
                "wrong sender or state of the move",
            );
        }
        let flow_names = flows.iter().map(|flow| flow.flow);
        if let Err(flow) = self.core.begin_flows(id, flow_names.clone()) {
            let result = Err(NodeFault::FlowInOtherMove(flow).into());
            return self
                .core
                .send(from, id, MoveFrame::ArmResponse { part, result });
        }
        inbound.held_flows.extend(flow_names);
        inbound.arm_count += 1;
        let purpose = CommandPurpose::Arm(id, part);
        self.core
            .push_command(purpose, |token| Command::Arm { token, id, flows });
    }

    pub(super) fn on_hold_armed(&mut self, id: MoveId, part: u32, result: Result<(), Failure>) {
        if self
            .inbound_in_stage(id, InboundMoveStage::Waiting)
            .is_some()
        {
            self.core
                .send(id.donor, id, MoveFrame::ArmResponse { part, result });
        }
    }

    /// Answers a frame about a move that this node does not have, and so will never run.
    pub(super) fn refuse_unknown_move(&mut self, from: NodeId, id: MoveId, frame: &'static str) {
        self.core
            .outputs
            .report_ignored(from, frame, "unknown move");
        if id.donor == from {
            self.send_never_runs(id, NodeFault::UnknownMove);
        }
    }

    /// Tells the donor that the process will never run here.
    pub(super) fn send_never_runs(&mut self, id: MoveId, reason: impl Into<Failure>) {
        let frame = MoveFrame::Done {
            result: Err(reason.into()),
            times: AcceptorPhaseTimes::default(),
            since_resume_us: 0,
            steps: Vec::new(),
        };
        self.core.send(id.donor, id, frame);
    }

    /// Tells the donor that this node knows of the commit.
    fn send_committed(&mut self, id: MoveId) {
        let Some(inbound) = self.inbound_moves.get(&id) else {
            return;
        };
        let frame = MoveFrame::Done {
            result: Ok(inbound.epoch),
            times: inbound.times,
            since_resume_us: 0,
            steps: Vec::new(),
        };
        self.core.send(id.donor, id, frame);
    }

    /// Gives up a move for which no commit was requested, or whose commit was refused.
    pub(super) fn discard(&mut self, id: MoveId, reason: impl Into<Failure>) {
        let Some(inbound) = self.inbound_moves.get(&id) else {
            return;
        };
        let touched = inbound.stage != InboundMoveStage::Examining;
        self.end_flows(id, &Default::default(), |_| true);
        self.end_inbound(id);
        if touched {
            self.core
                .push_command(CommandPurpose::Discard(id), |token| Command::Discard {
                    token,
                    id,
                });
            let reason = reason.into();
            self.core
                .outputs
                .push_event(Event::ProcessDiscarded { id, reason });
        }
    }

    pub(super) fn end_inbound(&mut self, id: MoveId) {
        self.set_inbound_deadline(id, None);
        self.inbound_moves.remove(&id);
        self.ended_moves.push_back(id);
        if self.ended_moves.len() > ENDED_MOVES_MAX {
            self.ended_moves.pop_front();
        }
    }

    /// Handles the donor's abort. A move with a requested commit continues: the holder decides.
    pub(super) fn on_abort(&mut self, from: NodeId, id: MoveId, reason: Failure) {
        if id.donor != from {
            return self.core.outputs.report_ignored(
                from,
                "MoveAbort",
                "the move belongs to another donor",
            );
        }
        match self.inbound_moves.get(&id).map(|inbound| inbound.stage) {
            None => self.refuse_unknown_move(from, id, "MoveAbort"),
            Some(
                InboundMoveStage::Examining
                | InboundMoveStage::Building
                | InboundMoveStage::Waiting
                | InboundMoveStage::Restoring,
            ) => {
                self.discard(id, reason.within(Context::DonorAborted));
                self.send_never_runs(id, PeerFault::MoveAborted);
            }
            // The process may not run before the original has ended: the original may have its file locks.
            Some(InboundMoveStage::Resuming) => self.send_committed(id),
            Some(_) => {}
        }
    }

    /// Handles the loss of the channel to a donor. A move with the whole process continues: the holder decides.
    pub(super) fn on_donor_lost(&mut self, peer: NodeId) {
        let is_waiting = |stage| {
            matches!(
                stage,
                InboundMoveStage::Examining
                    | InboundMoveStage::Building
                    | InboundMoveStage::Waiting
            )
        };
        let moves = self.inbound_moves.iter();
        let moves = moves.filter(|(id, inbound)| id.donor == peer && is_waiting(inbound.stage));
        let moves: Vec<MoveId> = moves.map(|(id, _)| *id).collect();
        for id in moves {
            self.discard(id, PeerFault::DonorChannelLost);
        }
    }

    /// Handles the timeout of a wait for the process, or repeats `Done`.
    pub(super) fn on_inbound_timeout(&mut self, now: Duration, id: MoveId) {
        let Some(inbound) = self.inbound_moves.get_mut(&id) else {
            return;
        };
        inbound.deadline = None;
        match inbound.stage {
            InboundMoveStage::Building | InboundMoveStage::Waiting => {
                self.discard(id, PeerFault::ProcessLate);
                self.send_never_runs(id, PeerFault::ProcessLate);
            }
            InboundMoveStage::Running => self.send_done(now, id),
            _ => {}
        }
    }
}
