//! Recovery after a restart: flows that the daemon finds in its maps in the middle of a handoff.
//!
//! A donor rolls back: the holder's answer tells if the flow moved. An acceptor rolls back as well, because it does not
//! know if the sockets have their state. Sockets have it for certain only if a commit was requested and granted; then
//! the record names this node.

use super::command_retry::Retryable;
use super::donor_resume_or_close::EndingFlow;
use super::event::FlowKeptReason;
use super::handoff_core::{HolderRequestPurpose, MovingFlow};
use super::requests_to_holder::{CHANGES_MAX, HolderAnswers};
use super::{FlowEpoch, Handoff, RecoveredFlow, RecoveredFlowRole};
use core::time::Duration;
use holdfast_wire::failure::NodeFault;
use holdfast_wire::{ChangeKind, Epoch, Flow, OwnershipChange};

/// A flow that this node was taking before the restart.
#[derive(Debug)]
pub(super) struct RecoveredInboundFlow {
    flow: Flow,
    /// Epoch of the transit.
    epoch: Epoch,
}

impl Handoff {
    pub(super) fn on_recovered(&mut self, now: Duration, flows: Vec<RecoveredFlow>) {
        let mut outbound = Vec::new();
        let mut inbound = Vec::new();
        for RecoveredFlow {
            flow,
            epoch,
            role,
            peer,
        } in flows
        {
            self.core.moving_flows.insert(flow, MovingFlow::default());
            let frozen = match role {
                RecoveredFlowRole::Acceptor => {
                    inbound.push(RecoveredInboundFlow { flow, epoch });
                    continue;
                }
                RecoveredFlowRole::DonorPrepared => false,
                RecoveredFlowRole::Donor => true,
            };
            outbound.push(EndingFlow {
                flow,
                epoch: if frozen {
                    epoch.saturating_sub(1)
                } else {
                    epoch
                },
                acceptor: peer,
                request: None,
                batch: None,
                is_frozen: frozen,
                is_taken: false,
                reason: FlowKeptReason::Restarted,
                is_reported: false,
                in_doubt: false,
            });
        }
        self.roll_back(now, outbound);
        while !inbound.is_empty() {
            let remaining = inbound.split_off(inbound.len().min(CHANGES_MAX));
            let changes = inbound.iter().map(rollback_change).collect();
            self.request_changes(now, changes, HolderRequestPurpose::Recovery(inbound));
            inbound = remaining;
        }
    }

    pub(super) fn on_recovery_answered(
        &mut self,
        inbound: Vec<RecoveredInboundFlow>,
        answers: HolderAnswers,
    ) {
        let node = self.core.config.node;
        let mut owned = Vec::new();
        let mut not_owned = Vec::new();
        for (take, answer) in inbound.into_iter().zip(answers) {
            let flow = take.flow;
            match answer.unwrap_or_else(|refusal| refusal.current) {
                Some(record) if record.is_owned_by(node) => {
                    owned.push(FlowEpoch {
                        flow,
                        epoch: record.epoch,
                    });
                }
                _ => not_owned.push(flow),
            }
        }
        if !owned.is_empty() {
            self.command_activate(None, Retryable::first_attempt(owned));
        }
        self.discard_flows(None, not_owned, NodeFault::RestartedBeforeFlowCommit);
    }
}

fn rollback_change(take: &RecoveredInboundFlow) -> OwnershipChange {
    OwnershipChange {
        flow: take.flow,
        kind: ChangeKind::Rollback,
        epoch: take.epoch,
    }
}
