//! The possible loads, actions and faults of a group whose conductors balance it, and the plan that a seed draws.

use super::ConductorBug;
use super::demand::{Demand, DemandPattern};
use crate::node_group::{CountRange, FaultFrequencies};
use crate::random::Random;
use crate::time::Time;
use std::fmt;

/// The possible loads, actions and faults; each seed draws from it. Probabilities of actions are per incident.
#[derive(Debug, Clone, PartialEq)]
pub struct ConductorPlanDistribution {
    /// Number of nodes.
    pub nodes: CountRange,
    /// Number of processes for each node, in the mean.
    pub processes_per_node: CountRange,
    /// Number of incidents.
    pub incidents: CountRange,
    /// Time at which the incidents begin: nodes begin no moves before.
    pub incidents_begin: Time,
    /// Time at which all faults end.
    pub faults_end: Time,
    /// Share of seeds with steady and noisy loads alone.
    pub calm: f64,
    /// Share of seeds in which one node lies about its load.
    pub liar: f64,
    /// Share of seeds in which a host outside the group sends forged frames.
    pub guest: f64,
    /// Share of seeds in which load messages come late now and then, by up to a minute.
    pub stale: f64,
    /// Share of seeds in which nodes have little memory.
    pub full: f64,
    /// Probability that a process is pinned.
    pub pinned: f64,
    /// Probability that a process has an anti-affinity label, one of two.
    pub labelled: f64,
    /// Probability that a daemon dies at a certain point of the next negotiation; it restarts within 5 s.
    pub crash: f64,
    /// Probability that a node reaches no other for at most 30 s.
    pub isolate: f64,
    /// Probability that a node leaves the group for at most 30 s.
    pub remove: f64,
    /// Probability that a node is drained, for at most two minutes or for good.
    pub drain: f64,
    /// Probability that the load of the processes at one node grows.
    pub surge: f64,
    /// Probability that all nodes are overloaded at once, for at most two minutes.
    pub overload: f64,
    /// Frequencies of unplanned faults; `reordered` is not used, since frames arrive in any order.
    pub faults: FaultFrequencies,
}

impl ConductorPlanDistribution {
    /// Returns all probabilities and shares.
    pub(crate) fn shares(&self) -> [f64; 13] {
        [
            self.calm,
            self.liar,
            self.guest,
            self.stale,
            self.full,
            self.pinned,
            self.labelled,
            self.crash,
            self.isolate,
            self.remove,
            self.drain,
            self.surge,
            self.overload,
        ]
    }
}

/// A process of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedProcess {
    /// The first node, by its index.
    pub node: usize,
    /// Load of the process over time.
    pub demand: Demand,
    /// True if the process is pinned.
    pub is_pinned: bool,
    /// Anti-affinity label.
    pub anti_affinity_label: Option<u64>,
}

/// Policies of all nodes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalancePolicies {
    /// The defaults, with all checks.
    Default,
    /// The policies of paper 002 as they stand, which break the rules of the oracle. Only the limits hold.
    Paper,
    /// No balancing by conductors: a central planner that knows all loads without noise moves processes, within the
    /// conductors' limits.
    Central,
    /// No balancing.
    Off,
}

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct ConductorRunConfig {
    /// Balancing policies of all nodes of the run.
    pub policies: BalancePolicies,
    /// Number of nodes.
    pub nodes: usize,
    /// The processes; their keys are their positions plus 1.
    pub processes: Vec<SimulatedProcess>,
    /// Time that each node's clock shows at the start, in seconds.
    pub clocks_s: Vec<u64>,
    /// The node that lies about its load, if any.
    pub liar: Option<usize>,
    /// True if a host outside the group sends forged frames.
    pub guest: bool,
    /// True if load messages come late now and then.
    pub stale: bool,
    /// Number of processes for which a node has memory; none if memory is plentiful.
    pub room: Option<usize>,
    /// True if frames are lost and repeated.
    pub hostile: bool,
    /// True if moves can fail.
    pub failing: bool,
    /// Frequencies of unplanned faults.
    pub faults: FaultFrequencies,
    /// The planned actions with their times.
    pub plan: Vec<(Time, ConductorAction)>,
    /// Time at which all faults end: daemons are restarted, links mended, members return.
    pub faults_end: Time,
    /// The deliberate bug, if any.
    pub bug: Option<ConductorBug>,
}

impl ConductorRunConfig {
    /// Returns true if no load changes by itself.
    #[must_use]
    pub fn is_calm(&self) -> bool {
        let mut patterns = self.processes.iter().map(|process| process.demand.pattern);
        patterns.all(|pattern| pattern.is_calm())
    }
}

/// A point of a negotiation at which a daemon dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashPoint {
    /// The donor, after its offer.
    Offered,
    /// The acceptor, after its acceptance.
    Accepted,
    /// The donor, after the move has begun.
    Begun,
    /// The acceptor, before it hears of the beginning.
    BeginReceived,
    /// The donor, before it hears of the end of the move.
    MoveEnded,
    /// The acceptor, before it hears of the end.
    EndedReceived,
}

impl CrashPoint {
    /// All points at which a daemon may die.
    pub const ALL: [CrashPoint; 6] = [
        CrashPoint::Offered,
        CrashPoint::Accepted,
        CrashPoint::Begun,
        CrashPoint::BeginReceived,
        CrashPoint::MoveEnded,
        CrashPoint::EndedReceived,
    ];
}

/// A planned action. Nodes are indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConductorAction {
    /// A daemon dies at this point of the next negotiation, and restarts soon.
    CrashAt(CrashPoint),
    /// Frames from and to a node are lost.
    Isolate(usize),
    /// Frames from and to a node pass again.
    Reconnect(usize),
    /// A node leaves the group.
    Remove(usize),
    /// A node is a member again.
    Return(usize),
    /// An operator drains a node.
    Drain(usize),
    /// An operator ends the drain of a node.
    Undrain(usize),
    /// The processes that run at a node get twice their load.
    Surge(usize),
    /// All processes get three times their load.
    Overload,
    /// All processes get their former load.
    Relieve,
}

impl fmt::Display for ConductorAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ConductorAction::CrashAt(point) => write!(f, "a daemon crashes at {point:?}"),
            ConductorAction::Isolate(node) => write!(f, "n{} is isolated", node + 1),
            ConductorAction::Reconnect(node) => write!(f, "n{} is reconnected", node + 1),
            ConductorAction::Remove(node) => write!(f, "n{} leaves the group", node + 1),
            ConductorAction::Return(node) => write!(f, "n{} returns to the group", node + 1),
            ConductorAction::Drain(node) => write!(f, "n{} is drained", node + 1),
            ConductorAction::Undrain(node) => write!(f, "n{} is undrained", node + 1),
            ConductorAction::Surge(node) => write!(f, "loads at n{} double", node + 1),
            ConductorAction::Overload => write!(f, "all loads triple"),
            ConductorAction::Relieve => write!(f, "all loads are as before"),
        }
    }
}

/// Derives a config from a setting and a seed.
#[must_use]
pub fn draw_run_config(
    setting: &ConductorPlanDistribution,
    seed: u64,
    bug: Option<ConductorBug>,
) -> ConductorRunConfig {
    // Use a random stream other than the world's.
    let mut random = Random::new(seed ^ 0x5eed_5eed_5eed_5eed);
    let nodes = setting.nodes.draw(&mut random);
    let processes = draw_processes(setting, nodes, &mut random);
    let clocks_s = (0..nodes).map(|_| random.between(1_000, 100_000)).collect();
    let liar = random.chance(setting.liar).then(|| random.below(nodes));
    let guest = random.chance(setting.guest);
    let hostile = random.chance(setting.faults.hostile);
    let failing = random.chance(setting.faults.failing);
    let mut plan = Vec::new();
    for _ in 0..setting.incidents.draw(&mut random) {
        add_incident(setting, nodes, &mut random, &mut plan);
    }
    plan.sort_by_key(|(at, _)| *at);
    let stale = random.chance(setting.stale);
    let room = random.chance(setting.full).then(|| {
        let per_node = processes.len().div_ceil(nodes);
        per_node + random.below(per_node)
    });
    ConductorRunConfig {
        policies: BalancePolicies::Default,
        nodes,
        processes,
        clocks_s,
        liar,
        guest,
        stale,
        room,
        hostile,
        failing,
        faults: setting.faults,
        plan,
        faults_end: setting.faults_end,
        bug,
    }
}

/// Draws processes, most of them at the first nodes. Together they use about half of all nodes.
fn draw_processes(
    setting: &ConductorPlanDistribution,
    nodes: usize,
    random: &mut Random,
) -> Vec<SimulatedProcess> {
    let per_node = setting.processes_per_node.draw(random).max(1);
    let is_calm = random.chance(setting.calm);
    let mean = 500.0 / per_node as f64;
    let process = |_| {
        let pattern = match random.below(if is_calm { 2 } else { 4 }) {
            0 => DemandPattern::Steady,
            1 => DemandPattern::Noisy(0.3),
            2 => DemandPattern::Bursty {
                period_s: 100.0 + 200.0 * random.fraction(),
                phase_s: 300.0 * random.fraction(),
            },
            _ => DemandPattern::Daily {
                period_s: 300.0,
                phase_s: 300.0 * random.fraction(),
            },
        };
        let node = random.below(nodes).min(random.below(nodes));
        SimulatedProcess {
            node,
            demand: Demand {
                base: mean * (0.5 + random.fraction()),
                pattern,
            },
            is_pinned: random.chance(setting.pinned),
            anti_affinity_label: random
                .chance(setting.labelled)
                .then(|| random.between(0, 2)),
        }
    };
    let mut processes: Vec<SimulatedProcess> = (0..per_node * nodes).map(process).collect();
    // Two processes with one label do not begin at one node.
    let mut taken = std::collections::BTreeSet::new();
    for process in &mut processes {
        process.anti_affinity_label = process
            .anti_affinity_label
            .filter(|label| taken.insert((process.node, *label)));
    }
    processes
}

fn add_incident(
    setting: &ConductorPlanDistribution,
    nodes: usize,
    random: &mut Random,
    plan: &mut Vec<(Time, ConductorAction)>,
) {
    let node = random.below(nodes);
    let span = setting.faults_end.since(setting.incidents_begin);
    let at = setting.incidents_begin + Time(random.between(0, span.0));
    let pairs = [
        (
            setting.isolate,
            ConductorAction::Isolate(node),
            ConductorAction::Reconnect(node),
            30.0,
        ),
        (
            setting.remove,
            ConductorAction::Remove(node),
            ConductorAction::Return(node),
            30.0,
        ),
        (
            setting.drain,
            ConductorAction::Drain(node),
            ConductorAction::Undrain(node),
            120.0,
        ),
    ];
    for (chance, begins, ends, within_s) in pairs {
        if random.chance(chance) {
            let end = at + Time::from_secs_f64(within_s * random.fraction());
            plan.push((at, begins));
            // Some nodes stay drained.
            let is_drain = matches!(begins, ConductorAction::Drain(_));
            if !is_drain || random.chance(0.5) {
                plan.push((end.min(setting.faults_end), ends));
            }
        }
    }
    if random.chance(setting.crash) {
        let point = CrashPoint::ALL[random.below(CrashPoint::ALL.len())];
        plan.push((at, ConductorAction::CrashAt(point)));
    }
    if random.chance(setting.surge) {
        plan.push((at, ConductorAction::Surge(node)));
    }
    if random.chance(setting.overload) {
        let end = at + Time::from_secs_f64(120.0 * random.fraction());
        plan.push((at, ConductorAction::Overload));
        plan.push((end.min(setting.faults_end), ConductorAction::Relieve));
    }
}
