//! The invariants after every step, and at the end.

use super::node::State;
use super::world::World;
use crate::group::{id, index, speaker};
use holdfast_wire::{Flow, Record, RecordState};

impl World {
    pub(super) fn check_dirty(&mut self) -> Result<(), String> {
        while let Some(flow) = self.core.dirty.pop() {
            self.check_flow(flow)?;
        }
        Ok(())
    }

    /// Checks that only the node in the holder's record may send, and has every byte of the flow, and that epochs only
    /// grow.
    fn check_flow(&mut self, flow: Flow) -> Result<(), String> {
        let Some(truth) = self.truths.get_mut(&flow) else {
            return Ok(());
        };
        let record = self.core.steering.get(&flow).copied();
        if record != truth.record {
            if let Some(record) = record {
                if record.epoch <= truth.epoch {
                    return Err(format!("{flow} was at epoch {}, is {record}", truth.epoch));
                }
                truth.epoch = record.epoch;
            }
            truth.record = record;
        }
        let speaks = |node: &usize| {
            let entry = self.nodes[*node].kernel.get(&flow);
            entry.is_some_and(|entry| entry.speaks())
        };
        let speakers: Vec<usize> = (0..self.nodes.len()).filter(speaks).collect();
        match speakers[..] {
            [] => Ok(()),
            [node] => self.check_speaker(flow, node, record),
            _ => Err(format!("{} nodes speak for {flow}", speakers.len())),
        }
    }

    fn check_speaker(&self, flow: Flow, at: usize, record: Option<Record>) -> Result<(), String> {
        let node = &self.nodes[at];
        let entry = &node.kernel[&flow];
        match record {
            Some(record) if index(speaker(&record)) != at => {
                return Err(format!(
                    "node {} has {flow}, {entry:?}, but {record}",
                    id(at)
                ));
            }
            None if entry.epoch != 0 => return Err(format!("{flow} speaks without record")),
            _ => {}
        }
        let content = self.truths.get(&flow).map_or(0, |truth| truth.content);
        match node.sockets.get(&flow) {
            None => Err(format!("{flow} speaks without socket")),
            Some(socket) if !socket.restored => Err(format!("{flow} speaks without state")),
            Some(socket) if socket.content != content => {
                let at = id(at);
                Err(format!("{flow} lost or repeated bytes at node {at}"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks the state after all faults have ended and time has passed.
    pub(super) fn check_rest(&mut self) -> Result<(), String> {
        for (at, node) in self.nodes.iter().enumerate() {
            if !node.open.is_empty() {
                return Err(format!("node {} owes outcomes {:?}", id(at), node.open));
            }
        }
        for flow in self.flows.clone() {
            self.check_flow(flow)?;
            self.check_owner(flow)?;
        }
        Ok(())
    }

    /// Checks that a live flow has one owner, which serves it, and that a closed flow has left nothing.
    fn check_owner(&self, flow: Flow) -> Result<(), String> {
        let alive = self.truths.get(&flow).is_some_and(|truth| truth.alive);
        let record = self.core.steering.get(&flow);
        let owner = record.and_then(|record| match record.state {
            RecordState::Owned { owner } => Some((index(owner), record.epoch)),
            RecordState::Transit { .. } => None,
        });
        let entries = self.nodes.iter().enumerate().filter_map(|(node, of)| {
            let entry = of.kernel.get(&flow)?;
            (entry.state != State::Moved).then_some((node, *entry))
        });
        let entries: Vec<_> = entries.collect();
        if !alive {
            // An establish that overtakes a removal, which no real channel allows, leaves a record.
            let ghost = self.core.was_hostile && owner.is_some();
            if (record.is_some() && !ghost) || !entries.is_empty() {
                return Err(format!("closed {flow} has {record:?}, {entries:?}"));
            }
            return Ok(());
        }
        match entries[..] {
            [(node, entry)]
                if entry.state == State::Owned && Some((node, entry.epoch)) == owner =>
            {
                Ok(())
            }
            _ => Err(format!("{flow} has {record:?} and is at {entries:?}")),
        }
    }
}
