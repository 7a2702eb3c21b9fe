//! A node: its clock, the daemon's state machine, its disk, and its processes.

use super::plan::ConductorRunConfig;
use crate::time::Time;
use holdfast_proto::conductor::Conductor;
use holdfast_wire::conductor_frames::{OfferId, PastMove, ProcessKey};
use std::collections::BTreeSet;
use std::time::Duration;

/// Capacity of each node, in thousandths of a processor.
pub(super) const CAPACITY: u32 = 1_000;

/// A node of the group.
#[derive(Debug)]
pub(super) struct SimulatedNode {
    /// Time that the clock shows at the start.
    clock_start: Duration,
    /// The daemon's state machine; none if the daemon is dead.
    pub(super) machine: Option<Conductor>,
    /// Number of the daemon's deaths.
    pub(super) incarnation: u64,
    /// Time of the next wake-up that is queued.
    pub(super) next_wake: Option<Time>,
    /// The processes that run here, by their indices.
    pub(super) processes: BTreeSet<usize>,
    /// The process histories on the disk, and the time of the save.
    pub(super) histories: (Time, Vec<(ProcessKey, Vec<PastMove>)>),
    /// True while all frames from and to the node are lost.
    pub(super) is_isolated: bool,
    /// True while the node is a member of the group.
    pub(super) is_member: bool,
    /// True while an operator has the node drained.
    pub(super) is_drained: bool,
    /// Offers that this node's machine has made.
    pub(super) offered: BTreeSet<OfferId>,
    /// Offers that this node's machine has accepted, with the donor's index.
    pub(super) accepted: BTreeSet<(usize, OfferId)>,
    /// Time since which an offer is open at the node.
    pub(super) negotiates_since: Option<Time>,
    /// Numbers of frames.
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl SimulatedNode {
    pub(super) fn new(config: &ConductorRunConfig, index: usize) -> SimulatedNode {
        let here = |(_, process): &(usize, &super::SimulatedProcess)| process.node == index;
        let processes = config.processes.iter().enumerate().filter(here);
        SimulatedNode {
            clock_start: Duration::from_secs(config.clocks_s[index]),
            machine: None,
            incarnation: 0,
            next_wake: None,
            processes: processes.map(|(number, _)| number).collect(),
            histories: (Time::ZERO, Vec::new()),
            is_isolated: false,
            is_member: true,
            is_drained: false,
            offered: BTreeSet::new(),
            accepted: BTreeSet::new(),
            negotiates_since: None,
            sent: 0,
            received: 0,
        }
    }

    /// Returns the time that the node's clock shows.
    pub(super) fn clock(&self, now: Time) -> Duration {
        self.clock_start + Duration::from(now)
    }

    /// Returns the time at which the node's clock shows `at`.
    pub(super) fn time_of(&self, at: Duration) -> Time {
        Time::from(at.saturating_sub(self.clock_start))
    }

    /// Returns the histories on the disk with their present ages.
    pub(super) fn aged_histories(&self, now: Time) -> Vec<(ProcessKey, Vec<PastMove>)> {
        let (saved_at, histories) = &self.histories;
        let elapsed_s = Duration::from(now.since(*saved_at)).as_secs() as u32;
        let mut histories = histories.clone();
        for past in histories.iter_mut().flat_map(|(_, past)| past) {
            past.age_s += elapsed_s;
        }
        histories
    }
}
