//! The four policies that specify a load balancer (paper 002, section IV), each with the paper's form and the default.

use super::load::ProcessLoad;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{NodeDemand, Utilization};

/// Width of the classes, in percent points, within which the default location policy chooses at random.
const LOCATION_CLASS_POINTS: f64 = 4.0;
/// Width of the classes, in percent points, within which the default selection policy takes the cheapest process.
const SELECTION_CLASS_POINTS: f64 = 1.0;
/// Most percent points of mismatch that the cost of a move may outweigh.
const COST_POINTS_MAX: f64 = 3.0;

/// The policies of a conductor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policies {
    /// Rule for the time at which a node gives processes away.
    pub transfer: TransferPolicy,
    /// Rule for the node that gets a process.
    pub location: LocationPolicy,
    /// Rule for the process to give away.
    pub selection: SelectionPolicy,
    /// When and to which nodes a node tells its load.
    pub information: InformationPolicy,
    /// True if the loads of both nodes after the move are predicted, and a move without benefit is not made. The paper
    /// does not predict.
    pub predicts: bool,
}

impl Policies {
    /// The policies of paper 002, section IV, with thresholds of our choice, since the paper names none.
    pub const PAPER: Policies = Policies {
        transfer: TransferPolicy::Threshold {
            critical: Utilization(9_000),
            excess: Utilization(800),
        },
        location: LocationPolicy::Mirror,
        selection: SelectionPolicy::Nearest,
        information: InformationPolicy::ToAll {
            interval: Duration::from_secs(1),
        },
        predicts: false,
    };

    /// The default policies.
    pub const DEFAULT: Policies = Policies {
        transfer: TransferPolicy::Hysteresis {
            critical: Utilization(9_000),
            start: Utilization(800),
            stop: Utilization(300),
            sustain: Duration::from_secs(5),
        },
        location: LocationPolicy::SpreadMirror,
        selection: SelectionPolicy::CheapestNear,
        information: InformationPolicy::Gossip {
            interval: Duration::from_secs(1),
            fanout: 3,
            reports: 16,
        },
        predicts: true,
    };
}

/// Decides when a node gives processes away (section IV-A, sender side).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TransferPolicy {
    /// As soon as the load is over `critical`, or more than `excess` above the average.
    Threshold {
        /// The critical load.
        critical: Utilization,
        /// The tolerated excess over the average.
        excess: Utilization,
    },
    /// From the time that the load has been over `critical`, or more than `start` above the average, for as long as
    /// `sustain`, until the load is at most `stop` above the average. While another node is more than `start` below the
    /// average, any load above the average suffices.
    Hysteresis {
        /// The critical load.
        critical: Utilization,
        /// The excess at which the node begins.
        start: Utilization,
        /// The excess at which the node ends.
        stop: Utilization,
        /// The time for which the load must stay high.
        sustain: Duration,
    },
}

impl TransferPolicy {
    /// Returns the greatest deviation from the average, in percent points, that makes no node begin.
    pub fn tolerance_points(&self) -> f64 {
        match self {
            TransferPolicy::Threshold { excess, .. } => excess.points(),
            TransferPolicy::Hysteresis { start, .. } => start.points(),
        }
    }
}

/// State of the transfer policy at one node: whether the node gives processes away.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TransferState {
    /// Time since which the load is high.
    pub high_since: Option<Duration>,
    /// True if the node gives processes away.
    pub is_on: bool,
}

/// Loads of a node and its group, in percent points.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoadPosition {
    pub own: f64,
    pub average: f64,
    /// Distance of the least loaded known node below the average.
    pub deficit_max: f64,
}

impl TransferState {
    /// Decides by the loads whether the node gives processes away.
    pub fn update(&mut self, now: Duration, policy: &TransferPolicy, loads: LoadPosition) {
        let excess = loads.own - loads.average;
        match policy {
            TransferPolicy::Threshold {
                critical,
                excess: tolerated,
            } => {
                self.is_on = loads.own > critical.points() || excess > tolerated.points();
            }
            TransferPolicy::Hysteresis {
                critical,
                start,
                stop,
                sustain,
            } => {
                let is_critical = loads.own > critical.points();
                let relieves = loads.deficit_max > start.points() && excess > 0.0;
                let is_high = is_critical || excess > start.points() || relieves;
                if self.is_on {
                    self.is_on = is_critical || relieves || excess > stop.points();
                } else if is_high {
                    let since = *self.high_since.get_or_insert(now);
                    self.is_on = now.saturating_sub(since) >= *sustain;
                }
                if !is_high {
                    self.high_since = None;
                }
            }
        }
    }
}

/// A node that may take a process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Location {
    pub node: NodeId,
    pub demand: NodeDemand,
    pub memory_free_kib: u64,
    /// Distance below the average, in percent points.
    pub deficit: f64,
}

/// Decides to which node a process goes (section IV-B): one on the other side of the average.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocationPolicy {
    /// The node that is most nearly as far below the average as this node is above.
    Mirror,
    /// As `Mirror`, and at random among nodes that are nearly equal, so that donors do not all ask the same node.
    SpreadMirror,
}

impl LocationPolicy {
    /// Puts the locations below the average in the order of preference. `draw` is a random number.
    pub(super) fn rank(&self, locations: &mut Vec<Location>, excess: f64, draw: u64) {
        locations.retain(|location| location.deficit > 0.0);
        let mismatch = |location: &Location| (excess - location.deficit).abs();
        match self {
            LocationPolicy::Mirror => {
                locations.sort_by(|a, b| mismatch(a).total_cmp(&mismatch(b)));
            }
            LocationPolicy::SpreadMirror => {
                // A float-to-integer conversion saturates.
                let class =
                    |location: &Location| (mismatch(location) / LOCATION_CLASS_POINTS) as u32;
                let shuffled = |location: &Location| {
                    (u64::from(location.node.0) ^ draw).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                };
                locations.sort_by_key(|location| (class(location), shuffled(location)));
            }
        }
    }
}

/// Decides which process moves (section IV-C).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectionPolicy {
    /// The process whose load is nearest to the amount that should move.
    Nearest,
    /// As `Nearest`, where a short freeze, little memory and few clients make up for some mismatch.
    CheapestNear,
}

impl SelectionPolicy {
    /// Puts processes in the order of preference. `amount` is the load that should move, `capacity` the capacity of the
    /// node, both in thousandths of a processor.
    pub(super) fn rank(&self, processes: &mut [&ProcessLoad], amount: f64, capacity: f64) {
        let mismatch = |process: &ProcessLoad| {
            let points = (process.used.mean() - amount).abs() / capacity * 100.0;
            match self {
                SelectionPolicy::Nearest => points,
                SelectionPolicy::CheapestNear => {
                    // Equal classes are decided by the cost alone.
                    let class = (points / SELECTION_CLASS_POINTS).floor();
                    class * SELECTION_CLASS_POINTS + cost_points(process)
                }
            }
        };
        let ranked = processes
            .iter()
            .map(|process| (mismatch(process), *process));
        let mut ranked: Vec<(f64, &ProcessLoad)> = ranked.collect();
        ranked.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        for (place, (_, process)) in processes.iter_mut().zip(ranked) {
            *place = process;
        }
    }
}

/// Returns the cost of moving a process, in the percent points of mismatch that are as bad: one point for each 50 ms of
/// freeze, each 1 GiB of memory and each 1,000 clients.
fn cost_points(process: &ProcessLoad) -> f64 {
    let sample = &process.sample;
    let freeze = sample.freeze.as_secs_f64() / 0.05;
    let memory = sample.memory_kib as f64 / f64::from(1 << 20);
    let clients = f64::from(sample.clients) / 1_000.0;
    (freeze + memory + clients).min(COST_POINTS_MAX)
}

/// Decides when and to which nodes a node tells its load (section IV-D). The messages are heartbeats too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InformationPolicy {
    /// Periodically to all nodes.
    ToAll {
        /// Time between two messages to one node.
        interval: Duration,
    },
    /// Periodically to a few random nodes, with the newest loads that the node has heard of. The messages of a node do not
    /// grow with the group.
    Gossip {
        /// Time between two rounds.
        interval: Duration,
        /// Number of receivers of a round.
        fanout: usize,
        /// Most reports in a message.
        reports: usize,
    },
}

impl InformationPolicy {
    /// Returns the time between two rounds.
    pub fn interval(&self) -> Duration {
        match self {
            InformationPolicy::ToAll { interval } | InformationPolicy::Gossip { interval, .. } => {
                *interval
            }
        }
    }
}
