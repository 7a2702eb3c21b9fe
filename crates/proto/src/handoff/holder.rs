//! The holder role: answers the requests of other nodes and of this one. The table belongs to the daemon, as a kernel
//! map; the rules are in [`crate::ownership`].

use super::asks::Answers;
use super::core::Purpose;
use super::{Command, Handoff};
use crate::ownership::{ASKED_EPOCH_MAX, Floors};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, Flow, Frame, NodeId, Record};

/// The holder's state besides the table; empty on a node that is not the holder.
#[derive(Debug, Default)]
pub(super) struct Holder {
    floors: Option<Floors>,
}

impl Handoff {
    /// Handles a peer's request.
    pub(super) fn asked(&mut self, from: NodeId, request: u64, changes: Vec<Change>) {
        if self.core.config.holder != self.core.config.node {
            return self
                .core
                .ignored(from, "Ask", "this node is not the holder");
        }
        let changes = self.lift_epochs(changes);
        let purpose = Purpose::ArbitrateFor {
            asker: from,
            request,
        };
        self.core.command(purpose, |token| Command::Arbitrate {
            token,
            asker: from,
            changes,
        });
    }

    pub(super) fn arbitrated_for(&mut self, asker: NodeId, request: u64, results: Answers) {
        self.core.send(asker, Frame::Answer { request, results });
    }

    pub(super) fn arbitrated_own(&mut self, now: Duration, request: u64, results: Answers) {
        let node = self.core.config.node;
        self.answered(now, node, request, results);
    }

    /// Raises the epochs of new flows above the floors. A removal raises its floor on request, not on completion: an
    /// establish right behind it must be above already.
    pub(super) fn lift_epochs(&mut self, mut changes: Vec<Change>) -> Vec<Change> {
        let least = self.core.config.epoch_floor;
        for change in &mut changes {
            match change.kind {
                ChangeKind::Establish => {
                    let floors = self.holder.floors.get_or_insert_with(|| Floors::new(least));
                    change.epoch = floors.at_least(&change.flow, change.epoch);
                }
                ChangeKind::Remove => {
                    let floors = self.holder.floors.get_or_insert_with(|| Floors::new(least));
                    // Bounded, because nobody has checked yet that the asker owns the flow.
                    let epoch = change.epoch.min(ASKED_EPOCH_MAX);
                    floors.removed(&change.flow, epoch);
                }
                _ => {}
            }
        }
        changes
    }

    pub(super) fn queried(&mut self, from: NodeId, request: u64, flows: Vec<Flow>) {
        if self.core.config.holder != self.core.config.node {
            return self
                .core
                .ignored(from, "Query", "this node is not the holder");
        }
        let purpose = Purpose::Lookup {
            asker: from,
            request,
        };
        self.core
            .command(purpose, |token| Command::Lookup { token, flows });
    }

    pub(super) fn looked_up(&mut self, asker: NodeId, request: u64, records: Vec<Option<Record>>) {
        self.core
            .send(asker, Frame::QueryAnswer { request, records });
    }
}
