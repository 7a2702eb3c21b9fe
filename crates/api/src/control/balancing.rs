//! `/v1/drain`, `/v1/undrain` and `/v1/balance`: the conductor of a node. The same below `/v1/nodes/{name}` for drains.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Body of `POST /v1/drain`: moves everything off the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// Seconds after which the drain ends: what is left then stays.
    #[serde(default)]
    pub deadline_s: Option<u64>,
}

/// A drain of a node. Answer of `GET` and `POST /v1/drain`, and of `POST /v1/undrain`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DrainReport {
    /// Name of the node.
    pub node: String,
    /// State of the drain.
    pub state: DrainState,
    /// True if nothing is left at the node that clients need: the host may be rebooted.
    pub safe_to_reboot: bool,
    /// Number of processes that have left.
    pub moved: u64,
    /// Number of processes that can move and have not left.
    pub remaining: u64,
    /// Processes that cannot move, and go on serving here.
    pub stuck: Vec<StuckProcess>,
    /// Connections of server programs with a session, which are handed off, that are still here.
    pub connections: u64,
    /// All connections of the group's services that are served here.
    #[serde(default)]
    pub flows: u64,
    /// Reasons why connections of server programs with a session stay.
    pub connections_kept: Vec<String>,
    /// The latest moves of the drain, the latest last.
    pub moves: Vec<DrainedProcess>,
    /// Estimated seconds until all processes that can move have left.
    pub estimate_s: f64,
    /// Seconds until the deadline, if there is one.
    pub deadline_s: Option<u64>,
    /// Reason why no process moves at present, if processes wait.
    pub waiting: Option<String>,
    /// Further facts that an operator should know before a reboot.
    pub notes: Vec<String>,
}

/// State of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrainState {
    /// The node is not being drained.
    #[default]
    Off,
    /// Processes or connections are leaving, or wait for room.
    Draining,
    /// Nothing more leaves: all is gone that can move, or the deadline has passed. The node takes nothing until
    /// `POST /v1/undrain`.
    Ended,
}

/// A process that cannot move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StuckProcess {
    /// PID of the process on this node.
    pub pid: i32,
    /// The process's name (`comm`).
    pub name: String,
    /// The reasons, as `holdfast check` gives them.
    pub reasons: Vec<String>,
}

/// A move of a drain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DrainedProcess {
    /// Number of the move, from 1.
    pub number: u64,
    /// PID of the process on this node.
    pub pid: i32,
    /// The process's name (`comm`).
    pub name: String,
    /// Name of the node that took the process, or refused it.
    pub to: String,
    /// Time for which the process stood still, in microseconds; none if it stayed.
    pub freeze_us: Option<f64>,
    /// Reason for which the process stayed, if the move failed.
    pub failure: Option<String>,
}

/// Body of `POST /v1/balance`: whether this node gives and takes processes to even out loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BalanceRequest {
    /// True to balance.
    pub on: bool,
}

/// Body of `POST /v1/balance/pins`: whether a process stays at this node, whatever the loads are, and also when the node is
/// drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PinRequest {
    /// PID of a process that serves the group, on this node.
    pub pid: i32,
    /// True to pin the process, false to free it.
    pub pinned: bool,
}

/// Loads of the group as this node knows them. Answer of `GET` and `POST /v1/balance`, and of `POST /v1/balance/pins`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalanceStatus {
    /// True if this node gives and takes processes to even out loads.
    pub on: bool,
    /// Mean load of the known nodes that take processes, in percent of their capacity.
    pub average_percent: Option<f64>,
    /// The nodes whose loads are known, this one first.
    pub nodes: Vec<KnownNodeLoad>,
    /// The managed processes of this node.
    pub processes: Vec<ManagedProcessEntry>,
}

/// Load of a node, as another node knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KnownNodeLoad {
    /// Name of the node.
    pub name: String,
    /// Load in percent of the capacity; more than 100 if processes wait for a processor.
    pub load_percent: f64,
    /// Capacity in thousandths of a processor.
    pub capacity: u32,
    /// Milliseconds since the measurement.
    pub age_ms: u32,
    /// False if the node takes no processes, because it is being drained.
    pub is_open: bool,
}

/// A process that this node may move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ManagedProcessEntry {
    /// PID of the process on this node.
    pub pid: i32,
    /// The process's name (`comm`).
    pub name: String,
    /// Use of processors, in thousandths of a processor.
    pub used: u32,
    /// Memory, in KiB.
    pub memory_kib: u64,
    /// True if the process has moved here.
    pub has_moved_here: bool,
    /// True if the process stays here, whatever the loads are, and also when the node is drained.
    #[serde(default)]
    pub pinned: bool,
    /// Reason for which the process cannot move, if it has been checked and cannot.
    pub blocked: Option<String>,
}

/// The move that this node would make now to even out loads, or has just begun. Answer of `GET /v1/balance/plan` and
/// `POST /v1/balance/now`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalancePlan {
    /// The move; none if no process moves.
    pub planned: Option<PlannedMoveEntry>,
    /// Reason for which no process moves.
    pub reason: Option<String>,
    /// Reasons by process, where each process has one.
    pub obstacles: Vec<ObstacleEntry>,
}

/// A move and its predicted effect. Loads are in percent of a node's capacity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedMoveEntry {
    /// PID of the process on this node; none if the process has left.
    pub pid: Option<i32>,
    /// The process's name (`comm`).
    pub name: String,
    /// Name of the acceptor.
    pub to: String,
    /// `balance` or `drain`.
    pub purpose: String,
    /// Mean load of the known nodes.
    pub average_percent: f64,
    /// Load of this node before the move.
    pub donor_before_percent: f64,
    /// Predicted load of this node.
    pub donor_after_percent: f64,
    /// Load of the acceptor before the move.
    pub acceptor_before_percent: f64,
    /// Predicted load of the acceptor.
    pub acceptor_after_percent: f64,
}

/// A process that does not move, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ObstacleEntry {
    /// PID of the process on this node; none if the process has left.
    pub pid: Option<i32>,
    /// The process's name (`comm`).
    pub name: String,
    /// Reason why the process does not move.
    pub reason: String,
}

/// Answer of `GET /v1/balance/log`: the latest decisions of this node's conductor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalanceLog {
    /// The decisions, the latest last.
    pub records: Vec<BalanceLogEntry>,
}

/// One offer of a process, given or taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalanceLogEntry {
    /// Seconds since the end of the offer.
    pub age_s: u64,
    /// Duration of the negotiation and the move, in milliseconds.
    pub duration_ms: u64,
    /// `gives` or `takes`.
    pub role: String,
    /// The process's name (`comm`), if this node knew it.
    pub name: String,
    /// Name of the other node.
    pub peer: String,
    /// `balance` or `drain`.
    pub purpose: String,
    /// Load of this node before, in percent.
    pub before_percent: f64,
    /// Predicted load of this node afterwards.
    pub predicted_percent: f64,
    /// Load of this node once it had settled, if observed.
    pub observed_percent: Option<f64>,
    /// The end: `moved`, or the reason for which the process did not move.
    pub outcome: String,
}
