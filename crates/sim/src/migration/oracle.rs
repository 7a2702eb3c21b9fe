//! The invariants after every step, and at the end.

use super::host::{Host, State, Who};
use super::world::World;
use crate::group::{id, speaker};
use holdfast_wire::Flow;
use std::collections::BTreeMap;

impl World {
    /// Checks that no process runs twice, and that each has all its work steps.
    pub(super) fn check_running(&self) -> Result<(), String> {
        let mut running: BTreeMap<Who, usize> = BTreeMap::new();
        for (node, host) in self.hosts.iter().enumerate() {
            for process in host.processes.values().filter(|process| process.running) {
                let who = process.image.who;
                if let Some(other) = running.insert(who, node) {
                    let (other, at) = (id(other), id(node));
                    return Err(format!("{who:?} runs at {other} and {at}"));
                }
                if let Who::Original(number) = who
                    && process.image.content != self.truths[number].content
                {
                    return Err(format!("{who:?} forgot or repeated at node {}", id(node)));
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_dirty(&mut self) -> Result<(), String> {
        while let Some(flow) = self.core.dirty.pop() {
            self.check_flow(flow)?;
        }
        Ok(())
    }

    /// Checks that only the node in the holder's record may send, and that epochs do not decrease.
    fn check_flow(&mut self, flow: Flow) -> Result<(), String> {
        let record = self.core.steering.get(&flow);
        if let Some(record) = record.filter(|_| !flow.is_process()) {
            let highest = self.epochs.entry(flow).or_default();
            if record.epoch < *highest {
                return Err(format!("{flow} was at epoch {highest}, is {record}"));
            }
            *highest = record.epoch;
        }
        let owned = |host: &Host| {
            let entry = host.entries.get(&flow);
            entry.is_some_and(|entry| entry.state == State::Owned)
        };
        let speaks = |node: &usize| owned(&self.hosts[*node]);
        let speakers: Vec<usize> = (0..self.hosts.len()).filter(speaks).collect();
        match (record, &speakers[..]) {
            (_, []) | (None, [_]) => Ok(()),
            (Some(record), [node]) if speaker(record) == id(*node) => Ok(()),
            (Some(record), [node]) => {
                let at = id(*node);
                Err(format!("node {at} speaks for {flow}, but {record}"))
            }
            (_, more) => Err(format!("{} nodes speak for {flow}", more.len())),
        }
    }

    /// Checks the state after all faults have ended and time has passed.
    pub(super) fn check_rest(&self) -> Result<(), String> {
        for (node, host) in self.hosts.iter().enumerate() {
            let at = id(node);
            if !host.open.is_empty() {
                return Err(format!("node {at} owes outcomes of {:?}", host.open));
            }
            let left = (&host.written, &host.husks, &host.prepared);
            if !(left.0.is_empty() && left.1.is_empty() && left.2.is_empty()) {
                return Err(format!("left at node {at}: {left:?}"));
            }
            let mut processes = host.processes.values();
            if let Some(process) = processes.find(|process| !process.running) {
                return Err(format!("stopped at node {at}: {process:?}"));
            }
        }
        for number in 0..self.truths.len() {
            self.check_process(number)?;
        }
        self.check_copies()?;
        self.check_leftovers()
    }

    /// Returns the nodes with this process, running or not.
    pub(super) fn homes(&self, who: Who) -> Vec<usize> {
        let of = |host: &Host| {
            let processes = host.processes.values();
            processes.filter(|process| process.image.who == who).count()
        };
        let hosts = self.hosts.iter().enumerate();
        let homes = hosts.flat_map(|(node, host)| std::iter::repeat_n(node, of(host)));
        homes.collect()
    }

    fn check_process(&self, number: usize) -> Result<(), String> {
        let who = Who::Original(number);
        let homes = self.homes(who);
        if !self.truths[number].alive {
            return match homes[..] {
                [] => Ok(()),
                _ => Err(format!("{who:?} was killed, and is at {homes:?}")),
            };
        }
        let [node] = homes[..] else {
            return Err(format!("{who:?} is at {} places", homes.len()));
        };
        let mut processes = self.hosts[node].processes.values();
        let Some(process) = processes.find(|process| process.image.who == who) else {
            return Ok(());
        };
        for flow in &process.image.flows {
            let entry = self.hosts[node].entries.get(flow);
            let record = self.core.steering.get(flow);
            // A repeated rollback that arrives after an establish, before which the first rollback arrived, leaves the
            // record's epoch above the entry's: the next change is refused with that record, and retried.
            let owned = entry.zip(record).is_some_and(|(entry, record)| {
                entry.state == State::Owned
                    && record.is_owned_by(id(node))
                    && entry.epoch <= record.epoch
            });
            if !owned {
                return Err(format!("{flow} of {who:?} has {entry:?}, {record:?}"));
            }
        }
        for connection in &process.image.connections {
            let other = 1 - number;
            // Forwarded packets are sent to the original destination.
            let forwarded = self.core.counts.contains_key("forwarded");
            if let [home] = self.homes(Who::Original(other))[..]
                && self.truths[other].alive
                && !forwarded
                && connection.peer != id(home)
            {
                let (peer, home) = (connection.peer, id(home));
                return Err(format!(
                    "{who:?} sends to {peer}, the other end is at {home}"
                ));
            }
        }
        Ok(())
    }

    fn check_copies(&self) -> Result<(), String> {
        for copy in &self.copies {
            let count = self.homes(*copy).len();
            if count != 1 {
                return Err(format!("{copy:?} was made, and is at {count} places"));
            }
        }
        Ok(())
    }

    /// Checks that every hold, transit and record belongs to a process.
    fn check_leftovers(&self) -> Result<(), String> {
        for (node, host) in self.hosts.iter().enumerate() {
            let mut entries = host.entries.iter();
            let left =
                entries.find(|(_, entry)| !matches!(entry.state, State::Owned | State::Moved));
            if let Some((flow, entry)) = left {
                return Err(format!("{flow} at node {} is {entry:?}", id(node)));
            }
        }
        for (flow, record) in &self.core.steering {
            let of_a_process = self.hosts.iter().any(|host| {
                let mut processes = host.processes.values();
                processes.any(|process| process.image.flows.contains(flow))
            });
            // A divert that overtakes the removal of its record, which no real channel allows, leaves a record.
            let ghost = self.core.was_hostile && flow.is_process();
            if !of_a_process && !ghost {
                return Err(format!("{flow} is left, {record}"));
            }
        }
        Ok(())
    }
}
