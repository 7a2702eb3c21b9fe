//! Draining a node: every process that can move leaves, so that the host may be rebooted.

use super::decision::Obstacle;
use core::time::Duration;
use holdfast_wire::NodeId;
use std::collections::BTreeMap;

/// Most affinity labels whose node is remembered.
const LABELS_MAX: usize = 256;

/// Progress of a drain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainStatus {
    /// Number of processes that have left.
    pub moved: usize,
    /// Number of processes that can move and have not left.
    pub remaining: usize,
    /// Processes that cannot move, and stay.
    pub stuck: Vec<Obstacle>,
    /// Estimate of the time until all processes that can move have left.
    pub estimate: Duration,
    /// Time until the deadline, if there is one.
    pub until_deadline: Option<Duration>,
    /// True if no process is left or moving: the host may be rebooted.
    pub is_safe_to_reboot: bool,
}

/// A drain of this node.
#[derive(Debug)]
pub(super) struct Drain {
    pub deadline: Option<Duration>,
    pub moved: usize,
    moving_time: Duration,
    /// Nodes that took processes, by affinity label.
    targets: BTreeMap<u64, NodeId>,
    /// True once the end of the drain was reported.
    pub is_ended: bool,
}

impl Drain {
    pub fn new(deadline: Option<Duration>) -> Drain {
        Drain {
            deadline,
            moved: 0,
            moving_time: Duration::ZERO,
            targets: BTreeMap::new(),
            is_ended: false,
        }
    }

    pub fn is_overdue(&self, now: Duration) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Counts a process that left.
    pub fn count(&mut self, took: Duration, affinity_label: Option<u64>, to: NodeId) {
        self.moved += 1;
        self.moving_time += took;
        if let Some(label) = affinity_label
            && (self.targets.len() < LABELS_MAX || self.targets.contains_key(&label))
        {
            self.targets.insert(label, to);
        }
    }

    /// Returns the node that took processes with an affinity label.
    pub fn target(&self, affinity_label: Option<u64>) -> Option<NodeId> {
        self.targets.get(&affinity_label?).copied()
    }

    /// Returns the mean duration of a move; `default` before the first one.
    pub fn move_duration(&self, default: Duration) -> Duration {
        match u32::try_from(self.moved) {
            Ok(count) if count > 0 => self.moving_time / count,
            _ => default,
        }
    }
}
