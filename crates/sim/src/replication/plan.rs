//! The possible faults of a replicated service, and the plan that a seed draws from them.

use super::ReplicationBug;
use crate::node_group::CountRange;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::replication::DivergencePolicy;
use std::fmt;

/// Longest time between two faults of one incident.
const SECOND_FAULT_MAX: u64 = 120_000;
/// Longest duration of a fault that ends.
const FAULT_MAX: u64 = 400_000;

/// The possible faults; each seed draws from it. Weights are relative to each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicationPlanDistribution {
    /// Number of legs, at most 4.
    pub legs: CountRange,
    /// Number of clients.
    pub clients: CountRange,
    /// Number of incidents.
    pub incidents: CountRange,
    /// Time in which clients connect and incidents begin.
    pub runtime: Time,
    /// Time by which each client must have ended.
    pub deadline: Time,
    /// Share of seeds whose links lose and reorder packets.
    pub lossy: f64,
    /// Share of packets that such links lose.
    pub loss: f64,
    /// Share of packets that such links delay behind others.
    pub reorder: f64,
    /// Share of seeds in which any leg may fail, also the last one.
    pub all_may_fail: f64,
    /// Share of seeds in which the contact node is lost.
    pub contact_lost: f64,
    /// Share of incidents that a second fault follows within 0.12 s.
    pub second_fault: f64,
    /// Weight of a killed server process.
    pub kill: u32,
    /// Weight of a killed worker process, which has one connection.
    pub kill_worker: u32,
    /// Weight of a stopped server process.
    pub stop: u32,
    /// Weight of a lost host.
    pub lose_host: u32,
    /// Weight of a cut link.
    pub cut: u32,
    /// Weight of a slow server process.
    pub slow: u32,
    /// Weight of a wrong byte in the output.
    pub differ: u32,
}

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicationRunConfig {
    /// Number of legs.
    pub legs: usize,
    /// Number of clients.
    pub clients: usize,
    /// Reaction to differing outputs.
    pub divergence: DivergencePolicy,
    /// Share of packets that links lose.
    pub loss: f64,
    /// Share of packets that links delay behind others.
    pub reorder: f64,
    /// Time in which clients connect.
    pub runtime: Time,
    /// Time by which each client must have ended.
    pub deadline: Time,
    /// The faults with their times.
    pub plan: Vec<(Time, ReplicationAction)>,
    /// The deliberate bug, if any.
    pub bug: Option<ReplicationBug>,
}

/// A planned fault. Legs are indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicationAction {
    /// The server process dies, and its kernel ends its connections.
    Kill(usize),
    /// The process of one connection dies.
    KillWorker {
        /// Index of the leg whose process dies.
        leg: usize,
        /// Random number that chooses the connection.
        draw: u64,
    },
    /// The server process is stopped.
    Stop(usize),
    /// The server process continues.
    Continue(usize),
    /// The host is lost.
    LoseHost(usize),
    /// The link to the host is cut.
    Cut(usize),
    /// The link to the host works again.
    Mend(usize),
    /// The server process becomes slow.
    Slow(usize),
    /// The next output of the server has a wrong byte.
    Differ(usize),
    /// The contact node is lost; its backup follows 0.3 s later.
    LoseContact,
}

impl fmt::Display for ReplicationAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ReplicationAction::Kill(leg) => write!(f, "the server of leg {leg} is killed"),
            ReplicationAction::KillWorker { leg, draw } => {
                write!(f, "a worker of leg {leg} is killed (draw {draw:x})")
            }
            ReplicationAction::Stop(leg) => write!(f, "the server of leg {leg} is stopped"),
            ReplicationAction::Continue(leg) => write!(f, "the server of leg {leg} continues"),
            ReplicationAction::LoseHost(leg) => write!(f, "the host of leg {leg} is lost"),
            ReplicationAction::Cut(leg) => write!(f, "the link to leg {leg} is cut"),
            ReplicationAction::Mend(leg) => write!(f, "the link to leg {leg} is mended"),
            ReplicationAction::Slow(leg) => write!(f, "the server of leg {leg} becomes slow"),
            ReplicationAction::Differ(leg) => write!(f, "leg {leg} sends a wrong byte"),
            ReplicationAction::LoseContact => write!(f, "the contact node is lost"),
        }
    }
}

/// Derives a config from a setting and a seed.
#[must_use]
pub fn draw_run_config(
    setting: &ReplicationPlanDistribution,
    seed: u64,
    bug: Option<ReplicationBug>,
) -> ReplicationRunConfig {
    // Use a random stream other than the world's.
    let mut random = Random::new(seed ^ 0x5eed_5eed_5eed_5eed);
    let legs = setting.legs.draw(&mut random);
    let is_lossy = random.chance(setting.lossy);
    let share = |share| if is_lossy { share } else { 0.0 };
    let divergence = match random.below(3) {
        0 => DivergencePolicy::Report,
        1 => DivergencePolicy::Drop,
        _ => DivergencePolicy::Vote,
    };
    // One leg stays without faults, unless all may fail.
    let spared = match random.chance(setting.all_may_fail) {
        true => legs,
        false => random.below(legs),
    };
    let clients = setting.clients.draw(&mut random);
    let contact_lost = random.chance(setting.contact_lost);
    let mut plan = Vec::new();
    for _ in 0..setting.incidents.draw(&mut random) {
        let at = random.between(0, setting.runtime.0);
        add_fault(setting, &mut random, &mut plan, (Time(at), legs, spared));
        if random.chance(setting.second_fault) {
            let later = Time(at) + Time::from_micros(random.between(0, SECOND_FAULT_MAX));
            add_fault(setting, &mut random, &mut plan, (later, legs, spared));
        }
    }
    if contact_lost {
        let at = Time(random.between(0, setting.runtime.0));
        plan.push((at, ReplicationAction::LoseContact));
    }
    plan.sort_by_key(|(at, _)| *at);
    ReplicationRunConfig {
        legs,
        clients,
        divergence,
        loss: share(setting.loss),
        reorder: share(setting.reorder),
        runtime: setting.runtime,
        deadline: setting.deadline,
        plan,
        bug,
    }
}

/// Adds one fault of a leg at a time, and its end.
fn add_fault(
    setting: &ReplicationPlanDistribution,
    random: &mut Random,
    plan: &mut Vec<(Time, ReplicationAction)>,
    (at, legs, spared): (Time, usize, usize),
) {
    let leg = random.below(legs);
    let draw = random.number();
    let end = at + Time::from_micros(random.between(1_000, FAULT_MAX));
    let weights = [
        (setting.kill, ReplicationAction::Kill(leg)),
        (
            setting.kill_worker,
            ReplicationAction::KillWorker { leg, draw },
        ),
        (setting.stop, ReplicationAction::Stop(leg)),
        (setting.lose_host, ReplicationAction::LoseHost(leg)),
        (setting.cut, ReplicationAction::Cut(leg)),
        (setting.slow, ReplicationAction::Slow(leg)),
        (setting.differ, ReplicationAction::Differ(leg)),
    ];
    let sum: u32 = weights.iter().map(|(weight, _)| weight).sum();
    let mut rest = random.below(sum as usize) as u32;
    if leg == spared {
        return;
    }
    for (weight, action) in weights {
        if rest < weight {
            plan.push((at, action));
            match action {
                ReplicationAction::Stop(leg) => plan.push((end, ReplicationAction::Continue(leg))),
                ReplicationAction::Cut(leg) => plan.push((end, ReplicationAction::Mend(leg))),
                _ => {}
            }
            return;
        }
        rest -= weight;
    }
}
