//! `holdfast bench group`: faults of the contact node in a group that runs itself, as clients see them.
//!
//! In each repeat, long connections exchange messages with servers at all nodes but the contact node, and new clients
//! come at a steady rate. The *client gap* is the longest round trip of a probe connection, minus the median one; one
//! probe runs at each owner. The *accept gap* is the longest time from the start of a new client until that client, or
//! a later one, has its answer: the wait of a client that tries again all the time.

mod clients_during_fault;
mod etcd_faults;
mod fault_group;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_testbed::stats::Quantiles;
use serde::Serialize;

pub use clients_during_fault::FaultSample;
pub use etcd_faults::EtcdFault;
pub use fault_group::{Fault, FaultGroup};

/// Flags of `holdfast bench group`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  holdfast bench group --faults contact_host_lost --repeats 5
  holdfast bench group --json group.json")]
pub struct GroupArgs {
    /// Faults; several, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Fault::ALL)]
    faults: Vec<Fault>,
    /// Repeats of each fault
    #[arg(long, default_value_t = 20)]
    repeats: usize,
    /// Long connections
    #[arg(long, default_value_t = 500)]
    connections: usize,
    /// Write the rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Result of all repeats of a fault.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupRow {
    /// Name of the fault.
    pub fault: &'static str,
    /// Number of repeats.
    pub repeats: usize,
    /// Median of the accept gaps, milliseconds.
    pub accept_gap_ms_median: f64,
    /// Longest accept gap, milliseconds.
    pub accept_gap_ms_max: f64,
    /// Median of the client gaps, milliseconds.
    pub client_gap_ms_median: f64,
    /// Longest client gap, milliseconds.
    pub client_gap_ms_max: f64,
    /// Connections that were reset or refused, or that ended.
    pub resets: u64,
    /// Bytes that differed from the expected ones or never came.
    pub bytes_wrong: u64,
    /// New views of the group between the faults and their ends.
    pub views: u64,
}

#[derive(Serialize)]
struct GroupReport {
    bench: &'static str,
    connections: usize,
    rows: Vec<GroupRow>,
}

/// Runs `holdfast bench group`: measures what clients see of each fault of the contact node.
///
/// # Errors
/// The lab or a program in it fails, or the group does not recover from a fault.
pub fn run(args: &GroupArgs) -> Result<()> {
    let group = FaultGroup::up("bench-group")?;
    println!("{}", GroupRow::heading());
    let mut rows = Vec::new();
    for fault in &args.faults {
        let row = measure(&group, *fault, args.repeats, args.connections)?;
        println!("{row}");
        rows.push(row);
    }
    let Some(file) = &args.json else {
        return Ok(());
    };
    let report = GroupReport {
        bench: "group",
        connections: args.connections,
        rows,
    };
    std::fs::write(file, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("write {}", file.display()))
}

/// Repeats a fault and returns the row of all repeats.
///
/// # Errors
/// A program fails, or the group does not recover.
pub fn measure(
    group: &FaultGroup,
    fault: Fault,
    repeats: usize,
    connections: usize,
) -> Result<GroupRow> {
    let samples = (0..repeats).map(|repeat| {
        let sample = group.run_fault(fault, connections);
        sample.with_context(|| format!("{}, repeat {repeat}", fault.name()))
    });
    let samples = samples.collect::<Result<Vec<_>>>()?;
    Ok(GroupRow::new(fault, &samples))
}

impl GroupRow {
    /// Returns the row of the samples of a fault.
    #[must_use]
    pub fn new(fault: Fault, samples: &[FaultSample]) -> GroupRow {
        let gaps = |gap: fn(&FaultSample) -> Duration| {
            let ms = samples.iter().map(|sample| gap(sample).as_secs_f64() * 1e3);
            Quantiles::new(ms.collect())
        };
        let sum = |count: fn(&FaultSample) -> u64| samples.iter().map(count).sum();
        let (accept, client) = (
            gaps(|sample| sample.accept_gap),
            gaps(|sample| sample.client_gap),
        );
        GroupRow {
            fault: fault.name(),
            repeats: samples.len(),
            accept_gap_ms_median: accept.median(),
            accept_gap_ms_max: accept.quantile(1.0),
            client_gap_ms_median: client.median(),
            client_gap_ms_max: client.quantile(1.0),
            resets: sum(|sample| sample.resets),
            bytes_wrong: sum(|sample| sample.bytes_wrong),
            views: sum(|sample| sample.views),
        }
    }

    fn heading() -> String {
        format!(
            "{:<26} {:>7} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6} {:>6}",
            "fault", "repeats", "accept_ms", "max", "client_ms", "max", "resets", "wrong", "views"
        )
    }
}

impl std::fmt::Display for GroupRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<26} {:>7} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>6} {:>6} {:>6}",
            self.fault,
            self.repeats,
            self.accept_gap_ms_median,
            self.accept_gap_ms_max,
            self.client_gap_ms_median,
            self.client_gap_ms_max,
            self.resets,
            self.bytes_wrong,
            self.views
        )
    }
}
