//! Measurements of groups without faults: the time until loads are even, and frames per second by the size of the group.

use super::balance_check::{STARTUP, TOLERANCE};
use super::demand::{Demand, DemandPattern};
use super::plan::{BalancePolicies, ConductorRunConfig, SimulatedProcess};
use super::world::ConductorWorld;
use crate::Violation;
use crate::node_group::FaultFrequencies;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Time between two looks at the loads.
const STEP: Time = Time::from_micros(1_000_000);
/// Time after which loads that are not even count as never even.
const HORIZON: Time = Time::from_micros(28_800_000_000);
/// Time for which policies are measured.
const POLICY_TIME: Time = Time::from_micros(3_600_000_000);
/// Duration of a day in the loads that follow the time of day, in seconds.
const DAY_S: f64 = 2_400.0;
/// Time for which frames are counted, in seconds, after a start-up of the same time.
const COUNTED_S: u64 = 20;

/// A group whose whole load is at a tenth of its nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalanceTimes {
    /// Time until the loads were even: each node within 10 percent points of the average.
    pub conductors: Time,
    /// Time of the central planner that knows all loads, under the same limits.
    pub planner: Time,
    /// Number of moves.
    pub moves: u64,
    /// Number of moves of the process that moved most.
    pub moves_of_one_max: usize,
    /// Number of moves that brought a process back to its former node within 10 minutes.
    pub undone: u64,
    /// Number of events of the simulation.
    pub events: u64,
}

/// How the loads of the processes of a group change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangingLoad {
    /// Each measurement differs by up to half of the mean. At first the nodes are loaded unevenly.
    Noisy,
    /// Each process has bursts, at times of its own.
    Bursty,
    /// Each process follows a recorded day, which begins earlier from node to node.
    Recorded,
    /// A third of the processes each is noisy, bursty, and swings with the time of day, which differs from node to node.
    Mixed,
}

impl fmt::Display for ChangingLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ChangingLoad::Noisy => "noisy",
            ChangingLoad::Bursty => "bursty",
            ChangingLoad::Recorded => "recorded",
            ChangingLoad::Mixed => "mixed",
        })
    }
}

impl ChangingLoad {
    /// Sets the demands of processes that run at `nodes` nodes in turn.
    fn apply(self, processes: &mut [SimulatedProcess], nodes: usize) {
        for (index, process) in processes.iter_mut().enumerate() {
            let noisy = DemandPattern::Noisy(0.5);
            let bursty = DemandPattern::Bursty {
                period_s: 200.0,
                phase_s: (index * 37 % 200) as f64,
            };
            let node_part = process.node as f64 / nodes as f64;
            let (period_s, phase_s) = (DAY_S, DAY_S * node_part);
            process.demand.pattern = match (self, index / nodes % 3) {
                (ChangingLoad::Noisy, _) | (ChangingLoad::Mixed, 0) => noisy,
                (ChangingLoad::Bursty, _) | (ChangingLoad::Mixed, 1) => bursty,
                (ChangingLoad::Recorded, _) => DemandPattern::Recorded { period_s, phase_s },
                (ChangingLoad::Mixed, _) => DemandPattern::Daily { period_s, phase_s },
            };
            if self == ChangingLoad::Noisy {
                process.demand.base *= 0.5 + node_part;
            }
        }
    }
}

/// Loads and policies of a group whose loads change all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyRun {
    /// Number of nodes.
    pub nodes: usize,
    /// Number of processes of each node at first. Together they use half of the node, in the mean.
    pub processes_per_node: usize,
    /// Change of the loads.
    pub load: ChangingLoad,
    /// Policies of all nodes.
    pub policies: BalancePolicies,
}

/// Effect of policies on a group whose loads change all the time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyEffect {
    /// Distance of the most loaded node above the average, in percent points: the mean over time.
    pub excess_mean: f64,
    /// Number of moves.
    pub moves: u64,
    /// Number of moves that brought a process back to its former node within 10 minutes.
    pub undone: u64,
}

/// Frames per second of a group at rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConductorFrameRates {
    /// Frames that a node sends, in the mean of all nodes.
    pub sent: f64,
    /// Frames that the busiest node sends.
    pub sent_max: f64,
    /// Frames that a node receives, in the mean of all nodes.
    pub received: f64,
    /// Frames that the busiest node receives.
    pub received_max: f64,
}

/// Returns a group without faults: `processes` use half of all nodes, and run at the first `loaded` nodes.
fn calm_config(nodes: usize, processes: usize, loaded: usize) -> ConductorRunConfig {
    let process = |index: usize| SimulatedProcess {
        node: index % loaded.max(1),
        demand: Demand {
            base: 500.0 * nodes as f64 / processes as f64,
            pattern: match index % 2 {
                0 => DemandPattern::Steady,
                _ => DemandPattern::Noisy(0.3),
            },
        },
        is_pinned: false,
        anti_affinity_label: None,
    };
    ConductorRunConfig {
        policies: BalancePolicies::Default,
        nodes,
        processes: (0..processes).map(process).collect(),
        clocks_s: (0..nodes).map(|node| 1_000 + 10 * node as u64).collect(),
        liar: None,
        guest: false,
        stale: false,
        room: None,
        hostile: false,
        failing: false,
        faults: FaultFrequencies::NONE,
        plan: Vec::new(),
        faults_end: HORIZON,
        bug: None,
    }
}

/// Measures how long a group takes to spread its whole load from a tenth of its nodes.
///
/// # Errors
/// A violated invariant, or loads that never become even.
pub fn measure_balance_times(
    nodes: usize,
    processes_per_node: usize,
    seed: u64,
) -> Result<BalanceTimes, Violation> {
    let config = calm_config(nodes, processes_per_node * nodes, nodes.div_ceil(10));
    let mut world = ConductorWorld::new(&config, seed, false);
    let never = |description: &str| Violation {
        at: HORIZON,
        description: description.to_owned(),
    };
    let planner = world.planner_time();
    let planner = planner.ok_or_else(|| never("even the planner finds no balance"))?;
    // Nodes begin no move in their first minute.
    world.run_until(STARTUP);
    let mut now = STARTUP;
    while (world.farthest_node()).is_some_and(|(_, load, mean)| (load - mean).abs() > TOLERANCE) {
        now = now + STEP;
        if now >= HORIZON {
            return Err(never("the loads never become even"));
        }
        world.run_until(now);
        if let Some(violation) = world.violation() {
            return Err(violation);
        }
    }
    let moves = (0..config.processes.len()).map(|process| world.oracle.moves(process));
    Ok(BalanceTimes {
        conductors: now.since(Time::from_micros(60_000_000)),
        planner,
        moves: world.moves_begun,
        moves_of_one_max: moves.max().unwrap_or(0),
        undone: world.oracle.undone,
        events: world.events(),
    })
}

/// Measures the effect of policies for an hour. Unless the load is noisy, each node has the same mix at the start, so only
/// bursts and the time of day make loads uneven.
///
/// # Errors
/// A violated invariant.
pub fn measure_policy_effect(run: &PolicyRun, seed: u64) -> Result<PolicyEffect, Violation> {
    let nodes = run.nodes;
    let mut config = calm_config(nodes, run.processes_per_node * nodes, nodes);
    config.policies = run.policies;
    run.load.apply(&mut config.processes, nodes);
    let mut world = ConductorWorld::new(&config, seed, false);
    let (mut now, end) = (STARTUP, STARTUP + POLICY_TIME);
    let (mut sum, mut count) = (0.0, 0.0);
    while now < end {
        world.run_until(now);
        if let Some(violation) = world.violation() {
            return Err(violation);
        }
        let loads: Vec<f64> = (0..nodes).map(|node| world.node_points(node)).collect();
        let average = loads.iter().sum::<f64>() / nodes as f64;
        sum += loads.iter().copied().fold(0.0, f64::max) - average;
        count += 1.0;
        now = now + STEP;
    }
    Ok(PolicyEffect {
        excess_mean: sum / count,
        moves: world.moves_begun,
        undone: world.oracle.undone,
    })
}

/// Counts the frames of a group whose loads are even.
///
/// # Errors
/// A violated invariant.
pub fn measure_conductor_frame_rates(
    nodes: usize,
    seed: u64,
) -> Result<ConductorFrameRates, Violation> {
    let config = calm_config(nodes, nodes, nodes);
    let mut world = ConductorWorld::new(&config, seed, false);
    let startup = Time::from_micros(COUNTED_S * 1_000_000);
    world.run_until(startup);
    for node in &mut world.nodes {
        (node.sent, node.received) = (0, 0);
    }
    world.run_until(startup + startup);
    if let Some(violation) = world.violation() {
        return Err(violation);
    }
    let rate = |frames: u64| frames as f64 / COUNTED_S as f64;
    let count = nodes as f64;
    let (sent, received): (Vec<u64>, Vec<u64>) = (world.nodes.iter())
        .map(|node| (node.sent, node.received))
        .unzip();
    let most = |frames: &[u64]| rate(frames.iter().copied().max().unwrap_or(0));
    Ok(ConductorFrameRates {
        sent: rate(sent.iter().sum()) / count,
        sent_max: most(&sent),
        received: rate(received.iter().sum()) / count,
        received_max: most(&received),
    })
}
