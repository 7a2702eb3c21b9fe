//! Background work in slices: reading sockets at the donor, making them at the acceptor, removing tombstones.
//!
//! No freeze waits for this work, but it takes longer than all work in a freeze. There is one thread, so without slices
//! the preparation of the next batch would lengthen the freeze of the previous one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use holdfast_bpf::shared::FlowState;
use holdfast_proto::handoff::{Completion, Reason, Results, StaticFlow, Token};
use holdfast_wire::Flow;
use holdfast_wire::frame::{BatchId, PrepareFlow};

use super::Engine;
use super::faults::Moment;
use super::tombstones::Tombstone;

/// Rough duration of a slice, for which more urgent work waits.
const SLICE: Duration = Duration::from_micros(60);

/// Maximum number of flows in a slice: one snapshot covers as many sockets.
const FLOWS_MAX: usize = 8;

/// Commands that are carried out slice by slice, in order.
#[derive(Default)]
pub struct Work {
    jobs: VecDeque<Job>,
}

enum Job {
    Read {
        token: Token,
        flows: Vec<Flow>,
        results: Vec<Result<StaticFlow, Reason>>,
    },
    Prepare {
        token: Token,
        batch: BatchId,
        flows: Vec<PrepareFlow>,
        results: Vec<Result<(), String>>,
    },
    Forget {
        moved: Vec<Tombstone>,
    },
}

impl Work {
    /// Adds tombstones to remove.
    pub fn forget(&mut self, moved: Vec<Tombstone>) {
        if !moved.is_empty() {
            self.jobs.push_back(Job::Forget { moved });
        }
    }

    /// Returns true if a slice of work is pending.
    pub fn is_waiting(&self) -> bool {
        !self.jobs.is_empty()
    }
}

impl Engine {
    pub(super) fn read_static(&mut self, token: Token, flows: Vec<Flow>) {
        let results = Vec::with_capacity(flows.len());
        self.work.jobs.push_back(Job::Read {
            token,
            flows,
            results,
        });
    }

    pub(super) fn prepare_sockets(
        &mut self,
        token: Token,
        batch: BatchId,
        flows: Vec<PrepareFlow>,
    ) {
        let results = Vec::with_capacity(flows.len());
        self.work.jobs.push_back(Job::Prepare {
            token,
            batch,
            flows,
            results,
        });
    }

    /// Completes all pending work, because the next command may name the same flows.
    pub(super) fn finish_work(&mut self) {
        while self.work.is_waiting() {
            self.work_a_slice();
        }
    }

    /// Does one slice of the pending work.
    pub(super) fn work_a_slice(&mut self) {
        match self.work.jobs.pop_front() {
            Some(Job::Read {
                token,
                flows,
                results,
            }) => self.read_slice(token, flows, results),
            Some(Job::Prepare {
                token,
                batch,
                flows,
                results,
            }) => self.prepare_slice(token, batch, flows, results),
            Some(Job::Forget { moved }) => self.forget_slice(moved),
            None => {}
        }
    }

    fn read_slice(
        &mut self,
        token: Token,
        flows: Vec<Flow>,
        mut results: Vec<Result<StaticFlow, Reason>>,
    ) {
        let until = Instant::now() + SLICE;
        let begin = results.len();
        if begin == 0 {
            self.static_reader.forget();
        }
        let slice = &flows[begin..flows.len().min(begin + FLOWS_MAX)];
        let mut entries = Vec::with_capacity(slice.len());
        let seen = self.look_at(slice);
        for (flow, seen) in slice.iter().zip(&seen) {
            results.push(self.read_one(flow, seen.as_ref()).map(|(read, entry)| {
                entries.push(entry);
                read
            }));
            if Instant::now() >= until {
                break;
            }
        }
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::Prepared) {
            tracing::warn!(%error, "out-of-order segments will not be copied");
        }
        if results.len() < flows.len() {
            self.work.jobs.push_front(Job::Read {
                token,
                flows,
                results,
            });
        } else {
            self.faults.at("read", Moment::After, flows.len());
            self.done(Completion {
                token,
                results: Results::ReadStatic(results),
            });
        }
    }

    /// Removes a few tombstones; the rest goes to the end of the queue, because nothing waits for it.
    fn forget_slice(&mut self, mut moved: Vec<Tombstone>) {
        let rest = moved.split_off(moved.len().min(FLOWS_MAX));
        for tombstone in &moved {
            self.forget_moved(tombstone);
        }
        self.work.forget(rest);
    }

    fn prepare_slice(
        &mut self,
        token: Token,
        batch: BatchId,
        flows: Vec<PrepareFlow>,
        mut results: Vec<Result<(), String>>,
    ) {
        let until = Instant::now() + SLICE;
        let mut entries = Vec::with_capacity(FLOWS_MAX);
        let mut states = Vec::with_capacity(FLOWS_MAX);
        let begin = results.len();
        for of in flows.iter().skip(begin).take(FLOWS_MAX) {
            results.push(
                self.prepare_one(batch.donor, of)
                    .map(|(entry, application)| {
                        entries.push(entry);
                        states.push((of.flow, application));
                    }),
            );
            if Instant::now() >= until {
                break;
            }
        }
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::TransitIn) {
            // Without its entry in the map, a flow's packets would reach the stack.
            for result in &mut results[begin..] {
                *result = Err(error.to_string());
            }
        }
        let failed = self.offer(states);
        for (of, result) in flows.iter().zip(&mut results).skip(begin) {
            if let Some(why) = failed.get(&of.flow) {
                *result = Err(why.clone());
            }
        }
        if results.len() < flows.len() {
            self.work.jobs.push_front(Job::Prepare {
                token,
                batch,
                flows,
                results,
            });
        } else {
            self.journal.prepared(batch, &flows);
            self.faults.at("prepare", Moment::After, flows.len());
            self.await_programs(token, flows.iter().map(|of| of.flow).collect(), results);
        }
    }
}
