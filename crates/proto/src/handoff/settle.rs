//! The end of a flow's handoff at its donor: rolled back and resumed, or closed.
//!
//! A flow that may have been diverted is rolled back at the holder, and the holder's answer decides. A frozen flow is
//! silent until then. A flow that is not frozen continues at once: no node can have committed it, for its state was
//! never sent. The holder is still asked until it answers, so that packets return to this node and a divert on its way
//! is fenced out.

use super::asks::{Answers, CHANGES_MAX};
use super::core::{AskPurpose, Purpose};
use super::event::{Outcome, Reason};
use super::repeat::Repeat;
use super::{Command, FlowEpoch, Handoff, RequestId};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, NodeId, Record, RecordState};
use std::collections::BTreeMap;

/// A flow that is leaving its handoff.
#[derive(Debug, Clone)]
pub(super) struct Settling {
    pub flow: Flow,
    /// Epoch at which this node owned the flow.
    pub epoch: Epoch,
    pub acceptor: NodeId,
    pub request: Option<RequestId>,
    /// Number of the flow's batch, if it was in one.
    pub batch: Option<u64>,
    /// True if the flow is frozen: this node is silent for it.
    pub frozen: bool,
    /// Reason reported if the flow stays.
    pub reason: Reason,
    /// True if the flow's outcome has been reported.
    pub told: bool,
    /// True if another command follows: the flow continues while the holder is still asked.
    pub in_doubt: bool,
}

impl Handoff {
    /// Rolls back a divert that has, or may have, taken place.
    pub(super) fn roll_back(&mut self, now: Duration, mut flows: Vec<Settling>) {
        let going_on: Vec<_> = flows
            .iter()
            .filter(|settling| !settling.frozen)
            .map(|settling| {
                let in_doubt = Settling {
                    in_doubt: true,
                    ..settling.clone()
                };
                (in_doubt, settling.epoch)
            })
            .collect();
        self.resume(going_on);
        for settling in &mut flows {
            settling.told = !settling.frozen;
        }
        while !flows.is_empty() {
            let rest = flows.split_off(flows.len().min(CHANGES_MAX));
            let changes = flows.iter().map(rollback).collect();
            self.ask(now, changes, AskPurpose::Rollback(flows));
            flows = rest;
        }
    }

    pub(super) fn rolled_back(&mut self, _now: Duration, flows: Vec<Settling>, answers: Answers) {
        let mut resume = Vec::new();
        let mut close = Vec::new();
        for (settling, answer) in flows.into_iter().zip(answers) {
            let record = answer.unwrap_or_else(|refusal| refusal.current);
            self.decide(settling, record, &mut resume, &mut close);
        }
        self.resume(resume);
        self.close(close);
    }

    /// Decides by the holder's record: the donor resumes or closes the flow.
    pub(super) fn decide(
        &self,
        mut settling: Settling,
        record: Option<Record>,
        resume: &mut Vec<(Settling, Epoch)>,
        close: &mut Vec<(Settling, Epoch)>,
    ) {
        let node = self.core.config.node;
        match record {
            Some(record) => match record.state {
                RecordState::Owned { owner } if owner == node => {
                    resume.push((settling, record.epoch));
                }
                RecordState::Owned { owner } => {
                    settling.acceptor = owner;
                    close.push((settling, record.epoch));
                }
                // The acceptor has handed the flow on meanwhile.
                RecordState::Transit { acceptor, .. } => {
                    settling.acceptor = acceptor;
                    close.push((settling, record.epoch));
                }
            },
            // A frozen flow without a record can only have moved and been closed there. One that is not frozen never
            // moved: the holder does not know it yet, or lost its table.
            None if settling.frozen => close.push((settling, 0)),
            None => {
                let epoch = settling.epoch;
                resume.push((settling, epoch));
            }
        }
    }

    /// Resumes flows on this node, each at the epoch given with it.
    pub(super) fn resume(&mut self, flows: Vec<(Settling, Epoch)>) {
        if flows.is_empty() {
            return;
        }
        let flows = flows.into_iter().map(with_epoch).collect();
        self.command_resume(Repeat::first(flows));
    }

    pub(super) fn command_resume(&mut self, repeat: Repeat<(Settling, FlowEpoch)>) {
        let flows = repeat.flows.iter().map(|(_, flow)| *flow).collect();
        // All flows of a command are alike: flows in doubt get a command of their own.
        let in_doubt = repeat.flows.iter().any(|(settling, _)| settling.in_doubt);
        self.core
            .command(Purpose::Resume(repeat), |token| Command::Resume {
                token,
                flows,
                in_doubt,
            });
    }

    /// Closes flows that other nodes own, each at the epoch given with it.
    pub(super) fn close(&mut self, flows: Vec<(Settling, Epoch)>) {
        let mut by_owner: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        for (settling, epoch) in flows {
            let of_owner = by_owner.entry(settling.acceptor).or_default();
            of_owner.push(with_epoch((settling, epoch)));
        }
        for flows in by_owner.into_values() {
            self.command_close(Repeat::first(flows));
        }
    }

    pub(super) fn command_close(&mut self, repeat: Repeat<(Settling, FlowEpoch)>) {
        let Some((first, _)) = repeat.flows.first() else {
            return;
        };
        let acceptor = first.acceptor;
        let flows = repeat.flows.iter().map(|(_, flow)| *flow).collect();
        self.core
            .command(Purpose::Close(repeat), |token| Command::Close {
                token,
                acceptor,
                flows,
            });
    }

    pub(super) fn resumed(
        &mut self,
        now: Duration,
        repeat: Repeat<(Settling, FlowEpoch)>,
        results: Vec<Result<(), String>>,
    ) {
        let (ended, again) = self.core.sort_ended(repeat, results, "Resume");
        if let Some(again) = again {
            self.core.later(now, Purpose::Resume(again));
        }
        let mut outcomes = Vec::new();
        for (settling, flow) in ended {
            if !settling.in_doubt {
                self.core.end_move(&flow.flow, Some(flow.epoch));
            }
            if !settling.told {
                let reason = settling.reason.clone();
                outcomes.push((settling, Outcome::Kept { reason }));
            }
        }
        self.tell_outcomes(outcomes);
    }

    pub(super) fn closed(
        &mut self,
        now: Duration,
        repeat: Repeat<(Settling, FlowEpoch)>,
        results: Vec<Result<(), String>>,
    ) {
        let (ended, again) = self.core.sort_ended(repeat, results, "Close");
        if let Some(again) = again {
            self.core.later(now, Purpose::Close(again));
        }
        let mut outcomes = Vec::new();
        for (settling, flow) in ended {
            self.core.end_move(&flow.flow, None);
            let outcome = match flow.epoch {
                0 => Outcome::Gone,
                epoch => Outcome::Moved { epoch },
            };
            if !settling.told {
                outcomes.push((settling, outcome));
            }
        }
        self.tell_outcomes(outcomes);
    }

    /// Reports outcomes, counts them for requests and batches, and ends the completed ones.
    fn tell_outcomes(&mut self, outcomes: Vec<(Settling, Outcome)>) {
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (settling, outcome) in outcomes {
            let group = groups
                .entry((settling.request, settling.batch))
                .or_default();
            group.push((settling.flow, outcome));
        }
        for ((request, batch), flows) in groups {
            self.tell(request, batch, flows);
        }
    }
}

fn rollback(settling: &Settling) -> Change {
    Change {
        flow: settling.flow,
        kind: ChangeKind::Rollback,
        epoch: settling.epoch.saturating_add(1),
    }
}

fn with_epoch((settling, epoch): (Settling, Epoch)) -> (Settling, FlowEpoch) {
    let flow = settling.flow;
    (settling, FlowEpoch { flow, epoch })
}
