//! `holdfast bench churn`: migrations of servers whose clients connect and disconnect.
//!
//! Long connections exchange messages all the time; short ones are opened, used and closed at a given rate. The clients
//! compare every byte. The server moves back and forth between two nodes meanwhile. A failed attempt counts as a move
//! not made at once; the benchmark repeats the request 0.1 s later, as an operator would.

mod clients;
mod protocols;
mod servers;
mod sockets_held_elsewhere;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::{MigrationStatus, SocketStrategy};
use serde::Serialize;

pub use clients::ChurnClients;
use clients::{RoundTrip, TimeSpan, added_delay_ms, control_delay_ms};
use holdfast_testbed::cluster::{ClusterService, ClusterSpec};
use holdfast_testbed::process_moves::{MoveAttemptOutcome, NodeGroup, SERVER_NODES};
use holdfast_testbed::stats::Quantiles;
pub use servers::{PROGRAMS, RunningServer, ServerProgram, find_server_program};

/// Host of the clients.
pub const CLIENT_HOST: &str = "c1";
/// Host of the backend that a server connects to.
pub const BACKEND_HOST: &str = "c2";
const SERVER_PORT: u16 = 7300;
/// Port of the backend, which clients do not see.
const BACKEND_PORT: u16 = 7301;

/// Pause before each move, with load: the gaps without a move are measured in it.
const LOAD_PAUSE: Duration = Duration::from_millis(700);
/// A move within this time after the first request counts as `moved_within_1s`.
const RETRY_LIMIT: Duration = Duration::from_secs(1);
/// Copies of sockets that stay open longer hinder a program that closes its own.
const HELD_SOCKETS_DELAY: Duration = Duration::from_millis(100);
/// Interval between two attempts at the same move.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Flags of `holdfast bench churn`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  holdfast bench churn --programs nginx --new-per-s 20
  holdfast bench churn --json churn.json")]
pub struct ChurnArgs {
    /// Programs; several, separated by commas (nginx, nginx-4, haproxy, postgresql, php-fpm, jvm, go)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "nginx,nginx-4,haproxy,postgresql,php-fpm,jvm,go"
    )]
    programs: Vec<String>,
    /// New connections per second; several, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "0,1,5,20,80")]
    new_per_s: Vec<u32>,
    /// Long connections
    #[arg(long, default_value_t = 32)]
    stay: usize,
    /// Moves of each row, there and back
    #[arg(long, default_value_t = 20)]
    moves: usize,
    /// Duration of the load after the last move, seconds
    #[arg(long, default_value_t = 10)]
    after_s: u64,
    /// Write the rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Parameters of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct ChurnPlan {
    /// The server that moves.
    pub program: &'static ServerProgram,
    /// Number of long connections.
    pub long_connections: usize,
    /// New connections per second.
    pub new_per_s: u32,
    /// Number of moves to request.
    pub moves: usize,
    /// Duration of the load after the last move.
    pub duration_after_last_move: Duration,
}

/// Result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct ChurnRow {
    /// Name of the program.
    pub program: &'static str,
    /// New connections per second.
    pub new_per_s: u32,
    /// Number of moves that were requested.
    pub moves: usize,
    /// Number of moves that succeeded at the first attempt.
    pub moved: usize,
    /// Number of moves that succeeded at the first attempt, or within 1 s of the first request.
    pub moved_within_1s: usize,
    /// Median of the freezes, milliseconds.
    pub freeze_ms_median: f64,
    /// Median of the predicted freezes, milliseconds.
    pub predicted_ms_median: f64,
    /// Median duration of each step of a freeze, milliseconds, under the names that the donor and the acceptor give.
    pub steps_ms_median: BTreeMap<String, f64>,
    /// The longest round trip of any connection during an attempt, minus the median one; 99th percentile, milliseconds.
    pub gap_ms_p99: f64,
    /// The same value over equal periods without a move.
    pub control_gap_ms_p99: f64,
    /// Connections that could not be opened, or ended, or hung.
    pub errors: u64,
    /// Bytes that differed from the expected ones.
    pub bytes_wrong: u64,
    /// Sockets of the server that other processes still had open 0.1 s after a move; the sockets open right after the
    /// move are in `reasons`.
    pub held_elsewhere: usize,
    /// Reasons of failed attempts, and failures of client connections.
    pub reasons: Vec<String>,
}

#[derive(Serialize)]
struct ChurnReport {
    bench: &'static str,
    stay: usize,
    rows: Vec<ChurnRow>,
}

/// Runs `holdfast bench churn`: measures moves of servers with changing clients.
///
/// # Errors
/// The lab or a program in it fails.
pub fn run(args: &ChurnArgs) -> Result<()> {
    let programs: Result<Vec<_>> = args
        .programs
        .iter()
        .map(|name| find_server_program(name))
        .collect();
    let mut rows = Vec::new();
    println!("{}", ChurnRow::heading());
    for program in programs? {
        for &new_per_s in &args.new_per_s {
            let row = measure(ChurnPlan {
                program,
                long_connections: args.stay,
                new_per_s,
                moves: args.moves,
                duration_after_last_move: Duration::from_secs(args.after_s),
            })?;
            println!("{row}");
            rows.push(row);
        }
    }
    let Some(file) = &args.json else {
        return Ok(());
    };
    let report = ChurnReport {
        bench: "churn",
        stay: args.stay,
        rows,
    };
    std::fs::write(file, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("write {}", file.display()))
}

/// Result of one move.
#[derive(Debug, Default)]
struct MoveResult {
    /// The donor's status of the successful attempt.
    status: Option<MigrationStatus>,
    attempts: usize,
    /// Time from the first request to the end of the move.
    duration: Duration,
}

/// Measures the moves of one server at one rate of new connections.
///
/// # Errors
/// The lab or the program fails, or the program cannot be moved at all. Errors seen by clients are in the row.
pub fn measure(plan: ChurnPlan) -> Result<ChurnRow> {
    let name = format!("churn-{}-{}", plan.program.name, std::process::id());
    let group = NodeGroup::up(server_cluster_spec(name))?;
    let folder = tempfile::tempdir()?;
    let server = RunningServer::start(plan.program, &group, folder.path())?;
    let row = move_under_load(plan, &group, &server);
    group.add_program_output(row, folder.path())
}

/// Returns the specification of a group in which a [`RunningServer`] can run and move.
#[must_use]
pub fn server_cluster_spec(name: String) -> ClusterSpec {
    let mut spec = ClusterSpec::new(name);
    spec.clients = 2;
    spec.log = "info".into();
    spec.services = vec![ClusterService::new("churn", Protocol::Tcp, SERVER_PORT)];
    let numbers = servers::server_user_ids()
        .into_iter()
        .map(toml::Value::from);
    let users = toml::Value::Array(numbers.collect());
    spec.migration_policy.insert("users".into(), users);
    spec
}

fn move_under_load(plan: ChurnPlan, group: &NodeGroup, server: &RunningServer) -> Result<ChurnRow> {
    let lab = group.cluster().lab();
    let clients = ChurnClients::start(
        lab,
        CLIENT_HOST,
        server.address_and_protocol(),
        (plan.long_connections, plan.new_per_s),
    )?;
    group.wait_for("all connections exchange data", || {
        clients.have_all_exchanged().then_some(())
    })?;
    let (mut pid, mut spans, mut controls) = (server.pid, Vec::new(), Vec::new());
    let (mut made, mut reasons) = (Vec::new(), Vec::new());
    let mut held_elsewhere = 0;
    for number in 0..plan.moves {
        std::thread::sleep(LOAD_PAUSE);
        let (moved, move_spans) = move_until_success(group, &mut pid, number, &mut reasons)?;
        controls.extend(move_spans.iter().map(|(begin, end)| {
            let length = (*end - *begin).min(LOAD_PAUSE);
            (move_spans[0].0 - length, move_spans[0].0)
        }));
        spans.extend(move_spans);
        made.push(moved);
        let proc = group.cluster().proc_path(SERVER_NODES[(number + 1) % 2])?;
        let held = sockets_held_elsewhere::sockets_held_elsewhere(&proc, pid)?;
        if !held.is_empty() {
            reasons.push(format!(
                "sockets open in other processes after move {number}: {held:?}"
            ));
            std::thread::sleep(HELD_SOCKETS_DELAY);
            held_elsewhere += sockets_held_elsewhere::sockets_held_elsewhere(&proc, pid)?.len();
        }
    }
    std::thread::sleep(plan.duration_after_last_move);
    let results = clients.end();
    reasons.extend(results.failures.iter().cloned());
    let gaps = |spans: &[TimeSpan], delay_ms: fn(&[RoundTrip], TimeSpan) -> f64| {
        let gaps = spans.iter().map(|span| delay_ms(&results.trips, *span));
        Quantiles::new(gaps.collect()).quantile(0.99)
    };
    let statuses = || made.iter().filter_map(|made| made.status.as_ref());
    let ms = |value_of: fn(&MigrationStatus) -> Option<f64>| {
        let values = statuses().filter_map(value_of).map(|us| us / 1e3);
        Quantiles::new(values.collect()).median()
    };
    Ok(ChurnRow {
        program: plan.program.name,
        new_per_s: plan.new_per_s,
        moves: plan.moves,
        moved: made.iter().filter(|made| made.attempts == 1).count(),
        moved_within_1s: made
            .iter()
            .filter(|made| made.duration <= RETRY_LIMIT || made.attempts == 1)
            .count(),
        freeze_ms_median: ms(|status| status.freeze_us),
        predicted_ms_median: ms(|status| status.predicted_freeze_us),
        steps_ms_median: step_medians(statuses()),
        gap_ms_p99: gaps(&spans, added_delay_ms),
        control_gap_ms_p99: gaps(&controls, control_delay_ms),
        errors: results.errors,
        bytes_wrong: results.bytes_wrong,
        held_elsewhere,
        reasons,
    })
}

/// Returns the median duration of each step of the freezes, milliseconds. Repeated steps of one freeze are added up.
fn step_medians<'a>(statuses: impl Iterator<Item = &'a MigrationStatus>) -> BTreeMap<String, f64> {
    let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for status in statuses {
        let steps_by_node = [
            ("donor", &status.steps_us.donor),
            ("acceptor", &status.steps_us.acceptor),
        ];
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for (node, steps) in steps_by_node {
            for step in steps {
                *sums.entry(format!("{node} {}", step.step)).or_default() +=
                    f64::from(step.duration_us) / 1e3;
            }
        }
        sums.into_iter()
            .for_each(|(step, ms)| all.entry(step).or_default().push(ms));
    }
    all.into_iter()
        .map(|(step, ms)| (step, Quantiles::new(ms).median()))
        .collect()
}

/// Requests a move until one succeeds; returns the period of each attempt.
fn move_until_success(
    group: &NodeGroup,
    pid: &mut i32,
    number: usize,
    reasons: &mut Vec<String>,
) -> Result<(MoveResult, Vec<TimeSpan>)> {
    /// More attempts than this mean a defect.
    const ATTEMPTS_MAX: usize = 50;
    let (began, mut spans) = (Instant::now(), Vec::new());
    loop {
        ensure!(
            spans.len() < ATTEMPTS_MAX,
            "move {number} failed {ATTEMPTS_MAX} times; last reason: {:?}",
            reasons.last()
        );
        let requested_at = Instant::now();
        match group.request_move(*pid, number, SocketStrategy::default())? {
            MoveAttemptOutcome::Moved(moved) => {
                spans.push(moved.span);
                *pid = moved.pid;
                let made = MoveResult {
                    status: Some(moved.status),
                    attempts: spans.len(),
                    duration: moved.span.1 - began,
                };
                return Ok((made, spans));
            }
            MoveAttemptOutcome::Kept(reason) => {
                spans.push((requested_at, Instant::now()));
                reasons.push(format!("move {number}, attempt {}: {reason}", spans.len()));
                std::thread::sleep(RETRY_INTERVAL);
            }
        }
    }
}

impl ChurnRow {
    fn heading() -> String {
        format!(
            "{:<12} {:>5} {:>5} {:>5} {:>6} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6}",
            "program",
            "new/s",
            "moves",
            "moved",
            "in 1 s",
            "freeze_ms",
            "predicted",
            "gap_p99",
            "control",
            "errors",
            "wrong"
        )
    }
}

impl std::fmt::Display for ChurnRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<12} {:>5} {:>5} {:>5} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>6} {:>6}",
            self.program,
            self.new_per_s,
            self.moves,
            self.moved,
            self.moved_within_1s,
            self.freeze_ms_median,
            self.predicted_ms_median,
            self.gap_ms_p99,
            self.control_gap_ms_p99,
            self.errors,
            self.bytes_wrong
        )?;
        if self.held_elsewhere > 0 {
            write!(
                f,
                "\n    {} sockets were still open in other processes",
                self.held_elsewhere
            )?;
        }
        self.reasons
            .iter()
            .try_for_each(|reason| write!(f, "\n    {reason}"))
    }
}
