//! The possible actions and faults of a group that runs itself, and the plan that a seed draws from them.

use super::MembershipBug;
use crate::node_group::{CountRange, FaultFrequencies};
use crate::random::Random;
use crate::time::Time;
use std::fmt;

/// The possible actions and faults; each seed draws from it. Probabilities are per incident.
#[derive(Debug, Clone, PartialEq)]
pub struct MembershipPlanDistribution {
    /// Number of nodes that join as backups, the first of which creates the group.
    pub voters: CountRange,
    /// Number of nodes that join as server nodes.
    pub server_nodes: CountRange,
    /// Number of incidents.
    pub incidents: CountRange,
    /// Duration of the incidents.
    pub runtime: Time,
    /// Longest time after the end of all faults until one node has a lease.
    pub lease_deadline: Time,
    /// Longest time after the end of all faults until all nodes are members and agree on the view.
    pub agreement_deadline: Time,
    /// Longest delay between the actions of an incident.
    pub action_delay_max: Time,
    /// Greatest deviation of a clock's rate, in parts per million.
    pub clock_drift_ppm: u32,
    /// Share of seeds whose nodes take others for failed after 80 ms already, so that leases alone prevent two contact
    /// nodes.
    pub impatient: f64,
    /// Share of seeds in which a host with a certificate of the group sends forged frames.
    pub guest: f64,
    /// Share of seeds whose views are in a store, in place of votes.
    pub store: f64,
    /// Probability that a node's daemon dies; it restarts within 1 s.
    pub crash: f64,
    /// Probability that no frames pass from one node to another, in this direction, for at most 1.5 s.
    pub cut: f64,
    /// Probability that a node reaches no other for at most 1.5 s.
    pub isolate: f64,
    /// Probability that the nodes fall into two parts for at most 1.5 s.
    pub partition: f64,
    /// Probability that a daemon is stopped for at most 0.6 s.
    pub stop: f64,
    /// Probability that a node leaves.
    pub leave: f64,
    /// Probability that an operator removes a node.
    pub remove: f64,
    /// Probability that an operator promotes a backup.
    pub promote: f64,
    /// Probability that an operator changes the group's settings.
    pub group_data: f64,
    /// Probability that a handoff to a server node fails.
    pub server_node_failed: f64,
    /// Probability that the store is without a majority for at most 1.5 s.
    pub store_down: f64,
    /// Probability that a node does not reach the store for at most 1.5 s.
    pub store_cut: f64,
    /// Frequencies of unplanned faults; `reordered` is not used, since frames arrive in any order.
    pub faults: FaultFrequencies,
}

impl MembershipPlanDistribution {
    /// Returns all probabilities and shares.
    pub(crate) fn shares(&self) -> [f64; 15] {
        [
            self.impatient,
            self.guest,
            self.crash,
            self.cut,
            self.isolate,
            self.partition,
            self.stop,
            self.leave,
            self.remove,
            self.promote,
            self.group_data,
            self.server_node_failed,
            self.store,
            self.store_down,
            self.store_cut,
        ]
    }
}

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct MembershipRunConfig {
    /// Number of nodes that join as backups.
    pub voters: usize,
    /// Number of nodes that join as server nodes; their indices follow.
    pub server_nodes: usize,
    /// Deviation of each node's clock, in parts per million.
    pub clock_drifts_ppm: Vec<i64>,
    /// True if nodes take others for failed after 80 ms already.
    pub impatient: bool,
    /// True if a host with a certificate of the group sends forged frames.
    pub guest: bool,
    /// True if the group's views are in a store.
    pub store: bool,
    /// True if frames are lost and repeated.
    pub hostile: bool,
    /// True if saves can fail.
    pub failing: bool,
    /// Frequencies of unplanned faults.
    pub faults: FaultFrequencies,
    /// The planned actions with their times.
    pub plan: Vec<(Time, MembershipAction)>,
    /// Time at which all faults end: daemons are restarted, links mended.
    pub faults_end: Time,
    /// As in [`MembershipPlanDistribution::lease_deadline`].
    pub lease_deadline: Time,
    /// As in [`MembershipPlanDistribution::agreement_deadline`].
    pub agreement_deadline: Time,
    /// The deliberate bug, if any.
    pub bug: Option<MembershipBug>,
}

/// A planned action. Nodes are indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MembershipAction {
    /// A node's daemon dies. The disk stays, and so does the lease in the kernel.
    Crash(usize),
    /// A node's daemon restarts.
    Restart(usize),
    /// Frames from one node to another are lost.
    Cut(usize, usize),
    /// Frames from one node to another pass again.
    Mend(usize, usize),
    /// Frames from and to a node are lost.
    Isolate(usize),
    /// Frames from and to a node pass again.
    Reconnect(usize),
    /// Frames between nodes with and without a bit of this mask are lost.
    Partition(u32),
    /// Frames between all nodes pass again.
    MendAll,
    /// A daemon is stopped, and handles nothing for a time.
    Stop(usize, Time),
    /// A node leaves the group.
    Leave(usize),
    /// An operator removes a node, chosen by a random number.
    Remove {
        /// Random number that chooses the node to remove.
        draw: u64,
    },
    /// An operator promotes a backup, chosen by a random number.
    Promote {
        /// Random number that chooses the backup to promote.
        draw: u64,
    },
    /// An operator changes the group's settings at a random node.
    GroupData {
        /// Random number that chooses the node of the change.
        draw: u64,
    },
    /// A handoff to a server node fails, chosen by a random number.
    ServerNodeFailed {
        /// Random number that chooses the server node that failed.
        draw: u64,
    },
    /// The store of views loses its majority.
    StoreFails,
    /// The store of views has a majority again.
    StoreReturns,
    /// A node does not reach the store of views.
    StoreCut(usize),
    /// A node reaches the store of views again.
    StoreMended(usize),
}

impl fmt::Display for MembershipAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            MembershipAction::Crash(node) => write!(f, "the daemon of n{} crashes", node + 1),
            MembershipAction::Restart(node) => write!(f, "the daemon of n{} restarts", node + 1),
            MembershipAction::Cut(from, to) => {
                write!(f, "frames from n{} to n{} are lost", from + 1, to + 1)
            }
            MembershipAction::Mend(from, to) => {
                write!(f, "frames from n{} to n{} pass again", from + 1, to + 1)
            }
            MembershipAction::Isolate(node) => write!(f, "n{} is isolated", node + 1),
            MembershipAction::Reconnect(node) => write!(f, "n{} is reconnected", node + 1),
            MembershipAction::Partition(mask) => write!(f, "the group is parted by {mask:b}"),
            MembershipAction::MendAll => write!(f, "all links are mended"),
            MembershipAction::Stop(node, time) => {
                let ms = time.as_secs_f64() * 1e3;
                write!(f, "the daemon of n{} is stopped for {ms:.0} ms", node + 1)
            }
            MembershipAction::Leave(node) => write!(f, "n{} leaves", node + 1),
            MembershipAction::Remove { draw } => {
                write!(f, "an operator removes a node (draw {draw:x})")
            }
            MembershipAction::Promote { draw } => {
                write!(f, "an operator promotes a backup (draw {draw:x})")
            }
            MembershipAction::GroupData { draw } => {
                write!(f, "an operator changes the settings (draw {draw:x})")
            }
            MembershipAction::ServerNodeFailed { draw } => {
                write!(f, "a handoff to a server node fails (draw {draw:x})")
            }
            MembershipAction::StoreFails => write!(f, "the store of views has no majority"),
            MembershipAction::StoreReturns => write!(f, "the store of views has a majority"),
            MembershipAction::StoreCut(node) => write!(f, "n{} loses the store", node + 1),
            MembershipAction::StoreMended(node) => write!(f, "n{} reaches the store", node + 1),
        }
    }
}

/// Derives a config from a setting and a seed.
#[must_use]
pub fn draw_run_config(
    setting: &MembershipPlanDistribution,
    seed: u64,
    bug: Option<MembershipBug>,
) -> MembershipRunConfig {
    // Use a random stream other than the world's.
    let mut random = Random::new(seed ^ 0x5eed_5eed_5eed_5eed);
    let voters = setting.voters.draw(&mut random);
    let server_nodes = setting.server_nodes.draw(&mut random);
    let drift_ppm = match bug {
        Some(MembershipBug::ClocksDrift) => 400_000,
        _ => u64::from(setting.clock_drift_ppm),
    };
    let drift = |_| random.between(0, 2 * drift_ppm + 1) as i64 - drift_ppm as i64;
    let clock_drifts_ppm = (0..voters + server_nodes).map(drift).collect();
    let impatient = random.chance(setting.impatient);
    let hostile = random.chance(setting.faults.hostile);
    let failing = random.chance(setting.faults.failing);
    let mut planner = Planner {
        setting,
        nodes: voters + server_nodes,
        random,
        plan: Vec::new(),
    };
    for _ in 0..setting.incidents.draw(&mut planner.random) {
        planner.add_incident();
    }
    let guest = planner.random.chance(setting.guest);
    // Groups that vote have the same plans with any store.
    planner.random = Random::new(seed ^ 0x0005_704e_0000_0000);
    let store = planner.random.chance(setting.store);
    if store {
        for _ in 0..setting.incidents.draw(&mut planner.random) {
            planner.add_store_incident();
        }
    }
    let mut plan = planner.plan;
    plan.sort_by_key(|(at, _)| *at);
    MembershipRunConfig {
        voters,
        server_nodes,
        clock_drifts_ppm,
        impatient,
        guest,
        store,
        hostile,
        failing,
        faults: setting.faults,
        plan,
        faults_end: setting.runtime,
        lease_deadline: setting.lease_deadline,
        agreement_deadline: setting.agreement_deadline,
        bug,
    }
}

struct Planner<'a> {
    setting: &'a MembershipPlanDistribution,
    nodes: usize,
    random: Random,
    plan: Vec<(Time, MembershipAction)>,
}

impl Planner<'_> {
    /// Adds the actions of one incident, which begin at about the same time.
    fn add_incident(&mut self) {
        let setting = self.setting;
        let at = self.random_time_within(Time::ZERO, setting.runtime);
        let node = self.random.below(self.nodes);
        let other = (node + 1 + self.random.below(self.nodes.max(2) - 1)) % self.nodes;
        let mask = self.random.number() as u32;
        // A supervisor restarts a daemon at once, an operator later.
        let restart_within = Time::from_secs_f64(if self.random.chance(0.5) { 0.1 } else { 1.0 });
        let mend_within = Time::from_secs_f64(1.5);
        let faults = [
            (
                setting.crash,
                MembershipAction::Crash(node),
                MembershipAction::Restart(node),
                restart_within,
            ),
            (
                setting.cut,
                MembershipAction::Cut(node, other),
                MembershipAction::Mend(node, other),
                mend_within,
            ),
            (
                setting.isolate,
                MembershipAction::Isolate(other),
                MembershipAction::Reconnect(other),
                mend_within,
            ),
            (
                setting.partition,
                MembershipAction::Partition(mask),
                MembershipAction::MendAll,
                mend_within,
            ),
        ];
        for (chance, begins, ends, within) in faults {
            if self.random.chance(chance) {
                let begin = self.random_time_within(at, setting.action_delay_max);
                let end = self.random_time_within(begin, within);
                self.plan.push((begin, begins));
                self.plan.push((end, ends));
            }
        }
        let stop_time = Time::from_micros(self.random.between(20_000, 600_000));
        let [remove, promote, data, failed] = [(); 4].map(|()| self.random.number());
        let actions = [
            (setting.stop, MembershipAction::Stop(other, stop_time)),
            (setting.leave, MembershipAction::Leave(node)),
            (setting.remove, MembershipAction::Remove { draw: remove }),
            (setting.promote, MembershipAction::Promote { draw: promote }),
            (
                setting.group_data,
                MembershipAction::GroupData { draw: data },
            ),
            (
                setting.server_node_failed,
                MembershipAction::ServerNodeFailed { draw: failed },
            ),
        ];
        for (chance, action) in actions {
            if self.random.chance(chance) {
                let at = self.random_time_within(at, setting.action_delay_max);
                self.plan.push((at, action));
            }
        }
    }

    /// Adds faults of the store of views.
    fn add_store_incident(&mut self) {
        let at = self.random_time_within(Time::ZERO, self.setting.runtime);
        let node = self.random.below(self.nodes);
        let faults = [
            (
                self.setting.store_down,
                MembershipAction::StoreFails,
                MembershipAction::StoreReturns,
            ),
            (
                self.setting.store_cut,
                MembershipAction::StoreCut(node),
                MembershipAction::StoreMended(node),
            ),
        ];
        for (chance, begins, ends) in faults {
            if self.random.chance(chance) {
                let end = self.random_time_within(at, Time::from_secs_f64(1.5));
                self.plan.extend([(at, begins), (end, ends)]);
            }
        }
    }

    /// Returns a random time up to `time` after `from`, but not after the end of all faults.
    fn random_time_within(&mut self, from: Time, time: Time) -> Time {
        let at = from + Time(self.random.between(0, time.0.max(1)));
        at.min(self.setting.runtime)
    }
}
