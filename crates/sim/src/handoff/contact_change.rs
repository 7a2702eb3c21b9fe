//! The contact node changes: requests that the new one cannot decide yet, and what a node reports to it.

use super::HandoffBug;
use super::node::KernelFlowState;
use super::world::{HandoffDaemonAction, HandoffWorld};
use crate::node_group::{DEFERRED_RETRY, GroupWorld as _, RebuildingWorld, TableRebuilds, node_id};
use holdfast_proto::flow_ownership::{ClaimVerdict, judge_claim};
use holdfast_proto::handoff::{CommandToken, Handoff};
use holdfast_proto::table_rebuild::Claim;
use holdfast_proto::view::View;
use holdfast_wire::{Flow, Frame, OwnershipChange, OwnershipRecord};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time of a decision about changes.
pub(super) enum ArbitrationTime {
    Now,
    Later,
    /// The node is a former holder: the machine ignores its answer, or the answer's frame is not sent.
    Never,
}

impl RebuildingWorld for HandoffWorld {
    fn rebuilds(&mut self) -> &mut TableRebuilds {
        &mut self.rebuilds
    }

    fn view_action(view: View) -> HandoffDaemonAction {
        HandoffDaemonAction::HearView(view)
    }

    fn wake_action() -> HandoffDaemonAction {
        HandoffDaemonAction::WakeRebuild
    }

    fn retry_action(from: usize) -> HandoffDaemonAction {
        HandoffDaemonAction::RetryDeferred { from }
    }

    fn admits_request(&mut self, from: usize, frame: &Frame) -> bool {
        match frame {
            Frame::ChangeRequest { changes, .. } => self.decides_now(from, changes),
            _ => true,
        }
    }

    fn handle_request(&mut self, from: usize, to: usize, frame: Frame) {
        self.drive_machine(to, |machine, now| {
            machine.handle_frame(now, node_id(from), frame);
        });
    }

    fn give_view(machine: &mut Handoff, now: Duration, view: View) {
        machine.handle_view(now, view);
    }

    fn forget_records(&mut self) {
        for truth in self.expected_flows.values_mut() {
            (truth.record, truth.epoch) = (None, 0);
        }
    }

    fn claimed_flows(&self, node: usize) -> Vec<Flow> {
        self.nodes[node].kernel.keys().copied().collect()
    }

    fn judge_claim(
        &self,
        current: Option<OwnershipRecord>,
        claimed: OwnershipRecord,
    ) -> ClaimVerdict {
        let is_newer = current.is_none_or(|current| claimed.epoch > current.epoch);
        match self.bug {
            Some(HandoffBug::BelievesHighestEpoch) if is_newer => ClaimVerdict::Stored,
            Some(HandoffBug::BelievesHighestEpoch) => ClaimVerdict::Known,
            _ => judge_claim(current, claimed, |_| true),
        }
    }

    fn has_liar(&self) -> bool {
        self.liar.is_some()
    }

    fn own_claims(&mut self, node: usize, flows: &[Flow]) -> Vec<Claim> {
        let own = node_id(node);
        let machine = self.core.daemons[node].machine.as_ref();
        let decided = machine.map(|machine| machine.ownership_claims());
        let decided: BTreeMap<Flow, Option<OwnershipRecord>> =
            decided.unwrap_or_default().into_iter().collect();
        let claim = |flow: &Flow| {
            if let Some(record) = decided.get(flow)
                && self.bug != Some(HandoffBug::ReportsWithoutDecisions)
            {
                return record.map(|record| (*flow, record));
            }
            let entry = self.nodes[node].kernel.get(flow)?;
            let record = match entry.state {
                _ if entry.epoch == 0 => return None,
                KernelFlowState::Owned | KernelFlowState::Prepared | KernelFlowState::Closing => {
                    OwnershipRecord::owned(own, entry.epoch)
                }
                KernelFlowState::Outgoing => OwnershipRecord::transit(own, entry.peer, entry.epoch),
                KernelFlowState::Incoming if self.bug == Some(HandoffBug::AcceptorClaimsFlow) => {
                    OwnershipRecord::owned(own, entry.epoch)
                }
                KernelFlowState::Incoming => OwnershipRecord::transit(entry.peer, own, entry.epoch),
                KernelFlowState::Moved => OwnershipRecord::owned(entry.peer, entry.epoch),
            };
            Some((*flow, record))
        };
        let mut claims: Vec<Claim> = flows.iter().filter_map(claim).collect();
        if self.liar.as_ref().is_some_and(|liar| liar.node == node) && node != self.core.holder {
            self.add_lies(&mut claims);
        }
        claims
    }
}

impl HandoffWorld {
    /// Returns true if the holder decides about changes now.
    fn decides_now(&mut self, asker: usize, changes: &[OwnershipChange]) -> bool {
        self.bug == Some(HandoffBug::DecidesBeforeReports) || self.is_admitted(asker, changes)
    }

    /// Returns when a node decides about changes; schedules a later decision.
    pub(super) fn time_of_arbitration(
        &mut self,
        node: usize,
        token: CommandToken,
        (asker, changes): (usize, &[OwnershipChange]),
    ) -> ArbitrationTime {
        let is_holder = node == self.core.holder;
        let has_heard = self.rebuilds.has_heard(node);
        if is_holder && has_heard && self.decides_now(asker, changes) {
            return ArbitrationTime::Now;
        }
        if !is_holder && (has_heard || asker != node) {
            return ArbitrationTime::Never;
        }
        let at = self.core.now + DEFERRED_RETRY;
        (self.core).schedule_action(node, at, HandoffDaemonAction::Arbitrate { token });
        ArbitrationTime::Later
    }
}
