//! Flows that are diverted with a process, so that its commit need not name them.

use super::apply_change;
use foldhash::fast::RandomState;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord,
};
use std::collections::HashMap;

/// The holder's memory of processes in transit: the flows that were diverted in one request with the process's record,
/// and the epochs of their transits.
///
/// A holder without an entry, as after a restart, refuses [`ChangeKind::CommitAll`]; the acceptor then asks for each
/// flow.
#[derive(Debug, Clone, Default)]
pub struct ProcessTransits {
    processes: HashMap<Flow, ProcessTransit, RandomState>,
    /// Process with which a flow was diverted.
    process_of_flow: HashMap<Flow, Flow, RandomState>,
}

#[derive(Debug, Clone, Default)]
struct ProcessTransit {
    flows: Vec<(Flow, Epoch)>,
    /// True if one of the flows has been changed alone since.
    flow_left: bool,
}

impl ProcessTransits {
    /// Learns from a request and the results that were stored for it.
    pub fn record_results(
        &mut self,
        changes: &[OwnershipChange],
        results: &[Result<Option<OwnershipRecord>, ChangeRefusal>],
    ) {
        let mut process = None;
        let mut flows = Vec::new();
        for (change, result) in changes.iter().zip(results) {
            let Ok(record) = result else { continue };
            let divert = matches!(change.kind, ChangeKind::Divert { .. });
            match (change.flow.is_process(), divert) {
                (true, true) => process = Some(change.flow),
                // The entry stays, because the holder may write the records of the flows later.
                (true, false) if matches!(change.kind, ChangeKind::CommitAll { .. }) => {}
                (true, false) => self.remove_process(&change.flow),
                (false, true) => flows.extend(record.map(|record| (change.flow, record.epoch))),
                (false, false) => self.remove_flow(&change.flow),
            }
        }
        if let Some(process) = process {
            self.remove_process(&process);
            for (flow, _) in &flows {
                self.remove_flow(flow);
                self.process_of_flow.insert(*flow, process);
            }
            let parted = false;
            self.processes.insert(
                process,
                ProcessTransit {
                    flows,
                    flow_left: parted,
                },
            );
        } else {
            flows.iter().for_each(|(flow, _)| self.remove_flow(flow));
        }
    }

    fn remove_flow(&mut self, flow: &Flow) {
        let process = self.process_of_flow.remove(flow);
        if let Some(parted) = process.and_then(|process| self.processes.get_mut(&process)) {
            parted.flow_left = true;
        }
    }

    fn remove_process(&mut self, process: &Flow) {
        let flows = self.processes.remove(process).unwrap_or_default().flows;
        for (flow, _) in flows {
            if self.process_of_flow.get(&flow) == Some(process) {
                self.process_of_flow.remove(&flow);
            }
        }
    }

    /// Returns true if the process has as many flows diverted with it as a [`ChangeKind::CommitAll`] says, and none of
    /// them was changed alone.
    #[must_use]
    pub fn can_commit(&self, change: &OwnershipChange) -> bool {
        let of_move = self.processes.get(&change.flow);
        of_move.is_some_and(|transit| {
            let flows = u32::try_from(transit.flows.len()).unwrap_or(u32::MAX);
            !transit.flow_left && change.kind == ChangeKind::CommitAll { flows }
        })
    }

    /// Returns the records of a process's flows after the [`ChangeKind::CommitAll`] that [`apply_change`] grants to `asker`
    /// for the process's own record; `current` returns a flow's current record.
    ///
    /// None unless each flow can be committed and their number is the one the asker names. [`ProcessTransits::can_commit`]
    /// tests the same without reading the records.
    pub fn records_after_commit(
        &self,
        change: &OwnershipChange,
        asker: NodeId,
        current: impl Fn(&Flow) -> Option<OwnershipRecord>,
    ) -> Option<Vec<(Flow, OwnershipRecord)>> {
        let of_move = self.processes.get(&change.flow)?;
        let after = of_move.flows.iter().map(|&(flow, epoch)| {
            let (transit, kind) = (current(&flow)?, ChangeKind::Commit);
            let change = OwnershipChange { flow, kind, epoch };
            // A record that commit does not change is no transit: the flow was committed by a request of its own.
            let record = apply_change(Some(transit), &change, asker).ok()??;
            (record != transit).then_some((flow, record))
        });
        self.can_commit(change).then(|| after.collect())?
    }
}
