//! Flows of this node that the holder has refused to record, to be reported again.
//!
//! A connection that begins at the node to which its server has moved may be reported before the end of an earlier
//! connection between the same ports, which another node reports. A full steering table has free entries again later.

use std::collections::BTreeMap;

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_wire::{ChangeKind, Epoch, Flow, OwnershipChange};

use super::Engine;
use crate::dataplane::Dataplane;

/// Maximum number of remembered flows. Packets of further flows follow the placement table.
const UNRECORDED_MAX: usize = 1024;

/// Epochs of the refused flows.
#[derive(Default)]
pub struct UnrecordedFlows(BTreeMap<Flow, Epoch>);

impl UnrecordedFlows {
    /// Returns true if the holder has refused to record a flow.
    pub fn has(&self, flow: &Flow) -> bool {
        self.0.contains_key(flow)
    }

    /// Remembers a flow that the holder has refused to record.
    pub fn add(&mut self, change: OwnershipChange) {
        if self.0.len() < UNRECORDED_MAX {
            self.0.insert(change.flow, change.epoch);
        }
    }

    /// Takes all flows, and returns the reports of the flows that this node still owns.
    pub fn take_owned(&mut self, dataplane: &Dataplane) -> Vec<OwnershipChange> {
        let unrecorded = std::mem::take(&mut self.0);
        let is_owned = |flow: &Flow, epoch: Epoch| {
            let entry = dataplane.flow(flow);
            entry.is_some_and(|(state, value)| state == FlowState::Owned && value.epoch == epoch)
        };
        let owned = unrecorded
            .into_iter()
            .filter(|(flow, epoch)| is_owned(flow, *epoch));
        owned
            .map(|(flow, epoch)| OwnershipChange {
                flow,
                kind: ChangeKind::Establish,
                epoch,
            })
            .collect()
    }
}

impl Engine {
    /// Reports the refused flows that this node still owns again.
    pub(super) fn report_unrecorded(&mut self) {
        let changes = self.flow_history.take_unrecorded(&self.dataplane);
        if !changes.is_empty() {
            tracing::info!(
                flows = changes.len(),
                "the holder has not recorded flows; reporting them again"
            );
            self.report_changes(changes);
        }
    }
}
