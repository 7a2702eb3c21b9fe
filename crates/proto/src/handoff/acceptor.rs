//! The acceptor: sockets are prepared, state restored, the flow committed at the holder, and only then active.

use super::asks::Answers;
use super::core::{AskPurpose, Moving, Purpose, Timer};
use super::event::Event;
use super::repeat::Repeat;
use super::{Command, FlowEpoch, Handoff, RestoreFlow};
use core::time::Duration;
use holdfast_wire::frame::{AcceptorTimes, BatchId, PrepareFlow, StateFlow};
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, Frame, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// How many ended batches are remembered, to tell a repeated `Prepare` from a new one.
const ENDED_MAX: usize = 256;

/// What an acceptor knows.
#[derive(Debug, Default)]
pub(super) struct Acceptor {
    pub batches: BTreeMap<BatchId, Taken>,
    ended: VecDeque<BatchId>,
}

/// Where a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Preparing,
    /// For the state.
    Waiting,
    Restoring,
    Committing,
    Activating,
}

/// A batch taken.
#[derive(Debug)]
pub(super) struct Taken {
    donor: NodeId,
    stage: Stage,
    /// When the stage began.
    since: Duration,
    deadline: Option<Duration>,
    flows: Vec<TakenFlow>,
    /// The state that has come, by index.
    states: BTreeMap<usize, StateFlow>,
    times: AcceptorTimes,
    /// Why it is given up once its command is complete.
    doomed: Option<String>,
}

#[derive(Debug)]
struct TakenFlow {
    flow: Flow,
    /// At which the donor owned it.
    epoch: Epoch,
    /// Why it is not taken; none as long as it goes the batch's way.
    refused: Option<String>,
    /// At which this node owns it.
    owned: Option<Epoch>,
}

impl Taken {
    /// Indices of the flows that still go the batch's way.
    fn active(&self) -> Vec<usize> {
        let flows = self.flows.iter().enumerate();
        flows
            .filter(|(_, flow)| flow.refused.is_none())
            .map(|(index, _)| index)
            .collect()
    }

    /// Ends the stage; gives how long it took, in microseconds.
    fn enter(&mut self, now: Duration, stage: Stage) -> u32 {
        let took = now.saturating_sub(self.since);
        self.since = now;
        self.stage = stage;
        u32::try_from(took.as_micros()).unwrap_or(u32::MAX)
    }

    /// Takes a flow off the batch's way.
    fn refuse(&mut self, index: usize, why: &str) -> Flow {
        let flow = &mut self.flows[index];
        flow.refused = Some(why.to_owned());
        flow.flow
    }
}

impl Handoff {
    fn taken_in(&mut self, batch: BatchId, stage: Stage) -> Option<&mut Taken> {
        let taken = self.acceptor.batches.get_mut(&batch)?;
        (taken.stage == stage).then_some(taken)
    }

    /// A donor wants sockets.
    pub(super) fn prepare_asked(
        &mut self,
        now: Duration,
        from: NodeId,
        batch: BatchId,
        flows: Vec<PrepareFlow>,
    ) {
        if batch.donor != from {
            return self
                .core
                .ignored(from, "Prepare", "the batch is another donor's");
        }
        if self.acceptor.batches.contains_key(&batch) || self.acceptor.ended.contains(&batch) {
            return self.core.ignored(from, "Prepare", "it is repeated");
        }
        let mut taken = Taken {
            donor: from,
            stage: Stage::Preparing,
            since: now,
            deadline: None,
            flows: Vec::with_capacity(flows.len()),
            states: BTreeMap::new(),
            times: AcceptorTimes::default(),
            doomed: None,
        };
        let mut accepted = Vec::with_capacity(flows.len());
        for flow in flows {
            let moving = self.core.moving.contains_key(&flow.flow);
            taken.flows.push(TakenFlow {
                flow: flow.flow,
                epoch: flow.epoch,
                refused: moving.then(|| "the flow takes part in another handoff there".to_owned()),
                owned: None,
            });
            if !moving {
                self.core.moving.insert(flow.flow, Moving::default());
                accepted.push(flow);
            }
        }
        self.acceptor.batches.insert(batch, taken);
        if accepted.is_empty() {
            return self.sockets_prepared(now, batch, Vec::new());
        }
        self.core
            .command(Purpose::Prepare(batch), |token| Command::PrepareSockets {
                token,
                batch,
                flows: accepted,
            });
    }

    pub(super) fn sockets_prepared(
        &mut self,
        now: Duration,
        batch: BatchId,
        results: Vec<Result<(), String>>,
    ) {
        let Some(taken) = self.taken_in(batch, Stage::Preparing) else {
            return;
        };
        taken.enter(now, Stage::Waiting);
        let donor = taken.donor;
        let doomed = taken.doomed.take();
        let mut unprepared = Vec::new();
        for (index, result) in taken.active().into_iter().zip(results) {
            if let Err(why) = result {
                unprepared.push(taken.refuse(index, &why));
            }
        }
        let refusals = taken
            .flows
            .iter()
            .map(|flow| flow.refused.clone().map_or(Ok(()), Err));
        let results = refusals.collect();
        let nothing = taken.active().is_empty();
        for flow in unprepared {
            self.core.end_move(&flow, None);
        }
        if let Some(why) = doomed {
            return self.drop_batch(batch, &why);
        }
        self.core.send(donor, Frame::Prepared { batch, results });
        if nothing {
            return self.end_batch(batch);
        }
        let deadline = now + self.core.config.state_timeout;
        if let Some(taken) = self.acceptor.batches.get_mut(&batch) {
            taken.deadline = Some(deadline);
        }
        self.core.timers.insert((deadline, Timer::Taken(batch)));
    }

    /// State arrives. Flows that have none when the last has come are not coming.
    pub(super) fn state_arrived(
        &mut self,
        now: Duration,
        from: NodeId,
        batch: BatchId,
        states: Vec<StateFlow>,
        last: bool,
    ) {
        if batch.donor != from {
            return self
                .core
                .ignored(from, "State", "the batch is another donor's");
        }
        if !self.acceptor.batches.contains_key(&batch) {
            let reason = "the batch is not known, or was given up".to_owned();
            self.core.send(from, Frame::Abort { batch, reason });
            return self.core.ignored(from, "State", "the batch is not known");
        }
        let Some(taken) = self.taken_in(batch, Stage::Waiting) else {
            return self
                .core
                .ignored(from, "State", "the batch does not wait for it");
        };
        for state in states {
            let index = state.index as usize;
            if taken
                .flows
                .get(index)
                .is_some_and(|flow| flow.refused.is_none())
            {
                taken.states.insert(index, state);
            }
        }
        if last {
            self.restore(now, batch);
        }
    }

    fn restore(&mut self, now: Duration, batch: BatchId) {
        let Some(taken) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        taken.enter(now, Stage::Restoring);
        if let Some(deadline) = taken.deadline.take() {
            self.core.timers.remove(&(deadline, Timer::Taken(batch)));
        }
        let mut missing = Vec::new();
        for index in taken.active() {
            if !taken.states.contains_key(&index) {
                missing.push(taken.refuse(index, "its state did not come"));
            }
        }
        let flows: Vec<RestoreFlow> = std::mem::take(&mut taken.states)
            .into_iter()
            .map(|(index, state)| RestoreFlow {
                flow: taken.flows[index].flow,
                dynamic: state.dynamic,
                application: state.application,
            })
            .collect();
        if flows.is_empty() {
            self.discard(Some(batch), missing, "its state did not come");
            return self.finish(now, batch);
        }
        self.core
            .command(Purpose::Restore(batch), |token| Command::Restore {
                token,
                batch,
                flows,
            });
        self.discard(Some(batch), missing, "its state did not come");
    }

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

    /// The holder has decided. What it does not give to this node is not this node's.
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

    /// Tells the donor how it ended.
    fn finish(&mut self, now: Duration, batch: BatchId) {
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

    fn end_batch(&mut self, batch: BatchId) {
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

    /// Gives a batch up of which nothing was asked of the holder.
    fn drop_batch(&mut self, batch: BatchId, why: &str) {
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

    /// The donor wants a batch given up, or cannot be reached any more. A batch whose commit is asked goes on.
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

    /// The channel to a donor is gone. What has all its state goes on: the holder decides.
    pub(super) fn donor_lost(&mut self, peer: NodeId) {
        let batches = self.acceptor.batches.iter();
        let lost = batches.filter(|(_, taken)| taken.donor == peer);
        let lost: Vec<BatchId> = lost.map(|(batch, _)| *batch).collect();
        for batch in lost {
            self.give_up_taking(batch, "the channel to the donor was lost", true);
        }
    }

    /// The state of a batch did not come in time.
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
