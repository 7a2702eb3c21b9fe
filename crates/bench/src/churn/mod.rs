//! `holdfast bench churn`: migrations of servers whose clients connect and disconnect.
//!
//! Long connections exchange messages all the time; short ones are opened, used and closed at a given rate. The clients
//! compare every byte. The server moves back and forth between two nodes meanwhile. A failed attempt counts as a move
//! not made at once; the benchmark repeats the request 0.1 s later, as an operator would.

mod holders;
mod load;
mod programs;
mod speech;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::{MigrationStatus, SocketsWay};
use serde::Serialize;

use crate::cluster::{ClusterSpec, Service};
use crate::handoff::stats::Quantiles;
use crate::moves::{Attempt, Group, HOMES};
pub use load::Clients;
use load::{Span, gap_ms};
pub use programs::{PROGRAMS, Program, Server, program};

/// Host of the clients.
pub const CLIENTS: &str = "c1";
/// Host of the backend that a server connects to.
pub const BEHIND: &str = "c2";
const PORT: u16 = 7300;
/// Port of the backend, which clients do not see.
const PORT_BEHIND: u16 = 7301;

/// Pause before each move, with load: the gaps without a move are measured in it.
const PAUSE: Duration = Duration::from_millis(700);
/// A move within this time after the first request counts as `moved_within_1s`.
const AGAIN: Duration = Duration::from_secs(1);
/// Copies of sockets that stay open longer hinder a program that closes its own.
const HELD_FOR: Duration = Duration::from_millis(100);
/// Interval between attempts.
const AGAIN_EVERY: Duration = Duration::from_millis(100);

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
pub struct Plan {
    /// The server.
    pub program: &'static Program,
    /// Long connections.
    pub stay: usize,
    /// New connections per second.
    pub new_per_s: u32,
    /// Moves.
    pub moves: usize,
    /// Duration of the load after the last move.
    pub after: Duration,
}

/// Result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the program.
    pub program: &'static str,
    /// New connections per second.
    pub new_per_s: u32,
    /// Moves requested.
    pub moves: usize,
    /// Moves that succeeded at the first attempt.
    pub moved: usize,
    /// Moves that succeeded at the first attempt, or within 1 s of the first request.
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
struct Report {
    bench: &'static str,
    stay: usize,
    rows: Vec<Row>,
}

/// Runs the benchmark.
///
/// # Errors
/// The lab or a program in it fails.
pub fn run(args: &ChurnArgs) -> Result<()> {
    let programs: Result<Vec<_>> = args.programs.iter().map(|name| program(name)).collect();
    let mut rows = Vec::new();
    println!("{}", Row::heading());
    for program in programs? {
        for &new_per_s in &args.new_per_s {
            let row = measure(Plan {
                program,
                stay: args.stay,
                new_per_s,
                moves: args.moves,
                after: Duration::from_secs(args.after_s),
            })?;
            println!("{row}");
            rows.push(row);
        }
    }
    let Some(file) = &args.json else {
        return Ok(());
    };
    let report = Report {
        bench: "churn",
        stay: args.stay,
        rows,
    };
    std::fs::write(file, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("write {}", file.display()))
}

/// Result of one move.
#[derive(Debug, Default)]
struct Made {
    /// The donor's status of the successful attempt.
    status: Option<MigrationStatus>,
    tries: usize,
    /// Time from the first request to the end of the move.
    took: Duration,
}

/// Measures one row.
///
/// # Errors
/// The lab or the program fails, or the program cannot be moved at all. Errors seen by clients are in the row.
pub fn measure(plan: Plan) -> Result<Row> {
    let name = format!("churn-{}-{}", plan.program.name, std::process::id());
    let group = Group::up(spec(name))?;
    let folder = tempfile::tempdir()?;
    let server = Server::start(plan.program, &group, folder.path())?;
    let row = drive(plan, &group, &server);
    group.with_output(row, folder.path())
}

/// Returns the specification of a group in which a [`Server`] can run and move.
#[must_use]
pub fn spec(name: String) -> ClusterSpec {
    let mut spec = ClusterSpec::new(name);
    spec.clients = 2;
    spec.log = "info".into();
    spec.services = vec![Service::new("churn", Protocol::Tcp, PORT)];
    let numbers = programs::users().into_iter().map(toml::Value::from);
    let users = toml::Value::Array(numbers.collect());
    spec.migration_policy.insert("users".into(), users);
    spec
}

fn drive(plan: Plan, group: &Group, server: &Server) -> Result<Row> {
    let lab = group.cluster().lab();
    let clients = Clients::start(lab, CLIENTS, server.spoken(), (plan.stay, plan.new_per_s))?;
    group.until("all connections exchange", || {
        clients.all_exchange().then_some(())
    })?;
    let (mut pid, mut spans, mut controls) = (server.pid, Vec::new(), Vec::new());
    let (mut made, mut reasons) = (Vec::new(), Vec::new());
    let mut held_elsewhere = 0;
    for number in 0..plan.moves {
        std::thread::sleep(PAUSE);
        let (moved, its) = move_once(group, &mut pid, number, &mut reasons)?;
        controls.extend(its.iter().map(|(begin, end)| {
            let length = (*end - *begin).min(PAUSE);
            (its[0].0 - length, its[0].0)
        }));
        spans.extend(its);
        made.push(moved);
        let proc = group.cluster().proc(HOMES[(number + 1) % 2])?;
        let held = holders::held_elsewhere(&proc, pid)?;
        if !held.is_empty() {
            reasons.push(format!("open elsewhere after move {number}: {held:?}"));
            std::thread::sleep(HELD_FOR);
            held_elsewhere += holders::held_elsewhere(&proc, pid)?.len();
        }
    }
    std::thread::sleep(plan.after);
    let seen = clients.end();
    reasons.extend(seen.failures.iter().cloned());
    let gaps = |spans: &[Span]| {
        let gaps = spans.iter().map(|span| gap_ms(&seen.trips, *span));
        Quantiles::of(gaps.collect()).at(0.99)
    };
    let statuses = || made.iter().filter_map(|made| made.status.as_ref());
    let ms = |of: fn(&MigrationStatus) -> Option<f64>| {
        let values = statuses().filter_map(of).map(|us| us / 1e3);
        Quantiles::of(values.collect()).median()
    };
    Ok(Row {
        program: plan.program.name,
        new_per_s: plan.new_per_s,
        moves: plan.moves,
        moved: made.iter().filter(|made| made.tries == 1).count(),
        moved_within_1s: made
            .iter()
            .filter(|made| made.took <= AGAIN || made.tries == 1)
            .count(),
        freeze_ms_median: ms(|status| status.freeze_us),
        predicted_ms_median: ms(|status| status.predicted_freeze_us),
        steps_ms_median: steps(statuses()),
        gap_ms_p99: gaps(&spans),
        control_gap_ms_p99: gaps(&controls),
        errors: seen.errors,
        bytes_wrong: seen.bytes_wrong,
        held_elsewhere,
        reasons,
    })
}

/// Returns the median duration of each step of the freezes, milliseconds. Repeated steps of one freeze are added up.
fn steps<'a>(statuses: impl Iterator<Item = &'a MigrationStatus>) -> BTreeMap<String, f64> {
    let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for status in statuses {
        let of = [
            ("donor", &status.steps_us.donor),
            ("acceptor", &status.steps_us.acceptor),
        ];
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for (node, steps) in of {
            for step in steps {
                *sums.entry(format!("{node} {}", step.step)).or_default() +=
                    f64::from(step.us) / 1e3;
            }
        }
        sums.into_iter()
            .for_each(|(step, ms)| all.entry(step).or_default().push(ms));
    }
    all.into_iter()
        .map(|(step, ms)| (step, Quantiles::of(ms).median()))
        .collect()
}

/// Requests a move until one succeeds; returns the period of each attempt.
fn move_once(
    group: &Group,
    pid: &mut i32,
    number: usize,
    reasons: &mut Vec<String>,
) -> Result<(Made, Vec<Span>)> {
    /// More attempts than this mean a defect.
    const TRIES_MAX: usize = 50;
    let (began, mut spans) = (Instant::now(), Vec::new());
    loop {
        ensure!(
            spans.len() < TRIES_MAX,
            "move {number} was not made: {:?}",
            reasons.last()
        );
        let asked = Instant::now();
        match group.attempt(*pid, number, SocketsWay::default())? {
            Attempt::Moved(moved) => {
                spans.push(moved.span);
                *pid = moved.pid;
                let made = Made {
                    status: Some(moved.status),
                    tries: spans.len(),
                    took: moved.span.1 - began,
                };
                return Ok((made, spans));
            }
            Attempt::Kept(reason) => {
                spans.push((asked, Instant::now()));
                reasons.push(format!("move {number}, try {}: {reason}", spans.len()));
                std::thread::sleep(AGAIN_EVERY);
            }
        }
    }
}

impl Row {
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

impl std::fmt::Display for Row {
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
                "\n    {} sockets were open elsewhere",
                self.held_elsewhere
            )?;
        }
        self.reasons
            .iter()
            .try_for_each(|reason| write!(f, "\n    {reason}"))
    }
}
