//! The holder's part: the steering table as the store of ownership.

use holdfast_bpf::Dataplane as Programs;
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

    /// All records.
    pub fn records(programs: &Programs) -> Vec<(Flow, Record)> {
        programs
            .steering
            .entries()
            .iter()
            .filter_map(|(key, record)| Some((flow_of(key)?, record_from_map(record)?)))
            .collect()
    }

    /// Applies one change. A table that is full refuses, as the record it has (none) says.
    pub fn arbitrate(
        &mut self,
        programs: &Programs,
        asker: NodeId,
        change: &Change,
    ) -> Result<Option<Record>, Refusal> {
        let mut change = *change;
        let current = Self::lookup(programs, &change.flow);
        if change.kind == ChangeKind::Establish {
            change.epoch = self.floors.at_least(&change.flow, change.epoch);
        }
        let next = apply(current, &change, asker)?;
        let key = key_of(&change.flow);
        let stored = match &next {
            Some(record) => programs.steering.set(&key, &record_to_map(record)),
            None => programs.steering.remove(&key),
        };
        if let Err(error) = stored {
            tracing::error!(flow = %change.flow, %error, "the steering table does not take a record");
            return Err(Refusal { current });
        }
        if let (None, Some(old)) = (next, current) {
            self.floors.removed(&change.flow, old.epoch);
        }
        Ok(next)
    }
}

impl Engine {
    pub(super) fn arbitrate(&mut self, token: Token, asker: NodeId, changes: &[Change]) {
        let programs = &self.dataplane.programs;
        let results = match &mut self.holder {
            Some(holder) => {
                let each = changes.iter();
                each.map(|change| holder.arbitrate(programs, asker, change))
                    .collect()
            }
            None => changes
                .iter()
                .map(|_| Err(Refusal { current: None }))
                .collect(),
        };
        self.done(Completion {
            token,
            results: Results::Arbitrated(results),
        });
    }

    pub(super) fn look_up(&mut self, token: Token, flows: &[Flow]) {
        let programs = &self.dataplane.programs;
        let records = flows
            .iter()
            .map(|flow| Holder::lookup(programs, flow))
            .collect();
        self.done(Completion {
            token,
            results: Results::LookedUp(records),
        });
    }
}
