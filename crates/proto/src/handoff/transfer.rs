//! The donor's last third: the frozen batch is transferred, and moved or given up.

use super::donor::{Batch, Stage};
use super::event::{Reason, Step};
use super::{FrozenFlow, Handoff};
use core::time::Duration;
use holdfast_wire::frame::{AcceptorTimes, StateFlow};
use holdfast_wire::{Epoch, Frame, LENGTH_MAX, NodeId};

/// Most bytes of state in a frame, unless one flow alone has more.
const STATE_FRAME_BYTES: usize = 8 << 20;
/// Most bytes of state of a flow: a frame has to hold them and little else.
const FLOW_BYTES_MAX: usize = LENGTH_MAX - (64 << 10);

impl Handoff {
    /// Handles the completion of `Freeze`. The hot path: the state is sent in the order it was extracted, its blobs
    /// untouched.
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

    /// Handles `Done`: the acceptor has finished the batch.
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

    /// Ends the batch's turn or preparation; its flows settle one by one.
    pub(super) fn leave(&mut self, now: Duration, seq: u64) {
        self.set_deadline(seq, None);
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.stage = Stage::Settling;
        let acceptor = batch.acceptor;
        if self.donor.turn == Some(seq) {
            self.donor.turn = None;
            self.rest(now);
        } else {
            self.left_lane(now, acceptor);
        }
    }

    pub(super) fn abort(&mut self, acceptor: NodeId, seq: u64, reason: &str) {
        let batch = self.batch_id(seq);
        let reason = reason.to_owned();
        self.core.send(acceptor, Frame::Abort { batch, reason });
    }

    /// Handles the timeout of a batch.
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

    /// Gives a batch up, in any stage.
    pub(super) fn fail_batch(&mut self, now: Duration, seq: u64, reason: Reason) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        let (acceptor, stage) = (batch.acceptor, batch.stage);
        match stage {
            Stage::Settling => return,
            Stage::Freezing if batch.doomed.is_some() => return,
            // The flows are being frozen; the completion of `Freeze` decides how to undo that.
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

    /// Handles the loss of the channel to an acceptor.
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
    /// Returns the step of the batch's stage.
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
