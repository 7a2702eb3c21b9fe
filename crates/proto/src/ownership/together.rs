//! Flows that are diverted with a process, so that its commit need not name them.

use super::apply;
use foldhash::fast::RandomState;
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, NodeId, Record, Refusal};
use std::collections::HashMap;

/// What the holder remembers of moves in transit: the flows that were diverted with one question behind the process's
/// record, and the epochs of their transits. Who does not know them, as after a restart, refuses
/// [`ChangeKind::CommitAll`], and is asked for each flow.
#[derive(Debug, Clone, Default)]
pub struct Together {
    moves: HashMap<Flow, Vec<(Flow, Epoch)>, RandomState>,
}

impl Together {
    /// Learns from a question and the answers to it, which stand.
    pub fn answered(&mut self, changes: &[Change], results: &[Result<Option<Record>, Refusal>]) {
        let mut process = None;
        let mut flows = Vec::new();
        for (change, result) in changes.iter().zip(results) {
            let Ok(record) = result else { continue };
            let divert = matches!(change.kind, ChangeKind::Divert { .. });
            match (change.flow.is_process(), divert) {
                (true, true) => process = Some(change.flow),
                (true, false) => drop(self.moves.remove(&change.flow)),
                (false, true) => flows.extend(record.map(|record| (change.flow, record.epoch))),
                (false, false) => {}
            }
        }
        if let Some(process) = process {
            self.moves.insert(process, flows);
        }
    }

    /// The records of the flows of a process after the [`ChangeKind::CommitAll`] that [`apply`] grants to `asker` for its own
    /// record; `current` gives those that stand. None unless each of them can be committed and they are as many as the
    /// asker says.
    pub fn committed(
        &self,
        change: &Change,
        asker: NodeId,
        current: impl Fn(&Flow) -> Option<Record>,
    ) -> Option<Vec<(Flow, Record)>> {
        let flows = self.moves.get(&change.flow)?;
        let kind = ChangeKind::CommitAll {
            flows: u32::try_from(flows.len()).ok()?,
        };
        if change.kind != kind {
            return None;
        }
        let after = flows.iter().map(|&(flow, epoch)| {
            let (transit, kind) = (current(&flow)?, ChangeKind::Commit);
            let change = Change { flow, kind, epoch };
            // Owned already is no transit: somebody has asked for this flow alone.
            let record = apply(Some(transit), &change, asker).ok()??;
            (record != transit).then_some((flow, record))
        });
        after.collect()
    }
}
