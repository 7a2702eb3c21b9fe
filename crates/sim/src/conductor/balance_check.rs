//! The time by which loads must be even: twice that of the central planner.

use super::central_planner::{CentralPlannerNode, CentralPlannerProcess, time_to_balance};
use super::node::{CAPACITY, SimulatedNode};
use super::oracle::{PROCESS_MOVES_MAX, PROCESS_REST};
use super::world::{ConductorWorld, Event};
use crate::time::Time;

/// Greatest distance of a node from the average in the end, in percent points.
pub(super) const TOLERANCE: f64 = 10.0;
/// Time after a restart in which a daemon begins no moves, and some more for the first decision.
pub(super) const STARTUP: Time = Time::from_micros(75_000_000);
/// Time after the balance deadline in which conductors may go on: they begin at a smaller distance than is tolerated here.
const REFINEMENT: Time = Time::from_micros(150_000_000);
/// Time after that, in which loads must stay even.
const QUIET: Time = Time::from_micros(100_000_000);
/// Most moves in that time.
const QUIET_MOVES_MAX: u64 = 2;
/// End of a run whose loads need not become even, after the end of all faults.
const UNCHECKED_END: Time = Time::from_micros(200_000_000);

impl ConductorWorld<'_> {
    /// Returns the time that the central planner needs from now on.
    pub(super) fn planner_time(&self) -> Option<Time> {
        let open = self.nodes.iter().filter(|node| !node.is_drained);
        let nodes = open.map(|node| self.as_central_planner_sees(node));
        time_to_balance(nodes.collect(), TOLERANCE)
    }

    /// Returns a node as the central planner sees it, with the present as the start of time. The node is free.
    pub(super) fn as_central_planner_sees(&self, node: &SimulatedNode) -> CentralPlannerNode {
        let process = |index: &usize| {
            let config = &self.config.processes[*index];
            let is_free = !config.is_pinned
                && config.anti_affinity_label.is_none()
                && self.oracle.moves(*index) < PROCESS_MOVES_MAX;
            let rested = self
                .oracle
                .last_move(*index)
                .map_or(Time::ZERO, |last| (last + PROCESS_REST).since(self.now));
            CentralPlannerProcess {
                index: *index,
                used: self.process_mean(*index),
                movable_at: is_free.then_some(rested),
            }
        };
        let processes = node.processes.iter().map(process).collect();
        CentralPlannerNode::new(f64::from(CAPACITY), processes)
    }

    /// Sets the deadline by which loads must be even, if that is possible, and the end of the run.
    pub(super) fn set_deadlines(&mut self) {
        let config = self.config;
        let is_regular = config.liar.is_none() && config.room.is_none();
        let is_checked = self.is_calm && is_regular && !self.has_surged();
        let planner_time = is_checked.then(|| self.planner_time()).flatten();
        let Some(time) = planner_time.filter(|time| *time < PROCESS_REST) else {
            return self.schedule(self.now + UNCHECKED_END, Event::End);
        };
        let deadline = self.now + STARTUP + time + time;
        self.schedule(deadline, Event::BalanceDeadline);
        self.schedule(deadline + REFINEMENT, Event::QuietBegins);
        self.schedule(deadline + REFINEMENT + QUIET, Event::End);
    }

    /// Returns the node that is farthest from the average of the open nodes, with both loads.
    pub(super) fn farthest_node(&self) -> Option<(usize, f64, f64)> {
        let open = (0..self.nodes.len()).filter(|node| !self.nodes[*node].is_drained);
        let loads: Vec<(usize, f64)> = open.map(|node| (node, self.node_points(node))).collect();
        let average = loads.iter().map(|(_, load)| load).sum::<f64>() / loads.len() as f64;
        let distance = |load: f64| (load - average).abs();
        let farthest = loads
            .iter()
            .max_by(|a, b| distance(a.1).total_cmp(&distance(b.1)));
        farthest.map(|(node, load)| (*node, *load, average))
    }

    pub(super) fn check_tolerance(&mut self) {
        if let Some((node, load, average)) = self.farthest_node()
            && (load - average).abs() > TOLERANCE
        {
            let node = node + 1;
            self.set_violation(format!(
                "n{node} has a load of {load:.1} %, and the average is {average:.1} %"
            ));
        }
    }

    pub(super) fn check_end(&mut self) {
        if let Some(before) = self.moves_before_quiet {
            self.check_tolerance();
            let moves = self.moves_begun - before;
            if moves > QUIET_MOVES_MAX {
                self.set_violation(format!("{moves} moves although the loads are even"));
            }
        }
        self.check_drained();
    }

    /// Checks that no process that can move is left at a drained node, unless no other has room.
    fn check_drained(&mut self) {
        let crowded = self
            .farthest_node()
            .is_none_or(|(_, _, average)| average > 80.0);
        if crowded || self.config.failing || self.config.room.is_some() {
            return;
        }
        for node in 0..self.nodes.len() {
            let is_free = |process: &&usize| {
                let config = &self.config.processes[**process];
                !config.is_pinned && config.anti_affinity_label.is_none()
            };
            let left = self.nodes[node].processes.iter().filter(is_free).count();
            if self.nodes[node].is_drained && left > 0 {
                self.set_violation(format!("{left} processes are left at n{}", node + 1));
            }
        }
    }
}
