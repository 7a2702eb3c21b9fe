//! The contact node changes: requests that the new one cannot decide yet, and what a node reports to it.

use super::MigrationBug;
use super::host::{KernelFlowState, RunningCommand};
use super::world::{MigrationDaemonAction, MigrationWorld};
use crate::node_group::{DEFERRED_RETRY, RebuildingWorld, TableRebuilds, node_id, node_index};
use holdfast_proto::flow_ownership::{ClaimVerdict, ProcessTransits, judge_claim};
use holdfast_proto::migration::{Command, CommandToken, Migration, Results};
use holdfast_proto::table_rebuild::Claim;
use holdfast_proto::view::View;
use holdfast_wire::{ChangeRefusal, Flow, Frame, OwnershipChange, OwnershipRecord, RecordState};
use std::collections::BTreeMap;
use std::time::Duration;

impl RebuildingWorld for MigrationWorld {
    fn rebuilds(&mut self) -> &mut TableRebuilds {
        &mut self.rebuilds
    }

    fn view_action(view: View) -> MigrationDaemonAction {
        MigrationDaemonAction::HearView(view)
    }

    fn wake_action() -> MigrationDaemonAction {
        MigrationDaemonAction::WakeRebuild
    }

    fn retry_action(from: usize) -> MigrationDaemonAction {
        MigrationDaemonAction::RetryDeferred { from }
    }

    fn admits_request(&mut self, from: usize, frame: &Frame) -> bool {
        match frame {
            Frame::ChangeRequest { changes, .. } => self.decides_now(from, changes),
            _ => self.is_query_admitted(),
        }
    }

    fn handle_request(&mut self, from: usize, to: usize, frame: Frame) {
        match frame {
            Frame::ChangeRequest { request, changes } => {
                let results = self.arbitrate(node_id(from), &changes);
                self.send_frame(to, from, Frame::ChangeResponse { request, results });
            }
            Frame::Query { request, flows } => {
                let steering = &self.core.steering;
                let records = flows.iter().map(|flow| steering.get(flow).copied());
                let records = records.collect();
                self.send_frame(to, from, Frame::QueryResponse { request, records });
            }
            other => unreachable!("{other:?} is no request to the holder"),
        }
    }

    fn give_view(machine: &mut Migration, now: Duration, view: View) {
        machine.handle_view(now, view);
    }

    fn forget_records(&mut self) {
        self.group_commit = ProcessTransits::default();
        self.epochs.clear();
    }

    fn claimed_flows(&self, node: usize) -> Vec<Flow> {
        let moving = self.claims_of_moves(node);
        let processes = moving.keys().filter(|flow| flow.is_process());
        let flows = self.hosts[node].entries.keys();
        processes.chain(flows).copied().collect()
    }

    fn judge_claim(
        &self,
        current: Option<OwnershipRecord>,
        claimed: OwnershipRecord,
    ) -> ClaimVerdict {
        judge_claim(current, claimed, |_| true)
    }

    fn has_liar(&self) -> bool {
        false
    }

    fn own_claims(&mut self, node: usize, flows: &[Flow]) -> Vec<Claim> {
        let moving = self.claims_of_moves(node);
        let own = node_id(node);
        let claim = |flow: &Flow| {
            if let Some(record) = moving.get(flow) {
                return record.map(|record| (*flow, record));
            }
            let entry = self.hosts[node].entries.get(flow)?;
            let record = match (entry.state, entry.id) {
                (KernelFlowState::Owned | KernelFlowState::Closing, _) => {
                    OwnershipRecord::owned(own, entry.epoch)
                }
                (KernelFlowState::Incoming, Some(id)) => {
                    OwnershipRecord::transit(id.donor, own, entry.epoch)
                }
                (KernelFlowState::Moved(to), _) => OwnershipRecord::owned(to, entry.epoch),
                _ => return None,
            };
            Some((*flow, record))
        };
        flows.iter().filter_map(claim).collect()
    }
}

impl MigrationWorld {
    /// Returns true if the holder decides about changes now.
    pub(super) fn decides_now(&mut self, asker: usize, changes: &[OwnershipChange]) -> bool {
        self.bug == Some(MigrationBug::DecidesBeforeReports) || self.is_admitted(asker, changes)
    }

    /// Returns what the machine of a node claims.
    fn claims_of_moves(&self, node: usize) -> BTreeMap<Flow, Option<OwnershipRecord>> {
        let machine = self.core.daemons[node].machine.as_ref();
        let claims = machine.map(Migration::ownership_claims);
        let claims = claims.unwrap_or_default().into_iter();
        match self.bug {
            Some(MigrationBug::ReportsFlowsAlone) => BTreeMap::new(),
            Some(MigrationBug::AcceptorClaimsProcess) => {
                let own = node_id(node);
                let as_owner = |record: OwnershipRecord| match record.state {
                    RecordState::Transit { acceptor, .. } if acceptor == own => {
                        OwnershipRecord::owned(own, record.epoch + 1)
                    }
                    _ => record,
                };
                claims
                    .map(|(flow, record)| (flow, record.map(as_owner)))
                    .collect()
            }
            _ => claims.collect(),
        }
    }

    /// Returns a command that can be carried out. A request of this node that cannot be decided is decided later, or
    /// answered as by a former holder, whose answer the machine ignores.
    pub(super) fn defer_own_request(
        &mut self,
        node: usize,
        token: CommandToken,
        running: RunningCommand,
    ) -> Option<RunningCommand> {
        let is_holder = node == self.core.holder;
        let has_heard = self.rebuilds.has_heard(node);
        let is_admitted = match &running.command {
            Command::Arbitrate { asker, changes, .. } => {
                is_holder && has_heard && self.decides_now(node_index(*asker), changes)
            }
            Command::Lookup { .. } => is_holder && has_heard && self.is_query_admitted(),
            _ => true,
        };
        if is_admitted {
            return Some(running);
        }
        let at = self.core.now + DEFERRED_RETRY;
        if is_holder || !has_heard {
            self.hosts[node].running.insert(token, running);
            let action = MigrationDaemonAction::Effect { token };
            self.core.schedule_action(node, at, action);
            return None;
        }
        let results = match &running.command {
            Command::Lookup { flows, .. } => Results::LookedUp(vec![None; flows.len()]),
            Command::Arbitrate { changes, .. } => {
                let refusals = changes.iter().map(|_| Err(ChangeRefusal { current: None }));
                Results::Arbitrated(refusals.collect())
            }
            other => unreachable!("{other:?} is no request to the holder"),
        };
        let action = MigrationDaemonAction::Complete { token, results };
        self.core.schedule_action(node, at, action);
        None
    }
}
