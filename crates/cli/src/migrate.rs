//! `holdfast migrate`: moves a running process to another node. Also contains the common part of `holdfast clone`.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use holdfast_api::control::{
    BlockingControlClient, MigrationOutcome, MigrationRequest, MigrationStatus, PostCopyMemory,
    RoundEntry, SocketStrategy,
};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};
use crate::process_arg::ProcessArg;

/// Interval between polls of a running migration.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Move a running process of this node, with all its children, to another node
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast migrate 4242 --to n2
  holdfast migrate $(pidof oa_ded) --to n2 --max-freeze-ms 5
  holdfast migrate game.service --to n2
  holdfast migrate 4242 --to n2 --post-copy --max-freeze-ms 20
  holdfast migrate 4242 --to n2 --json | jq .freeze_us

Run the command on the node where the process runs. Anything that cannot move is reported before the process is
touched; `holdfast check PID` reports it without a migration. Until the process resumes on the other node, any failure
leaves it running here. Exit codes: 0 the process moved, 1 it stayed or the command failed.")]
pub struct MigrateArgs {
    #[command(flatten)]
    options: MoveArgs,
    /// Strategy for moving the sockets: one at a time, all together, or before the freeze with later changes sent in it
    #[arg(long, default_value = SocketStrategy::default().name(),
          value_parser = PossibleValuesParser::new(SocketStrategy::NAMES).try_map(|name| name.parse::<SocketStrategy>()))]
    sockets: SocketStrategy,
    /// Allow post-copy: if the freeze would exceed --max-freeze-ms (or, without that limit, if further rounds of
    /// copying do not shorten it and memory is most of it), the remaining pages are sent after the process resumes at
    /// the other node; until then both nodes must stay up
    #[arg(long, conflicts_with = "verify")]
    post_copy: bool,
}

/// Common options: a process, and the node for it or for its copy.
#[derive(Debug, Args)]
pub struct MoveArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The process, by its PID on this node, or the systemd unit that it is the main process of
    #[arg(value_name = "PID|UNIT")]
    process: ProcessArg,
    /// The node that takes the process
    #[arg(long, value_name = "NODE")]
    to: String,
    /// Move only if the predicted freeze is at most this many milliseconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    max_freeze_ms: Option<u64>,
    /// Compare registers, memory and descriptors on both nodes before the process resumes; on any difference the
    /// process stays here
    #[arg(long)]
    verify: bool,
    /// Maximum time to wait for the result, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Return after the migration has started
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Print JSON, without progress lines
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast migrate`.
///
/// # Errors
/// The daemon refuses, or there is no result within the time limit.
pub fn run(args: &MigrateArgs) -> Result<ExitResult> {
    args.options.run(args.sockets, false, args.post_copy)
}

impl MoveArgs {
    /// Requests the migration, and shows its progress and result.
    ///
    /// # Errors
    /// The daemon refuses, or there is no result within the time limit.
    pub fn run(&self, sockets: SocketStrategy, clone: bool, post_copy: bool) -> Result<ExitResult> {
        let client = self.daemon.client()?;
        let request = MigrationRequest {
            pid: self.process.pid(&self.daemon, &client)?,
            to: self.to.clone(),
            sockets,
            clone,
            max_freeze_us: self.max_freeze_ms.map(|ms| ms * 1000),
            post_copy,
            verify: self.verify,
        };
        let accepted = (self.daemon).ask(&client, |client| client.migrate(&request))?;
        if self.no_wait {
            match self.json {
                true => print_json(&accepted)?,
                false => output_line!("migration {} to {} has begun", accepted.id, self.to),
            }
            return Ok(ExitResult::Success);
        }
        let status = self.show_progress(&client, accepted.id)?;
        match self.json {
            true => print_json(&status)?,
            false => output!("{}", migration_text(&status)),
        }
        let lost_reason = status
            .post_copy
            .is_some_and(|memory| memory.problem.is_some());
        Ok(match status.outcome {
            MigrationOutcome::Moved | MigrationOutcome::Cloned if !lost_reason => {
                ExitResult::Success
            }
            _ => ExitResult::Failed,
        })
    }

    /// Shows the rounds of copying until the migration has ended.
    fn show_progress(&self, client: &BlockingControlClient, id: u64) -> Result<MigrationStatus> {
        let deadline = Instant::now() + Duration::from_secs(self.wait);
        let (mut shown, mut post_copy_shown) = (0, false);
        loop {
            let status = (self.daemon).ask(client, |client| client.migration(id))?;
            let new = |round: &RoundEntry| round.number > shown && !self.json;
            if let Some(round) = status.round.filter(new) {
                shown = round.number;
                output_line!("{}", round_text(&round));
            }
            if let Some(memory) = &status.post_copy
                && !std::mem::replace(&mut post_copy_shown, true)
                && !self.json
            {
                output_line!(
                    "the process runs on {}; {:.1} MiB of its memory remain to be sent (post-copy)",
                    self.to,
                    mib(memory.bytes)
                );
            }
            if status.outcome != MigrationOutcome::Running {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!(
                    "no result after {} s; migration {id} continues. --wait SECONDS waits longer, `holdfast migrations cancel {id}` ends the migration",
                    self.wait
                );
            }
            sleep(POLL_INTERVAL);
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn round_text(round: &RoundEntry) -> String {
    format!(
        "round {}: sent {:.1} MiB{} at {:.0} MiB/s; the process changes {:.1} MiB/s; predicted freeze {:.1} ms",
        round.number,
        mib(round.copied_bytes),
        compression_text(round.copied_bytes, round.saved_bytes),
        mib(round.rate_bytes_per_s),
        mib(round.dirty_bytes_per_s),
        round.predicted_freeze_us / 1e3
    )
}

/// Describes the effect of compression, if any.
fn compression_text(sent: u64, saved: u64) -> String {
    match saved {
        0 => String::new(),
        saved => format!(" (compressed from {:.1})", mib(sent + saved)),
    }
}

pub(crate) fn migration_text(status: &MigrationStatus) -> String {
    let (pid, to) = (status.pid, &status.to);
    let sent = status.copied_bytes + status.freeze_bytes;
    // A process that has ended, or never existed, has no name.
    let process_name = match status.name.as_str() {
        "" => format!("process {pid}"),
        name => format!("{name} ({pid})"),
    };
    match &status.outcome {
        MigrationOutcome::Running => format!("{process_name} is moving to {to}\n"),
        MigrationOutcome::Kept { reason, .. } if status.clone => {
            format!("{process_name} was not copied, and continues: {reason}\n")
        }
        MigrationOutcome::Kept { reason, .. } => format!("{process_name} stays here: {reason}\n"),
        MigrationOutcome::Cloned => format!(
            "a copy of {process_name} runs on {to}; the original was frozen for {:.1} ms and continues here, {:.1} MiB \
             sent before the freeze and {:.2} MiB in it{}\n",
            status.freeze_us.unwrap_or(0.0) / 1e3,
            mib(status.copied_bytes),
            mib(status.freeze_bytes),
            compression_text(sent, status.saved_bytes)
        ),
        MigrationOutcome::Moved => {
            let phases = &status.phases_us;
            format!(
                "{process_name} runs on {to}; frozen {:.1} ms (extract {:.1}, transfer {:.1}, restore {:.1}, \
                 commit {:.1}), {:.1} MiB sent before the freeze and {:.2} MiB in it{}\n",
                status.freeze_us.unwrap_or(0.0) / 1e3,
                phases.extract / 1e3,
                phases.transfer / 1e3,
                phases.restore / 1e3,
                phases.commit / 1e3,
                mib(status.copied_bytes),
                mib(status.freeze_bytes),
                compression_text(sent, status.saved_bytes)
            ) + &post_copy_text(status.post_copy.as_ref())
                + &forwarded_text(&status.forwarded)
        }
    }
}

/// Describes the post-copy of memory, if any.
fn post_copy_text(memory: Option<&PostCopyMemory>) -> String {
    let Some(memory) = memory else {
        return String::new();
    };
    if let Some(problem) = &memory.problem {
        return format!(
            "the process has ended there before all its memory had arrived: {problem}\n"
        );
    }
    format!(
        "then {:.1} MiB of its memory ({} pages) arrived by post-copy in {:.1} ms; it waited for pages {} times\n",
        mib(memory.sent_bytes),
        memory.sent_pages,
        memory.duration_us / 1e3,
        memory.page_faults
    )
}

/// Lists connections that are forwarded, because their other ends run no daemon.
pub(crate) fn forwarded_text(connections: &[String]) -> String {
    if connections.is_empty() {
        return String::new();
    }
    let lines: String = (connections.iter())
        .map(|flow| format!("forwarded: {flow}\n"))
        .collect();
    lines
        + "the other ends of forwarded connections run no daemon that could send to the new node: the node with \
           the local address forwards their packets, and must stay up\n"
}

#[cfg(test)]
mod tests {
    use holdfast_api::control::{Blame, MigrationPhasesUs, MigrationStepsUs};

    use super::*;

    fn status(outcome: MigrationOutcome) -> MigrationStatus {
        MigrationStatus {
            id: 1,
            pid: 4242,
            name: "game".into(),
            to: "n2".into(),
            clone: false,
            outcome,
            round: None,
            copied_bytes: 3 << 20,
            freeze_bytes: 1 << 18,
            saved_bytes: 0,
            predicted_freeze_us: Some(2_000.0),
            freeze_us: Some(2_540.0),
            forwarded: Vec::new(),
            post_copy: None,
            phases_us: MigrationPhasesUs {
                restore: 1_200.0,
                ..MigrationPhasesUs::default()
            },
            steps_us: MigrationStepsUs::default(),
        }
    }

    #[test]
    fn moved_process_text_shows_the_freeze() {
        let text = migration_text(&status(MigrationOutcome::Moved));
        assert!(
            text.starts_with("game (4242) runs on n2; frozen 2.5 ms"),
            "{text}"
        );
        assert!(text.contains("restore 1.2"), "{text}");
        assert!(
            text.ends_with("3.0 MiB sent before the freeze and 0.25 MiB in it\n"),
            "{text}"
        );
    }

    fn kept(reason: String) -> MigrationOutcome {
        let blame = Blame::Program;
        MigrationOutcome::Kept { reason, blame }
    }

    #[test]
    fn clone_text_says_that_the_original_runs() {
        let mut status = status(MigrationOutcome::Cloned);
        status.clone = true;
        assert_eq!(
            migration_text(&status),
            "a copy of game (4242) runs on n2; the original was frozen for 2.5 ms and continues here, 3.0 MiB sent \
             before the freeze and 0.25 MiB in it\n"
        );
        let reason = "the process cannot move: it has io_uring".to_owned();
        status.outcome = kept(reason);
        assert!(
            migration_text(&status)
                .starts_with("game (4242) was not copied, and continues: the process")
        );
    }

    #[test]
    fn compression_is_shown_if_any() {
        let mut status = status(MigrationOutcome::Moved);
        status.saved_bytes = 1 << 20;
        let expected = "0.25 MiB in it (compressed from 4.2)\n";
        assert!(
            migration_text(&status).ends_with(expected),
            "{}",
            migration_text(&status)
        );
    }

    #[test]
    fn post_copy_is_shown() {
        let mut status = status(MigrationOutcome::Moved);
        let mut memory = PostCopyMemory {
            bytes: 64 << 20,
            sent_bytes: 64 << 20,
            sent_pages: 16_384,
            page_faults: 12,
            duration_us: 250_000.0,
            problem: None,
            blame: None,
        };
        status.post_copy = Some(memory.clone());
        let expected = "\nthen 64.0 MiB of its memory (16384 pages) arrived by post-copy in 250.0 ms; \
                        it waited for pages 12 times\n";
        assert!(
            migration_text(&status).ends_with(expected),
            "{}",
            migration_text(&status)
        );
        memory.problem = Some("its donor was not heard for 30 s".to_owned());
        status.post_copy = Some(memory);
        let text = migration_text(&status);
        assert!(
            text.ends_with("before all its memory had arrived: its donor was not heard for 30 s\n"),
            "{text}"
        );
    }

    #[test]
    fn forwarded_connections_are_listed() {
        let flow = "tcp:10.0.0.2:4242-10.0.9.1:3306";
        let mut status = status(MigrationOutcome::Moved);
        status.forwarded.push(flow.to_owned());
        let text = migration_text(&status);
        assert!(text.contains(&format!("\nforwarded: {flow}\n")), "{text}");
        assert!(text.contains("must stay up"), "{text}");
    }

    #[test]
    fn nameless_process_is_shown_by_pid() {
        let reason = "process 4242 has ended".to_owned();
        let mut status = status(kept(reason));
        status.name.clear();
        assert_eq!(
            migration_text(&status),
            "process 4242 stays here: process 4242 has ended\n"
        );
    }

    #[test]
    fn kept_process_text_shows_the_reason() {
        let reason = "the process cannot move: it has io_uring".to_owned();
        let text = migration_text(&status(kept(reason)));
        assert_eq!(
            text,
            "game (4242) stays here: the process cannot move: it has io_uring\n"
        );
    }
}
