//! A central planner that knows all loads: it always moves the best process of the most loaded node to the least loaded
//! one, under the limits that conductors have. The time that the planner needs is the yardstick for the conductors' speed.

use super::oracle::{CALM_DOWN, MOVES_PER_MINUTE_MAX};
use crate::time::Time;
use std::collections::VecDeque;

/// Time between two decisions.
pub(super) const STEP: Time = Time::from_micros(500_000);
/// Duration of a move.
const MOVE_TIME: Time = Time::from_micros(2_000_000);
/// Time after which the planner gives up.
const HORIZON: Time = Time::from_micros(14_400_000_000);
const MINUTE: Time = Time::from_micros(60_000_000);

/// A node as the central planner sees it.
#[derive(Debug, Clone)]
pub(super) struct CentralPlannerNode {
    /// Thousandths of a processor.
    pub(super) capacity: f64,
    processes: Vec<CentralPlannerProcess>,
    /// Sum of the processes' demands, in thousandths of a processor.
    used: f64,
    begun: VecDeque<Time>,
    pub(super) free_at: Time,
}

/// A process as the central planner sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct CentralPlannerProcess {
    /// Index of the process in the run.
    pub(super) index: usize,
    /// Thousandths of a processor.
    pub(super) used: f64,
    /// Time from which the process may move; none for a process that stays.
    pub(super) movable_at: Option<Time>,
}

impl CentralPlannerNode {
    pub(super) fn new(capacity: f64, processes: Vec<CentralPlannerProcess>) -> CentralPlannerNode {
        CentralPlannerNode {
            capacity,
            used: processes.iter().map(|process| process.used).sum(),
            processes,
            begun: VecDeque::new(),
            free_at: Time::ZERO,
        }
    }

    pub(super) fn points(&self) -> f64 {
        self.used / self.capacity * 100.0
    }

    pub(super) fn take(&mut self, process: usize) -> CentralPlannerProcess {
        let taken = self.processes.remove(process);
        self.used -= taken.used;
        taken
    }

    fn add(&mut self, process: CentralPlannerProcess) {
        self.used += process.used;
        self.processes.push(process);
    }

    fn is_free(&self, now: Time) -> bool {
        let recent = self.begun.iter().filter(|at| now.since(**at) < MINUTE);
        now >= self.free_at && recent.count() < MOVES_PER_MINUTE_MAX
    }

    pub(super) fn begin(&mut self, now: Time) {
        self.begun.push_back(now);
        self.free_at = now + MOVE_TIME + CALM_DOWN;
        while self.begun.len() > MOVES_PER_MINUTE_MAX {
            self.begun.pop_front();
        }
    }
}

/// Returns the time until all nodes are within `tolerance` percent points of the average; none if that is impossible
/// for this planner. A process moves at most once.
pub(super) fn time_to_balance(mut nodes: Vec<CentralPlannerNode>, tolerance: f64) -> Option<Time> {
    let mut now = Time::ZERO;
    // A move under way counts at its end.
    let mut last_end = Time::ZERO;
    while now < HORIZON {
        let average =
            nodes.iter().map(CentralPlannerNode::points).sum::<f64>() / nodes.len() as f64;
        let is_even = |node: &CentralPlannerNode| (node.points() - average).abs() <= tolerance;
        if nodes.iter().all(is_even) {
            return Some(last_end.max(now));
        }
        while let Some((donor, process, acceptor)) = best_move(&nodes, now, average, 0.0) {
            let mut moved = nodes[donor].take(process);
            moved.movable_at = None;
            nodes[acceptor].add(moved);
            nodes[donor].begin(now);
            nodes[acceptor].begin(now);
            last_end = now + MOVE_TIME;
        }
        now = now + STEP;
    }
    None
}

/// Returns the donor, the position of its process, and the acceptor of the next move. Donors are more than `excess_min`
/// percent points above the average.
pub(super) fn best_move(
    nodes: &[CentralPlannerNode],
    now: Time,
    average: f64,
    excess_min: f64,
) -> Option<(usize, usize, usize)> {
    let free = (0..nodes.len()).filter(|node| nodes[*node].is_free(now));
    let loads = free.map(|node| (node, nodes[node].points()));
    let (mut donors, others): (Vec<_>, Vec<_>) =
        loads.partition(|(_, load)| *load > average + excess_min);
    let acceptor = others.into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let (acceptor, least) = acceptor.filter(|(_, load)| *load < average)?;
    let room = (average - least) / 100.0 * nodes[acceptor].capacity;
    donors.sort_by(|a, b| a.1.total_cmp(&b.1));
    for (donor, load) in donors.iter().rev() {
        let excess = (load - average) / 100.0 * nodes[*donor].capacity;
        let amount = excess.min(room);
        let gap = (load - least) / 100.0 * nodes[*donor].capacity;
        let processes = nodes[*donor].processes.iter().enumerate();
        let movable = processes.filter(|(_, process)| {
            process.movable_at.is_some_and(|at| at <= now) && process.used < gap
        });
        let mismatch = |process: &CentralPlannerProcess| (process.used - amount).abs();
        let best = movable.min_by(|(_, a), (_, b)| mismatch(a).total_cmp(&mismatch(b)));
        if let Some((process, _)) = best {
            return Some((*donor, process, acceptor));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(loads: &[f64]) -> CentralPlannerNode {
        let process = |used: &f64| CentralPlannerProcess {
            index: 0,
            used: *used,
            movable_at: Some(Time::ZERO),
        };
        CentralPlannerNode::new(1_000.0, loads.iter().map(process).collect())
    }

    #[test]
    fn planner_obeys_the_limits() {
        // Seven moves: six in the first minute, one in the next.
        let loads: [&[f64]; 2] = [&[50.0; 14], &[]];
        let nodes = loads.map(node).to_vec();
        let time = time_to_balance(nodes, 4.0).expect("possible");
        assert!(
            time >= MINUTE && time < MINUTE + CALM_DOWN + CALM_DOWN,
            "{time:?}"
        );
        // A minute is not needed if five moves suffice.
        let nodes = loads.map(node).to_vec();
        let time = time_to_balance(nodes, 10.0).expect("possible");
        assert!(time < MINUTE, "{time:?}");
    }

    #[test]
    fn impossible_balance_is_none() {
        let nodes = vec![node(&[500.0]), node(&[])];
        assert_eq!(time_to_balance(nodes, 10.0), None);
    }
}
