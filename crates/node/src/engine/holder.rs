//! The holder's part: the steering table as the store of ownership.

use std::collections::HashSet;

use holdfast_bpf::Dataplane as Programs;
use holdfast_bpf::shared::{FlowKey, Record as MapRecord};
use holdfast_proto::handoff::{Completion, Results, Token};
use holdfast_proto::ownership::{Floors, apply};
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, NodeId, Record, Refusal};

use super::Engine;
use crate::dataplane::{flow_of, key_of, record_from_map, record_to_map};

/// Looks records up and changes them. One daemon writes the table, so look-up and store are one step.
pub struct Holder {
    floors: Floors,
}

impl Holder {
    /// A holder over the table that an earlier daemon may have left.
    pub fn new(programs: &Programs, seconds_since_2020: Epoch) -> Self {
        let highest = programs
            .steering
            .entries()
            .iter()
            .map(|(_, record)| record.epoch)
            .max();
        let least = highest
            .map_or(1, |epoch| epoch.saturating_add(1))
            .max(seconds_since_2020);
        Self {
            floors: Floors::new(least),
        }
    }

    /// The record of a flow.
    pub fn lookup(programs: &Programs, flow: &Flow) -> Option<Record> {
        programs
            .steering
            .get(&key_of(flow))
            .ok()
            .flatten()
            .as_ref()
            .and_then(record_from_map)
    }

    /// All records of flows; those of processes that move are not among them.
    pub fn records(programs: &Programs) -> Vec<(Flow, Record)> {
        programs
            .steering
            .entries()
            .iter()
            .filter_map(|(key, record)| Some((flow_of(key)?, record_from_map(record)?)))
            .filter(|(flow, _)| !flow.is_process())
            .collect()
    }

    /// Applies changes, one after the other. A table that is full refuses, as the record it has (none) says.
    pub fn arbitrate(
        &mut self,
        programs: &Programs,
        asker: NodeId,
        changes: &[Change],
    ) -> Vec<Result<Option<Record>, Refusal>> {
        let mut results = Vec::with_capacity(changes.len());
        let mut unstored = Unstored::default();
        for change in changes {
            // One question may name a flow twice.
            if unstored.has(&change.flow) {
                unstored.store(programs, &mut results);
            }
            let current = Self::lookup(programs, &change.flow);
            let mut result = self.decide(current, asker, change);
            match result {
                Ok(Some(record)) => unstored.put(results.len(), change.flow, record, current),
                Ok(None) => result = self.remove(programs, &change.flow, current),
                Err(_) => {}
            }
            results.push(result);
        }
        unstored.store(programs, &mut results);
        results
    }

    fn decide(
        &mut self,
        current: Option<Record>,
        asker: NodeId,
        change: &Change,
    ) -> Result<Option<Record>, Refusal> {
        let mut change = *change;
        if change.kind == ChangeKind::Establish {
            change.epoch = self.floors.at_least(&change.flow, change.epoch);
        }
        apply(current, &change, asker)
    }

    fn remove(
        &mut self,
        programs: &Programs,
        flow: &Flow,
        current: Option<Record>,
    ) -> Result<Option<Record>, Refusal> {
        if let Err(error) = programs.steering.remove(&key_of(flow)) {
            tracing::error!(%flow, %error, "a record stays in the steering table");
            return Err(Refusal { current });
        }
        if let Some(old) = current {
            self.floors.removed(flow, old.epoch);
        }
        Ok(None)
    }
}

/// Records that are decided and not yet in the table, where they go together.
#[derive(Default)]
struct Unstored {
    flows: HashSet<Flow>,
    keys: Vec<FlowKey>,
    records: Vec<MapRecord>,
    /// The place of each result, and what to refuse with.
    places: Vec<(usize, Option<Record>)>,
}

impl Unstored {
    fn has(&self, flow: &Flow) -> bool {
        self.flows.contains(flow)
    }

    fn put(&mut self, place: usize, flow: Flow, record: Record, current: Option<Record>) {
        self.flows.insert(flow);
        self.keys.push(key_of(&flow));
        self.records.push(record_to_map(&record));
        self.places.push((place, current));
    }

    /// Stores them; those that the table does not take are refused.
    fn store(&mut self, programs: &Programs, results: &mut [Result<Option<Record>, Refusal>]) {
        let Self {
            keys,
            records,
            places,
            ..
        } = std::mem::take(self);
        if programs.steering.set_many(&keys, &records).is_ok() {
            return;
        }
        // Some are in: which, is seen one by one.
        for ((key, record), (place, current)) in keys.iter().zip(&records).zip(places) {
            if let Err(error) = programs.steering.set(key, record) {
                tracing::error!(%error, "the steering table does not take a record");
                results[place] = Err(Refusal { current });
            }
        }
    }
}

impl Engine {
    pub(super) fn arbitrate(&mut self, token: Token, asker: NodeId, changes: &[Change]) {
        let results = Results::Arbitrated(self.decide(asker, changes));
        self.done(Completion { token, results });
    }

    pub(super) fn look_up(&mut self, token: Token, flows: &[Flow]) {
        let results = Results::LookedUp(self.records_of(flows));
        self.done(Completion { token, results });
    }

    /// Decides as the holder; a node that is not refuses.
    pub(super) fn decide(
        &mut self,
        asker: NodeId,
        changes: &[Change],
    ) -> Vec<Result<Option<Record>, Refusal>> {
        let programs = &self.dataplane.programs;
        match &mut self.holder {
            Some(holder) => holder.arbitrate(programs, asker, changes),
            None => changes
                .iter()
                .map(|_| Err(Refusal { current: None }))
                .collect(),
        }
    }

    /// The records of flows, as this node has them.
    pub(super) fn records_of(&self, flows: &[Flow]) -> Vec<Option<Record>> {
        let programs = &self.dataplane.programs;
        let record = |flow| Holder::lookup(programs, flow);
        flows.iter().map(record).collect()
    }
}
