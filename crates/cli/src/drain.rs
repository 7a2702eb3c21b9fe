//! `holdfast drain` and `holdfast undrain`: move everything off a node, so that its host can be rebooted.

use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::control::{DrainReport, DrainRequest, DrainState, DrainedProcess, StuckProcess};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};

/// Interval between polls of a drain.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Exit code of a command that SIGINT ends, as shells have it.
const INTERRUPTED: i32 = 130;

/// Move everything off a node without a loss, and say when its host can be rebooted
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast drain && systemctl reboot
  holdfast drain n2 --deadline 10m
  holdfast drain --json | jq .stuck

Processes that serve the group move to the nodes with the lowest predicted load, with their connections; connections of
server programs with a session are handed off; new clients go to other nodes. Anything that cannot move is named at
once, and goes on serving. Run the command on the node itself or on the contact node. Ctrl-C ends the command, not the
drain: `holdfast undrain` ends it, and a reboot of the host does. A restart of the daemon does not.

Exit codes: 0 the host can be rebooted, 1 the command failed, 3 something stays.")]
pub struct DrainArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The node [default: this one]; the contact node drains any node
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// End the drain after this time (90, 90s, 10m, 2h): what is left then stays
    #[arg(long, value_name = "T", value_parser = parse_seconds)]
    deadline: Option<u64>,
    /// Return after the drain has begun; `holdfast drain` again shows its progress
    #[arg(long)]
    no_wait: bool,
    /// Print the final report as JSON, without progress lines
    #[arg(long)]
    json: bool,
}

/// End the drain of a node, which takes processes and new clients again
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast undrain
  holdfast undrain n2

Processes that have left do not come back by themselves; `holdfast balance` evens out loads.")]
pub struct UndrainArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The node [default: this one]; the contact node ends the drain of any node
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast drain`.
///
/// # Errors
/// The daemon refuses or does not answer.
pub fn run(args: &DrainArgs) -> Result<ExitResult> {
    let client = args.daemon.client()?;
    let request = DrainRequest {
        deadline_s: args.deadline,
    };
    let mut report = args.daemon.ask(&client, async |client| match &args.node {
        Some(node) => client.drain_node(node, &request).await,
        None => client.drain(&request).await,
    })?;
    if args.no_wait {
        match args.json {
            true => print_json(&report)?,
            false => output_line!("the drain of {} has begun", report.node),
        }
        return Ok(ExitResult::Success);
    }
    announce_interrupt(report.node.clone())?;
    let mut progress = Progress::default();
    loop {
        if !args.json {
            progress.show(&report);
        }
        match report.state {
            DrainState::Draining => {}
            DrainState::Ended => break,
            DrainState::Off => bail!("another command has ended the drain of {}", report.node),
        }
        sleep(POLL_INTERVAL);
        report = args.daemon.ask(&client, async |client| match &args.node {
            Some(node) => client.node_drain_report(node).await,
            None => client.drain_report().await,
        })?;
    }
    match args.json {
        true => print_json(&report)?,
        false => output!("{}", result_text(&report)),
    }
    Ok(match report.safe_to_reboot {
        true => ExitResult::Success,
        false => ExitResult::PartlyKept,
    })
}

/// Runs `holdfast undrain`.
///
/// # Errors
/// The daemon refuses or does not answer.
pub fn undrain(args: &UndrainArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let report = args.daemon.ask(&client, async |client| match &args.node {
        Some(node) => client.undrain_node(node).await,
        None => client.undrain().await,
    })?;
    match args.json {
        true => print_json(&report)?,
        false => output_line!("{} takes processes and new clients again", report.node),
    }
    Ok(())
}

/// Says on Ctrl-C that the drain goes on, and ends the command.
fn announce_interrupt(node: String) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("wait for signals")?;
    std::thread::Builder::new()
        .spawn(move || {
            if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
                eprintln!(
                    "holdfast: the drain of {node} goes on; `holdfast drain {node}` shows its progress, `holdfast undrain {node}` ends it"
                );
                std::process::exit(INTERRUPTED);
            }
        })
        .context("wait for signals")?;
    Ok(())
}

/// Lines shown so far.
#[derive(Debug, Default)]
struct Progress {
    last_move: u64,
    stuck: BTreeSet<i32>,
    waiting: Option<String>,
    connections: Option<u64>,
}

impl Progress {
    /// Shows what is new in a report.
    fn show(&mut self, report: &DrainReport) {
        for process in &report.stuck {
            if self.stuck.insert(process.pid) {
                output!("{}", stuck_text(process, &report.node));
            }
        }
        let last = self.last_move;
        for one in report.moves.iter().filter(|one| one.number > last) {
            self.last_move = one.number;
            output_line!("{}", move_text(one, report));
        }
        if self.connections != Some(report.connections) && report.connections > 0 {
            output_line!(
                "{} connections of server programs are at {}",
                report.connections,
                report.node
            );
        }
        self.connections = Some(report.connections);
        let waiting = report.waiting.clone().filter(|reason| !reason.is_empty());
        if waiting != self.waiting {
            if let Some(reason) = &waiting {
                output_line!("waiting: {reason}");
            }
            self.waiting = waiting;
        }
    }
}

fn stuck_text(process: &StuckProcess, node: &str) -> String {
    let mut text = format!(
        "{} ({}) cannot move, and goes on at {node}\n",
        process.name, process.pid
    );
    for reason in &process.reasons {
        text += &format!("  {reason}\n");
    }
    text
}

fn move_text(one: &DrainedProcess, report: &DrainReport) -> String {
    let (name, pid, to) = (&one.name, one.pid, &one.to);
    if let Some(failure) = &one.failure {
        return format!("{name} ({pid}) did not move to {to}: {failure}");
    }
    let frozen_ms = one.freeze_us.unwrap_or(0.0) / 1e3;
    let rest = match report.remaining {
        0 => String::new(),
        remaining => format!("; {remaining} left, about {:.0} s", report.estimate_s),
    };
    format!("{name} ({pid}) runs on {to}, frozen {frozen_ms:.1} ms{rest}")
}

fn result_text(report: &DrainReport) -> String {
    let mut text = String::new();
    for note in &report.notes {
        text += &format!("note: {note}\n");
    }
    let node = &report.node;
    if report.safe_to_reboot {
        return text
            + &format!(
                "{node}: safe to reboot ({} processes moved)\n",
                report.moved
            );
    }
    let mut left = Vec::new();
    let stuck = report.stuck.len() as u64;
    if stuck > 0 {
        left.push(format!("{stuck} processes cannot move"));
    }
    if report.remaining > 0 {
        left.push(format!(
            "{} processes did not move in time",
            report.remaining
        ));
    }
    if report.connections > 0 {
        let reasons = report.connections_kept.join("; ");
        left.push(format!(
            "{} connections stay ({reasons})",
            report.connections
        ));
    }
    let others = report.flows.saturating_sub(report.connections);
    if stuck == 0 && others > 0 {
        left.push(format!(
            "{others} connections are served there by other processes"
        ));
    }
    if left.is_empty() {
        left.push("see the notes".to_owned());
    }
    text + &format!(
        "{node}: not safe to reboot: {} ({} processes moved); `holdfast undrain` takes the node back\n",
        left.join(", "),
        report.moved
    )
}

/// Parses a number of seconds, minutes or hours: `90`, `90s`, `10m`, `2h`.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let (number, factor) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(number) if text.ends_with('m') => (number, 60),
        Some(number) if text.ends_with('h') => (number, 3_600),
        Some(number) => (number, 1),
        None => (text, 1),
    };
    let seconds = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor));
    seconds
        .filter(|seconds| *seconds > 0)
        .ok_or_else(|| "a time is a number above 0 with s, m or h, such as 90s".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> DrainReport {
        DrainReport {
            node: "n2".to_owned(),
            state: DrainState::Ended,
            safe_to_reboot: true,
            moved: 3,
            ..DrainReport::default()
        }
    }

    #[test]
    fn times_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7_200)] {
            assert_eq!(parse_seconds(text), Ok(seconds));
        }
        for wrong in ["", "s", "0", "-1", "1d", "m10", "99999999999999999h", "1 s"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn result_says_whether_the_host_can_be_rebooted() {
        assert_eq!(
            result_text(&report()),
            "n2: safe to reboot (3 processes moved)\n"
        );
        let stuck = StuckProcess {
            pid: 42,
            name: "game".to_owned(),
            reasons: vec!["process 42, descriptor 3: io_uring".to_owned()],
        };
        assert_eq!(
            stuck_text(&stuck, "n2"),
            "game (42) cannot move, and goes on at n2\n  process 42, descriptor 3: io_uring\n"
        );
        let kept = DrainReport {
            safe_to_reboot: false,
            stuck: vec![stuck],
            connections: 4,
            connections_kept: vec!["no other node serves their service".to_owned()],
            notes: vec!["a note".to_owned()],
            ..report()
        };
        assert_eq!(
            result_text(&kept),
            "note: a note\nn2: not safe to reboot: 1 processes cannot move, 4 connections stay (no other node serves \
             their service) (3 processes moved); `holdfast undrain` takes the node back\n"
        );
    }

    #[test]
    fn moves_are_shown_with_the_rest() {
        let mut one = DrainedProcess {
            number: 1,
            pid: 42,
            name: "redis-server".to_owned(),
            to: "n3".to_owned(),
            freeze_us: Some(12_340.0),
            failure: None,
        };
        let mut report = report();
        assert_eq!(
            move_text(&one, &report),
            "redis-server (42) runs on n3, frozen 12.3 ms"
        );
        (report.remaining, report.estimate_s) = (2, 4.2);
        assert_eq!(
            move_text(&one, &report),
            "redis-server (42) runs on n3, frozen 12.3 ms; 2 left, about 4 s"
        );
        one.failure = Some("no memory".to_owned());
        assert_eq!(
            move_text(&one, &report),
            "redis-server (42) did not move to n3: no memory"
        );
    }
}
