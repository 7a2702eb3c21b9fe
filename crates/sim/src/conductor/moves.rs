//! Moves of processes: their beginning, which the oracle checks, and their end.

use super::node::CAPACITY;
use super::oracle::Beginning;
use super::plan::{BalancePolicies, CrashPoint};
use super::world::{ConductorWorld, Event};
use crate::node_group::node_index;
use crate::time::Time;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{OfferId, ProcessKey};
use holdfast_wire::failure::NodeFault;

/// Time after a surge in which loads settle.
const SURGE_SETTLES: Time = Time::from_micros(60_000_000);

/// A move under way.
#[derive(Debug)]
pub(super) struct Move {
    id: OfferId,
    begin: Beginning,
    /// The donor's life that began the move.
    incarnation: u64,
    fails: bool,
}

impl ConductorWorld<'_> {
    /// Begins a move at a donor's word, unless that breaks a rule.
    pub(super) fn begin_move(
        &mut self,
        donor: usize,
        id: OfferId,
        process: ProcessKey,
        to: NodeId,
    ) {
        let (process, acceptor) = (process.0 as usize - 1, node_index(to));
        let config = self.config;
        let label = config.processes[process].anti_affinity_label;
        let labels = self.nodes[acceptor].processes.iter();
        let mut labels = labels.map(|other| config.processes[*other].anti_affinity_label);
        let is_moving = self
            .moves
            .values()
            .any(|known| known.begin.process == process);
        let settled = self
            .surged_at
            .is_none_or(|at| self.now.since(at) > SURGE_SETTLES);
        let is_predictable = self.is_calm && config.liar.is_none() && settled;
        let after =
            self.node_points(acceptor) + self.process_mean(process) / f64::from(CAPACITY) * 100.0;
        let begin = Beginning {
            at: self.now,
            donor,
            acceptor,
            process,
            is_drain: self.nodes[donor].is_drained,
            is_pinned: config.processes[process].is_pinned,
            is_here: self.nodes[donor].processes.contains(&process) && !is_moving,
            is_busy: self.moves_of(donor) + self.moves_of(acceptor) > 0,
            breaks_label: label.is_some() && labels.any(|other| other == label),
            is_full: config
                .room
                .is_some_and(|room| self.nodes[acceptor].processes.len() >= room),
            is_accepted: self.nodes[acceptor].accepted.contains(&(donor, id)),
            loads: is_predictable.then(|| (self.node_points(donor), after)),
        };
        let predicts = config.policies != BalancePolicies::Paper;
        if let Err(what) = self.oracle.on_begin(&begin, predicts) {
            return self.set_violation(what);
        }
        let faults = self.config.faults;
        let is_slow = self.is_faulty() && self.random.chance(faults.slow_commands);
        let longest = if is_slow { 40_000_000 } else { 4_000_000 };
        let delay = Time::from_micros(self.random.between(300_000, longest));
        let fails = self.is_faulty() && self.config.failing && self.random.chance(faults.failed);
        let number = self.moves_begun;
        self.moves_begun += 1;
        let incarnation = self.nodes[donor].incarnation;
        self.moves.insert(
            number,
            Move {
                id,
                begin,
                incarnation,
                fails,
            },
        );
        self.schedule(self.now + delay, Event::MoveEnds(number));
        self.count(if begin.is_drain {
            "drained"
        } else {
            "balanced"
        });
        self.tell_moves(&begin);
        self.crash_at(CrashPoint::Begun, donor);
    }

    fn tell_moves(&mut self, begin: &Beginning) {
        for node in [begin.donor, begin.acceptor] {
            let count = self.moves_of(node);
            let clock = self.nodes[node].clock(self.now);
            if let Some(machine) = self.nodes[node].machine.as_mut() {
                machine.handle_moves_under_way(clock, count);
            }
        }
    }

    /// Ends a move: the process runs at the acceptor, or still at the donor.
    pub(super) fn end_move(&mut self, number: u64) {
        let Some(ended) = self.moves.remove(&number) else {
            return;
        };
        let begin = ended.begin;
        let is_orphan = self.nodes[begin.donor].incarnation != ended.incarnation;
        let is_moved = !(ended.fails || is_orphan && self.random.chance(0.5));
        if is_moved {
            let was_here = self.nodes[begin.donor].processes.remove(&begin.process);
            let is_new = self.nodes[begin.acceptor].processes.insert(begin.process);
            if !was_here || !is_new {
                self.set_violation(format!("p{} is lost or doubled", begin.process));
            }
        }
        self.oracle.on_end(self.now, &begin, is_moved);
        self.count(if is_moved { "moved" } else { "kept" });
        if is_orphan {
            self.count("move outlives the donor's daemon");
        }
        self.crash_at(CrashPoint::MoveEnded, begin.donor);
        self.tell_moves(&begin);
        if self.nodes[begin.donor].incarnation == ended.incarnation {
            let result = match is_moved {
                true => Ok(()),
                false => Err(NodeFault::RestartedInMove.into()),
            };
            self.drive(begin.donor, |machine, now| {
                machine.handle_move_ended(now, ended.id, result);
            });
        }
    }

    /// Returns the number of moves from and to a node.
    pub(super) fn moves_of(&self, node: usize) -> usize {
        let moves = self.moves.values();
        moves
            .filter(|known| known.begin.donor == node || known.begin.acceptor == node)
            .count()
    }
}
