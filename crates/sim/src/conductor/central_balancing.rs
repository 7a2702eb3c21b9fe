//! The central planner in the place of the conductors: it knows all loads without noise, and moves processes as they do.

use super::central_planner::{CentralPlannerNode, STEP, best_move};
use super::world::{ConductorWorld, Event};
use crate::node_group::node_id;
use crate::time::Time;
use holdfast_wire::conductor_frames::{OfferId, ProcessKey};

/// Time of the first decision: conductors begin no move in their first minute.
const START: Time = Time::from_micros(60_000_000);
/// Least excess of a donor over the average, in percent points: that at which conductors stop, too.
const EXCESS_MIN: f64 = 3.0;
/// Boot number of the planner's offers, which no daemon has.
const BOOT: u64 = u64::MAX;

impl ConductorWorld<'_> {
    pub(super) fn schedule_central_planner(&mut self) {
        self.schedule(START, Event::CentralPlan);
    }

    /// Begins the moves that the planner chooses now.
    pub(super) fn plan_centrally(&mut self) {
        self.schedule(self.now + STEP, Event::CentralPlan);
        let mut nodes: Vec<CentralPlannerNode> = Vec::with_capacity(self.nodes.len());
        for (index, node) in self.nodes.iter().enumerate() {
            let mut node = self.as_central_planner_sees(node);
            if self.moves_of(index) > 0 || !self.oracle.may_move(self.now, index) {
                node.free_at = Time(u64::MAX);
            }
            nodes.push(node);
        }
        let loads = nodes.iter().map(CentralPlannerNode::points);
        let average = loads.sum::<f64>() / nodes.len() as f64;
        while let Some((donor, process, acceptor)) =
            best_move(&nodes, Time::ZERO, average, EXCESS_MIN)
        {
            let process = nodes[donor].take(process).index;
            for node in [donor, acceptor] {
                nodes[node].begin(Time::ZERO);
            }
            let id = OfferId {
                boot: BOOT,
                seq: self.moves_begun,
            };
            self.nodes[acceptor].accepted.insert((donor, id));
            let key = ProcessKey(process as u64 + 1);
            self.begin_move(donor, id, key, node_id(acceptor));
        }
    }
}
