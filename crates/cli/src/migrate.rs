//! `holdfast migrate`: moves a running process to another node.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use holdfast_api::control::{
    MigrationOutcome, MigrationRequest, MigrationStatus, RoundEntry, SocketsWay,
};

use crate::Ending;
use crate::control::{Daemon, print_json};

/// Between two looks at a migration that goes on.
const LOOK: Duration = Duration::from_millis(20);

/// Move a running process of this node, with all its children, to another node
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast migrate 4242 --to n2
  holdfast migrate $(pidof oa_ded) --to n2 --max-freeze-ms 5
  holdfast migrate 4242 --to n2 --json | jq .freeze_us

It is asked on the node where the process runs. What it uses that cannot move is named before anything is
touched; `holdfast check PID` says so without moving it. Until the other node runs it every failure leaves
it running here. Exit codes: 0 it moved, 1 it stayed or the command failed.")]
pub struct MigrateArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// The process, by its PID on this node
    pid: i32,
    /// The node that is to take it
    #[arg(long, value_name = "NODE")]
    to: String,
    /// How its sockets move
    #[arg(long, value_enum, default_value_t)]
    sockets: Sockets,
    /// Only if it is predicted to stand still for so many milliseconds at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    max_freeze_ms: Option<u64>,
    /// Wait at most so many seconds for the result
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Return when it has begun
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Print JSON, without lines of progress
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Sockets {
    /// One at a time
    Iterative,
    /// All in one message
    Collective,
    /// Made beforehand; in the freeze one message has what changed
    #[default]
    Incremental,
}

/// Carries out `holdfast migrate`.
///
/// # Errors
/// The daemon refuses, or the result does not come in time.
pub fn run(args: &MigrateArgs) -> Result<Ending> {
    let client = args.daemon.client()?;
    let request = request(args);
    let accepted = (args.daemon).ask(&client, |client| client.migrate(&request))?;
    if args.no_wait {
        match args.json {
            true => print_json(&accepted)?,
            false => println!("migration {} to {} has begun", accepted.id, args.to),
        }
        return Ok(Ending::Done);
    }
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let mut shown = 0;
    let status = loop {
        let status = (args.daemon).ask(&client, |client| client.migration(accepted.id))?;
        if let Some(round) = status
            .round
            .filter(|round| round.number > shown && !args.json)
        {
            shown = round.number;
            println!("{}", progress(&round));
        }
        if status.outcome != MigrationOutcome::Running {
            break status;
        }
        if Instant::now() > deadline {
            bail!(
                "after {} s migration {} has no result; it goes on. --wait SECONDS waits longer",
                args.wait,
                accepted.id
            );
        }
        sleep(LOOK);
    };
    match args.json {
        true => print_json(&status)?,
        false => print!("{}", text(&status)),
    }
    Ok(match status.outcome {
        MigrationOutcome::Moved => Ending::Done,
        _ => Ending::Failed,
    })
}

fn request(args: &MigrateArgs) -> MigrationRequest {
    MigrationRequest {
        pid: args.pid,
        to: args.to.clone(),
        sockets: match args.sockets {
            Sockets::Iterative => SocketsWay::Iterative,
            Sockets::Collective => SocketsWay::Collective,
            Sockets::Incremental => SocketsWay::Incremental,
        },
        max_freeze_us: args.max_freeze_ms.map(|ms| ms * 1000),
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn progress(round: &RoundEntry) -> String {
    format!(
        "round {}: sent {:.1} MiB at {:.0} MiB/s; it changes {:.1} MiB/s; predicted freeze {:.1} ms",
        round.number,
        mib(round.copied_bytes),
        mib(round.rate_bytes_per_s),
        mib(round.dirty_bytes_per_s),
        round.predicted_freeze_us / 1e3
    )
}

fn text(status: &MigrationStatus) -> String {
    let (pid, to) = (status.pid, &status.to);
    // One that has ended, or never was, has no name.
    let who = match status.name.as_str() {
        "" => format!("process {pid}"),
        name => format!("{name} ({pid})"),
    };
    match &status.outcome {
        MigrationOutcome::Running => format!("{who} is on its way to {to}\n"),
        MigrationOutcome::Kept { reason } => format!("{who} stays here: {reason}\n"),
        MigrationOutcome::Moved => {
            let phases = &status.phases_us;
            format!(
                "{who} runs on {to}; frozen {:.1} ms (extract {:.1}, transfer {:.1}, restore {:.1}, \
                 commit {:.1}), {:.1} MiB sent before and {:.2} MiB meanwhile\n",
                status.freeze_us.unwrap_or(0.0) / 1e3,
                phases.extract / 1e3,
                phases.transfer / 1e3,
                phases.restore / 1e3,
                phases.commit / 1e3,
                mib(status.copied_bytes),
                mib(status.freeze_bytes)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_api::control::MigrationPhasesUs;

    use super::*;

    fn status(outcome: MigrationOutcome) -> MigrationStatus {
        MigrationStatus {
            id: 1,
            pid: 4242,
            name: "game".into(),
            to: "n2".into(),
            outcome,
            round: None,
            copied_bytes: 3 << 20,
            freeze_bytes: 1 << 18,
            predicted_freeze_us: Some(2_000.0),
            freeze_us: Some(2_540.0),
            phases_us: MigrationPhasesUs {
                restore: 1_200.0,
                ..MigrationPhasesUs::default()
            },
        }
    }

    #[test]
    fn what_moved_says_how_long_it_stood_still() {
        let text = text(&status(MigrationOutcome::Moved));
        assert!(
            text.starts_with("game (4242) runs on n2; frozen 2.5 ms"),
            "{text}"
        );
        assert!(text.contains("restore 1.2"), "{text}");
        assert!(
            text.ends_with("3.0 MiB sent before and 0.25 MiB meanwhile\n"),
            "{text}"
        );
    }

    #[test]
    fn what_has_no_name_is_called_by_its_pid() {
        let reason = "process 4242 has ended".to_owned();
        let mut status = status(MigrationOutcome::Kept { reason });
        status.name.clear();
        assert_eq!(
            text(&status),
            "process 4242 stays here: process 4242 has ended\n"
        );
    }

    #[test]
    fn what_stays_says_why() {
        let reason = "the process cannot move: it has io_uring".to_owned();
        let text = text(&status(MigrationOutcome::Kept { reason }));
        assert_eq!(
            text,
            "game (4242) stays here: the process cannot move: it has io_uring\n"
        );
    }
}
