//! Recovery after a restart: moves that the daemon finds unfinished in its saved state.
//!
//! A donor that may have diverted rolls back: the holder's answer tells whether the process moved. An acceptor that may
//! have asked to commit rolls back as well: the record names this node only if the commit was granted. Both requests
//! name the same records in the same order as without a restart.

use super::acceptor::{InboundMove, InboundMoveStage};
use super::acceptor_commit::process_and_flow_changes;
use super::command::ProcessId;
use super::donor::OutboundMove;
use super::donor_divert::{OutboundFlow, OutboundFlowState};
use super::event::ProcessKeptReason;
use super::requests_to_holder::{HolderAnswers, HolderRequestPurpose};
use super::{Migration, MoveRequestOptions};
use core::time::Duration;
use holdfast_wire::failure::NodeFault;
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveFrame, PeerConnections};
use holdfast_wire::{ChangeKind, Epoch, Flow, MoveId, NodeId};

/// Saved state of a move. A node may be donor or acceptor, and peer as well; it then has two of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredMove {
    /// Move whose state was saved.
    pub id: MoveId,
    /// Number of earlier moves of the process.
    pub hops: u32,
    /// Role of this node in the move.
    pub role: RecoveredMoveRole,
}

/// Role of a node in a saved move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecoveredMoveRole {
    /// The node gives the process: `CopyRound` was commanded.
    Donor {
        /// Process that the node gives.
        process: ProcessId,
        /// Node that takes the process.
        to: NodeId,
        /// True for a clone: the original stays.
        clone: bool,
        /// Arguments of the last `SaveFlows`; none if there was none.
        saved_flows: Option<(Vec<DonorFlowEpoch>, Vec<PeerConnections>)>,
        /// True if `Freeze` was commanded: the process may be stopped.
        maybe_stopped: bool,
    },
    /// The node takes the process: `Build` was commanded.
    Acceptor {
        /// Arguments of `Restore`; none if it was not commanded.
        restored: Option<(Vec<DonorFlowEpoch>, Vec<PeerConnections>)>,
        /// True if `Resume` was commanded: the holder has committed the process.
        committed: bool,
        /// True if the process runs: `Resume` was carried out. The epoch of the process's record is then 3.
        resumed: bool,
    },
    /// The node is at the other end of connections of the process: `Translate` was commanded.
    Peer {
        /// The node to which the process moves.
        to: NodeId,
        /// The connections as the moving process sees them.
        connections: Vec<Flow>,
    },
}

/// Epoch at which an acceptor owns a process's record.
pub(super) const COMMITTED_EPOCH: Epoch = super::requests_to_holder::TRANSIT_EPOCH + 1;

impl Migration {
    pub(super) fn on_recovered(&mut self, now: Duration, moves: Vec<RecoveredMove>) {
        for RecoveredMove { id, hops, role } in moves {
            match role {
                RecoveredMoveRole::Donor {
                    process,
                    to,
                    clone,
                    saved_flows: noted,
                    maybe_stopped: frozen,
                } => {
                    let options = MoveRequestOptions {
                        clone,
                        ..MoveRequestOptions::default()
                    };
                    let mut outbound = OutboundMove::new(process, to, options, now);
                    outbound.hops = hops;
                    outbound.maybe_stopped = frozen && !clone;
                    // Without a freeze the acceptor of a process without flows cannot have committed, also that of a clone.
                    outbound.maybe_diverted =
                        (noted.as_ref()).is_some_and(|(flows, _)| frozen || !flows.is_empty());
                    self.recover_outbound(now, id, outbound, noted);
                }
                RecoveredMoveRole::Acceptor {
                    restored,
                    committed,
                    resumed: gone,
                } => {
                    let mut inbound = InboundMove::new(InboundMoveStage::Waiting, now);
                    inbound.hops = hops;
                    inbound.is_committed = committed;
                    self.recover_inbound(now, id, inbound, restored, gone);
                }
                RecoveredMoveRole::Peer { to, connections } => {
                    self.recover_translation(now, id, (hops, to), connections);
                }
            }
        }
    }

    fn recover_outbound(
        &mut self,
        now: Duration,
        id: MoveId,
        mut outbound: OutboundMove,
        saved_flows: Option<(Vec<DonorFlowEpoch>, Vec<PeerConnections>)>,
    ) {
        let (to, divert_requested) = (outbound.to, saved_flows.is_some());
        let (flows, peers) = saved_flows.unwrap_or_default();
        let state = OutboundFlowState::Frozen;
        let outbound_flows = flows.iter().map(|saved| {
            let epoch = saved.epoch;
            (saved.flow, OutboundFlow { epoch, state })
        });
        outbound.flows = outbound_flows.collect();
        outbound.peers = peers;
        outbound.divert_requested = divert_requested;
        // Peers may have been told of the move.
        outbound.arm_count = 1;
        let flow_names: Vec<Flow> = outbound.flows.keys().copied().collect();
        self.outbound_moves.insert(id, outbound);
        let flows_free = self.core.begin_flows(id, flow_names.into_iter());
        debug_assert!(flows_free.is_ok(), "a flow was recorded twice");
        let reason = ProcessKeptReason::Restarted.failure();
        self.core.send(to, id, MoveFrame::Abort { reason });
        match divert_requested {
            true => self.request_rollback(now, id),
            false => self.thaw(now, id),
        }
    }

    fn recover_inbound(
        &mut self,
        now: Duration,
        id: MoveId,
        mut inbound: InboundMove,
        restored: Option<(Vec<DonorFlowEpoch>, Vec<PeerConnections>)>,
        resumed: bool,
    ) {
        let was_restoring = restored.is_some();
        let (flows, peers) = restored.unwrap_or_default();
        inbound.held_flows = flows.iter().map(|flow| flow.flow).collect();
        inbound.flows = flows;
        inbound.peers = peers;
        if resumed {
            inbound.stage = InboundMoveStage::Running;
            inbound.epoch = COMMITTED_EPOCH;
            inbound.done_retry_wait = self.core.config.retry_min;
            self.inbound_moves.insert(id, inbound);
            self.switch_translations(now, id);
            return self.send_done(now, id);
        }
        let flow_names: Vec<Flow> = inbound.flows.iter().map(|flow| flow.flow).collect();
        let rollback = process_and_flow_changes(id, ChangeKind::Rollback, &inbound.flows);
        if was_restoring {
            inbound.stage = InboundMoveStage::Committing;
        }
        self.inbound_moves.insert(id, inbound);
        let flows_free = self.core.begin_flows(id, flow_names.into_iter());
        debug_assert!(flows_free.is_ok(), "a flow was recorded twice");
        match was_restoring {
            true => drop(self.request_changes(now, rollback, HolderRequestPurpose::Recovery(id))),
            false => self.discard(id, NodeFault::RestartedBeforeWholeProcess),
        }
    }

    pub(super) fn on_recovery_answered(
        &mut self,
        now: Duration,
        id: MoveId,
        answers: HolderAnswers,
    ) {
        let node = self.core.config.node;
        if self
            .inbound_in_stage(id, InboundMoveStage::Committing)
            .is_none()
        {
            return;
        }
        // A refusal names the current record.
        let records = answers.into_iter();
        let mut records = records.map(|answer| answer.unwrap_or_else(|refusal| refusal.current));
        match records.next().flatten() {
            Some(record) if record.is_owned_by(node) => self.resume(now, id, record, records),
            _ => {
                self.discard(id, NodeFault::RestartedBeforeMoveCommit);
                self.send_never_runs(id, NodeFault::RestartedBeforeMoveCommit);
            }
        }
    }
}
