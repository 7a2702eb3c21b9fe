//! The acceptor role: prepares sockets, restores state, commits the flows at the holder, and only then activates them.

use super::core::{Moving, Purpose, Timer};
use super::{Command, Handoff, RestoreFlow};
use core::time::Duration;
use holdfast_wire::frame::{AcceptorTimes, BatchId, PrepareFlow, StateFlow};
use holdfast_wire::{Epoch, Flow, Frame, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// State of the acceptor role.
#[derive(Debug, Default)]
pub(super) struct Acceptor {
    pub batches: BTreeMap<BatchId, Taken>,
    pub ended: VecDeque<BatchId>,
}

/// Stage of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Preparing,
    /// Waiting for the state.
    Waiting,
    Restoring,
    Committing,
    Activating,
}

/// A batch that this node takes.
#[derive(Debug)]
pub(super) struct Taken {
    pub donor: NodeId,
    pub stage: Stage,
    /// Start of the stage.
    pub since: Duration,
    pub deadline: Option<Duration>,
    pub flows: Vec<TakenFlow>,
    /// Received state, by flow index.
    pub states: BTreeMap<usize, StateFlow>,
    pub times: AcceptorTimes,
    /// Reason for giving the batch up once its command is complete.
    pub doomed: Option<String>,
}

#[derive(Debug)]
pub(super) struct TakenFlow {
    pub flow: Flow,
    /// Epoch at which the donor owned the flow.
    pub epoch: Epoch,
    /// Reason the flow is not taken; none while it moves with the batch.
    pub refused: Option<String>,
    /// Epoch at which this node owns the flow.
    pub owned: Option<Epoch>,
}

impl Taken {
    /// Indices of the flows that still move with the batch.
    pub(super) fn active(&self) -> Vec<usize> {
        let flows = self.flows.iter().enumerate();
        flows
            .filter(|(_, flow)| flow.refused.is_none())
            .map(|(index, _)| index)
            .collect()
    }

    /// Enters `stage`; returns the duration of the previous one, in microseconds.
    pub(super) fn enter(&mut self, now: Duration, stage: Stage) -> u32 {
        let took = now.saturating_sub(self.since);
        self.since = now;
        self.stage = stage;
        u32::try_from(took.as_micros()).unwrap_or(u32::MAX)
    }

    /// Removes a flow from the batch.
    pub(super) fn refuse(&mut self, index: usize, why: &str) -> Flow {
        let flow = &mut self.flows[index];
        flow.refused = Some(why.to_owned());
        flow.flow
    }
}

impl Handoff {
    pub(super) fn taken_in(&mut self, batch: BatchId, stage: Stage) -> Option<&mut Taken> {
        let taken = self.acceptor.batches.get_mut(&batch)?;
        (taken.stage == stage).then_some(taken)
    }

    /// Handles `Prepare`: a donor wants sockets.
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
            let refused = if flow.flow.is_process() {
                Some("a process does not move as a connection")
            } else if self.core.moving.contains_key(&flow.flow) {
                Some("the flow takes part in another handoff there")
            } else {
                None
            };
            taken.flows.push(TakenFlow {
                flow: flow.flow,
                epoch: flow.epoch,
                refused: refused.map(str::to_owned),
                owned: None,
            });
            if refused.is_none() {
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

    /// Handles a `State` frame. Flows without state in the last frame or before are given up.
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
}
