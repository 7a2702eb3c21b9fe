//! The end of a flow's handoff at its donor: rolled back and resumed, or closed.
//!
//! A flow that may have been diverted is rolled back at the holder, and the holder's answer decides. A frozen flow is
//! silent until then. A flow that is not frozen continues at once: no node can have committed it, for its state was
//! never sent. The holder is still asked until it answers, so that packets return to this node and a divert on its way
//! is fenced out.

use super::command_retry::Retryable;
use super::event::{FlowHandoffOutcome, FlowKeptReason};
use super::handoff_core::{CommandPurpose, HolderRequestPurpose};
use super::requests_to_holder::{CHANGES_MAX, HolderAnswers};
use super::{Command, FlowEpoch, Handoff, RequestId};
use crate::flow_ownership::is_disputed;
use core::time::Duration;
use holdfast_wire::failure::Failure;
use holdfast_wire::{
    ChangeKind, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord, RecordState,
};
use std::collections::BTreeMap;

/// A flow that is leaving its handoff.
#[derive(Debug, Clone)]
pub(super) struct EndingFlow {
    pub flow: Flow,
    /// Epoch at which this node owned the flow.
    pub epoch: Epoch,
    pub acceptor: NodeId,
    pub request: Option<RequestId>,
    /// Number of the flow's batch, if it was in one.
    pub batch: Option<u64>,
    /// True if the flow is frozen: this node is silent for it.
    pub is_frozen: bool,
    /// True if the acceptor says that it has taken the flow: this node does not resume the flow.
    pub is_taken: bool,
    /// Reason reported if the flow stays.
    pub reason: FlowKeptReason,
    /// True if the flow's outcome has been reported.
    pub is_reported: bool,
    /// True if another command follows: the flow continues while the holder is still asked.
    pub in_doubt: bool,
}

impl Handoff {
    /// Rolls back a divert that has, or may have, taken place.
    pub(super) fn roll_back(&mut self, now: Duration, mut flows: Vec<EndingFlow>) {
        let continuing: Vec<_> = flows
            .iter()
            .filter(|ending_flow| !ending_flow.is_frozen)
            .map(|ending_flow| {
                let in_doubt = EndingFlow {
                    in_doubt: true,
                    ..ending_flow.clone()
                };
                (in_doubt, ending_flow.epoch)
            })
            .collect();
        self.resume(continuing);
        for ending_flow in &mut flows {
            ending_flow.is_reported = !ending_flow.is_frozen;
        }
        while !flows.is_empty() {
            let remaining = flows.split_off(flows.len().min(CHANGES_MAX));
            let changes = flows.iter().map(rollback_change).collect();
            self.request_changes(now, changes, HolderRequestPurpose::Rollback(flows));
            flows = remaining;
        }
    }

    pub(super) fn on_rolled_back(
        &mut self,
        _now: Duration,
        flows: Vec<EndingFlow>,
        answers: HolderAnswers,
    ) {
        let mut flows_to_resume = Vec::new();
        let mut flows_to_close = Vec::new();
        for (ending_flow, answer) in flows.into_iter().zip(answers) {
            let record = answer.unwrap_or_else(|refusal| refusal.current);
            self.decide_by_record(
                ending_flow,
                record,
                &mut flows_to_resume,
                &mut flows_to_close,
            );
        }
        self.resume(flows_to_resume);
        self.close(flows_to_close);
    }

    /// Decides by the holder's record: the donor resumes or closes the flow.
    pub(super) fn decide_by_record(
        &mut self,
        mut ending_flow: EndingFlow,
        record: Option<OwnershipRecord>,
        flows_to_resume: &mut Vec<(EndingFlow, Epoch)>,
        flows_to_close: &mut Vec<(EndingFlow, Epoch)>,
    ) {
        let node = self.core.config.node;
        match record {
            // The record is an earlier connection's with the same ports, and says nothing about this one.
            Some(record) if record.epoch < ending_flow.epoch && !ending_flow.is_frozen => {
                let epoch = ending_flow.epoch;
                flows_to_resume.push((ending_flow, epoch));
            }
            // Nobody has decided yet, and a flow that is not frozen never moved.
            Some(record) if is_disputed(record) && !ending_flow.is_frozen => {
                let epoch = ending_flow.epoch;
                flows_to_resume.push((ending_flow, epoch));
            }
            Some(record) => match record.state {
                // The acceptor has closed the flow since, and this holder heard only of the transit.
                RecordState::Owned { owner } if owner == node && ending_flow.is_taken => {
                    let (flow, kind, epoch) = (ending_flow.flow, ChangeKind::Remove, record.epoch);
                    self.core
                        .reports
                        .push_back(OwnershipChange { flow, kind, epoch });
                    flows_to_close.push((ending_flow, epoch));
                }
                RecordState::Owned { owner } if owner == node => {
                    flows_to_resume.push((ending_flow, record.epoch));
                }
                RecordState::Owned { owner } => {
                    ending_flow.acceptor = owner;
                    flows_to_close.push((ending_flow, record.epoch));
                }
                // The acceptor has handed the flow on meanwhile.
                RecordState::Transit { acceptor, .. } => {
                    ending_flow.acceptor = acceptor;
                    flows_to_close.push((ending_flow, record.epoch));
                }
            },
            // A frozen flow without a record can only have moved and been closed there. One that is not frozen never
            // moved: the holder does not know it yet, or lost its table.
            None if ending_flow.is_frozen => flows_to_close.push((ending_flow, 0)),
            None => {
                let epoch = ending_flow.epoch;
                flows_to_resume.push((ending_flow, epoch));
            }
        }
    }

    /// Resumes flows on this node, each at the epoch given with it.
    pub(super) fn resume(&mut self, flows: Vec<(EndingFlow, Epoch)>) {
        if flows.is_empty() {
            return;
        }
        let flows = flows.into_iter().map(with_epoch).collect();
        self.command_resume(Retryable::first_attempt(flows));
    }

    pub(super) fn command_resume(&mut self, retryable: Retryable<(EndingFlow, FlowEpoch)>) {
        let flows = retryable.flows.iter().map(|(_, flow)| *flow).collect();
        // All flows of a command are alike: flows in doubt get a command of their own.
        let in_doubt = retryable
            .flows
            .iter()
            .any(|(ending_flow, _)| ending_flow.in_doubt);
        self.core
            .push_command(CommandPurpose::Resume(retryable), |token| Command::Resume {
                token,
                flows,
                in_doubt,
            });
    }

    /// Closes flows that other nodes own, each at the epoch given with it.
    pub(super) fn close(&mut self, flows: Vec<(EndingFlow, Epoch)>) {
        let mut by_owner: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        for (ending_flow, epoch) in flows {
            let of_owner = by_owner.entry(ending_flow.acceptor).or_default();
            of_owner.push(with_epoch((ending_flow, epoch)));
        }
        for flows in by_owner.into_values() {
            self.command_close(Retryable::first_attempt(flows));
        }
    }

    pub(super) fn command_close(&mut self, retryable: Retryable<(EndingFlow, FlowEpoch)>) {
        let Some((first, _)) = retryable.flows.first() else {
            return;
        };
        let acceptor = first.acceptor;
        let flows = retryable.flows.iter().map(|(_, flow)| *flow).collect();
        self.core
            .push_command(CommandPurpose::Close(retryable), |token| Command::Close {
                token,
                acceptor,
                flows,
            });
    }

    pub(super) fn on_resumed(
        &mut self,
        now: Duration,
        retryable: Retryable<(EndingFlow, FlowEpoch)>,
        results: Vec<Result<(), Failure>>,
    ) {
        let (ended, to_retry) = self.core.split_ended(retryable, results, "Resume", false);
        if let Some(to_retry) = to_retry {
            self.core
                .schedule_command_retry(now, CommandPurpose::Resume(to_retry));
        }
        let mut outcomes = Vec::new();
        for (ending_flow, flow) in ended {
            if !ending_flow.in_doubt {
                self.core.end_move(&flow.flow, Some(flow.epoch));
            }
            if !ending_flow.is_reported {
                let reason = ending_flow.reason.clone();
                outcomes.push((ending_flow, FlowHandoffOutcome::Kept { reason }));
            }
        }
        self.report_ended(outcomes);
    }

    pub(super) fn on_closed(
        &mut self,
        now: Duration,
        retryable: Retryable<(EndingFlow, FlowEpoch)>,
        results: Vec<Result<(), Failure>>,
    ) {
        let (ended, to_retry) = self.core.split_ended(retryable, results, "Close", true);
        if let Some(to_retry) = to_retry {
            self.core
                .schedule_command_retry(now, CommandPurpose::Close(to_retry));
        }
        let mut outcomes = Vec::new();
        for (ending_flow, flow) in ended {
            self.core.end_move(&flow.flow, None);
            let outcome = match flow.epoch {
                0 => FlowHandoffOutcome::Closed,
                epoch => FlowHandoffOutcome::Moved { epoch },
            };
            if !ending_flow.is_reported {
                outcomes.push((ending_flow, outcome));
            }
        }
        self.report_ended(outcomes);
    }

    /// Reports outcomes, counts them for requests and batches, and ends the completed ones.
    fn report_ended(&mut self, outcomes: Vec<(EndingFlow, FlowHandoffOutcome)>) {
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (ending_flow, outcome) in outcomes {
            let group = groups
                .entry((ending_flow.request, ending_flow.batch))
                .or_default();
            group.push((ending_flow.flow, outcome));
        }
        for ((request, batch), flows) in groups {
            self.report_outcomes(request, batch, flows);
        }
    }
}

fn rollback_change(settling: &EndingFlow) -> OwnershipChange {
    OwnershipChange {
        flow: settling.flow,
        kind: ChangeKind::Rollback,
        epoch: settling.epoch.saturating_add(1),
    }
}

fn with_epoch((settling, epoch): (EndingFlow, Epoch)) -> (EndingFlow, FlowEpoch) {
    let flow = settling.flow;
    (settling, FlowEpoch { flow, epoch })
}
