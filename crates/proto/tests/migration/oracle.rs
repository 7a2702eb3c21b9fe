//! What must be true at every step, and in the end.

use crate::host::{Host, State, Who};
use crate::world::{World, id};
use holdfast_proto::migration::Migration;
use holdfast_wire::{Flow, RecordState};
use std::collections::BTreeMap;

impl World {
    /// No process runs twice, each has done what it did wherever it was, and each flow has one speaker.
    pub fn check(&mut self) {
        let (seed, now) = (self.seed, self.now);
        let mut running: BTreeMap<Who, usize> = BTreeMap::new();
        for host in &self.hosts {
            for process in host.processes.values().filter(|process| process.running) {
                let who = process.image.who;
                if let Some(other) = running.insert(who, usize::from(host.id.0)) {
                    panic!(
                        "seed {seed} at {now:?}: {who:?} runs at {other} and {}",
                        host.id
                    );
                }
                if let Who::Original(number) = who {
                    assert_eq!(
                        process.image.content, self.truths[number].content,
                        "seed {seed} at {now:?}: {who:?} forgot or repeated at node {}",
                        host.id
                    );
                }
            }
        }
        while let Some(flow) = self.dirty.pop() {
            self.check_flow(flow);
        }
    }

    fn check_flow(&mut self, flow: Flow) {
        let (seed, now) = (self.seed, self.now);
        let record = self.steering.get(&flow);
        if let Some(record) = record.filter(|_| !flow.is_process()) {
            let highest = self.epochs.entry(flow).or_default();
            assert!(
                record.epoch >= *highest,
                "seed {seed} at {now:?}: {flow} was at epoch {highest}, is {record}"
            );
            *highest = record.epoch;
        }
        let owned = |host: &&Host| {
            let entry = host.entries.get(&flow);
            entry.is_some_and(|entry| entry.state == State::Owned)
        };
        let speakers: Vec<&Host> = self.hosts.iter().filter(owned).collect();
        assert!(
            speakers.len() < 2,
            "seed {seed} at {now:?}: two speak for {flow}"
        );
        let (Some(record), [speaker]) = (record, &speakers[..]) else {
            return;
        };
        let may = match record.state {
            RecordState::Owned { owner } => owner,
            RecordState::Transit { donor, .. } => donor,
        };
        assert_eq!(
            speaker.id, may,
            "seed {seed} at {now:?}: {} speaks for {flow}, {record}",
            speaker.id
        );
    }

    /// After all faults have healed and time has passed.
    pub fn check_end(&mut self, quiet: bool) {
        let seed = self.seed;
        assert!(quiet, "seed {seed}: something goes on for ever");
        for host in &self.hosts {
            let idle = host.machine.as_ref().is_some_and(Migration::is_idle);
            assert!(
                idle,
                "seed {seed}: node {} hangs: {:#?}",
                host.id, host.machine
            );
            let at = host.id;
            assert!(host.open.is_empty(), "seed {seed}: node {at} owes outcomes");
            let left = (&host.written, &host.husks, &host.prepared);
            assert!(
                left.0.is_empty() && left.1.is_empty() && left.2.is_empty(),
                "seed {seed}: left at node {at}: {left:?}"
            );
            for process in host.processes.values() {
                assert!(process.running, "seed {seed}: stopped at {at}: {process:?}");
            }
        }
        for number in 0..self.truths.len() {
            self.check_process(number);
        }
        self.check_copies();
        self.check_leftovers();
    }

    fn check_process(&self, number: usize) {
        let seed = self.seed;
        let who = Who::Original(number);
        let found = self.hosts.iter().enumerate().flat_map(|(node, host)| {
            let processes = host.processes.values();
            let here = processes.filter(move |process| process.image.who == who);
            here.map(move |process| (node, process))
        });
        let found: Vec<_> = found.collect();
        if !self.truths[number].alive {
            assert!(found.is_empty(), "seed {seed}: {who:?} was killed");
            return;
        }
        let [(node, process)] = found[..] else {
            panic!("seed {seed}: {who:?} is at {} places", found.len());
        };
        for flow in &process.image.flows {
            let entry = self.hosts[node].entries.get(flow);
            let record = self.steering.get(flow);
            let (Some(entry), Some(record)) = (entry, record) else {
                panic!("seed {seed}: {flow} of {who:?} has {entry:?}, {record:?}");
            };
            // A rollback that was repeated, and came behind an establish that the first had come before, leaves the record
            // above the entry: the next change is refused with it, and asked again.
            assert!(
                entry.state == State::Owned
                    && record.is_owned_by(id(node))
                    && entry.epoch <= record.epoch,
                "seed {seed}: {flow} of {who:?} at {node} has {entry:?}, {record}"
            );
        }
        for connection in &process.image.connections {
            let other = 1 - number;
            let where_to = self.hosts.iter().find(|host| {
                let mut processes = host.processes.values();
                processes.any(|process| process.image.who == Who::Original(other))
            });
            // What is forwarded goes where it went.
            let forwarded = self.tally.counts.contains_key("forwarded");
            if let Some(host) = where_to.filter(|_| self.truths[other].alive && !forwarded) {
                assert!(
                    connection.peer == host.id,
                    "seed {seed}: {who:?} sends to {}, the other end is at {}",
                    connection.peer,
                    host.id
                );
            }
        }
    }

    fn check_copies(&self) {
        for copy in &self.copies {
            let hosts = self.hosts.iter().flat_map(|host| host.processes.values());
            let count = hosts.filter(|process| process.image.who == *copy).count();
            assert_eq!(count, 1, "seed {}: {copy:?} was made", self.seed);
        }
    }

    /// Nothing is held, in transit or recorded that no process has.
    fn check_leftovers(&self) {
        let seed = self.seed;
        for host in &self.hosts {
            for (flow, entry) in &host.entries {
                assert!(
                    matches!(entry.state, State::Owned | State::Moved),
                    "seed {seed}: {flow} at node {} is {entry:?}",
                    host.id
                );
            }
        }
        for (flow, record) in &self.steering {
            let of_a_process = self.hosts.iter().any(|host| {
                let mut processes = host.processes.values();
                processes.any(|process| process.image.flows.contains(flow))
            });
            // A divert that overtakes the removal of its record, as no real channel lets it, leaves one.
            let ghost = self.was_hostile && flow.is_process();
            assert!(
                of_a_process || ghost,
                "seed {seed}: {flow} is left, {record}"
            );
        }
    }
}
