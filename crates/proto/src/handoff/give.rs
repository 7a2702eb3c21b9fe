//! The donor's second third: a prepared batch is drained, diverted and frozen.
//!
//! Only one batch at a time is between divert and `Done`, so that each has the machine to itself. A batch that fails
//! ends its turn at once and settles in parallel.

use super::asks::Answers;
use super::core::{AskPurpose, Purpose, Timer};
use super::donor::{Batch, Stage};
use super::event::Reason;
use super::settle::Settling;
use super::{Command, FlowEpoch, Handoff, SendQueueInfo, drain};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, NodeId, RecordState};

impl Batch {
    /// Removes a flow from the batch.
    pub(super) fn take(
        &mut self,
        seq: u64,
        index: usize,
        frozen: bool,
        reason: Reason,
    ) -> Settling {
        let flow = &mut self.flows[index];
        flow.active = false;
        Settling {
            flow: flow.flow,
            epoch: flow.epoch,
            acceptor: self.acceptor,
            request: Some(flow.request),
            batch: Some(seq),
            frozen,
            reason,
            told: false,
            in_doubt: false,
        }
    }

    /// Removes all remaining flows from the batch.
    pub(super) fn take_all(&mut self, seq: u64, frozen: bool, reason: &Reason) -> Vec<Settling> {
        let active: Vec<usize> = self.active().collect();
        active
            .into_iter()
            .map(|index| self.take(seq, index, frozen, reason.clone()))
            .collect()
    }

    /// Indices of the flows that still move with the batch.
    pub(super) fn active(&self) -> impl Iterator<Item = usize> + '_ {
        let flows = self.flows.iter().enumerate();
        flows
            .filter(|(_, flow)| flow.active)
            .map(|(index, _)| index)
    }

    /// Enters `stage`; returns the duration of the previous one.
    pub(super) fn enter(&mut self, now: Duration, stage: Stage) -> Duration {
        let took = now.saturating_sub(self.since);
        self.since = now;
        self.stage = stage;
        took
    }
}

impl Handoff {
    /// Returns the batch with number `seq`, if it is in `stage`.
    pub(super) fn batch_in(&mut self, seq: u64, stage: Stage) -> Option<&mut Batch> {
        let batch = self.donor.batches.get_mut(&seq)?;
        (batch.stage == stage).then_some(batch)
    }

    pub(super) fn set_deadline(&mut self, seq: u64, deadline: Option<Duration>) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        if let Some(old) = std::mem::replace(&mut batch.deadline, deadline) {
            self.core.timers.remove(&(old, Timer::Given(seq)));
        }
        if let Some(deadline) = deadline {
            self.core.timers.insert((deadline, Timer::Given(seq)));
        }
    }

    /// Handles `Prepared`: the acceptor made sockets, or refuses flows.
    pub(super) fn prepared(
        &mut self,
        now: Duration,
        from: NodeId,
        seq: u64,
        results: Vec<Result<(), String>>,
    ) {
        let Some(batch) = self.batch_in(seq, Stage::Preparing) else {
            return self
                .core
                .ignored(from, "Prepared", "the batch is not being prepared");
        };
        if batch.acceptor != from || batch.flows.len() != results.len() {
            return self
                .core
                .ignored(from, "Prepared", "it does not fit the batch");
        }
        let took = batch.enter(now, Stage::Waiting);
        batch.phases.prepare += took;
        let mut refused = Vec::new();
        for (index, result) in results.into_iter().enumerate() {
            if let Err(why) = result {
                let settling = batch.take(seq, index, false, Reason::Refused { by: from, why });
                let epoch = settling.epoch;
                refused.push((settling, epoch));
            }
        }
        self.set_deadline(seq, None);
        self.resume(refused);
        if !self.drain(now, seq) {
            self.await_turn(now, seq);
        }
    }

    /// Waits for the send queues of a batch, if the request wants a drain and one is worthwhile.
    fn drain(&mut self, now: Duration, seq: u64) -> bool {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return false;
        };
        let Some(limit) = batch.drain else {
            return false;
        };
        let active: Vec<_> = batch.active().map(|index| &batch.flows[index]).collect();
        let waits = active.iter().map(|flow| drain::wait(&flow.queue, limit));
        let wait = waits.max().unwrap_or_default();
        if wait.is_zero() {
            return false;
        }
        let flows = active.iter().map(|flow| flow.flow).collect();
        batch.stage = Stage::Draining;
        let deadline = now + wait;
        self.core
            .command(Purpose::Drain(seq), |token| Command::Drain {
                token,
                flows,
                deadline,
            });
        true
    }

    pub(super) fn drained(&mut self, now: Duration, seq: u64, queues: Vec<SendQueueInfo>) {
        let Some(batch) = self.batch_in(seq, Stage::Draining) else {
            return;
        };
        let active: Vec<usize> = batch.active().collect();
        for (index, queue) in active.into_iter().zip(queues) {
            batch.flows[index].queue = queue;
        }
        batch.stage = Stage::Waiting;
        self.await_turn(now, seq);
    }

    fn await_turn(&mut self, now: Duration, seq: u64) {
        let Some(batch) = self.donor.batches.get(&seq) else {
            return self.pump_turn(now);
        };
        if batch.active().next().is_none() {
            // The acceptor refused all flows.
            self.leave(now, seq);
        } else {
            self.donor.ready.push_back(seq);
        }
        self.pump_turn(now);
    }

    /// Starts the freeze of the next batch.
    pub(super) fn pump_turn(&mut self, now: Duration) {
        while self.donor.turn.is_none() && !self.donor.rests {
            let Some(seq) = self.donor.ready.pop_front() else {
                return;
            };
            if self.batch_in(seq, Stage::Waiting).is_some() {
                self.donor.turn = Some(seq);
                self.donor.busy_since.get_or_insert(now);
                self.divert(now, seq);
            }
        }
    }

    /// Rests at the end of a turn, if other programs need the processors: for half as long as the donor was busy.
    pub(super) fn rest(&mut self, now: Duration) {
        let donor = &mut self.donor;
        let has_more = !donor.lanes.is_empty() || !donor.ready.is_empty();
        let busy_since = donor.busy_since.take_if(|_| donor.gives_way || !has_more);
        if let Some(since) = busy_since.filter(|_| has_more) {
            donor.rests = true;
            let rest = (now.saturating_sub(since) / 2).min(self.core.config.rest_max);
            self.core.timers.insert((now + rest, Timer::Rest));
        }
    }

    /// Ends the rest.
    pub(super) fn go_on(&mut self, now: Duration) {
        self.donor.rests = false;
        self.donor.busy_since = Some(now);
        let lanes: Vec<NodeId> = self.donor.lanes.keys().copied().collect();
        for acceptor in lanes {
            self.pump_lane(now, acceptor);
        }
    }

    fn divert(&mut self, now: Duration, seq: u64) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        let acceptor = batch.acceptor;
        let mut changes = Vec::new();
        let mut queued = 0;
        for flow in batch.flows.iter().filter(|flow| flow.active) {
            changes.push(Change {
                flow: flow.flow,
                kind: ChangeKind::Divert { acceptor },
                epoch: flow.epoch,
            });
            queued += super::batch::STATE_BYTES + drain::bytes_left(&flow.queue, None);
        }
        batch.predicted = self.donor.model.predict(changes.len(), queued);
        let deadline = now + self.core.config.divert_timeout;
        let request = self.ask(now, changes, AskPurpose::Divert(seq));
        if let Some(batch) = self.donor.batches.get_mut(&seq) {
            batch.phases.drain = batch.enter(now, Stage::Diverting(request));
        }
        self.set_deadline(seq, Some(deadline));
        self.left_lane(now, acceptor);
    }

    /// Handles the end of a batch's preparation in the lane.
    pub(super) fn left_lane(&mut self, now: Duration, acceptor: NodeId) {
        if let Some(lane) = self.donor.lanes.get_mut(&acceptor) {
            lane.preparing = lane.preparing.saturating_sub(1);
        }
        self.pump_lane(now, acceptor);
    }

    pub(super) fn diverted(&mut self, now: Duration, seq: u64, answers: Answers) {
        let node = self.core.config.node;
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.phases.divert = batch.enter(now, Stage::Freezing);
        let acceptor = batch.acceptor;
        let transit = RecordState::Transit {
            donor: node,
            acceptor,
        };
        let active: Vec<usize> = batch.active().collect();
        let mut flows = Vec::with_capacity(active.len());
        let mut refused = Vec::new();
        for (index, answer) in active.into_iter().zip(answers) {
            match answer {
                Ok(Some(record)) if record.state == transit => {
                    let flow = batch.flows[index].flow;
                    flows.push(FlowEpoch {
                        flow,
                        epoch: record.epoch,
                    });
                }
                Ok(record) => {
                    let refusal = holdfast_wire::Refusal { current: record };
                    let settling = batch.take(seq, index, false, Reason::NotDiverted(refusal));
                    refused.push((settling, record));
                }
                Err(refusal) => {
                    let settling = batch.take(seq, index, false, Reason::NotDiverted(refusal));
                    refused.push((settling, refusal.current));
                }
            }
        }
        self.set_deadline(seq, None);
        let (mut resume, mut close) = (Vec::new(), Vec::new());
        for (settling, record) in refused {
            self.decide(settling, record, &mut resume, &mut close);
        }
        self.resume(resume);
        self.close(close);
        if flows.is_empty() {
            self.abort(acceptor, seq, "no flow was diverted");
            return self.leave(now, seq);
        }
        self.core
            .command(Purpose::Freeze(seq), |token| Command::Freeze {
                token,
                acceptor,
                flows,
            });
    }
}
