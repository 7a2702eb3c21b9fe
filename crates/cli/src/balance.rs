//! `holdfast balance`: even out the load of the group, and see why a process moves or stays.

use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::control::{BalanceLog, BalancePlan, BalanceStatus, PinRequest, PlannedMoveEntry};

use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};
use crate::table::{TextTable, optional_number};

/// Even out the load of the group by moving processes; off by default
#[derive(Debug, Args)]
pub struct BalanceArgs {
    #[command(subcommand)]
    action: BalanceAction,
}

#[derive(Debug, Subcommand)]
enum BalanceAction {
    /// Give and take processes at this node to even out loads. The node remembers the wish
    #[command(after_help = "Example:
  holdfast balance on

A node with balancing on gives processes to other such nodes, and takes theirs. Run the command on each node that is to
take part.")]
    On(PlainArgs),
    /// Stop giving and taking processes at this node; a move under way is completed
    #[command(after_help = "Example:\n  holdfast balance off")]
    Off(PlainArgs),
    /// Keep a process at this node, whatever the loads are, and also in a drain
    #[command(after_help = "Example:
  holdfast balance pin 4711

The pin ends with the process, with its move by `holdfast migrate`, and with `holdfast balance unpin`. [[balance.rule]] in the
node's configuration pins all processes of a name.")]
    Pin(PinArgs),
    /// Let a process move again
    #[command(after_help = "Example:\n  holdfast balance unpin 4711")]
    Unpin(PinArgs),
    /// Decide at once, without waiting for the load to have been high for a while, and begin the move
    #[command(after_help = "Example:
  holdfast balance now

All limits hold: on moves a minute, on moves of a process, and on the predicted freeze.")]
    Now(PlainArgs),
    /// Show what this node would do now, and why; nothing moves
    #[command(
        after_help = "Examples:\n  holdfast balance plan\n  holdfast balance plan --json | jq .obstacles"
    )]
    Plan(PlainArgs),
    /// Show the loads that this node knows, and the processes that it may move
    #[command(
        after_help = "Examples:\n  holdfast balance status\n  holdfast balance status --json"
    )]
    Status(PlainArgs),
    /// Show the latest decisions of this node, with their reasons and their effect on its load
    #[command(
        after_help = "Examples:\n  holdfast balance log\n  holdfast balance log --json | jq '.records[-1]'"
    )]
    Log(PlainArgs),
}

#[derive(Debug, Args)]
struct PlainArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct PinArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// PID of a process that `holdfast balance status` shows
    pid: i32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast balance`.
///
/// # Errors
/// The daemon refuses or does not answer.
pub fn run(args: &BalanceArgs) -> Result<()> {
    match &args.action {
        BalanceAction::On(args) => set(args, true),
        BalanceAction::Off(args) => set(args, false),
        BalanceAction::Pin(args) => pin(args, true),
        BalanceAction::Unpin(args) => pin(args, false),
        BalanceAction::Now(args) => {
            let client = args.daemon.client()?;
            let plan = args.daemon.ask(&client, |client| client.balance_now())?;
            show(args, &plan, |plan| plan_text(plan, "moving"))
        }
        BalanceAction::Plan(args) => {
            let client = args.daemon.client()?;
            let plan = args.daemon.ask(&client, |client| client.balance_plan())?;
            show(args, &plan, |plan| plan_text(plan, "would move"))
        }
        BalanceAction::Status(args) => {
            let client = args.daemon.client()?;
            let status = args.daemon.ask(&client, |client| client.balance())?;
            show(args, &status, status_text)
        }
        BalanceAction::Log(args) => {
            let client = args.daemon.client()?;
            let log = args.daemon.ask(&client, |client| client.balance_log())?;
            show(args, &log, log_text)
        }
    }
}

fn show<T: serde::Serialize>(
    args: &PlainArgs,
    answer: &T,
    text: impl Fn(&T) -> String,
) -> Result<()> {
    match args.json {
        true => print_json(answer)?,
        false => output!("{}", text(answer)),
    }
    Ok(())
}

fn set(args: &PlainArgs, on: bool) -> Result<()> {
    let client = args.daemon.client()?;
    let status = (args.daemon).ask(&client, |client| client.set_balancing(on))?;
    match args.json {
        true => print_json(&status)?,
        false => output_line!("balancing is {} at this node", on_text(status.on)),
    }
    Ok(())
}

fn pin(args: &PinArgs, pinned: bool) -> Result<()> {
    let client = args.daemon.client()?;
    let pid = args.pid;
    let request = PinRequest { pid, pinned };
    let status = args.daemon.ask(&client, |client| client.pin(&request))?;
    match (args.json, pinned) {
        (true, _) => print_json(&status)?,
        (false, true) => output_line!("process {pid} stays at this node"),
        (false, false) => output_line!("process {pid} may move"),
    }
    Ok(())
}

fn on_text(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Returns a plan in words.
pub fn plan_text(plan: &BalancePlan, verb: &str) -> String {
    let mut text = match (&plan.planned, &plan.reason) {
        (Some(planned), _) => planned_text(planned, verb),
        (None, Some(reason)) => format!("no process moves: {reason}\n"),
        (None, None) => "no process moves\n".to_owned(),
    };
    for obstacle in &plan.obstacles {
        text += &format!(
            "  {}: {}\n",
            process_text(&obstacle.name, obstacle.pid),
            obstacle.reason
        );
    }
    text
}

fn planned_text(plan: &PlannedMoveEntry, verb: &str) -> String {
    let why = match plan.purpose.as_str() {
        "drain" => "to drain this node",
        _ => "to even out loads",
    };
    format!(
        "{verb} {} to {} {why}: this node from {:.1} % to {:.1} %, {} from {:.1} % to {:.1} % (average {:.1} %)\n",
        process_text(&plan.name, plan.pid),
        plan.to,
        plan.donor_before_percent,
        plan.donor_after_percent,
        plan.to,
        plan.acceptor_before_percent,
        plan.acceptor_after_percent,
        plan.average_percent
    )
}

fn process_text(name: &str, pid: Option<i32>) -> String {
    match pid {
        Some(pid) => format!("{name} ({pid})"),
        None => name.to_owned(),
    }
}

fn percent(load: f64) -> String {
    format!("{load:.1}")
}

fn status_text(status: &BalanceStatus) -> String {
    let average = status
        .average_percent
        .map(|load| format!("; average load {load:.1} %"));
    let mut text = format!(
        "balancing is {} at this node{}\n\n",
        on_text(status.on),
        average.unwrap_or_default()
    );
    let mut table = TextTable::new(["node", "load %", "capacity", "age ms", "takes processes"]);
    for node in &status.nodes {
        let takes = if node.is_open { "yes" } else { "no, draining" };
        table.row([
            node.name.clone(),
            percent(node.load_percent),
            node.capacity.to_string(),
            node.age_ms.to_string(),
            takes.to_owned(),
        ]);
    }
    text += &table.text();
    if status.processes.is_empty() {
        return text + "\nno process of this node serves the group\n";
    }
    let mut table = TextTable::new([
        "process",
        "pid",
        "used",
        "memory MiB",
        "moved here",
        "pinned",
        "blocked",
    ]);
    for process in &status.processes {
        let moved = if process.has_moved_here { "yes" } else { "no" };
        let pinned = if process.pinned { "yes" } else { "no" };
        table.row([
            process.name.clone(),
            process.pid.to_string(),
            process.used.to_string(),
            format!("{:.1}", process.memory_kib as f64 / 1_024.0),
            moved.to_owned(),
            pinned.to_owned(),
            process.blocked.clone().unwrap_or_default(),
        ]);
    }
    text + &format!("\n{}", table.text())
}

fn log_text(log: &BalanceLog) -> String {
    if log.records.is_empty() {
        return "this node has made no decision on a move since its daemon started\n".to_owned();
    }
    let mut table = TextTable::new([
        "s ago",
        "role",
        "process",
        "node",
        "why",
        "ms",
        "load %",
        "predicted",
        "observed",
        "outcome",
    ]);
    for record in &log.records {
        table.row([
            record.age_s.to_string(),
            record.role.clone(),
            record.name.clone(),
            record.peer.clone(),
            record.purpose.clone(),
            record.duration_ms.to_string(),
            percent(record.before_percent),
            percent(record.predicted_percent),
            optional_number(record.observed_percent.map(percent)),
            record.outcome.clone(),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::ObstacleEntry;

    #[test]
    fn plan_names_process_nodes_and_loads() {
        let planned = PlannedMoveEntry {
            pid: Some(42),
            name: "zone".to_owned(),
            to: "n3".to_owned(),
            purpose: "balance".to_owned(),
            average_percent: 50.0,
            donor_before_percent: 80.0,
            donor_after_percent: 60.0,
            acceptor_before_percent: 20.0,
            acceptor_after_percent: 40.0,
        };
        let plan = BalancePlan {
            planned: Some(planned),
            ..BalancePlan::default()
        };
        assert_eq!(
            plan_text(&plan, "would move"),
            "would move zone (42) to n3 to even out loads: this node from 80.0 % to 60.0 %, n3 from 20.0 % to 40.0 % \
             (average 50.0 %)\n"
        );
        let stay = BalancePlan {
            planned: None,
            reason: Some("balancing is off".to_owned()),
            obstacles: vec![ObstacleEntry {
                pid: None,
                name: "zone".to_owned(),
                reason: "its load makes no difference".to_owned(),
            }],
        };
        assert_eq!(
            plan_text(&stay, "would move"),
            "no process moves: balancing is off\n  zone: its load makes no difference\n"
        );
    }

    #[test]
    fn empty_log_says_so() {
        assert!(log_text(&BalanceLog::default()).starts_with("this node has made no decision"));
    }
}
