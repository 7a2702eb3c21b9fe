//! The donor's second half: acceptor and peers prepare, the holder diverts, the process is frozen and sent.
//!
//! Flows may appear until the process is stopped. Flows that no round has seen are armed, diverted and sent during the
//! freeze: the steps are repeated once, for them alone.

use super::Migration;
use super::command::Command;
use super::donor::{OutboundMove, OutboundMoveStage};
use super::event::{Event, ProcessKeptReason};
use super::migration_core::{CommandPurpose, MoveTimer, MovingFlow};
use super::requests_to_holder::{HolderAnswers, HolderRequestPurpose, OWNED_EPOCH, process_change};
use core::time::Duration;
use holdfast_wire::failure::{Failure, MigrationStep};
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveFrame, TranslationStep};
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, MoveId, NodeId, OwnershipChange, RecordState,
};

/// Time until a flow that was not diverted is requested again.
const DIVERT_RETRY: Duration = Duration::from_millis(1);

/// A flow of a process that this node gives.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutboundFlow {
    /// Epoch at which this node owns the flow.
    pub epoch: Epoch,
    pub state: OutboundFlowState,
}

/// Progress of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutboundFlowState {
    Owned,
    Diverted,
    Frozen,
    /// Closed by the process before the freeze: the remains belong to this node, at the epoch of this entry.
    Closed,
    /// The holder has no record of the flow: it moved and was closed there, or was closed here before the holder heard
    /// of it.
    Unrecorded,
}

pub(super) fn outbound_flow(flow: &DonorFlowEpoch) -> (Flow, OutboundFlow) {
    let (epoch, state) = (flow.epoch, OutboundFlowState::Owned);
    (flow.flow, OutboundFlow { epoch, state })
}

impl OutboundMove {
    pub(super) fn flows_in(
        &self,
        state: OutboundFlowState,
    ) -> impl Iterator<Item = DonorFlowEpoch> + '_ {
        let flows = self
            .flows
            .iter()
            .filter(move |(_, entry)| entry.state == state);
        flows.map(|(flow, entry)| DonorFlowEpoch {
            flow: *flow,
            epoch: entry.epoch,
        })
    }
}

impl Migration {
    /// Prepares the freeze at acceptor and peers, after the rounds.
    pub(super) fn prepare_freeze(&mut self, now: Duration, id: MoveId) {
        let view = &self.core.view;
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.since = now;
        // The other end may be on this node too.
        outbound.peers.retain(|peer| view.contains(peer.node));
        outbound.unprepared_peers = outbound.peers.iter().map(|peer| peer.node).collect();
        let forwarded = outbound.forwarded.clone();
        self.send_arm(id);
        self.set_deadline(id, Some(now + self.core.config.arm_timeout));
        self.translate_at_peers(now, id, TranslationStep::Prepare);
        if !forwarded.is_empty() {
            let connections = forwarded;
            self.core
                .outputs
                .push_event(Event::ConnectionsForwarded { id, connections });
        }
    }

    /// Has the acceptor hold the packets of flows that are about to be diverted.
    pub(super) fn send_arm(&mut self, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Arming;
        outbound.arm_count += 1;
        outbound.armed = false;
        let (to, part) = (outbound.to, outbound.arm_count);
        let flows = outbound.flows_in(OutboundFlowState::Owned).collect();
        self.core.send(to, id, MoveFrame::Arm { part, flows });
    }

    pub(super) fn on_armed(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        part: u32,
        result: Result<(), Failure>,
    ) {
        let Some(outbound) = self.outbound_in_stage(id, OutboundMoveStage::Arming) else {
            return self.core.outputs.report_ignored(
                from,
                "ArmResponse",
                "unexpected in this state",
            );
        };
        if outbound.arm_count != part {
            return self.core.outputs.report_ignored(
                from,
                "ArmResponse",
                "response to another request",
            );
        }
        if let Err(error) = result {
            let (by, whys) = (from, vec![error]);
            return self.fail_move(now, id, ProcessKeptReason::Refused { by, whys });
        }
        outbound.armed = true;
        self.save_flows(now, id);
    }

    /// Handles a peer's report on its preparation.
    pub(super) fn on_peer_prepared(
        &mut self,
        now: Duration,
        peer: NodeId,
        id: MoveId,
        result: Result<(), Failure>,
    ) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        if !outbound.unprepared_peers.remove(&peer) || outbound.stage != OutboundMoveStage::Arming {
            return;
        }
        match result {
            Ok(()) => self.save_flows(now, id),
            Err(error) => self.fail_move(
                now,
                id,
                ProcessKeptReason::PeerRefused {
                    by: peer,
                    why: error,
                },
            ),
        }
    }

    /// Forwards the connections of peers that did not answer.
    pub(super) fn forward_unprepared(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let silent = std::mem::take(&mut outbound.unprepared_peers);
        let silent_peers = outbound
            .peers
            .extract_if(.., |peer| silent.contains(&peer.node));
        let silent_peers: Vec<_> = silent_peers.collect();
        let connections = silent_peers.iter().flat_map(|peer| &peer.connections);
        let connections: Vec<Flow> = connections.copied().collect();
        outbound.forwarded.extend(&connections);
        self.undo_at_peers(now, id, silent_peers);
        self.core
            .outputs
            .push_event(Event::ConnectionsForwarded { id, connections });
        self.save_flows(now, id);
    }

    /// Saves the flows that are about to be diverted, once acceptor and peers are prepared.
    fn save_flows(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        if !outbound.armed || !outbound.unprepared_peers.is_empty() {
            return;
        }
        let elapsed = now.saturating_sub(outbound.since);
        if !outbound.divert_requested {
            outbound.since = now;
            outbound.summary.phases.arm = elapsed;
        }
        self.set_deadline(id, None);
        self.command_save_flows(id);
    }

    fn command_save_flows(&mut self, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::SavingFlows;
        let flows = outbound.flows.iter().map(|(flow, entry)| DonorFlowEpoch {
            flow: *flow,
            epoch: entry.epoch,
        });
        let (flows, peers) = (flows.collect(), outbound.peers.clone());
        self.core
            .push_command(CommandPurpose::SaveFlows(id), |token| Command::SaveFlows {
                token,
                id,
                flows,
                peers,
            });
    }

    pub(super) fn on_flows_saved(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<(), Failure>,
    ) {
        if self
            .outbound_in_stage(id, OutboundMoveStage::SavingFlows)
            .is_none()
        {
            return;
        }
        if let Err(error) = result {
            let step = MigrationStep::Arm;
            return self.fail_move(now, id, ProcessKeptReason::Failed { step, why: error });
        }
        // One deadline covers all repetitions.
        if self.outbound_moves[&id].deadline.is_none() {
            self.set_deadline(id, Some(now + self.core.config.divert_timeout));
        }
        self.request_divert(now, id);
    }

    /// Asks the holder to divert the remaining flows; the first request also diverts the process itself.
    pub(super) fn request_divert(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Diverting;
        let kind = ChangeKind::Divert {
            acceptor: outbound.to,
        };
        let mut changes = Vec::new();
        if !std::mem::replace(&mut outbound.divert_requested, true) {
            changes.push(process_change(id, ChangeKind::Establish, OWNED_EPOCH));
            changes.push(process_change(id, kind, OWNED_EPOCH));
        }
        let flows = outbound.flows_in(OutboundFlowState::Owned);
        changes.extend(flows.map(|DonorFlowEpoch { flow, epoch }| OwnershipChange {
            flow,
            kind,
            epoch,
        }));
        let holder_request = self.request_changes(now, changes, HolderRequestPurpose::Divert(id));
        if let Some(outbound) = self.outbound_moves.get_mut(&id) {
            outbound.holder_request = Some(holder_request);
        }
    }

    pub(super) fn on_diverted(&mut self, now: Duration, id: MoveId, answers: HolderAnswers) {
        let node = self.core.config.node;
        let moving = &self.core.moving_flows;
        let is_diverting =
            |outbound: &&mut OutboundMove| outbound.stage == OutboundMoveStage::Diverting;
        let Some(outbound) = self.outbound_moves.get_mut(&id).filter(is_diverting) else {
            return;
        };
        outbound.holder_request = None;
        let acceptor = outbound.to;
        let transit = RecordState::Transit {
            donor: node,
            acceptor,
        };
        let mut answers = answers.into_iter();
        let pending: Vec<Flow> = outbound
            .flows_in(OutboundFlowState::Owned)
            .map(|flow| flow.flow)
            .collect();
        if answers.len() > pending.len() {
            let process = answers
                .nth(1)
                .unwrap_or(Err(ChangeRefusal { current: None }));
            let current = process.unwrap_or_else(|refusal| refusal.current);
            if current.is_none_or(|record| record.state != transit) {
                return self.fail_move(
                    now,
                    id,
                    ProcessKeptReason::NotDiverted(ChangeRefusal { current }),
                );
            }
            outbound.maybe_diverted = true;
        }
        let mut failure = None;
        let mut missing = false;
        for (flow, answer) in pending.into_iter().zip(answers) {
            let record = answer.unwrap_or_else(|refusal| refusal.current);
            let closed = moving.get(&flow).is_some_and(MovingFlow::is_closed);
            let Some(entry) = outbound.flows.get_mut(&flow) else {
                continue;
            };
            match record {
                Some(record) if record.state == transit => {
                    entry.epoch = record.epoch.saturating_sub(1);
                    entry.state = OutboundFlowState::Diverted;
                }
                _ if closed => entry.state = OutboundFlowState::Closed,
                // The holder has not heard of the flow yet, or knows it at another epoch: request it again.
                None => missing = true,
                Some(record) if record.is_owned_by(node) => {
                    entry.epoch = record.epoch;
                    missing = true;
                }
                Some(record) => failure = Some(ProcessKeptReason::NotOurs { flow, record }),
            }
        }
        match failure {
            Some(reason) => self.fail_move(now, id, reason),
            None if missing => self.schedule_divert(now, id),
            None => self.freeze(now, id),
        }
    }

    fn schedule_divert(&mut self, now: Duration, id: MoveId) {
        let due = now + DIVERT_RETRY;
        if let Some(outbound) = self.outbound_moves.get_mut(&id) {
            self.core.set_timer(
                MoveTimer::RepeatDivert(id),
                &mut outbound.divert_due,
                Some(due),
            );
        }
    }

    /// Repeats the divert of flows that the holder did not divert. Their epochs may have changed, and are saved first.
    pub(super) fn repeat_divert(&mut self, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.divert_due = None;
        if outbound.stage != OutboundMoveStage::Diverting || outbound.holder_request.is_some() {
            return;
        }
        self.command_save_flows(id);
    }
}
