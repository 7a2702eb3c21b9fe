//! The holder: a table with the rules of `flow_ownership`, and a simplified form of the handoff state machine's reports.

use super::MigrationBug;
use super::host::KernelFlowState;
use super::world::{MigrationDaemonAction, MigrationWorld};
use crate::node_group::{GroupWorld as _, change, node_id, node_index};
use crate::time::Time;
use holdfast_proto::flow_ownership;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Flow, NodeId, OwnershipChange, OwnershipRecord, RecordState,
};

impl MigrationWorld {
    /// Handles all changes of one request atomically. Refusing a process's record also refuses the flows named after it.
    pub(super) fn arbitrate(
        &mut self,
        asker: NodeId,
        changes: &[OwnershipChange],
    ) -> Vec<Result<Option<OwnershipRecord>, ChangeRefusal>> {
        let mut is_refused = false;
        let mut results = Vec::new();
        for change in changes {
            if is_refused && !change.flow.is_process() {
                let current = self.core.steering.get(&change.flow).copied();
                results.push(Err(ChangeRefusal { current }));
                continue;
            }
            let result = self.arbitrate_one(asker, *change);
            if change.flow.is_process() {
                is_refused = result.is_err();
            }
            results.push(result);
        }
        self.group_commit.record_results(changes, &results);
        results
    }

    /// Commits the flows that belong to their process's commit; returns true if they are committed.
    fn commit_flows(&mut self, asker: NodeId, change: &OwnershipChange) -> bool {
        if self.bug == Some(MigrationBug::CommitsProcessAlone) {
            return true;
        }
        let current = |flow: &Flow| self.core.steering.get(flow).copied();
        let Some(flows) = self
            .group_commit
            .records_after_commit(change, asker, current)
        else {
            return false;
        };
        for (flow, record) in flows {
            self.core.record_result(flow, &Ok(Some(record)));
            self.core.count("commit of flow with its process");
        }
        true
    }

    fn arbitrate_one(
        &mut self,
        asker: NodeId,
        mut change: OwnershipChange,
    ) -> Result<Option<OwnershipRecord>, ChangeRefusal> {
        let current = self.core.steering.get(&change.flow).copied();
        let process = change.flow.is_process();
        match (self.bug, change.kind, current) {
            (Some(MigrationBug::StaleEpochAccepted), kind, Some(record))
                if kind != ChangeKind::Establish =>
            {
                change.epoch = record.epoch;
            }
            (Some(MigrationBug::RollbackWithoutProcess), ChangeKind::Rollback, _) if process => {
                return Ok(Some(OwnershipRecord::owned(asker, 3)));
            }
            (Some(MigrationBug::CommitWithoutProcess), kind, _) if process && is_commit(kind) => {
                return Ok(Some(OwnershipRecord::owned(asker, 3)));
            }
            _ => {}
        }
        let mut result = flow_ownership::apply_change(current, &change, asker);
        let commits_all = matches!(change.kind, ChangeKind::CommitAll { .. });
        let is_repeated = result == Ok(current);
        if commits_all && result.is_ok() && !is_repeated && !self.commit_flows(asker, &change) {
            result = Err(ChangeRefusal { current });
        }
        self.core.record_result(change.flow, &result);
        match &mut result {
            Ok(_) if self.bug == Some(MigrationBug::RecordRemovedEarly) => {
                if process && is_commit(change.kind) {
                    self.core.steering.remove(&change.flow);
                }
            }
            Ok(_) => {}
            Err(refusal) => refusal.current = current,
        }
        let kind = match change.kind {
            ChangeKind::Divert { .. } => "divert".to_owned(),
            ChangeKind::CommitAll { .. } => "commit with all flows".to_owned(),
            kind => format!("{kind:?}").to_lowercase(),
        };
        let subject = if process { "process" } else { "flow" };
        let answer = if result.is_ok() { "granted" } else { "refused" };
        self.core.count(&format!("{kind} of {subject} {answer}"));
        result
    }

    /// Delivers a report to the holder, immediately or later.
    pub(super) fn report(&mut self, node: usize, change: OwnershipChange) {
        let holder = self.core.holder;
        let reached =
            self.core.is_alive(holder) && (node == holder || self.core.is_up(node, holder));
        let has_heard = self.rebuilds.has_heard(node) && self.rebuilds.has_heard(holder);
        if !reached || !has_heard || !self.decides_now(node, &[change]) {
            let later = self.core.now + Time::from_micros(20_000);
            return self.core.schedule_action(
                node,
                later,
                MigrationDaemonAction::Report { change },
            );
        }
        let entry = self.hosts[node].entries.get(&change.flow).copied();
        let owned = entry.is_some_and(|entry| entry.state == KernelFlowState::Owned);
        match change.kind {
            ChangeKind::Establish if owned => {
                let _ = self.arbitrate(node_id(node), &[change]);
            }
            ChangeKind::Remove => self.remove(node, change),
            _ => {}
        }
        self.core.changed_flows.push(change.flow);
    }

    fn remove(&mut self, node: usize, of: OwnershipChange) {
        let flow = of.flow;
        let machine = self.core.daemons[node].machine.as_ref();
        if machine.is_some_and(|machine| machine.is_moving(&flow)) {
            return self.drive_machine(node, |machine, _| machine.handle_changes(vec![of]));
        }
        let epoch = match self.core.steering.get(&flow).copied() {
            Some(OwnershipRecord {
                epoch,
                state: RecordState::Transit { donor, .. },
            }) if node_index(donor) == node => {
                let _ = self.arbitrate(node_id(node), &[change(flow, ChangeKind::Rollback, epoch)]);
                epoch + 1
            }
            Some(record) => record.epoch,
            None => of.epoch,
        };
        let _ = self.arbitrate(node_id(node), &[change(flow, ChangeKind::Remove, epoch)]);
        let entries = &mut self.hosts[node].entries;
        if entries
            .get(&flow)
            .is_some_and(|entry| entry.state == KernelFlowState::Closing)
        {
            entries.remove(&flow);
        }
    }
}

/// Returns true for a commit, which an acceptor requests.
pub(super) fn is_commit(kind: ChangeKind) -> bool {
    matches!(kind, ChangeKind::Commit | ChangeKind::CommitAll { .. })
}
