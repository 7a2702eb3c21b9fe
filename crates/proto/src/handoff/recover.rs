//! Recovery after a restart: flows that the daemon finds in its maps in the middle of a handoff.
//!
//! A donor rolls back: the holder's answer tells if the flow moved. An acceptor rolls back as well, because it does not
//! know if the sockets have their state. Sockets have it for certain only if a commit was requested and granted; then
//! the record names this node.

use super::asks::{Answers, CHANGES_MAX};
use super::core::{AskPurpose, Moving};
use super::event::Reason;
use super::repeat::Repeat;
use super::settle::Settling;
use super::{FlowEpoch, Handoff, RecoveredFlow, RecoveredRole};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, Epoch, Flow};

/// A flow that this node was taking before the restart.
#[derive(Debug)]
pub(super) struct RestartedTake {
    flow: Flow,
    /// Epoch of the transit.
    epoch: Epoch,
}

impl Handoff {
    pub(super) fn recovered(&mut self, now: Duration, flows: Vec<RecoveredFlow>) {
        let mut given = Vec::new();
        let mut taken = Vec::new();
        for RecoveredFlow {
            flow,
            epoch,
            role,
            peer,
        } in flows
        {
            self.core.moving.insert(flow, Moving::default());
            let frozen = match role {
                RecoveredRole::Acceptor => {
                    taken.push(RestartedTake { flow, epoch });
                    continue;
                }
                RecoveredRole::DonorPrepared => false,
                RecoveredRole::Donor => true,
            };
            given.push(Settling {
                flow,
                epoch: if frozen {
                    epoch.saturating_sub(1)
                } else {
                    epoch
                },
                acceptor: peer,
                request: None,
                batch: None,
                frozen,
                reason: Reason::Restarted,
                told: false,
                in_doubt: false,
            });
        }
        self.roll_back(now, given);
        while !taken.is_empty() {
            let rest = taken.split_off(taken.len().min(CHANGES_MAX));
            let changes = taken.iter().map(rollback).collect();
            self.ask(now, changes, AskPurpose::Restarted(taken));
            taken = rest;
        }
    }

    pub(super) fn restarted_takes_answered(&mut self, taken: Vec<RestartedTake>, answers: Answers) {
        let node = self.core.config.node;
        let mut ours = Vec::new();
        let mut others = Vec::new();
        for (take, answer) in taken.into_iter().zip(answers) {
            let flow = take.flow;
            match answer.unwrap_or_else(|refusal| refusal.current) {
                Some(record) if record.is_owned_by(node) => {
                    ours.push(FlowEpoch {
                        flow,
                        epoch: record.epoch,
                    });
                }
                _ => others.push(flow),
            }
        }
        if !ours.is_empty() {
            self.command_activate(None, Repeat::first(ours));
        }
        self.discard(None, others, "the daemon restarted before it was committed");
    }
}

fn rollback(take: &RestartedTake) -> Change {
    Change {
        flow: take.flow,
        kind: ChangeKind::Rollback,
        epoch: take.epoch,
    }
}
