//! The holder: a table, and the rules of `ownership`. What the handoff's machine does about reports, in short.

use crate::fault::Fault;
use crate::host::State;
use crate::world::{What, World, change, id, index};
use holdfast_proto::ownership;
use holdfast_wire::{Change, ChangeKind, NodeId, Record, RecordState, Refusal};
use std::time::Duration;

impl World {
    /// All changes of one question, in one step.
    pub fn arbitrate(
        &mut self,
        asker: NodeId,
        changes: &[Change],
    ) -> Vec<Result<Option<Record>, Refusal>> {
        let each = changes.iter();
        each.map(|change| self.arbitrate_one(asker, *change))
            .collect()
    }

    fn arbitrate_one(
        &mut self,
        asker: NodeId,
        mut change: Change,
    ) -> Result<Option<Record>, Refusal> {
        let current = self.steering.get(&change.flow).copied();
        let process = change.flow.is_process();
        match (self.fault, change.kind, current) {
            (Fault::StaleEpochAccepted, kind, Some(record)) if kind != ChangeKind::Establish => {
                change.epoch = record.epoch;
            }
            (Fault::RollbackWithoutProcess, ChangeKind::Rollback, _) if process => {
                return Ok(Some(Record::owned(asker, 3)));
            }
            (Fault::CommitWithoutProcess, ChangeKind::Commit, _) if process => {
                return Ok(Some(Record::owned(asker, 3)));
            }
            _ => {}
        }
        let mut result = ownership::apply(current, &change, asker);
        if let Ok(record) = &result {
            match record {
                Some(record) => self.steering.insert(change.flow, *record),
                None => self.steering.remove(&change.flow),
            };
            if self.fault == Fault::ForgottenEarly && process && change.kind == ChangeKind::Commit {
                self.steering.remove(&change.flow);
            }
            self.dirty.push(change.flow);
        }
        if let Err(refusal) = &mut result {
            refusal.current = current;
        }
        let kind = match change.kind {
            ChangeKind::Divert { .. } => "divert".to_owned(),
            kind => format!("{kind:?}").to_lowercase(),
        };
        let what = if process { "process" } else { "flow" };
        let how = if result.is_ok() { "granted" } else { "refused" };
        self.count(&format!("{kind} of {what} {how}"));
        result
    }

    /// A report reaches the holder, sooner or later.
    pub fn report(&mut self, node: usize, change: Change) {
        let life = self.hosts[node].life;
        let later = What::Report { node, life, change };
        let reached = self.hosts[self.holder].machine.is_some()
            && (node == self.holder || self.net.channel(node, self.holder).up);
        if !reached {
            return self.at(Duration::from_millis(20), later);
        }
        let entry = self.hosts[node].entries.get(&change.flow).copied();
        let owned = entry.is_some_and(|entry| entry.state == State::Owned);
        match change.kind {
            ChangeKind::Establish if owned => {
                let _ = self.arbitrate(id(node), &[change]);
            }
            ChangeKind::Remove => self.remove(node, change),
            _ => {}
        }
        self.dirty.push(change.flow);
    }

    fn remove(&mut self, node: usize, of: Change) {
        let flow = of.flow;
        let machine = self.hosts[node].machine.as_ref();
        if machine.is_some_and(|machine| machine.is_moving(&flow)) {
            return self.input(node, |machine, _| machine.handle_changes(vec![of]));
        }
        let epoch = match self.steering.get(&flow).copied() {
            Some(Record {
                epoch,
                state: RecordState::Transit { donor, .. },
            }) if index(donor) == node => {
                let _ = self.arbitrate(id(node), &[change(flow, ChangeKind::Rollback, epoch)]);
                epoch + 1
            }
            Some(record) => record.epoch,
            None => of.epoch,
        };
        let _ = self.arbitrate(id(node), &[change(flow, ChangeKind::Remove, epoch)]);
        let entries = &mut self.hosts[node].entries;
        if entries
            .get(&flow)
            .is_some_and(|entry| entry.state == State::Closing)
        {
            entries.remove(&flow);
        }
    }
}
