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
    moves: HashMap<Flow, Move, RandomState>,
    /// With which process a flow was diverted.
    with: HashMap<Flow, Flow, RandomState>,
}

#[derive(Debug, Clone, Default)]
struct Move {
    flows: Vec<(Flow, Epoch)>,
    /// Something has become of one of them alone.
    parted: bool,
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
                // The holder may write its flows' records later.
                (true, false) if matches!(change.kind, ChangeKind::CommitAll { .. }) => {}
                (true, false) => self.forget(&change.flow),
                (false, true) => flows.extend(record.map(|record| (change.flow, record.epoch))),
                (false, false) => self.part(&change.flow),
            }
        }
        if let Some(process) = process {
            self.forget(&process);
            for (flow, _) in &flows {
                self.part(flow);
                self.with.insert(*flow, process);
            }
            let parted = false;
            self.moves.insert(process, Move { flows, parted });
        } else {
            flows.iter().for_each(|(flow, _)| self.part(flow));
        }
    }

    fn part(&mut self, flow: &Flow) {
        let process = self.with.remove(flow);
        if let Some(parted) = process.and_then(|process| self.moves.get_mut(&process)) {
            parted.parted = true;
        }
    }

    fn forget(&mut self, process: &Flow) {
        let flows = self.moves.remove(process).unwrap_or_default().flows;
        for (flow, _) in flows {
            if self.with.get(&flow) == Some(process) {
                self.with.remove(&flow);
            }
        }
    }

    /// Whether the flows of a process are, as diverted with it, as many as a [`ChangeKind::CommitAll`] says.
    #[must_use]
    pub fn can_commit(&self, change: &Change) -> bool {
        let of_move = self.moves.get(&change.flow);
        of_move.is_some_and(|of| {
            let flows = u32::try_from(of.flows.len()).unwrap_or(u32::MAX);
            !of.parted && change.kind == ChangeKind::CommitAll { flows }
        })
    }

    /// The records of the flows of a process after the [`ChangeKind::CommitAll`] that [`apply`] grants to `asker` for its own
    /// record; `current` gives those that stand. None unless each of them can be committed and they are as many as the
    /// asker says: what [`Together::can_commit`] says without a look at them.
    pub fn committed(
        &self,
        change: &Change,
        asker: NodeId,
        current: impl Fn(&Flow) -> Option<Record>,
    ) -> Option<Vec<(Flow, Record)>> {
        let of_move = self.moves.get(&change.flow)?;
        let after = of_move.flows.iter().map(|&(flow, epoch)| {
            let (transit, kind) = (current(&flow)?, ChangeKind::Commit);
            let change = Change { flow, kind, epoch };
            // Owned already is no transit: somebody has asked for this flow alone.
            let record = apply(Some(transit), &change, asker).ok()??;
            (record != transit).then_some((flow, record))
        });
        self.can_commit(change).then(|| after.collect())?
    }
}
