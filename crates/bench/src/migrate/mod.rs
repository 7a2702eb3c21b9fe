//! `holdfast bench migrate`: the cost of moving a running process: freeze and client gap, as `bench handoff`
//! defines them.
//!
//! The process is the example `migrating_zone`, an ordinary program with connections that it answers and with memory of which it
//! writes distinct random pages of 4 KiB all the time. The process moves back and forth between two nodes while its
//! clients exchange messages.

mod criu_availability;
mod freeze_steps;
mod link_throughput;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use holdfast_api::control::{MigrationPhasesUs, MigrationStepsUs, SocketStrategy};
use holdfast_lab::{LinkEntry, Topology};
use serde::Serialize;

use holdfast_testbed::process_moves::migrating_zone::{
    MigratingZone, MigratingZoneSpec, MoveResults,
};
use holdfast_testbed::process_moves::{CompletedMove, PostCopyCondition};
use holdfast_testbed::stats::Quantiles;

/// Flags of `holdfast bench migrate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  holdfast bench migrate --connections 16 --memory-mib 64 --dirty-mib-per-s 0
  holdfast bench migrate --connections 16,256,1024,10000 --memory-mib 64,1024 --dirty-mib-per-s 0,100 --json migrate.json
  holdfast bench migrate --connections 1024 --sockets collective --link-mbit 1000")]
pub struct MigrateArgs {
    /// Connections of the server, one of them the probe; from 5,000 on, each exchanges 2 messages per second instead of
    /// 20. Several numbers, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "16,256,1024,10000")]
    connections: Vec<usize>,
    /// Memory of the server, MiB; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "64,1024")]
    memory_mib: Vec<usize>,
    /// Rate at which the server writes its memory, MiB per second; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "0,100")]
    dirty_mib_per_s: Vec<u64>,
    /// How sockets move
    #[arg(long, default_value = SocketStrategy::default().name(),
          value_parser = PossibleValuesParser::new(SocketStrategy::NAMES).try_map(|name| name.parse::<SocketStrategy>()))]
    sockets: SocketStrategy,
    /// Allow post-copy; rows then contain the amount of memory sent after the freeze, and total times include it
    #[arg(long)]
    post_copy: bool,
    /// Moves there and back for each row; by default fewer for larger rows
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: Option<u32>,
    /// Rate of the nodes' links, Mbit/s; by default as fast as the machine
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    link_mbit: Option<u32>,
    /// Measure this program beside ours, if installed and usable
    #[arg(long, value_enum)]
    peer: Option<ComparedProgram>,
    /// Write the rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A program to compare with.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ComparedProgram {
    /// Checkpoint and restore in user space: dump and restore on one machine, images in memory
    Criu,
}

/// Result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateRow {
    connections: usize,
    memory_mib: usize,
    dirty_mib_per_s: u64,
    mode: &'static str,
    freeze_us_median: f64,
    freeze_us_max: f64,
    predicted_freeze_us: f64,
    client_gap_us_p99: f64,
    control_gap_us_p99: f64,
    bytes_in_freeze: u64,
    bytes_followed: u64,
    total_ms: f64,
    resets: u64,
    retransmits: u64,
    bytes_wrong: u64,
}

#[derive(Serialize)]
struct MigrateBenchReport {
    bench: &'static str,
    /// Rate limit of the links between the nodes; none without a limit.
    link_mbit_per_s: Option<u32>,
    /// Throughput of one TCP connection between two nodes.
    link_measured_mbit_per_s: f64,
    rows: Vec<MigrateRow>,
    /// Medians of each row's phases.
    phases_us: Vec<MigrationPhasesUs>,
    /// Medians of each row's steps.
    steps_us: Vec<MigrationStepsUs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<criu_availability::CriuAvailability>,
}

/// Runs `holdfast bench migrate`: measures moves of a process under each load.
///
/// # Errors
/// The lab or a program in it fails, or a move fails.
pub fn run(args: &MigrateArgs) -> Result<()> {
    let measured = link_throughput::measure_throughput(&lab_topology(args.link_mbit))?;
    let limit = args.link_mbit.map_or("no limit".to_owned(), |mbit| {
        format!("limited to {mbit} Mbit/s")
    });
    println!("link between the nodes: {limit}, {measured:.0} Mbit/s measured");
    println!("{}", MigrateRow::heading());
    let (mut rows, mut phases, mut steps) = (Vec::new(), Vec::new(), Vec::new());
    for load in zone_loads(args) {
        let (row, row_phases, row_steps) = measure_row(&load, args)?;
        println!("{row}");
        println!("        {}", phases_text(&row_phases));
        println!(
            "        donor: {}",
            freeze_steps::steps_text(&row_steps.donor)
        );
        println!(
            "        acceptor: {}",
            freeze_steps::steps_text(&row_steps.acceptor)
        );
        rows.push(row);
        phases.push(row_phases);
        steps.push(row_steps);
    }
    println!(
        "predicted freeze: median error {:.0} %",
        prediction_error_pct(&rows)
    );
    let peer = args
        .peer
        .map(|ComparedProgram::Criu| criu_availability::check_criu());
    if let Some(peer) = &peer {
        println!("{peer}");
    }
    let Some(file) = &args.json else {
        return Ok(());
    };
    let report = MigrateBenchReport {
        bench: "migrate",
        link_mbit_per_s: args.link_mbit,
        link_measured_mbit_per_s: measured,
        rows,
        phases_us: phases,
        steps_us: steps,
        peer,
    };
    std::fs::write(file, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("write {}", file.display()))
}

/// Returns a topology with this rate on links between nodes; the client links stay as fast as the machine.
#[must_use]
pub fn lab_topology(link_mbit: Option<u32>) -> Topology {
    let Some(mbit) = link_mbit else {
        return Topology::default();
    };
    Topology::default().with_entry(LinkEntry {
        rate_mbit: Some(f64::from(mbit)),
        // The link program would take a processor from the measured processes.
        kernel: Some(true),
        ..LinkEntry::for_host("nodes")
    })
}

fn zone_loads(args: &MigrateArgs) -> Vec<MigratingZoneSpec> {
    let mut loads = Vec::new();
    for &memory_mib in &args.memory_mib {
        for &dirty_mib_per_s in &args.dirty_mib_per_s {
            for &connections in &args.connections {
                loads.push(MigratingZoneSpec {
                    name: format!("migrate-{}-{}", std::process::id(), loads.len()),
                    topology: lab_topology(args.link_mbit),
                    connections,
                    memory_mib,
                    dirty_mib_per_s,
                    database: false,
                    post_copy: args.post_copy.then_some(PostCopyCondition::default()),
                });
            }
        }
    }
    loads
}

/// Returns the default number of moves there and back.
fn default_round_trips(load: &MigratingZoneSpec) -> u32 {
    match (load.connections, load.memory_mib) {
        (0..=2048, 0..=256) => 5,
        _ => 2,
    }
}

fn measure_row(
    load: &MigratingZoneSpec,
    args: &MigrateArgs,
) -> Result<(MigrateRow, MigrationPhasesUs, MigrationStepsUs)> {
    let mut loaded = MigratingZone::start(load)?;
    for _ in 0..2 * args.repeats.unwrap_or(default_round_trips(load)) {
        loaded.move_server(args.sockets)?;
    }
    let results = loaded.end()?;
    let row = build_row(load, args.sockets, &results);
    Ok((
        row,
        phase_medians(&results.moves),
        freeze_steps::step_medians(&results.moves),
    ))
}

fn build_row(
    load: &MigratingZoneSpec,
    strategy: SocketStrategy,
    results: &MoveResults,
) -> MigrateRow {
    let freezes = median_of_moves(&results.moves, |migration| {
        migration.status.freeze_us.unwrap_or_default()
    });
    let predicted = median_of_moves(&results.moves, |of| {
        of.status.predicted_freeze_us.unwrap_or_default()
    });
    let bytes = median_of_moves(&results.moves, |of| of.status.freeze_bytes as f64);
    let followed = median_of_moves(&results.moves, |of| {
        let memory = of.status.post_copy.as_ref();
        memory.map_or(0.0, |memory| memory.sent_bytes as f64)
    });
    let totals = median_of_moves(&results.moves, |of| {
        (of.span.1 - of.span.0).as_secs_f64() * 1e3
    });
    MigrateRow {
        connections: load.connections,
        memory_mib: load.memory_mib,
        dirty_mib_per_s: load.dirty_mib_per_s,
        mode: match load.post_copy {
            Some(_) => "post-copy",
            None => strategy.name(),
        },
        freeze_us_median: freezes.median(),
        freeze_us_max: freezes.quantile(1.0),
        predicted_freeze_us: predicted.median(),
        client_gap_us_p99: Quantiles::new(results.gaps.moves_us.clone()).quantile(0.99),
        control_gap_us_p99: Quantiles::new(results.gaps.control_us.clone()).quantile(0.99),
        bytes_in_freeze: bytes.median() as u64,
        bytes_followed: followed.median() as u64,
        total_ms: totals.median(),
        resets: results.network.resets,
        retransmits: results.network.retransmits,
        bytes_wrong: results.bytes_wrong,
    }
}

fn median_of_moves(moves: &[CompletedMove], value_of: impl Fn(&CompletedMove) -> f64) -> Quantiles {
    Quantiles::new(moves.iter().map(value_of).collect())
}

fn phase_medians(moves: &[CompletedMove]) -> MigrationPhasesUs {
    let phase_median = |of: fn(&MigrationPhasesUs) -> f64| {
        median_of_moves(moves, |one| of(&one.status.phases_us)).median()
    };
    MigrationPhasesUs {
        copy: phase_median(|phases| phases.copy),
        arm: phase_median(|phases| phases.arm),
        divert: phase_median(|phases| phases.divert),
        extract: phase_median(|phases| phases.extract),
        transfer: phase_median(|phases| phases.transfer),
        restore: phase_median(|phases| phases.restore),
        commit: phase_median(|phases| phases.commit),
    }
}

fn phases_text(phases: &MigrationPhasesUs) -> String {
    format!(
        "copy {:.0}, arm {:.0}, divert {:.0}; extract {:.0}, transfer {:.0}, restore {:.0}, commit {:.0} us",
        phases.copy,
        phases.arm,
        phases.divert,
        phases.extract,
        phases.transfer,
        phases.restore,
        phases.commit
    )
}

/// Returns the median over the rows of the difference between predicted and measured freeze, percent.
fn prediction_error_pct(rows: &[MigrateRow]) -> f64 {
    let row_error_pct = |row: &MigrateRow| {
        100.0 * (row.predicted_freeze_us - row.freeze_us_median).abs() / row.freeze_us_median
    };
    Quantiles::new(rows.iter().map(row_error_pct).collect()).median()
}

impl MigrateRow {
    fn heading() -> String {
        format!(
            "{:>6} {:>6} {:>6} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>8} {:>5} {:>5} {:>6}",
            "conns",
            "MiB",
            "MiB/s",
            "mode",
            "freeze_us",
            "max",
            "predicted",
            "gap_p99",
            "ctrl_p99",
            "bytes",
            "total_ms",
            "rst",
            "rtx",
            "wrong"
        )
    }
}

impl std::fmt::Display for MigrateRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:>6} {:>6} {:>6} {:>11} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>10} {:>8.0} {:>5} {:>5} {:>6}",
            self.connections,
            self.memory_mib,
            self.dirty_mib_per_s,
            self.mode,
            self.freeze_us_median,
            self.freeze_us_max,
            self.predicted_freeze_us,
            self.client_gap_us_p99,
            self.control_gap_us_p99,
            self.bytes_in_freeze,
            self.total_ms,
            self.resets,
            self.retransmits,
            self.bytes_wrong
        )
    }
}
