//! The acceptor's second half: restored flows are committed at the holder and then activated; or they are given up.

use super::acceptor::{Stage, TakenFlow};
use super::asks::Answers;
use super::core::{AskPurpose, Purpose, Timer};
use super::event::Event;
use super::repeat::Repeat;
use super::{Command, FlowEpoch, Handoff};
use core::time::Duration;
use holdfast_wire::frame::BatchId;
use holdfast_wire::{Change, ChangeKind, Flow, Frame, NodeId};

/// Number of ended batches to remember, to tell a repeated `Prepare` from a new one.
const ENDED_MAX: usize = 256;

impl Handoff {
    pub(super) fn restored(
        &mut self,
        now: Duration,
        batch: BatchId,
        results: Vec<Result<(), String>>,
    ) {
        let Some(taken) = self.taken_in(batch, Stage::Restoring) else {
            return;
        };
        taken.times.restore_us = taken.enter(now, Stage::Committing);
        if let Some(why) = taken.doomed.take() {
            return self.drop_batch(batch, &why);
        }
        let mut failed = Vec::new();
        let mut changes = Vec::new();
        for (index, result) in taken.active().into_iter().zip(results) {
            match result {
                Ok(()) => changes.push(commit(&taken.flows[index])),
                Err(why) => failed
                    .push(taken.refuse(index, &format!("its state could not be restored: {why}"))),
            }
        }
        if changes.is_empty() {
            self.finish(now, batch);
        } else {
            self.ask(now, changes, AskPurpose::Commit(batch));
        }
        self.discard(Some(batch), failed, "its state could not be restored");
    }

    /// Handles the holder's answer. A flow that the holder does not grant to this node is discarded.
    pub(super) fn committed(&mut self, now: Duration, batch: BatchId, answers: Answers) {
        let node = self.core.config.node;
        let Some(taken) = self.taken_in(batch, Stage::Committing) else {
            return;
        };
        let mut lost = Vec::new();
        let mut ours = Vec::new();
        for (index, answer) in taken.active().into_iter().zip(answers) {
            match answer {
                Ok(Some(record)) if record.is_owned_by(node) => {
                    taken.flows[index].owned = Some(record.epoch);
                    let flow = taken.flows[index].flow;
                    ours.push(FlowEpoch {
                        flow,
                        epoch: record.epoch,
                    });
                }
                _ => lost.push(taken.refuse(index, "the holder did not commit it")),
            }
        }
        taken.stage = Stage::Activating;
        if ours.is_empty() {
            self.finish(now, batch);
        } else {
            self.command_activate(Some(batch), Repeat::first(ours));
        }
        self.discard(Some(batch), lost, "the holder did not commit it");
    }

    pub(super) fn command_activate(&mut self, batch: Option<BatchId>, repeat: Repeat<FlowEpoch>) {
        let flows = repeat.flows.clone();
        let purpose = Purpose::Activate(batch, repeat);
        self.core
            .command(purpose, |token| Command::Activate { token, flows });
    }

    pub(super) fn activated(
        &mut self,
        now: Duration,
        batch: Option<BatchId>,
        repeat: Repeat<FlowEpoch>,
        results: Vec<Result<(), String>>,
    ) {
        let (ended, again) = self.core.sort_ended(repeat, results, "Activate");
        let complete = again.is_none();
        if let Some(again) = again {
            self.core.later(now, Purpose::Activate(batch, again));
        }
        for flow in &ended {
            self.core.end_move(&flow.flow, Some(flow.epoch));
        }
        let flows: Vec<_> = ended
            .into_iter()
            .map(|flow| (flow.flow, flow.epoch))
            .collect();
        if !flows.is_empty() {
            self.core.event(Event::Accepted { batch, flows });
        }
        if let Some(batch) = batch
            && complete
        {
            self.finish(now, batch);
        }
    }

    /// Reports the batch's results to the donor.
    pub(super) fn finish(&mut self, now: Duration, batch: BatchId) {
        let Some(taken) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        taken.times.commit_us = taken.enter(now, Stage::Activating);
        let (donor, times) = (taken.donor, taken.times);
        let results = taken
            .flows
            .iter()
            .map(|flow| match (&flow.owned, &flow.refused) {
                (Some(epoch), _) => Ok(*epoch),
                (None, Some(why)) => Err(why.clone()),
                (None, None) => Err("it was given up".to_owned()),
            });
        let results = results.collect();
        self.core.send(
            donor,
            Frame::Done {
                batch,
                results,
                times,
            },
        );
        self.end_batch(batch);
    }

    pub(super) fn end_batch(&mut self, batch: BatchId) {
        if let Some(taken) = self.acceptor.batches.remove(&batch)
            && let Some(deadline) = taken.deadline
        {
            self.core.timers.remove(&(deadline, Timer::Taken(batch)));
        }
        self.acceptor.ended.push_back(batch);
        if self.acceptor.ended.len() > ENDED_MAX {
            self.acceptor.ended.pop_front();
        }
    }

    /// Gives up a batch for which no commit was requested.
    pub(super) fn drop_batch(&mut self, batch: BatchId, why: &str) {
        let Some(taken) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        let flows = taken
            .active()
            .into_iter()
            .map(|index| taken.refuse(index, why))
            .collect();
        self.end_batch(batch);
        self.discard(Some(batch), flows, why);
    }

    pub(super) fn discard(&mut self, batch: Option<BatchId>, flows: Vec<Flow>, why: &str) {
        if flows.is_empty() {
            return;
        }
        let purpose = Purpose::Discard(flows.clone());
        let named = flows.clone();
        self.core
            .command(purpose, |token| Command::Discard { token, flows });
        let (flows, why) = (named, why.to_owned());
        self.core.event(Event::Discarded { batch, flows, why });
    }

    pub(super) fn discarded(&mut self, flows: Vec<Flow>) {
        for flow in flows {
            self.core.end_move(&flow, None);
        }
    }

    /// Gives a batch up, because the donor wants it or is unreachable. A batch with a requested commit continues. True
    /// `all_is_here_goes_on` lets a batch with all its state continue as well.
    pub(super) fn give_up_taking(&mut self, batch: BatchId, why: &str, all_is_here_goes_on: bool) {
        let Some(taken) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        match taken.stage {
            Stage::Preparing => taken.doomed = Some(why.to_owned()),
            Stage::Restoring if !all_is_here_goes_on => taken.doomed = Some(why.to_owned()),
            Stage::Waiting => self.drop_batch(batch, why),
            Stage::Restoring | Stage::Committing | Stage::Activating => {}
        }
    }

    /// Handles the loss of the channel to a donor. A batch with all its state continues: the holder decides.
    pub(super) fn donor_lost(&mut self, peer: NodeId) {
        let batches = self.acceptor.batches.iter();
        let lost = batches.filter(|(_, taken)| taken.donor == peer);
        let lost: Vec<BatchId> = lost.map(|(batch, _)| *batch).collect();
        for batch in lost {
            self.give_up_taking(batch, "the channel to the donor was lost", true);
        }
    }

    /// Handles the timeout of a batch that waits for its state.
    pub(super) fn taken_timed_out(&mut self, batch: BatchId) {
        let Some(taken) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        taken.deadline = None;
        let reason = "its state did not come in time".to_owned();
        self.core.send(taken.donor, Frame::Abort { batch, reason });
        self.drop_batch(batch, "its state did not come in time");
    }
}

fn commit(flow: &TakenFlow) -> Change {
    Change {
        flow: flow.flow,
        kind: ChangeKind::Commit,
        epoch: flow.epoch.saturating_add(1),
    }
}
