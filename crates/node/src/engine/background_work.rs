//! Background work in slices: reading sockets at the donor, making them at the acceptor, removing tombstones.
//!
//! No freeze waits for this work, but it takes longer than all work in a freeze. There is one thread, so without slices
//! the preparation of the next batch would lengthen the freeze of the previous one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, FlowKeptReason, Results, StaticFlow};
use holdfast_wire::Flow;
use holdfast_wire::failure::Failure;
use holdfast_wire::frame::{BatchId, FlowToPrepare};

use super::Engine;
use super::fault_injection::InjectionPoint;
use super::tombstones::Tombstone;
use crate::failure_conversion::IntoFailure;

/// Rough duration of a slice, for which more urgent work waits.
const SLICE_DURATION: Duration = Duration::from_micros(60);

/// Maximum number of flows in a slice: one snapshot covers as many sockets.
const FLOWS_PER_SLICE: usize = 8;

/// Commands that are carried out slice by slice, in order.
#[derive(Default)]
pub struct BackgroundWork {
    jobs: VecDeque<BackgroundJob>,
}

enum BackgroundJob {
    ReadStatic {
        token: CommandToken,
        flows: Vec<Flow>,
        results: Vec<Result<StaticFlow, FlowKeptReason>>,
    },
    Prepare {
        token: CommandToken,
        batch: BatchId,
        flows: Vec<FlowToPrepare>,
        results: Vec<Result<(), Failure>>,
    },
    RemoveTombstones {
        tombstones: Vec<Tombstone>,
    },
}

impl BackgroundWork {
    /// Adds tombstones to remove.
    pub fn add_tombstones(&mut self, tombstones: Vec<Tombstone>) {
        if !tombstones.is_empty() {
            self.jobs
                .push_back(BackgroundJob::RemoveTombstones { tombstones });
        }
    }

    /// Adds a command after all others.
    fn add(&mut self, job: BackgroundJob) {
        self.jobs.push_back(job);
    }

    /// Returns an unfinished command to the front.
    fn put_back(&mut self, job: BackgroundJob) {
        self.jobs.push_front(job);
    }

    /// Takes the command whose next slice is due.
    fn take_next(&mut self) -> Option<BackgroundJob> {
        self.jobs.pop_front()
    }

    /// Returns true if a slice of work is pending.
    pub fn has_work(&self) -> bool {
        !self.jobs.is_empty()
    }
}

impl Engine {
    pub(super) fn read_static(&mut self, token: CommandToken, flows: Vec<Flow>) {
        let results = Vec::with_capacity(flows.len());
        self.background_work.add(BackgroundJob::ReadStatic {
            token,
            flows,
            results,
        });
    }

    pub(super) fn prepare_sockets(
        &mut self,
        token: CommandToken,
        batch: BatchId,
        flows: Vec<FlowToPrepare>,
    ) {
        let results = Vec::with_capacity(flows.len());
        self.background_work.add(BackgroundJob::Prepare {
            token,
            batch,
            flows,
            results,
        });
    }

    /// Completes all pending work, because the next command may name the same flows.
    pub(super) fn finish_background_work(&mut self) {
        while self.background_work.has_work() {
            self.run_slice();
        }
    }

    /// Does one slice of the engine's background work.
    pub(super) fn run_slice(&mut self) {
        match self.background_work.take_next() {
            Some(BackgroundJob::ReadStatic {
                token,
                flows,
                results,
            }) => self.read_slice(token, flows, results),
            Some(BackgroundJob::Prepare {
                token,
                batch,
                flows,
                results,
            }) => self.prepare_slice(token, batch, flows, results),
            Some(BackgroundJob::RemoveTombstones { tombstones: moved }) => {
                self.remove_tombstones_slice(moved)
            }
            None => {}
        }
    }

    fn read_slice(
        &mut self,
        token: CommandToken,
        flows: Vec<Flow>,
        mut results: Vec<Result<StaticFlow, FlowKeptReason>>,
    ) {
        let deadline = Instant::now() + SLICE_DURATION;
        let begin = results.len();
        if begin == 0 {
            self.donations.forget_options();
        }
        let slice = &flows[begin..flows.len().min(begin + FLOWS_PER_SLICE)];
        let mut entries = Vec::with_capacity(slice.len());
        let observer = &mut self.dataplane.sockets;
        let snapshots = self.donations.snapshot_sockets(observer, slice);
        for (flow, snapshot) in slice.iter().zip(&snapshots) {
            results.push(
                self.donations
                    .read_flow(&self.dataplane, flow, snapshot.as_ref())
                    .map(|(read, entry)| {
                        entries.push(entry);
                        read
                    }),
            );
            if Instant::now() >= deadline {
                break;
            }
        }
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::Prepared) {
            tracing::warn!(%error, "cannot mark flows as prepared: out-of-order segments will not be copied");
        }
        if results.len() < flows.len() {
            self.background_work.put_back(BackgroundJob::ReadStatic {
                token,
                flows,
                results,
            });
        } else {
            self.faults
                .inject_if_due("read", InjectionPoint::After, flows.len());
            self.complete_handoff_command(Completion {
                token,
                results: Results::ReadStatic(results),
            });
        }
    }

    /// Removes a few tombstones; the rest goes to the end of the queue, because nothing waits for it.
    fn remove_tombstones_slice(&mut self, mut tombstones: Vec<Tombstone>) {
        let later = tombstones.split_off(tombstones.len().min(FLOWS_PER_SLICE));
        for tombstone in &tombstones {
            self.remove_tombstone(tombstone);
        }
        self.background_work.add_tombstones(later);
    }

    fn prepare_slice(
        &mut self,
        token: CommandToken,
        batch: BatchId,
        flows: Vec<FlowToPrepare>,
        mut results: Vec<Result<(), Failure>>,
    ) {
        let deadline = Instant::now() + SLICE_DURATION;
        let mut entries = Vec::with_capacity(FLOWS_PER_SLICE);
        let mut states = Vec::with_capacity(FLOWS_PER_SLICE);
        let begin = results.len();
        for prepare in flows.iter().skip(begin).take(FLOWS_PER_SLICE) {
            results.push(
                self.prepare_flow(batch.donor, prepare)
                    .map(|(entry, application)| {
                        entries.push(entry);
                        states.push((prepare.flow, application));
                    }),
            );
            if Instant::now() >= deadline {
                break;
            }
        }
        let set = self.dataplane.set_flows(&entries, FlowState::TransitIn);
        if let Err(failure) = set.map_err(IntoFailure::into_failure) {
            // Without its entry in the map, a flow's packets would reach the stack.
            for result in &mut results[begin..] {
                *result = Err(failure.clone());
            }
        }
        let messages = &mut self.program_messages;
        let failed = self.arrivals.offer_to_programs(messages, states);
        for (prepare, result) in flows.iter().zip(&mut results).skip(begin) {
            if let Some(why) = failed.get(&prepare.flow) {
                *result = Err(why.clone());
            }
        }
        if results.len() < flows.len() {
            self.background_work.put_back(BackgroundJob::Prepare {
                token,
                batch,
                flows,
                results,
            });
        } else {
            self.arrivals.journal().record_static(batch, &flows);
            self.faults
                .inject_if_due("prepare", InjectionPoint::After, flows.len());
            self.await_programs(
                token,
                flows.iter().map(|prepare| prepare.flow).collect(),
                results,
            );
        }
    }
}
