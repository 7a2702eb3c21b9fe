//! The holder role: answers the requests of other nodes and of this one. The table belongs to the daemon, as a kernel
//! map; the rules are in [`crate::flow_ownership`].

use super::handoff_core::CommandPurpose;
use super::requests_to_holder::HolderAnswers;
use super::{Command, Handoff};
use crate::flow_ownership::{EpochFloors, REQUESTED_EPOCH_MAX};
use core::time::Duration;
use holdfast_wire::{ChangeKind, Flow, Frame, NodeId, OwnershipChange, OwnershipRecord};

/// The holder's state besides the table; empty on a node that is not the holder.
#[derive(Debug, Default)]
pub(super) struct Holder {
    epoch_floors: Option<EpochFloors>,
}

impl Handoff {
    /// Handles a peer's request.
    pub(super) fn on_change_request(
        &mut self,
        from: NodeId,
        request: u64,
        changes: Vec<OwnershipChange>,
    ) {
        if !self.core.holder_client.is_holder() {
            return self.core.outputs.report_ignored(
                from,
                "ChangeRequest",
                "this node is not the holder",
            );
        }
        let changes = self.raise_epochs(changes);
        let purpose = CommandPurpose::ArbitrateForPeer {
            asker: from,
            request,
        };
        self.core.push_command(purpose, |token| Command::Arbitrate {
            token,
            asker: from,
            changes,
        });
    }

    pub(super) fn on_arbitrated_for_peer(
        &mut self,
        asker: NodeId,
        request: u64,
        results: HolderAnswers,
    ) {
        self.core
            .send(asker, Frame::ChangeResponse { request, results });
    }

    pub(super) fn on_arbitrated_own(
        &mut self,
        now: Duration,
        request: u64,
        results: HolderAnswers,
    ) {
        let node = self.core.config.node;
        self.on_holder_answer(now, node, request, results);
    }

    /// Raises the epochs of new flows above the floors. A removal raises its floor on request, not on completion: an
    /// establish right behind it must be above already.
    pub(super) fn raise_epochs(
        &mut self,
        mut changes: Vec<OwnershipChange>,
    ) -> Vec<OwnershipChange> {
        let least = self.core.config.new_flow_epoch_min;
        for change in &mut changes {
            match change.kind {
                ChangeKind::Establish => {
                    let floors = self
                        .holder
                        .epoch_floors
                        .get_or_insert_with(|| EpochFloors::new(least));
                    change.epoch = floors.start_epoch(&change.flow, change.epoch);
                }
                ChangeKind::Remove => {
                    let floors = self
                        .holder
                        .epoch_floors
                        .get_or_insert_with(|| EpochFloors::new(least));
                    // Bounded, because nobody has checked yet that the asker owns the flow.
                    let epoch = change.epoch.min(REQUESTED_EPOCH_MAX);
                    floors.raise(&change.flow, epoch);
                }
                _ => {}
            }
        }
        changes
    }

    pub(super) fn on_query(&mut self, from: NodeId, request: u64, flows: Vec<Flow>) {
        if !self.core.holder_client.is_holder() {
            return self
                .core
                .outputs
                .report_ignored(from, "Query", "this node is not the holder");
        }
        let purpose = CommandPurpose::Lookup {
            asker: from,
            request,
        };
        self.core
            .push_command(purpose, |token| Command::Lookup { token, flows });
    }

    pub(super) fn on_looked_up(
        &mut self,
        asker: NodeId,
        request: u64,
        records: Vec<Option<OwnershipRecord>>,
    ) {
        self.core
            .send(asker, Frame::QueryResponse { request, records });
    }
}
