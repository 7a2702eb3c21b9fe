//! `GET /v1/load`, and the loads that programs report.
//!
//! Unit of processor time: thousandths of a processor.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Answer of `GET /v1/load`: the load of this node and of its processes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeLoadStatus {
    /// Name of this node.
    pub node: String,
    /// Load of the whole node; none in the first seconds after the daemon's start.
    pub load: Option<NodeLoadEntry>,
    /// Loads of the processes, each with its descendants: programs with a session, servers that listen at TCP services,
    /// processes that were moved here, and processes with a report. By PID.
    pub processes: Vec<ProcessLoadEntry>,
    /// Valid reports.
    pub reports: Vec<LoadReportEntry>,
}

/// Load of a node over the last second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeLoadEntry {
    /// The load that pool policies compare, 0 to 1: the greatest of the demand as a share of the capacity (a mean over the
    /// last seconds), the used part of the flow table, and reported values as shares of the value at which a subject is
    /// full.
    pub load: f64,
    /// Processor time used.
    pub cpu_millis: u32,
    /// Demand for processor time: the time used, and up to as much again if processes wait on a busy node.
    pub demand_millis: u32,
    /// Processors that the node has: the online ones, or fewer by the quota of its control group.
    pub capacity_millis: u32,
    /// Share of the time in which some process waited for a processor, in thousandths.
    pub waiting_millis: u32,
    /// Memory in use without files that the kernel can drop, in KiB; none if the kernel counts none for this host.
    pub memory_used_kib: Option<u64>,
    /// Memory that processes can still get, in KiB.
    pub memory_free_kib: u64,
    /// Bytes that the node's interface received in a second.
    pub received_bytes_s: u64,
    /// Bytes that the node's interface sent in a second.
    pub sent_bytes_s: u64,
    /// Flows of services that the node owns.
    pub flows: u32,
    /// Flows that the node has room for.
    pub flow_capacity: u32,
}

/// Load of a process with its descendants, over the time since its last measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessLoadEntry {
    /// The PID on this node.
    pub pid: i32,
    /// Name of the program, as the kernel has it.
    pub name: String,
    /// Processor time used.
    pub cpu_millis: u32,
    /// Demand for processor time; the demands of all processes of a node add up to the node's.
    pub demand_millis: u32,
    /// Mean number of threads that were ready and waited for a processor, in thousandths.
    pub waiting_millis: u32,
    /// Memory of the process and its descendants, in KiB.
    pub memory_kib: u64,
    /// Number of processes.
    pub processes: u32,
    /// Number of threads.
    pub threads: u32,
    /// Number of clients, if the process is a server.
    pub clients: Option<u64>,
}

/// Body of `POST /v1/load/reports`: a load that only a program itself knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadReportRequest {
    /// Name of the load: 1 to 32 of `a-z`, `0-9` and `_`, beginning with a letter.
    pub name: String,
    /// The value, 0 to 2^53, in the reporter's unit.
    pub value: f64,
    /// Value at which the process takes no more load. With it the report counts in the load of the node.
    #[serde(default)]
    pub full_at: Option<f64>,
    /// The process that the report is about; none for the node as a whole. An ordinary user must name an own process.
    #[serde(default)]
    pub pid: Option<i32>,
    /// Validity in seconds, 1 to 86400; 30 if absent.
    #[serde(default)]
    pub for_s: Option<u64>,
}

/// A valid report. Answer of `POST /v1/load/reports`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LoadReportEntry {
    /// Name of the load.
    pub name: String,
    /// The process that the report is about; none for the node as a whole.
    pub pid: Option<i32>,
    /// The value, in the reporter's unit.
    pub value: f64,
    /// Value at which the process takes no more load.
    pub full_at: Option<f64>,
    /// Seconds until the report ends, unless it is repeated.
    pub ends_in_s: u64,
}

/// Body of `POST /v1/load/withdraw`: the report to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadWithdrawRequest {
    /// Name of the load.
    pub name: String,
    /// The process that the report is about; none for the node as a whole.
    #[serde(default)]
    pub pid: Option<i32>,
}

/// Answer of `POST /v1/load/withdraw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoadWithdrawn {
    /// False if there was no such report.
    pub was_valid: bool,
}
