//! `holdfast bench handlespace`: operations per second on a registrar's handlespace, without a network.
//!
//! The six operations of paper 001 section 3.1, with registration and deregistration measured apart: at steady size, on
//! elements in random order, with least-used loads in sixteen levels that change with every re-registration. Batches
//! are prepared outside the measured time. Every operation finds its pool and element by handle and id; registration
//! sets a timer; a restarted timer is restarted three times in its life, while the virtual time advances. On our
//! handlespace, operations by handle are announced ahead ([`expect`](holdfast_handlespace::Handlespace::announce_operation)), as
//! `rserpoold` announces the messages of one receive call; rsplib has no such call.

mod batch_times;
mod handlespace_under_test;
mod operations;
mod rsplib;
mod workload;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;

use operations::{HandlespaceBench, HandlespaceOperation};
use rsplib::Rsplib;
use workload::PolicyName;

/// Flags of `holdfast bench handlespace`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Holdfast's handlespace learns the handle of each operation some operations ahead, as from a registrar \
that has received several messages at once; rsplib has no such call.

Examples:
  holdfast bench handlespace --elements 1000,100000 --policy RR,LU
  holdfast bench handlespace --peer rsplib --peer-prefix /usr/local --json rows.json"
)]
pub struct HandlespaceArgs {
    /// Pool elements; several numbers, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1000,10000,100000,1000000"
    )]
    elements: Vec<u32>,
    /// Pools that the elements are spread over; several numbers. Combinations with fewer than ten elements per pool are
    /// skipped.
    #[arg(long, value_delimiter = ',', default_value = "1,10000")]
    pools: Vec<u32>,
    /// Policies, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "RR,WRR,RAND,WRAND,LU,LU-DPF"
    )]
    policy: Vec<PolicyName>,
    /// Operations, separated by commas; all by default.
    #[arg(long, value_delimiter = ',')]
    operation: Vec<HandlespaceOperation>,
    /// Time for which each operation is measured in a round, milliseconds.
    #[arg(long, default_value_t = 60)]
    milliseconds: u64,
    /// Rounds; the best one counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measure this handlespace too, with the same workload in the same run, if installed.
    #[arg(long)]
    peer: Option<ComparedImplementation>,
    /// Directory in which rsplib is installed.
    #[arg(long, value_name = "DIR", default_value = "/usr")]
    peer_prefix: PathBuf,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Result of one operation on one handlespace.
#[derive(Clone, Debug, Serialize)]
pub struct HandlespaceRow {
    policy: &'static str,
    elements: u32,
    pools: u32,
    operation: HandlespaceOperation,
    /// Operations per second; for `synchronize`, elements per second.
    ops_per_s: f64,
    ns_median: f64,
    bytes_per_element: f64,
    /// Implementation of the handlespace, if not ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<ComparedImplementation>,
}

/// Implementations of the handlespace to compare ours with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComparedImplementation {
    /// The handlespace management of rsplib 3.5.
    Rsplib,
}

#[derive(Serialize)]
struct HandlespaceReport<'a> {
    bench: &'static str,
    /// The machine's setting for transparent huge pages.
    huge_pages: &'a str,
    rows: &'a [HandlespaceRow],
}

/// Runs `holdfast bench handlespace`: measures operations on a registrar's handlespace.
///
/// # Errors
/// The flags leave nothing to measure, or the file cannot be written.
pub fn run(args: &HandlespaceArgs) -> Result<()> {
    ensure!(
        args.rounds > 0 && args.milliseconds > 0,
        "--rounds and --milliseconds must be at least 1"
    );
    ensure!(
        args.elements.iter().all(|&elements| elements > 0),
        "--elements must be at least 1"
    );
    ensure!(
        args.pools.iter().all(|&pools| pools > 0),
        "--pools must be at least 1"
    );
    restart_with_huge_pages()?;
    let peer = args
        .peer
        .map(|_| Rsplib::new(&args.peer_prefix))
        .transpose()?;
    let huge_pages = huge_page_setting();
    println!("huge pages: {huge_pages}");
    let mut rows = Vec::new();
    println!("{}", heading(selected_operations(args)));
    for &policy in &args.policy {
        for &elements in &args.elements {
            for &pools in &args.pools {
                if pools == 1 || elements / pools >= 10 {
                    let rows_of_size = measure(args, policy, elements, pools);
                    println!("{}", rows_line(&rows_of_size));
                    rows.extend(rows_of_size);
                    if let Some(peer) = &peer {
                        let peer_rows = peer.measure(args, policy, elements, pools)?;
                        println!("{}", rows_line(&peer_rows));
                        rows.extend(peer_rows);
                    }
                }
            }
        }
    }
    if let Some(path) = &args.json {
        let report = HandlespaceReport {
            bench: "handlespace",
            huge_pages: &huge_pages,
            rows: &rows,
        };
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Restarts the program with an allocator that asks for huge pages, for us and a peer alike: otherwise more time passes
/// in the processor's page tables than in any handlespace. Existing glibc tunables of the user are kept.
fn restart_with_huge_pages() -> Result<()> {
    const TUNABLES: &str = "GLIBC_TUNABLES";
    if std::env::var_os(TUNABLES).is_some() {
        return Ok(());
    }
    let mut restarted = Command::new(std::env::current_exe()?);
    restarted.args(std::env::args_os().skip(1));
    let error = restarted.env(TUNABLES, "glibc.malloc.hugetlb=1").exec();
    Err(error).context("restart with huge pages")
}

/// Returns the kernel's setting for transparent huge pages: given on request (`always` or `madvise`) or not at all
/// (`never`, `unknown`).
fn huge_page_setting() -> String {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let setting = setting.unwrap_or_default();
    let chosen = setting.split(['[', ']']).nth(1);
    chosen.unwrap_or("unknown").to_owned()
}

fn measure(
    args: &HandlespaceArgs,
    policy: PolicyName,
    elements: u32,
    pools: u32,
) -> Vec<HandlespaceRow> {
    eprintln!("{}, {elements} elements in {pools} pools", policy.name());
    let mut bench = HandlespaceBench::new(policy, elements, pools);
    let mut best: Vec<HandlespaceRow> = Vec::new();
    for _ in 0..args.rounds {
        for (index, &operation) in selected_operations(args).iter().enumerate() {
            let duration = Duration::from_millis(args.milliseconds);
            let mut samples = bench.measure(operation, duration);
            let row = HandlespaceRow {
                policy: policy.name(),
                elements,
                pools,
                operation,
                ops_per_s: samples.per_second(),
                ns_median: samples.ns_median(),
                bytes_per_element: bench.bytes_per_element(),
                peer: None,
            };
            match best.get_mut(index) {
                Some(old) if old.ops_per_s < row.ops_per_s => *old = row,
                Some(_) => {}
                None => best.push(row),
            }
        }
    }
    best
}

fn selected_operations(args: &HandlespaceArgs) -> &[HandlespaceOperation] {
    if args.operation.is_empty() {
        HandlespaceOperation::value_variants()
    } else {
        &args.operation
    }
}

fn heading(operations: &[HandlespaceOperation]) -> String {
    let mut text = format!("{:<9} {:>8} {:>6}", "policy", "elements", "pools");
    for operation in operations {
        let operation = operation.to_possible_value();
        let operation = operation.as_ref().map_or("", |value| value.get_name());
        text += &format!(" {operation:>13}");
    }
    text + "  bytes   (thousand operations per second)"
}

fn rows_line(rows: &[HandlespaceRow]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let mut text = format!(
        "{:<9} {:>8} {:>6}",
        first.policy, first.elements, first.pools
    );
    for row in rows {
        text += &format!(" {:>13.0}", row.ops_per_s / 1e3);
    }
    let peer = first.peer.map_or("", |_| "  rsplib");
    text + &format!(" {:>6.0}{peer}", first.bytes_per_element)
}
