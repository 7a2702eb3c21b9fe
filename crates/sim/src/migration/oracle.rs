//! The invariants after every step, and at the end.

use super::host::{KernelFlowState, ProcessIdentity, SimulatedHost};
use super::world::MigrationWorld;
use crate::node_group::{node_id, sender};
use holdfast_proto::flow_ownership::is_disputed;
use holdfast_wire::{Flow, RecordState};
use std::collections::BTreeMap;

impl MigrationWorld {
    /// Checks that no process runs twice, and that each has all its work steps.
    pub(super) fn check_processes_run_once(&self) -> Result<(), String> {
        let mut running: BTreeMap<ProcessIdentity, usize> = BTreeMap::new();
        for (node, host) in self.hosts.iter().enumerate() {
            for process in host.processes.values().filter(|process| process.running) {
                let identity = process.image.identity;
                if let Some(other) = running.insert(identity, node) {
                    let (other, at) = (node_id(other), node_id(node));
                    return Err(format!("{identity:?} runs at nodes {other} and {at}"));
                }
                if let ProcessIdentity::Original(number) = identity
                    && process.image.content != self.expected_processes[number].content
                {
                    return Err(format!(
                        "{identity:?} lost or repeated work at node {}",
                        node_id(node)
                    ));
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_changed_flows(&mut self) -> Result<(), String> {
        while let Some(flow) = self.core.changed_flows.pop() {
            self.check_flow(flow)?;
        }
        Ok(())
    }

    /// Checks that only the node in the holder's record may send, and that epochs do not decrease.
    fn check_flow(&mut self, flow: Flow) -> Result<(), String> {
        let record = self.core.steering.get(&flow);
        // Several nodes claim the flow, and a report that explains why may be missing.
        let record = record.filter(|record| !is_disputed(**record));
        if let Some(record) = record.filter(|_| !flow.is_process()) {
            let highest = self.epochs.entry(flow).or_default();
            if record.epoch < *highest {
                return Err(format!(
                    "the epoch of {flow} decreased: was {highest}, is {record}"
                ));
            }
            *highest = record.epoch;
        }
        let owned = |host: &SimulatedHost| {
            let entry = host.entries.get(&flow);
            entry.is_some_and(|entry| entry.state == KernelFlowState::Owned)
        };
        let may_send = |node: &usize| owned(&self.hosts[*node]);
        let senders: Vec<usize> = (0..self.hosts.len()).filter(may_send).collect();
        match (record, &senders[..]) {
            (_, []) | (None, [_]) => Ok(()),
            (Some(record), [node]) if sender(record) == node_id(*node) => Ok(()),
            // Reports are missing.
            (Some(_), [_]) if !self.rebuilds.is_table_complete => Ok(()),
            (Some(record), [node]) => {
                let at = node_id(*node);
                Err(format!(
                    "node {at} may send for {flow}, but the flow is {record}"
                ))
            }
            (_, more) => Err(format!("{} nodes may send for {flow}", more.len())),
        }
    }

    /// Checks the state after all faults have ended and time has passed.
    pub(super) fn check_idle_state(&self) -> Result<(), String> {
        for (node, host) in self.hosts.iter().enumerate() {
            let at = node_id(node);
            if !host.pending_moves.is_empty() {
                return Err(format!(
                    "node {at} has not reported outcomes of {:?}",
                    host.pending_moves
                ));
            }
            let leftovers = (
                &host.move_records,
                &host.stub_processes,
                &host.peer_translations,
            );
            if !(leftovers.0.is_empty() && leftovers.1.is_empty() && leftovers.2.is_empty()) {
                return Err(format!("leftover records at node {at}: {leftovers:?}"));
            }
            let mut processes = host.processes.values();
            if let Some(process) = processes.find(|process| !process.running) {
                return Err(format!(
                    "a process is still stopped at node {at}: {process:?}"
                ));
            }
        }
        for number in 0..self.expected_processes.len() {
            self.check_process(number)?;
        }
        self.check_copies()?;
        self.check_leftovers()
    }

    /// Returns the nodes with this process, running or not.
    pub(super) fn nodes_of(&self, identity: ProcessIdentity) -> Vec<usize> {
        let processes_of = |host: &SimulatedHost| {
            let processes = host.processes.values();
            processes
                .filter(|process| process.image.identity == identity)
                .count()
        };
        let hosts = self.hosts.iter().enumerate();
        let homes = hosts.flat_map(|(node, host)| std::iter::repeat_n(node, processes_of(host)));
        homes.collect()
    }

    fn check_process(&self, number: usize) -> Result<(), String> {
        let identity = ProcessIdentity::Original(number);
        let homes = self.nodes_of(identity);
        if !self.expected_processes[number].alive {
            return match homes[..] {
                [] => Ok(()),
                _ => Err(format!(
                    "{identity:?} was killed, but still exists at {homes:?}"
                )),
            };
        }
        let [node] = homes[..] else {
            return Err(format!("{identity:?} exists {} times", homes.len()));
        };
        let mut processes = self.hosts[node].processes.values();
        let Some(process) = processes.find(|process| process.image.identity == identity) else {
            return Ok(());
        };
        for flow in &process.image.flows {
            let entry = self.hosts[node].entries.get(flow);
            let record = self.core.steering.get(flow);
            // A repeated rollback that arrives after an establish, before which the first rollback arrived, leaves the
            // record's epoch above the entry's: the next change is refused with that record, and retried.
            let owned = entry.zip(record).is_some_and(|(entry, record)| {
                entry.state == KernelFlowState::Owned
                    && record.is_owned_by(node_id(node))
                    && entry.epoch <= record.epoch
            });
            if !owned {
                return Err(format!(
                    "{flow} of {identity:?} has entry {entry:?}, record {record:?}"
                ));
            }
        }
        for connection in &process.image.connections {
            let other = 1 - number;
            // Forwarded packets are sent to the original destination.
            let forwarded = self.core.counts.contains_key("forwarded");
            if let [home] = self.nodes_of(ProcessIdentity::Original(other))[..]
                && self.expected_processes[other].alive
                && !forwarded
                && connection.peer != node_id(home)
            {
                let (peer, home) = (connection.peer, node_id(home));
                return Err(format!(
                    "{identity:?} sends to node {peer}, but the other end is at node {home}"
                ));
            }
        }
        Ok(())
    }

    fn check_copies(&self) -> Result<(), String> {
        for copy in &self.clones_run {
            let count = self.nodes_of(*copy).len();
            if count != 1 {
                return Err(format!("{copy:?} was made, and exists {count} times"));
            }
        }
        Ok(())
    }

    /// Checks that every hold, transit and record belongs to a process.
    fn check_leftovers(&self) -> Result<(), String> {
        for (node, host) in self.hosts.iter().enumerate() {
            let mut entries = host.entries.iter();
            let left = entries.find(|(_, entry)| {
                !matches!(
                    entry.state,
                    KernelFlowState::Owned | KernelFlowState::Moved(_)
                )
            });
            if let Some((flow, entry)) = left {
                return Err(format!(
                    "leftover entry of {flow} at node {}: {entry:?}",
                    node_id(node)
                ));
            }
        }
        for (flow, record) in &self.core.steering {
            let of_a_process = self.hosts.iter().any(|host| {
                let mut processes = host.processes.values();
                processes.any(|process| process.image.flows.contains(flow))
            });
            // A divert that overtakes the removal of its record, which no real channel allows, leaves a record. So does a
            // divert that was sent to a contact node in an earlier term and arrives in a later one.
            let has_terms = self.rebuilds.view.epoch > 2;
            let leftover = (self.core.was_hostile || has_terms) && flow.is_process();
            // An acceptor whose daemon restarts forgets the flows that were closed since the commit. The donor may report
            // one of them to a new holder after the former holder has removed the flow.
            let counts = &self.core.counts;
            let has_forgotten = ["contact changed", "recovered acceptor, resumed"]
                .iter()
                .all(|event| counts.contains_key(*event));
            let is_transit = matches!(record.state, RecordState::Transit { .. });
            let leftover = leftover || has_forgotten && is_transit && !flow.is_process();
            if !of_a_process && !leftover {
                return Err(format!("leftover record: {flow} is {record}"));
            }
        }
        Ok(())
    }
}
