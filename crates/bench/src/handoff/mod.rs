//! `holdfast bench handoff`: the cost of handing off live connections.
//!
//! The *freeze* is the time from the last instant at which the donor's socket can act to the first instant at which the
//! acceptor's can. The *client gap* is the longest round trip of a probe, minus the median one.
//!
//! The nodes are namespaces of one kernel, so a freeze (from the donor's switch to the acceptor's wake-up) is the
//! difference of two readings of one clock. Resets and retransmissions are the kernels' own counters, summed over every
//! host.

mod full_send_queue_rows;
mod small_message_rows;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::Drain;
use holdfast_api::control::{
    FlowFilter, FlowListQuery, FlowOutcome, FlowSelection, HandoffRequest, HandoffState,
    HandoffStatus,
};
use serde::Serialize;

use holdfast_testbed::cluster::Cluster;
use holdfast_testbed::stats::{Quantiles, nanoseconds_to_us};

/// Nodes that the connections move between; the holder is a third node, so every frame takes its full way.
const SERVER_NODES: [&str; 2] = ["n2", "n3"];

/// Time limit for one handoff of all connections.
const HANDOFF_TIMEOUT: Duration = Duration::from_secs(60);

/// Flags of `holdfast bench handoff`.
#[derive(Debug, clap::Args)]
pub struct HandoffArgs {
    /// Connections that move at once; several numbers, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,64,1024,10000")]
    connections: Vec<usize>,
    /// Handoffs of all connections, back and forth; by default fewer for more connections.
    #[arg(long)]
    repeats: Option<usize>,
    /// Leave out the rows with full send queues over a 100 Mbit/s link.
    #[arg(long)]
    no_full_queue: bool,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Duration of a handoff's phases, microseconds: `divert` to `commit` follow one another; the freeze is the sum from
/// `extract` on.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct HandoffPhasesUs {
    prepare: f64,
    divert: f64,
    extract: f64,
    transfer: f64,
    restore: f64,
    commit: f64,
}

/// Result of one measurement.
#[derive(Debug, Clone, Serialize)]
pub struct HandoffRow {
    connections: usize,
    repeats: usize,
    freeze_us_median: f64,
    freeze_us_p99: f64,
    freeze_us_per_connection: f64,
    client_gap_us_median: f64,
    client_gap_us_p99: f64,
    /// `None` if no probe ran.
    control_gap_us_median: Option<f64>,
    control_gap_us_p99: Option<f64>,
    total_ms: f64,
    phases_us: HandoffPhasesUs,
    bytes_transferred: f64,
    send_queue: f64,
    drained: bool,
    resets: u64,
    retransmits: u64,
    loss_probes: u64,
    timeouts: u64,
    bytes_verified: u64,
    bytes_wrong: u64,
}

#[derive(Serialize)]
struct HandoffReport {
    bench: &'static str,
    rows: Vec<HandoffRow>,
}

/// Runs `holdfast bench handoff`: measures handoffs of each number of connections.
///
/// # Errors
/// The lab or a program in it fails, or a handoff does not end.
pub fn run(args: &HandoffArgs) -> Result<()> {
    let mut rows = Vec::new();
    println!("{}", HandoffRow::heading());
    for connections in &args.connections {
        let repeats = args.repeats.unwrap_or(match connections {
            0..=8 => 40,
            9..=256 => 20,
            257..=2048 => 10,
            _ => 4,
        });
        let row = small_message_rows::run(*connections, repeats)?;
        println!("{row}");
        rows.push(row);
    }
    if !args.no_full_queue {
        for (connections, drained) in [(1, false), (1, true), (8, false), (8, true)] {
            let row = full_send_queue_rows::run(connections, drained)?;
            println!("{row}");
            rows.push(row);
        }
    }
    println!(
        "paper 000, one connection of 90 kB over 100 Mbit/s: 10.6 ms for extract, transfer, re-create and activate"
    );
    if let Some(file) = &args.json {
        let report = HandoffReport {
            bench: "handoff",
            rows,
        };
        std::fs::write(file, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

/// Results of one handoff of all connections.
pub struct HandoffSample {
    status: HandoffStatus,
    /// Freeze of each connection, microseconds.
    freezes_us: Vec<f64>,
}

/// Hands all flows of a pool from one node to another, and waits for the end.
fn hand_off_pool(
    cluster: &Cluster,
    pool: &str,
    from: &str,
    to: &str,
    drain: Drain,
) -> Result<HandoffSample> {
    let donor = cluster.blocking_control_client(from)?;
    let selection = FlowSelection::AllOf(FlowFilter {
        pool: Some(pool.to_owned()),
        ..FlowFilter::default()
    });
    let request = HandoffRequest {
        selection,
        to: to.to_owned(),
        drain,
    };
    let id = donor
        .run(async |client| client.hand_off(&request).await)?
        .id;
    let started = Instant::now();
    loop {
        let list = donor.run(async |client| client.handoffs().await)?;
        let is_finished = |state: HandoffState| state == HandoffState::Finished;
        if list
            .handoffs
            .iter()
            .any(|summary| summary.id == id && is_finished(summary.state))
        {
            break;
        }
        if started.elapsed() > HANDOFF_TIMEOUT {
            bail!(
                "exceeded time: the handoff from {from} to {to} did not end in {HANDOFF_TIMEOUT:?}"
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // The daemon reports the times of the last batch right after its outcomes.
    std::thread::sleep(Duration::from_millis(20));
    let status = donor.run(async |client| client.handoff(id).await)?;
    let acceptor = cluster.blocking_control_client(to)?;
    let query = FlowListQuery {
        limit: Some(1_000_000),
        ..FlowListQuery::default()
    };
    let flows = acceptor
        .run(async |client| client.flows(&query).await)?
        .flows;
    let flows_taken: std::collections::HashMap<_, _> = flows
        .into_iter()
        .filter_map(|entry| Some((entry.flow.to_string(), entry.taken_at_ns?)))
        .collect();
    let freezes_us = status
        .results
        .iter()
        .filter_map(|result| {
            Some((
                result.frozen_at_ns?,
                *flows_taken.get(&result.flow.to_string())?,
            ))
        })
        .map(|(frozen, active)| nanoseconds_to_us(active.saturating_sub(frozen)))
        .collect();
    for result in &status.results {
        if let FlowOutcome::Kept { reason, .. } = &result.outcome {
            bail!("{} stayed at {from}: {reason}", result.flow);
        }
    }
    Ok(HandoffSample { status, freezes_us })
}

/// Returns the freeze time per connection: the sum of the batches' longest freezes divided by the connections. Flows
/// with the same freeze instant are one batch.
fn freeze_us_per_connection(samples: &[HandoffSample]) -> f64 {
    let mut total = 0.0;
    let mut connections = 0;
    for sample in samples {
        let mut batches = std::collections::BTreeMap::new();
        for (result, freeze) in sample.status.results.iter().zip(&sample.freezes_us) {
            let longest = batches.entry(result.frozen_at_ns).or_insert(0.0f64);
            *longest = longest.max(*freeze);
        }
        total += batches.values().sum::<f64>();
        connections += sample.freezes_us.len();
    }
    total / connections.max(1) as f64
}

/// Returns the medians of the phases; `transfer` is the rest of the freeze beside the others.
fn phase_medians(samples: &[HandoffSample], freeze_us_median: f64) -> HandoffPhasesUs {
    let results = || samples.iter().flat_map(|sample| &sample.status.results);
    let median = |phase: fn(&holdfast_api::control::PhasesUs) -> f64| {
        Quantiles::new(results().map(|result| phase(&result.phases_us)).collect()).median()
    };
    let (extract, restore, commit) = (
        median(|p| p.extract),
        median(|p| p.restore),
        median(|p| p.commit),
    );
    HandoffPhasesUs {
        prepare: median(|p| p.prepare),
        divert: median(|p| p.divert),
        extract,
        transfer: (freeze_us_median - extract - restore - commit).max(0.0),
        restore,
        commit,
    }
}

/// Returns a row for these samples and counters.
fn build_row(
    samples: &[HandoffSample],
    gaps: holdfast_testbed::latency_probe::ProbeGaps,
    drained: bool,
    network: &holdfast_testbed::network_counters::NetworkCounters,
    load: &holdfast_testbed::stats::VerifiedBytes,
) -> HandoffRow {
    let freezes = Quantiles::new(
        samples
            .iter()
            .flat_map(|sample| sample.freezes_us.clone())
            .collect(),
    );
    let results = || samples.iter().flat_map(|sample| &sample.status.results);
    let quantiles_of = |value: fn(&holdfast_api::control::FlowResult) -> u64| {
        Quantiles::new(results().map(|result| value(result) as f64).collect())
    };
    let totals = samples.iter().map(|sample| {
        let summary = &sample.status.summary;
        let end = summary.finished_at_ns.unwrap_or(summary.started_at_ns);
        nanoseconds_to_us(end.saturating_sub(summary.started_at_ns)) / 1000.0
    });
    let control = (!gaps.control_us.is_empty()).then(|| Quantiles::new(gaps.control_us));
    let gaps = Quantiles::new(gaps.moves_us);
    HandoffRow {
        connections: samples
            .first()
            .map_or(0, |sample| sample.status.results.len()),
        repeats: samples.len(),
        freeze_us_median: freezes.median(),
        freeze_us_p99: freezes.quantile(0.99),
        freeze_us_per_connection: freeze_us_per_connection(samples),
        client_gap_us_median: gaps.median(),
        client_gap_us_p99: gaps.quantile(0.99),
        control_gap_us_median: control.as_ref().map(Quantiles::median),
        control_gap_us_p99: control.as_ref().map(|gaps| gaps.quantile(0.99)),
        total_ms: Quantiles::new(totals.collect()).median(),
        phases_us: phase_medians(samples, freezes.median()),
        bytes_transferred: quantiles_of(|result| result.bytes_transferred).median(),
        send_queue: quantiles_of(|result| result.send_queue_bytes).median(),
        drained,
        resets: network.resets,
        retransmits: network.retransmits,
        loss_probes: network.loss_probes,
        timeouts: network.timeouts,
        bytes_verified: load.verified,
        bytes_wrong: load.wrong,
    }
}

fn format_rounded(figure: Option<f64>) -> String {
    figure.map_or("-".to_owned(), |figure| format!("{figure:.0}"))
}

impl HandoffRow {
    fn heading() -> String {
        format!(
            "{:>6} {:>9} {:>9} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7} {:>5} {:>5} {:>5} {:>5} {:>6}",
            "conns",
            "freeze_us",
            "p99",
            "us/conn",
            "gap_us",
            "gap_p99",
            "ctrl_us",
            "ctrl_p99",
            "total_ms",
            "bytes",
            "queue",
            "drained",
            "rst",
            "rtx",
            "tlp",
            "rto",
            "wrong"
        )
    }
}

impl std::fmt::Display for HandoffRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:>6} {:>9.0} {:>9.0} {:>8.1} {:>9.0} {:>9.0} {:>9} {:>9} {:>9.1} {:>7.0} {:>7.0} {:>7} {:>5} {:>5} {:>5} {:>5} {:>6}",
            self.connections,
            self.freeze_us_median,
            self.freeze_us_p99,
            self.freeze_us_per_connection,
            self.client_gap_us_median,
            self.client_gap_us_p99,
            format_rounded(self.control_gap_us_median),
            format_rounded(self.control_gap_us_p99),
            self.total_ms,
            self.bytes_transferred,
            self.send_queue,
            self.drained,
            self.resets,
            self.retransmits,
            self.loss_probes,
            self.timeouts,
            self.bytes_wrong
        )
    }
}
