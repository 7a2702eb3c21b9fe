//! The donor's second half: a prepared batch is drained, diverted, frozen and transferred.
//!
//! One batch at a time is between divert and `Done`, so that each gets the machine to itself; a batch that fails
//! leaves its turn at once and settles by the side.

use super::asks::Answers;
use super::core::{AskPurpose, Purpose, Timer};
use super::donor::{Batch, Stage};
use super::event::{Reason, Step};
use super::settle::Settling;
use super::{Command, FlowEpoch, FrozenFlow, Handoff, SendQueueInfo, drain};
use core::time::Duration;
use holdfast_wire::frame::{AcceptorTimes, StateFlow};
use holdfast_wire::{Change, ChangeKind, Epoch, Frame, LENGTH_MAX, NodeId, RecordState};

/// The most bytes of state in a frame, unless one flow alone has more.
const STATE_FRAME_BYTES: usize = 8 << 20;
/// The most bytes of state of a flow: a frame has to hold them and little else.
const FLOW_BYTES_MAX: usize = LENGTH_MAX - (64 << 10);

impl Batch {
    /// Takes a flow off the batch's way.
    fn take(&mut self, seq: u64, index: usize, frozen: bool, reason: Reason) -> Settling {
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

    /// Takes all flows off that are still on it.
    fn take_all(&mut self, seq: u64, frozen: bool, reason: &Reason) -> Vec<Settling> {
        let active: Vec<usize> = self.active().collect();
        active
            .into_iter()
            .map(|index| self.take(seq, index, frozen, reason.clone()))
            .collect()
    }

    /// Indices of the flows that still go the batch's way.
    fn active(&self) -> impl Iterator<Item = usize> + '_ {
        let flows = self.flows.iter().enumerate();
        flows
            .filter(|(_, flow)| flow.active)
            .map(|(index, _)| index)
    }

    /// Ends the stage; gives how long it took.
    fn enter(&mut self, now: Duration, stage: Stage) -> Duration {
        let took = now.saturating_sub(self.since);
        self.since = now;
        self.stage = stage;
        took
    }
}

impl Handoff {
    /// The batch of that number, if it is in `stage`.
    fn batch_in(&mut self, seq: u64, stage: Stage) -> Option<&mut Batch> {
        let batch = self.donor.batches.get_mut(&seq)?;
        (batch.stage == stage).then_some(batch)
    }

    fn set_deadline(&mut self, seq: u64, deadline: Option<Duration>) {
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

    /// The acceptor has sockets, or refuses.
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

    /// Waits for the send queues of a batch, if that is wanted and worth it.
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
            // All were refused.
            self.leave(now, seq);
        } else {
            self.donor.ready.push_back(seq);
        }
        self.pump_turn(now);
    }

    /// Gives the turn to the next batch.
    pub(super) fn pump_turn(&mut self, now: Duration) {
        while self.donor.turn.is_none() {
            let Some(seq) = self.donor.ready.pop_front() else {
                return;
            };
            if self.batch_in(seq, Stage::Waiting).is_some() {
                self.donor.turn = Some(seq);
                self.divert(now, seq);
            }
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

    /// A batch of the lane is past its preparation.
    fn left_lane(&mut self, now: Duration, acceptor: NodeId) {
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

    /// The hot path: the state goes out in the order it came, its blobs untouched.
    pub(super) fn frozen(
        &mut self,
        now: Duration,
        seq: u64,
        results: Vec<Result<FrozenFlow, String>>,
    ) {
        let Some(batch) = self.batch_in(seq, Stage::Freezing) else {
            return;
        };
        let acceptor = batch.acceptor;
        batch.phases.extract = batch.enter(now, Stage::Transferring);
        if let Some(reason) = batch.doomed.take() {
            let flows = batch.take_all(seq, true, &reason);
            self.leave(now, seq);
            return self.roll_back(now, flows);
        }
        let active: Vec<usize> = batch.active().collect();
        let mut states = Vec::with_capacity(active.len());
        let mut failed = Vec::new();
        for (index, result) in active.into_iter().zip(results) {
            let reason = match result {
                Err(why) => Reason::Extract(why),
                Ok(FrozenFlow {
                    dynamic,
                    application,
                }) => {
                    let bytes = dynamic.len() + application.len();
                    if bytes <= FLOW_BYTES_MAX {
                        batch.bytes += bytes;
                        let index = index as u32;
                        states.push(StateFlow {
                            index,
                            dynamic,
                            application,
                        });
                        continue;
                    }
                    Reason::TooBig { bytes }
                }
            };
            failed.push(batch.take(seq, index, true, reason));
        }
        let bytes = batch.bytes;
        if states.is_empty() {
            self.abort(acceptor, seq, "no flow could be frozen");
            self.leave(now, seq);
        } else {
            self.send_states(acceptor, seq, states);
            let patience = self.core.config.transfer_timeout + self.donor.model.transfer(bytes) * 4;
            self.set_deadline(seq, Some(now + patience));
        }
        self.roll_back(now, failed);
    }

    fn send_states(&mut self, acceptor: NodeId, seq: u64, states: Vec<StateFlow>) {
        let batch = self.batch_id(seq);
        let mut flows = Vec::with_capacity(states.len());
        let mut bytes = 0;
        for state in states {
            let more = state.dynamic.len() + state.application.len();
            if bytes + more > STATE_FRAME_BYTES && !flows.is_empty() {
                let flows = std::mem::take(&mut flows);
                self.core.send(
                    acceptor,
                    Frame::State {
                        batch,
                        flows,
                        last: false,
                    },
                );
                bytes = 0;
            }
            bytes += more;
            flows.push(state);
        }
        self.core.send(
            acceptor,
            Frame::State {
                batch,
                flows,
                last: true,
            },
        );
    }

    /// The acceptor is through with the batch.
    pub(super) fn done(
        &mut self,
        now: Duration,
        from: NodeId,
        seq: u64,
        results: Vec<Result<Epoch, String>>,
        times: AcceptorTimes,
    ) {
        let Some(batch) = self.batch_in(seq, Stage::Transferring) else {
            return self
                .core
                .ignored(from, "Done", "the batch is not being transferred");
        };
        if batch.acceptor != from || batch.flows.len() != results.len() {
            return self.core.ignored(from, "Done", "it does not fit the batch");
        }
        let restore = Duration::from_micros(times.restore_us.into());
        let commit = Duration::from_micros(times.commit_us.into());
        let took = batch.enter(now, Stage::Settling);
        batch.phases.transfer = took.saturating_sub(restore + commit);
        batch.phases.restore = restore;
        batch.phases.commit = commit;
        let mut moved = Vec::new();
        let mut doubtful = Vec::new();
        let active: Vec<usize> = batch.active().collect();
        for index in active {
            let taken_at = batch.flows[index].epoch.saturating_add(2);
            match &results[index] {
                Ok(epoch) if *epoch == taken_at => {
                    let reason = Reason::AlreadyMoving;
                    moved.push((batch.take(seq, index, true, reason), taken_at));
                }
                Ok(_) => {
                    let why = "it names an epoch that is not the transit's".to_owned();
                    doubtful.push(batch.take(seq, index, true, Reason::Refused { by: from, why }));
                }
                Err(why) => {
                    let why = why.clone();
                    doubtful.push(batch.take(seq, index, true, Reason::Refused { by: from, why }));
                }
            }
        }
        let (bytes, phases) = (batch.bytes, batch.phases);
        self.donor.model.learn(moved.len(), bytes, &phases);
        self.leave(now, seq);
        self.close(moved);
        self.roll_back(now, doubtful);
    }

    /// The batch is on nobody's way any more; its flows settle by themselves.
    fn leave(&mut self, now: Duration, seq: u64) {
        self.set_deadline(seq, None);
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.stage = Stage::Settling;
        let acceptor = batch.acceptor;
        if self.donor.turn == Some(seq) {
            self.donor.turn = None;
        } else {
            self.left_lane(now, acceptor);
        }
    }

    fn abort(&mut self, acceptor: NodeId, seq: u64, reason: &str) {
        let batch = self.batch_id(seq);
        let reason = reason.to_owned();
        self.core.send(acceptor, Frame::Abort { batch, reason });
    }

    /// A batch took too long.
    pub(super) fn given_timed_out(&mut self, now: Duration, seq: u64) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.deadline = None;
        let (peer, step) = match batch.stage {
            Stage::Diverting(_) => (self.core.config.holder, Step::Divert),
            Stage::Transferring => (batch.acceptor, Step::Transfer),
            _ => (batch.acceptor, Step::Prepare),
        };
        let acceptor = batch.acceptor;
        let reason = Reason::TimedOut { peer, step };
        if step == Step::Prepare {
            self.fail_lane(acceptor, &reason);
        }
        self.fail_batch(now, seq, reason);
    }

    /// Gives a batch up, wherever it is.
    pub(super) fn fail_batch(&mut self, now: Duration, seq: u64, reason: Reason) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        let (acceptor, stage) = (batch.acceptor, batch.stage);
        match stage {
            Stage::Settling => return,
            Stage::Freezing if batch.doomed.is_some() => return,
            // Its flows are about to be frozen; what to do with them is known when they are.
            Stage::Freezing => batch.doomed = Some(reason.clone()),
            Stage::Preparing | Stage::Draining | Stage::Waiting => {
                let flows = batch.take_all(seq, false, &reason);
                let flows = flows.into_iter().map(|settling| {
                    let epoch = settling.epoch;
                    (settling, epoch)
                });
                let flows = flows.collect();
                self.leave(now, seq);
                self.resume(flows);
            }
            Stage::Diverting(request) => {
                let flows = batch.take_all(seq, false, &reason);
                self.cancel_ask(request);
                self.leave(now, seq);
                self.roll_back(now, flows);
            }
            Stage::Transferring => {
                let flows = batch.take_all(seq, true, &reason);
                self.leave(now, seq);
                self.roll_back(now, flows);
            }
        }
        self.abort(acceptor, seq, &reason.to_string());
    }

    /// The channel to an acceptor is gone.
    pub(super) fn acceptor_lost(&mut self, now: Duration, peer: NodeId) {
        let step = Step::Prepare;
        self.fail_lane(peer, &Reason::PeerLost { peer, step });
        let batches = self.donor.batches.iter();
        let lost = batches.filter(|(_, batch)| batch.acceptor == peer);
        let lost: Vec<(u64, Step)> = lost.map(|(seq, batch)| (*seq, batch.step())).collect();
        for (seq, step) in lost {
            self.fail_batch(now, seq, Reason::PeerLost { peer, step });
        }
    }
}

impl Batch {
    /// The step the batch is in.
    pub(super) fn step(&self) -> Step {
        match self.stage {
            Stage::Preparing => Step::Prepare,
            Stage::Draining | Stage::Waiting => Step::Drain,
            Stage::Diverting(_) => Step::Divert,
            Stage::Freezing => Step::Extract,
            Stage::Transferring | Stage::Settling => Step::Transfer,
        }
    }
}
