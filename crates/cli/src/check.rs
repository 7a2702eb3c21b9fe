//! `holdfast check`: tests if a process can move.

use anyhow::Result;
use clap::Args;
use holdfast_api::control::{BlockerEntry, ProcessCheck};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::migrate::forwarded_text;
use crate::output::{output, print_json};
use crate::process_arg::ProcessArg;

/// Check if a process of this node can move with all its children, and list its blockers
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast check 4242
  holdfast check 4242 --to n2
  holdfast check game.service
  holdfast check $(pidof oa_ded) --json | jq .blockers

With --to, node n2 examines the process as in a migration, without its memory, and then discards it: refusals are
worded as in a migration. The process is stopped for a moment, as in the first round of copying, and continues.
Without --to the process is not touched.

Exit codes: 0 the process can move, 1 it cannot, or the check failed.")]
pub struct CheckArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The process, by its PID on this node, or the systemd unit that it is the main process of
    #[arg(value_name = "PID|UNIT")]
    process: ProcessArg,
    /// Also ask this node if it would take the process
    #[arg(long, value_name = "NODE")]
    to: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast check`.
///
/// # Errors
/// The daemon does not answer, or there is no such process.
pub fn run(args: &CheckArgs) -> Result<ExitResult> {
    let client = args.daemon.client()?;
    let pid = args.process.pid(&args.daemon, &client)?;
    let check = match &args.to {
        Some(node) => args
            .daemon
            .ask(&client, |client| client.check_to(pid, node))?,
        None => args.daemon.ask(&client, |client| client.check(pid))?,
    };
    if args.json {
        print_json(&check)?;
    } else {
        output!("{}", check_text(&check));
    }
    Ok(match check.movable {
        true => ExitResult::Success,
        false => ExitResult::Failed,
    })
}

fn check_text(check: &ProcessCheck) -> String {
    let to = (check.to.as_ref()).map_or_else(String::new, |node| format!(" to {node}"));
    let verdict = match check.blockers.len() + check.refusals.len() {
        0 => format!("can move{to}"),
        1 => format!("cannot move{to}: 1 blocker"),
        count => format!("cannot move{to}: {count} blockers"),
    };
    let mut text = format!("{} ({}) {verdict}\n", check.name, check.pid);
    for refusal in &check.refusals {
        text += &format!("  refused: {refusal}\n");
    }
    for blocker in &check.blockers {
        text += &format!("  {}\n", blocker_text(blocker));
    }
    let mib = check.memory_bytes as f64 / f64::from(1 << 20);
    text += &format!(
        "processes {}, threads {}, mappings {}, descriptors {} ({} of them sockets), memory {mib:.1} MiB\n",
        check.processes.len(),
        check.threads,
        check.mappings,
        check.descriptors,
        check.sockets
    );
    text += &forwarded_text(&check.forwarded);
    if check.movable {
        let ms = check.predicted_freeze_us / 1e3;
        text += &format!(
            "predicted freeze {ms:.1} ms, plus the time to send the memory that the process writes meanwhile\n"
        );
    }
    text
}

fn blocker_text(blocker: &BlockerEntry) -> String {
    let descriptor = blocker
        .fd
        .map_or_else(String::new, |fd| format!(", descriptor {fd}"));
    let path = (blocker.path.as_deref()).map_or_else(String::new, |path| format!(" ({path})"));
    format!(
        "process {}{descriptor}{path}: {}",
        blocker.pid, blocker.reason
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(blockers: Vec<BlockerEntry>) -> ProcessCheck {
        ProcessCheck {
            pid: 4242,
            name: "game".into(),
            movable: blockers.is_empty(),
            blockers,
            to: None,
            refusals: Vec::new(),
            processes: vec![4242, 4243],
            threads: 9,
            mappings: 80,
            descriptors: 12,
            sockets: 2,
            memory_bytes: 3 << 19,
            forwarded: Vec::new(),
            predicted_freeze_us: 1_840.0,
        }
    }

    #[test]
    fn each_blocker_is_listed_with_its_descriptor() {
        let text = check_text(&check(vec![BlockerEntry {
            pid: 4243,
            fd: Some(7),
            path: Some("anon_inode:[io_uring]".into()),
            reason: "use epoll".into(),
        }]));
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("game (4242) cannot move: 1 blocker"));
        assert_eq!(
            lines.next(),
            Some("  process 4243, descriptor 7 (anon_inode:[io_uring]): use epoll")
        );
        assert!(!text.contains("predicted"), "{text}");
    }

    #[test]
    fn refusals_of_the_other_node_are_listed() {
        let refused = ProcessCheck {
            movable: false,
            to: Some("n2".into()),
            refusals: vec!["user 33 is not in its list".into(), "no such file".into()],
            ..check(Vec::new())
        };
        let text = check_text(&refused);
        let first =
            "game (4242) cannot move to n2: 2 blockers\n  refused: user 33 is not in its list\n";
        assert!(text.starts_with(first), "{text}");
        assert!(!text.contains("predicted"), "{text}");
    }

    #[test]
    fn movable_process_has_a_predicted_freeze() {
        let text = check_text(&check(Vec::new()));
        assert!(text.starts_with("game (4242) can move\n"), "{text}");
        assert!(
            text.contains("threads 9") && text.contains("memory 1.5 MiB"),
            "{text}"
        );
        assert!(text.contains("predicted freeze 1.8 ms"), "{text}");
    }
}
