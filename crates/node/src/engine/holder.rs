//! The holder's role: the steering table as the store of ownership.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use foldhash::fast::RandomState;
use holdfast_bpf::shared::{FlowKey, Record as MapRecord};
use holdfast_bpf::{Dataplane as Programs, guaranteed};
use holdfast_proto::handoff::{Completion, Results, Token};
use holdfast_proto::ownership::{Floors, Together, apply};
use holdfast_wire::{
    Change, ChangeKind, Epoch, Flow, NodeId, Protocol, Record, RecordState, Refusal,
};

use super::Engine;
use crate::config::{Config, Service};
use crate::dataplane::{flow_of, key_of, record_from_map, record_to_map};

/// Reads and changes ownership records. Only this daemon writes the table, so a read followed by a write is atomic.
pub struct Holder {
    node: NodeId,
    floors: Floors,
    /// Copies of the records of flows in transit. A commit or rollback is urgent, and reading the records one by one
    /// from the table is slow.
    transits: HashMap<Flow, Record, RandomState>,
    together: Together,
    /// The last committed process whose flow records are not written yet, and the node that asked.
    unwritten: Option<(Change, NodeId)>,
    shares: Shares,
}

/// Number of records of each service in the steering table. No service may use up capacity that is guaranteed to
/// another.
#[derive(Default)]
struct Shares {
    rows: HashMap<(Protocol, SocketAddr), usize>,
    records: Vec<u32>,
    capacity: u32,
}

impl Shares {
    fn new(services: &[Service], capacity: u32) -> Self {
        let address = |of: &Service| (of.protocol, of.address);
        let rows = services.iter().map(address).zip(0..).collect();
        let records = vec![0; services.len()];
        Self {
            rows,
            records,
            capacity,
        }
    }

    fn of(&mut self, flow: &Flow) -> Option<&mut u32> {
        let row = *self.rows.get(&(flow.protocol, flow.local))?;
        self.records.get_mut(row)
    }

    /// Returns true if the flow's service may have one more record.
    fn has_room(&mut self, flow: &Flow) -> bool {
        let services = u32::try_from(self.records.len()).unwrap_or(u32::MAX);
        let guaranteed = guaranteed(services, self.capacity);
        match self.of(flow) {
            Some(records) if *records >= guaranteed => {
                let taken = self.records.iter().map(|records| records.max(&guaranteed));
                taken.map(|records| u64::from(*records)).sum::<u64>() < u64::from(self.capacity)
            }
            _ => true,
        }
    }

    fn took(&mut self, flow: &Flow) {
        if let Some(records) = self.of(flow) {
            *records += 1;
        }
    }

    fn freed(&mut self, flow: &Flow) {
        if let Some(records) = self.of(flow) {
            *records = records.saturating_sub(1);
        }
    }
}

impl Holder {
    /// Returns a holder over the table that an earlier daemon may have left.
    pub fn new(programs: &Programs, config: &Config, seconds_since_2020: Epoch) -> Self {
        let entries = programs.steering.entries();
        let highest = entries.iter().map(|(_, record)| record.epoch).max();
        let mut shares = Shares::new(&config.services, config.node.capacity);
        let flows = entries.iter().filter_map(|(key, _)| flow_of(key));
        flows.for_each(|flow| shares.took(&flow));
        let least = highest
            .map_or(1, |epoch| epoch.saturating_add(1))
            .max(seconds_since_2020);
        Self {
            node: config.node.id,
            floors: Floors::new(least),
            shares,
            transits: HashMap::default(),
            together: Together::default(),
            unwritten: None,
        }
    }

    /// Returns the record of a flow.
    pub fn lookup(programs: &Programs, flow: &Flow) -> Option<Record> {
        programs
            .steering
            .get(&key_of(flow))
            .ok()
            .flatten()
            .as_ref()
            .and_then(record_from_map)
    }

    /// Returns all records of flows, without the records of moving processes.
    pub fn records(programs: &Programs) -> Vec<(Flow, Record)> {
        programs
            .steering
            .entries()
            .iter()
            .filter_map(|(key, record)| Some((flow_of(key)?, record_from_map(record)?)))
            .filter(|(flow, _)| !flow.is_process())
            .collect()
    }

    /// Applies changes in order. A full table refuses a new record, and the refusal carries no current record.
    pub fn arbitrate(
        &mut self,
        programs: &Programs,
        asker: NodeId,
        changes: &[Change],
    ) -> Vec<Result<Option<Record>, Refusal>> {
        self.write_behind(programs);
        let mut results = Vec::with_capacity(changes.len());
        let mut unstored = Unstored::of(self.node, changes);
        // Refusing a process's record also refuses the flows named after it.
        let mut refused = false;
        for change in changes {
            if refused && !change.flow.is_process() {
                let current = self.current(programs, &change.flow);
                results.push(Err(Refusal { current }));
                continue;
            }
            let all = matches!(change.kind, ChangeKind::CommitAll { .. });
            // One request may name a flow twice.
            if all || unstored.has(&change.flow) {
                self.store(programs, &mut unstored, &mut results);
            }
            let current = self.current(programs, &change.flow);
            let mut result = self.decide(current, asker, change);
            match result {
                Ok(Some(record)) if all => {
                    result = self.commit_all(programs, asker, change, (current, record));
                }
                Ok(Some(_)) if current.is_none() && !self.shares.has_room(&change.flow) => {
                    result = Err(Refusal { current });
                }
                Ok(Some(record)) => {
                    if current.is_none() {
                        self.shares.took(&change.flow);
                    }
                    unstored.put(results.len(), change.flow, record, current);
                }
                Ok(None) => result = self.remove(programs, &change.flow, current),
                Err(_) => {}
            }
            if change.flow.is_process() {
                refused = result.is_err();
            }
            results.push(result);
        }
        self.store(programs, &mut unstored, &mut results);
        self.together.answered(changes, &results);
        results
    }

    fn current(&self, programs: &Programs, flow: &Flow) -> Option<Record> {
        let in_transit = self.transits.get(flow).copied();
        in_transit.or_else(|| Self::lookup(programs, flow))
    }

    /// Stores the record of a committed process, which decides about all its flows or none. The flow records are
    /// written after the process runs ([`Holder::write_behind`]). If the holder crashes in between, it commits each
    /// flow when the acceptor asks again.
    fn commit_all(
        &mut self,
        programs: &Programs,
        asker: NodeId,
        change: &Change,
        (current, record): (Option<Record>, Record),
    ) -> Result<Option<Record>, Refusal> {
        // A repeated request gets the same answer.
        if current == Some(record) {
            return Ok(current);
        }
        if !self.together.can_commit(change) {
            return Err(Refusal { current });
        }
        let key = key_of(&change.flow);
        if let Err(error) = programs.steering.set(&key, &record_to_map(&record, false)) {
            tracing::error!(%error, "the steering table does not take a process's record");
            return Err(Refusal { current });
        }
        self.transits.remove(&change.flow);
        self.unwritten = Some((*change, asker));
        Ok(Some(record))
    }

    /// Writes the decided flow records into the table. Until then packets of these flows go to the donor, which
    /// forwards them.
    pub fn write_behind(&mut self, programs: &Programs) {
        let Some((change, asker)) = self.unwritten.take() else {
            return;
        };
        let transit = |flow: &Flow| self.transits.get(flow).copied();
        let Some(all) = self.together.committed(&change, asker, transit) else {
            return tracing::error!(process = %change.flow, "flows are not what was committed with it");
        };
        let keys: Vec<FlowKey> = all.iter().map(|(flow, _)| key_of(flow)).collect();
        let records = all.iter().map(|(_, record)| record_to_map(record, false));
        let records: Vec<MapRecord> = records.collect();
        if let Err(error) = programs.steering.set_many(&keys, &records) {
            tracing::error!(%error, "the steering table lacks records of a process");
        }
        for (flow, _) in &all {
            self.transits.remove(flow);
        }
    }

    fn store(
        &mut self,
        programs: &Programs,
        unstored: &mut Unstored,
        results: &mut [Result<Option<Record>, Refusal>],
    ) {
        let (taken, refused) = unstored.store(programs, results);
        refused.iter().for_each(|flow| self.shares.freed(flow));
        for (flow, record) in taken {
            match record.state {
                RecordState::Transit { .. } => drop(self.transits.insert(flow, record)),
                RecordState::Owned { .. } => drop(self.transits.remove(&flow)),
            }
        }
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
        self.transits.remove(flow);
        if let Some(old) = current {
            self.shares.freed(flow);
            self.floors.removed(flow, old.epoch);
        }
        Ok(None)
    }
}

/// Decided records that are not yet in the table; written in one batch.
#[derive(Default)]
struct Unstored {
    flows: HashSet<Flow, RandomState>,
    decided: Vec<Decided>,
    /// Route in-transit packets via the donor. False if the holder is the acceptor, because the detour via the donor
    /// does not lead to the holder.
    by_donor: bool,
}

struct Decided {
    flow: Flow,
    record: Record,
    /// Index of the result, and the record to return if the table refuses.
    place: usize,
    current: Option<Record>,
}

impl Unstored {
    /// Prepares the batch for a request.
    fn of(holder: NodeId, changes: &[Change]) -> Self {
        let of_process = changes.iter().take_while(|change| change.flow.is_process());
        let by_donor = of_process.into_iter().any(|change| match change.kind {
            ChangeKind::Divert { acceptor } => acceptor != holder,
            _ => false,
        });
        Self {
            by_donor,
            ..Self::default()
        }
    }

    fn has(&self, flow: &Flow) -> bool {
        self.flows.contains(flow)
    }

    fn put(&mut self, place: usize, flow: Flow, record: Record, current: Option<Record>) {
        self.flows.insert(flow);
        self.decided.push(Decided {
            flow,
            record,
            place,
            current,
        });
    }

    /// Stores the batch. Returns the stored records, and the flows of new records that the table refused. The results
    /// of all refused records become refusals.
    fn store(
        &mut self,
        programs: &Programs,
        results: &mut [Result<Option<Record>, Refusal>],
    ) -> (Vec<(Flow, Record)>, Vec<Flow>) {
        let (decided, by_donor) = (std::mem::take(&mut self.decided), self.by_donor);
        self.flows.clear();
        let keys: Vec<FlowKey> = decided.iter().map(|one| key_of(&one.flow)).collect();
        let records: Vec<MapRecord> = (decided.iter())
            .map(|one| record_to_map(&one.record, by_donor))
            .collect();
        let stored = |one: &Decided| (one.flow, one.record);
        if programs.steering.set_many(&keys, &records).is_ok() {
            return (decided.iter().map(stored).collect(), Vec::new());
        }
        // A failed batch is partly stored, so each record is stored singly.
        let (mut taken, mut refused) = (Vec::new(), Vec::new());
        for (one, (key, record)) in decided.iter().zip(keys.iter().zip(&records)) {
            match programs.steering.set(key, record) {
                Ok(()) => taken.push(stored(one)),
                Err(error) => {
                    if refused.is_empty() {
                        tracing::error!(%error, "the steering table does not take a record");
                    }
                    if one.current.is_none() {
                        refused.push(one.flow);
                    }
                    results[one.place] = Err(Refusal {
                        current: one.current,
                    });
                }
            }
        }
        (taken, refused)
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

    /// Decides as the holder. Any other node refuses all changes.
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

    /// Returns the records of flows in this node's table.
    pub(super) fn records_of(&mut self, flows: &[Flow]) -> Vec<Option<Record>> {
        self.write_behind();
        let programs = &self.dataplane.programs;
        let record = |flow| Holder::lookup(programs, flow);
        flows.iter().map(record).collect()
    }

    /// Writes the holder's pending decisions into its table.
    pub(super) fn write_behind(&mut self) {
        if let Some(holder) = &mut self.holder {
            holder.write_behind(&self.dataplane.programs);
        }
    }
}
