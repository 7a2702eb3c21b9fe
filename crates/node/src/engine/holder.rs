//! The holder's role: the steering table as the store of ownership.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use foldhash::fast::RandomState;
use holdfast_bpf::shared_with_c::{FlowKey, Record as MapRecord};
use holdfast_bpf::{Dataplane as Programs, guaranteed_flows};
use holdfast_proto::flow_ownership::{
    ClaimVerdict, EpochFloors, ProcessTransits, apply_change, judge_claim,
};
use holdfast_proto::handoff::{CommandToken, Completion, Results};
use holdfast_proto::table_rebuild::{Claim, DecidedFlow, Dispute};
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord, Protocol,
    RecordState,
};

use super::Engine;
use super::deferred_requests::LocalHolderRequest;
use crate::config::{Config, ServiceConfig};
use crate::dataplane::{flow_from_key, flow_key, record_from_map, record_to_map};

/// Reads and changes ownership records. Only this daemon writes the table, so a read followed by a write is atomic.
pub struct Holder {
    node: NodeId,
    floors: EpochFloors,
    /// Copies of the records of flows in transit. A commit or rollback is urgent, and reading the records one by one
    /// from the table is slow.
    transits: HashMap<Flow, OwnershipRecord, RandomState>,
    group_commit: ProcessTransits,
    /// The last committed process whose flow records are not written yet, and the node that asked.
    uncommitted_process: Option<(OwnershipChange, NodeId)>,
    record_counts: RecordCounts,
}

/// Share of the steering table for flows of no service: private flows and moving processes. Their number depends on what
/// nodes report, so they have no guarantee.
const OTHERS_DIVISOR: u32 = 4;

/// Number of records of each service in the steering table. No service may use up capacity that is guaranteed to
/// another, and flows of no service may use none of it.
#[derive(Default)]
struct RecordCounts {
    services: HashMap<(Protocol, SocketAddr), u32, RandomState>,
    /// Numbers of records of flows of no service, by their local addresses.
    others: HashMap<(Protocol, SocketAddr), u32, RandomState>,
    /// Number of records of flows of no service: the sum of `others`.
    other_records: u32,
    capacity: u32,
}

impl RecordCounts {
    fn new(services: &[ServiceConfig], capacity: u32) -> Self {
        let mut counts = Self {
            capacity,
            ..Self::default()
        };
        counts.set_services(services);
        counts
    }

    /// Replaces the services. Records of flows at other addresses count as flows of no service.
    fn set_services(&mut self, services: &[ServiceConfig]) {
        self.others.extend(self.services.drain());
        for service in services {
            let key = (service.protocol, service.address);
            let records = self.others.remove(&key).unwrap_or(0);
            self.services.insert(key, records);
        }
        self.others.retain(|_, records| *records > 0);
        self.other_records = self.others.values().sum();
    }

    /// Returns true if the flow's service may have one more record.
    fn has_room(&self, flow: &Flow) -> bool {
        let services = u32::try_from(self.services.len()).unwrap_or(u32::MAX);
        let guaranteed = guaranteed_flows(services, self.capacity);
        match self.services.get(&(flow.protocol, flow.local)) {
            Some(records) if *records < guaranteed => return true,
            None if self.other_records >= self.capacity / OTHERS_DIVISOR => return false,
            _ => {}
        }
        let used = self
            .services
            .values()
            .map(|records| u64::from(*records.max(&guaranteed)));
        used.sum::<u64>() + u64::from(self.other_records) < u64::from(self.capacity)
    }

    fn record_added(&mut self, flow: &Flow) {
        let key = (flow.protocol, flow.local);
        match self.services.get_mut(&key) {
            Some(records) => *records += 1,
            None => {
                *self.others.entry(key).or_default() += 1;
                self.other_records += 1;
            }
        }
    }

    fn record_removed(&mut self, flow: &Flow) {
        let key = (flow.protocol, flow.local);
        if let Some(records) = self.services.get_mut(&key) {
            *records = records.saturating_sub(1);
        } else if let Some(records) = self.others.get_mut(&key) {
            *records -= 1;
            self.other_records -= 1;
            if *records == 0 {
                self.others.remove(&key);
            }
        }
    }
}

impl Holder {
    /// Returns a holder over the table that an earlier daemon may have left.
    pub fn new(programs: &Programs, config: &Config, seconds_since_2020: Epoch) -> Self {
        let entries = programs.steering.entries();
        let highest = entries.iter().map(|(_, record)| record.epoch).max();
        let mut shares = RecordCounts::new(&config.services, config.node.capacity);
        let flows = entries.iter().filter_map(|(key, _)| flow_from_key(key));
        flows.for_each(|flow| shares.record_added(&flow));
        let floor = highest
            .map_or(1, |epoch| epoch.saturating_add(1))
            .max(seconds_since_2020);
        Self {
            node: config.node.id,
            floors: EpochFloors::new(floor),
            record_counts: shares,
            transits: HashMap::default(),
            group_commit: ProcessTransits::default(),
            uncommitted_process: None,
        }
    }

    /// Counts the records of these services from now on.
    pub fn set_services(&mut self, services: &[ServiceConfig]) {
        self.record_counts.set_services(services);
    }

    /// Returns the number of a service's records.
    pub fn record_count(&self, service: &ServiceConfig) -> u32 {
        let key = (service.protocol, service.address);
        self.record_counts.services.get(&key).copied().unwrap_or(0)
    }

    /// Returns the record of a flow.
    pub fn lookup(programs: &Programs, flow: &Flow) -> Option<OwnershipRecord> {
        programs
            .steering
            .get(&flow_key(flow))
            .ok()
            .flatten()
            .as_ref()
            .and_then(record_from_map)
    }

    /// Returns all records of flows, without the records of moving processes.
    pub fn records(programs: &Programs) -> Vec<(Flow, OwnershipRecord)> {
        programs
            .steering
            .entries()
            .iter()
            .filter_map(|(key, record)| Some((flow_from_key(key)?, record_from_map(record)?)))
            .filter(|(flow, _)| !flow.is_process())
            .collect()
    }

    /// Applies changes in order. A full table refuses a new record, and the refusal carries no current record.
    pub fn arbitrate(
        &mut self,
        programs: &Programs,
        asker: NodeId,
        changes: &[OwnershipChange],
    ) -> Vec<Result<Option<OwnershipRecord>, ChangeRefusal>> {
        self.write_behind(programs);
        let mut results = Vec::with_capacity(changes.len());
        let mut batch = WriteBatch::for_request(self.node, changes);
        // Refusing a process's record also refuses the flows named after it.
        let mut is_refused = false;
        for change in changes {
            if is_refused && !change.flow.is_process() {
                let current = self.current_record(programs, &change.flow);
                results.push(Err(ChangeRefusal { current }));
                continue;
            }
            let commits_all = matches!(change.kind, ChangeKind::CommitAll { .. });
            // One request may name a flow twice.
            if commits_all || batch.has(&change.flow) {
                self.store_batch(programs, &mut batch, &mut results);
            }
            let current = self.current_record(programs, &change.flow);
            let mut result = self.apply_change(current, asker, change);
            match result {
                Ok(Some(record)) if commits_all => {
                    result = self.commit_all(programs, asker, change, (current, record));
                }
                Ok(Some(_)) if current.is_none() && !self.record_counts.has_room(&change.flow) => {
                    result = Err(ChangeRefusal { current });
                }
                Ok(Some(record)) => {
                    if current.is_none() {
                        self.record_counts.record_added(&change.flow);
                    }
                    batch.push(results.len(), change.flow, record, current);
                }
                Ok(None) => result = self.remove_record(programs, &change.flow, current),
                Err(_) => {}
            }
            if change.flow.is_process() {
                is_refused = result.is_err();
            }
            results.push(result);
        }
        self.store_batch(programs, &mut batch, &mut results);
        self.group_commit.record_results(changes, &results);
        results
    }

    /// Stores claims of nodes about their flows: those newer than the table's records, or those of flows without a
    /// record. A node that has joined again with another number gets its records back. Returns the claims that contradict
    /// the table.
    pub fn store_claims(
        &mut self,
        programs: &Programs,
        claims: &[Claim],
        only_missing: bool,
        is_in_view: impl Fn(NodeId) -> bool,
    ) -> Vec<Dispute> {
        let mut batch = WriteBatch::default();
        let (mut results, mut disputes) = (Vec::new(), Vec::new());
        let mut without_room = 0_usize;
        for (flow, claimed) in claims {
            let current = self.current_record(programs, flow);
            if batch.has(flow) {
                continue;
            }
            let verdict = judge_claim(current, *claimed, &is_in_view);
            match (verdict, current) {
                (ClaimVerdict::Stored, None) => {
                    if !self.record_counts.has_room(flow) {
                        without_room += 1;
                        continue;
                    }
                    self.record_counts.record_added(flow);
                }
                (ClaimVerdict::Stored, Some(_)) if !only_missing => {}
                // The claim of an acceptor whose donor is lost: whoever has the record goes on.
                (ClaimVerdict::Disputed, Some(_)) if only_missing => continue,
                (ClaimVerdict::Disputed, Some(recorded)) => {
                    disputes.push(Dispute {
                        flow: *flow,
                        recorded,
                        claimed: *claimed,
                    });
                    continue;
                }
                _ => continue,
            }
            batch.push(results.len(), *flow, *claimed, current);
            results.push(Ok(Some(*claimed)));
        }
        self.store_batch(programs, &mut batch, &mut results);
        if without_room > 0 {
            tracing::error!(
                flows = without_room,
                "the steering table has no room for flows that nodes report"
            );
        }
        disputes
    }

    /// Stores or removes records, whatever the table has.
    pub fn set_records(&mut self, programs: &Programs, records: &[DecidedFlow]) {
        self.write_behind(programs);
        let mut batch = WriteBatch::default();
        let mut results = Vec::new();
        for (flow, record) in records {
            if batch.has(flow) {
                self.store_batch(programs, &mut batch, &mut results);
            }
            let current = self.current_record(programs, flow);
            match record {
                Some(record) => {
                    if current.is_none() {
                        self.record_counts.record_added(flow);
                    }
                    batch.push(results.len(), *flow, *record, current);
                    results.push(Ok(Some(*record)));
                }
                None => {
                    // A failure is logged.
                    let _ = self.remove_record(programs, flow, current);
                }
            }
        }
        self.store_batch(programs, &mut batch, &mut results);
    }

    fn current_record(&self, programs: &Programs, flow: &Flow) -> Option<OwnershipRecord> {
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
        change: &OwnershipChange,
        (current, record): (Option<OwnershipRecord>, OwnershipRecord),
    ) -> Result<Option<OwnershipRecord>, ChangeRefusal> {
        // A repeated request gets the same answer.
        if current == Some(record) {
            return Ok(current);
        }
        if !self.group_commit.can_commit(change) {
            return Err(ChangeRefusal { current });
        }
        let key = flow_key(&change.flow);
        if let Err(error) = programs.steering.set(&key, &record_to_map(&record, false)) {
            tracing::error!(%error, "cannot write a process's record to the steering table");
            return Err(ChangeRefusal { current });
        }
        self.transits.remove(&change.flow);
        self.uncommitted_process = Some((*change, asker));
        Ok(Some(record))
    }

    /// Writes the decided flow records into the table. Until then packets of these flows go to the donor, which
    /// forwards them.
    pub fn write_behind(&mut self, programs: &Programs) {
        let Some((change, asker)) = self.uncommitted_process.take() else {
            return;
        };
        let transit = |flow: &Flow| self.transits.get(flow).copied();
        let Some(flow_records) = self
            .group_commit
            .records_after_commit(&change, asker, transit)
        else {
            return tracing::error!(process = %change.flow, "flows of a process differ from those committed with it");
        };
        let keys: Vec<FlowKey> = flow_records
            .iter()
            .map(|(flow, _)| flow_key(flow))
            .collect();
        let records = flow_records
            .iter()
            .map(|(_, record)| record_to_map(record, false));
        let records: Vec<MapRecord> = records.collect();
        if let Err(error) = programs.steering.set_many(&keys, &records) {
            tracing::error!(%error, "cannot write a process's flow records to the steering table");
        }
        for (flow, _) in &flow_records {
            self.transits.remove(flow);
        }
    }

    fn store_batch(
        &mut self,
        programs: &Programs,
        batch: &mut WriteBatch,
        results: &mut [Result<Option<OwnershipRecord>, ChangeRefusal>],
    ) {
        let (stored, refused) = batch.store(programs, results);
        refused
            .iter()
            .for_each(|flow| self.record_counts.record_removed(flow));
        for (flow, record) in stored {
            match record.state {
                RecordState::Transit { .. } => drop(self.transits.insert(flow, record)),
                RecordState::Owned { .. } => drop(self.transits.remove(&flow)),
            }
        }
    }

    fn apply_change(
        &mut self,
        current: Option<OwnershipRecord>,
        asker: NodeId,
        change: &OwnershipChange,
    ) -> Result<Option<OwnershipRecord>, ChangeRefusal> {
        let mut change = *change;
        if change.kind == ChangeKind::Establish {
            change.epoch = self.floors.start_epoch(&change.flow, change.epoch);
        }
        apply_change(current, &change, asker)
    }

    fn remove_record(
        &mut self,
        programs: &Programs,
        flow: &Flow,
        current: Option<OwnershipRecord>,
    ) -> Result<Option<OwnershipRecord>, ChangeRefusal> {
        if let Err(error) = programs.steering.remove(&flow_key(flow)) {
            tracing::error!(%flow, %error, "cannot remove a record from the steering table");
            return Err(ChangeRefusal { current });
        }
        self.transits.remove(flow);
        if let Some(old) = current {
            self.record_counts.record_removed(flow);
            self.floors.raise(flow, old.epoch);
        }
        Ok(None)
    }
}

/// Decided records that are not yet in the table; written in one batch.
#[derive(Default)]
struct WriteBatch {
    flows: HashSet<Flow, RandomState>,
    pending: Vec<PendingRecord>,
    /// Route in-transit packets via the donor. False if the holder is the acceptor, because the detour via the donor
    /// does not lead to the holder.
    via_donor: bool,
}

struct PendingRecord {
    flow: Flow,
    record: OwnershipRecord,
    /// Index of the result, and the record to return if the table refuses.
    result_index: usize,
    current: Option<OwnershipRecord>,
}

impl WriteBatch {
    /// Returns an empty batch of records to write for a request.
    fn for_request(holder: NodeId, changes: &[OwnershipChange]) -> Self {
        let process_changes = changes.iter().take_while(|change| change.flow.is_process());
        let via_donor = process_changes.into_iter().any(|change| match change.kind {
            ChangeKind::Divert { acceptor } => acceptor != holder,
            _ => false,
        });
        Self {
            via_donor,
            ..Self::default()
        }
    }

    fn has(&self, flow: &Flow) -> bool {
        self.flows.contains(flow)
    }

    fn push(
        &mut self,
        result_index: usize,
        flow: Flow,
        record: OwnershipRecord,
        current: Option<OwnershipRecord>,
    ) {
        self.flows.insert(flow);
        self.pending.push(PendingRecord {
            flow,
            record,
            result_index,
            current,
        });
    }

    /// Stores the batch. Returns the stored records, and the flows of new records that the table refused. The results
    /// of all refused records become refusals.
    fn store(
        &mut self,
        programs: &Programs,
        results: &mut [Result<Option<OwnershipRecord>, ChangeRefusal>],
    ) -> (Vec<(Flow, OwnershipRecord)>, Vec<Flow>) {
        let (decided, via_donor) = (std::mem::take(&mut self.pending), self.via_donor);
        self.flows.clear();
        let keys: Vec<FlowKey> = decided
            .iter()
            .map(|record| flow_key(&record.flow))
            .collect();
        let records: Vec<MapRecord> = (decided.iter())
            .map(|pending| record_to_map(&pending.record, via_donor))
            .collect();
        let to_stored = |pending: &PendingRecord| (pending.flow, pending.record);
        if programs.steering.set_many(&keys, &records).is_ok() {
            return (decided.iter().map(to_stored).collect(), Vec::new());
        }
        // A failed batch is partly stored, so each record is stored singly.
        let (mut written, mut refused) = (Vec::new(), Vec::new());
        for (one, (key, record)) in decided.iter().zip(keys.iter().zip(&records)) {
            match programs.steering.set(key, record) {
                Ok(()) => written.push(to_stored(one)),
                Err(error) => {
                    if refused.is_empty() {
                        tracing::error!(%error, "cannot write a record to the steering table");
                    }
                    if one.current.is_none() {
                        refused.push(one.flow);
                    }
                    results[one.result_index] = Err(ChangeRefusal {
                        current: one.current,
                    });
                }
            }
        }
        (written, refused)
    }
}

impl Engine {
    /// Decides about changes that the handoff machine wants. Changes of this node may have to wait; those of other nodes
    /// waited as frames.
    pub(super) fn arbitrate(
        &mut self,
        token: CommandToken,
        asker: NodeId,
        changes: Vec<OwnershipChange>,
    ) {
        if asker == self.group.own() && !self.admits_own_changes(&changes) {
            return self
                .deferred
                .add_local_request(LocalHolderRequest::Handoff(token, changes));
        }
        let results = Results::Arbitrated(self.decide_ownership_changes(asker, &changes));
        self.complete_handoff_command(Completion { token, results });
    }

    pub(super) fn look_up(&mut self, token: CommandToken, flows: &[Flow]) {
        let results = Results::LookedUp(self.records_of(flows));
        self.complete_handoff_command(Completion { token, results });
    }

    /// Decides as the holder. Any other node refuses all changes.
    pub(super) fn decide_ownership_changes(
        &mut self,
        asker: NodeId,
        changes: &[OwnershipChange],
    ) -> Vec<Result<Option<OwnershipRecord>, ChangeRefusal>> {
        let programs = &self.dataplane.programs;
        match &mut self.holder {
            Some(holder) => holder.arbitrate(programs, asker, changes),
            None => changes
                .iter()
                .map(|_| Err(ChangeRefusal { current: None }))
                .collect(),
        }
    }

    /// Returns the records of flows in this node's table.
    pub(super) fn records_of(&mut self, flows: &[Flow]) -> Vec<Option<OwnershipRecord>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CheckConfig, PlacementRule};
    use holdfast_wire::group_data::ServicePolicy;

    const CAPACITY: u32 = 1_000;

    fn service(port: u16) -> ServiceConfig {
        ServiceConfig {
            pool: "web".to_owned(),
            address: ([10, 0, 0, 1], port).into(),
            protocol: Protocol::Tcp,
            placement: PlacementRule::Hash,
            weights: std::collections::BTreeMap::new(),
            check: CheckConfig::default(),
            drain: None,
            policy: ServicePolicy::default(),
            row: 0,
            is_ending: false,
            replication: None,
        }
    }

    fn flow(local: u16, remote: u16) -> Flow {
        Flow {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], local).into(),
            remote: ([10, 0, 1, 1], remote).into(),
        }
    }

    /// Adds records of flows at a local port until there is no room.
    fn fill(counts: &mut RecordCounts, local: u16) -> u32 {
        let flows = (0..u16::MAX).map(|remote| flow(local, remote));
        let added = flows.take_while(|flow| {
            let has_room = counts.has_room(flow);
            if has_room {
                counts.record_added(flow);
            }
            has_room
        });
        added.count() as u32
    }

    #[test]
    fn flows_of_no_service_leave_room_for_services() {
        let mut counts = RecordCounts::new(&[service(80), service(81)], CAPACITY);
        assert_eq!(fill(&mut counts, 5_000), CAPACITY / OTHERS_DIVISOR);
        let guaranteed = guaranteed_flows(2, CAPACITY);
        let first = fill(&mut counts, 80);
        assert_eq!(first, CAPACITY - CAPACITY / OTHERS_DIVISOR - guaranteed);
        assert_eq!(fill(&mut counts, 81), guaranteed);
        counts.record_removed(&flow(5_000, 1));
        assert!(counts.has_room(&flow(80, 60_000)));
    }

    #[test]
    fn records_are_counted_for_a_service_that_begins_later() {
        let mut counts = RecordCounts::new(&[], CAPACITY);
        for remote in 0..10 {
            counts.record_added(&flow(80, remote));
        }
        counts.set_services(&[service(80)]);
        let key = (Protocol::Tcp, service(80).address);
        assert_eq!((counts.services[&key], counts.other_records), (10, 0));
        counts.record_removed(&flow(80, 1));
        counts.set_services(&[]);
        assert_eq!(counts.other_records, 9);
    }
}
