//! What must be true at every step, and in the end.

use crate::node::{Entry, State};
use crate::world::{Tally, World, id, speaker};
use holdfast_proto::handoff::{Handoff, Outcome, Reason};
use holdfast_wire::{Flow, RecordState};

impl World {
    pub fn check_dirty(&mut self) {
        while let Some(flow) = self.dirty.pop() {
            self.check(flow);
        }
    }

    /// One speaker, who is whom the holder says, with every byte the flow has seen; epochs only grow.
    fn check(&mut self, flow: Flow) {
        let seed = self.seed;
        let now = self.now;
        let Some(truth) = self.truths.get_mut(&flow) else {
            return;
        };
        let record = self.steering.get(&flow).copied();
        if record != truth.record {
            if let Some(record) = record {
                assert!(
                    record.epoch > truth.epoch,
                    "seed {seed} at {now:?}: {flow} was at epoch {}, is {record}",
                    truth.epoch
                );
                truth.epoch = record.epoch;
            }
            truth.record = record;
        }
        let mut speakers = 0;
        for node in &self.nodes {
            let Some(entry) = node.kernel.get(&flow).filter(|entry| entry.speaks()) else {
                continue;
            };
            speakers += 1;
            assert_eq!(speakers, 1, "seed {seed} at {now:?}: two speak for {flow}");
            match record {
                Some(record) => assert_eq!(
                    speaker(&record),
                    node.id,
                    "seed {seed} at {now:?}: {flow} {entry:?} but {record}"
                ),
                None => assert_eq!(
                    entry.epoch, 0,
                    "seed {seed} at {now:?}: {flow} speaks without record"
                ),
            }
            let socket = node.sockets.get(&flow);
            let socket = socket
                .unwrap_or_else(|| panic!("seed {seed} at {now:?}: {flow} speaks without socket"));
            assert!(
                socket.restored,
                "seed {seed} at {now:?}: {flow} speaks without state"
            );
            assert_eq!(
                socket.content, truth.content,
                "seed {seed} at {now:?}: {flow} lost or repeated bytes at node {}",
                node.id
            );
        }
    }

    /// After all faults have healed and time has passed.
    pub fn check_end(&mut self, quiet: bool) {
        let seed = self.seed;
        assert!(quiet, "seed {seed}: something goes on for ever");
        for node in &self.nodes {
            let idle = node.machine.as_ref().is_some_and(Handoff::is_idle);
            assert!(
                idle,
                "seed {seed}: node {} hangs: {:#?}",
                node.id, node.machine
            );
            assert!(
                node.open.is_empty(),
                "seed {seed}: node {} owes outcomes {:?}",
                node.id,
                node.open
            );
        }
        for flow in self.flows.clone() {
            self.check(flow);
            let alive = self.truths.get(&flow).is_some_and(|truth| truth.alive);
            let record = self.steering.get(&flow);
            let owner = record.and_then(|record| match record.state {
                RecordState::Owned { owner } => Some((owner, record.epoch)),
                RecordState::Transit { .. } => None,
            });
            let entries = self.nodes.iter().enumerate().filter_map(|(index, node)| {
                let entry: &Entry = node.kernel.get(&flow)?;
                (entry.state != State::Moved).then_some((id(index), *entry))
            });
            let entries: Vec<_> = entries.collect();
            if !alive {
                // An establish that overtakes a removal, as no real channel lets it, leaves a record.
                let ghost = self.was_hostile && owner.is_some();
                assert!(
                    record.is_none() || ghost,
                    "seed {seed}: closed {flow} has {record:?}, {entries:?}"
                );
                assert!(
                    entries.is_empty(),
                    "seed {seed}: closed {flow} has {entries:?}"
                );
                continue;
            }
            let [(node, entry)] = entries[..] else {
                panic!("seed {seed}: {flow} {record:?} is not at one node but {entries:?}");
            };
            assert_eq!(
                entry.state,
                State::Owned,
                "seed {seed}: {flow} is not served"
            );
            assert_eq!(
                Some((node, entry.epoch)),
                owner,
                "seed {seed}: {flow} {record:?} but {entry:?}"
            );
        }
    }

    pub fn count_outcome(&mut self, outcome: &Outcome) {
        let what = match outcome {
            Outcome::Moved { .. } => "moved".to_owned(),
            Outcome::Gone => "gone".to_owned(),
            Outcome::Kept { reason } => match reason {
                Reason::TimedOut { step, .. } => format!("kept: timed out in {step}"),
                Reason::PeerLost { step, .. } => format!("kept: lost in {step}"),
                Reason::Refused { .. } => "kept: refused".to_owned(),
                Reason::Aborted { .. } => "kept: aborted".to_owned(),
                Reason::Extract(_) => "kept: not extracted".to_owned(),
                Reason::NotDiverted(_) => "kept: not diverted".to_owned(),
                other => format!("kept: {other:?}"),
            },
        };
        self.count(&what);
    }
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.events += other.events;
        for (what, count) in &other.counts {
            *self.counts.entry(what.clone()).or_default() += count;
        }
    }
}
