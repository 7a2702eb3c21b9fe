//! `holdfast migrate`: moves a running process to another node. Also contains the common part of `holdfast clone`.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use holdfast_api::control::{
    BlockingClient, FollowedMemory, MigrationOutcome, MigrationRequest, MigrationStatus,
    RoundEntry, SocketsWay,
};

use crate::Ending;
use crate::control::{Daemon, print_json};
use crate::process::Process;

/// Interval between polls of a running migration.
const LOOK: Duration = Duration::from_millis(20);

/// Move a running process of this node, with all its children, to another node
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast migrate 4242 --to n2
  holdfast migrate $(pidof oa_ded) --to n2 --max-freeze-ms 5
  holdfast migrate game.service --to n2
  holdfast migrate 4242 --to n2 --post-copy --max-freeze-ms 20
  holdfast migrate 4242 --to n2 --json | jq .freeze_us

It is asked on the node where the process runs. What it uses that cannot move is named before anything is
touched; `holdfast check PID` says so without moving it. Until the other node runs it every failure leaves
it running here. Exit codes: 0 it moved, 1 it stayed or the command failed.")]
pub struct MigrateArgs {
    #[command(flatten)]
    journey: Journey,
    /// Strategy for moving the sockets: one at a time, all together, or before the freeze with later changes sent in it
    #[arg(long, value_enum, default_value_t)]
    sockets: Sockets,
    /// Allow post-copy: if the freeze would exceed --max-freeze-ms (or, without that limit, if further rounds of
    /// copying do not shorten it and memory is most of it), the remaining pages are sent after the process resumes at
    /// the other node; until then both nodes must stay up
    #[arg(long, conflicts_with = "verify")]
    post_copy: bool,
}

/// Common options: a process, and the node for it or for its copy.
#[derive(Debug, Args)]
pub struct Journey {
    #[command(flatten)]
    daemon: Daemon,
    /// The process, by its PID on this node, or the systemd unit that it is the main process of
    #[arg(value_name = "PID|UNIT")]
    process: Process,
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

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Sockets {
    /// One at a time
    Iterative,
    /// All in one message
    Collective,
    /// Created before the freeze; one message in the freeze carries the changes
    #[default]
    Incremental,
}

/// Runs `holdfast migrate`.
///
/// # Errors
/// The daemon refuses, or there is no result within the time limit.
pub fn run(args: &MigrateArgs) -> Result<Ending> {
    let sockets = match args.sockets {
        Sockets::Iterative => SocketsWay::Iterative,
        Sockets::Collective => SocketsWay::Collective,
        Sockets::Incremental => SocketsWay::Incremental,
    };
    args.journey.make(sockets, false, args.post_copy)
}

impl Journey {
    /// Requests the migration, and shows its progress and result.
    ///
    /// # Errors
    /// The daemon refuses, or there is no result within the time limit.
    pub fn make(&self, sockets: SocketsWay, clone: bool, post_copy: bool) -> Result<Ending> {
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
                false => println!("migration {} to {} has begun", accepted.id, self.to),
            }
            return Ok(Ending::Done);
        }
        let status = self.follow(&client, accepted.id)?;
        match self.json {
            true => print_json(&status)?,
            false => print!("{}", text(&status)),
        }
        let lost = status
            .followed
            .is_some_and(|memory| memory.problem.is_some());
        Ok(match status.outcome {
            MigrationOutcome::Moved | MigrationOutcome::Cloned if !lost => Ending::Done,
            _ => Ending::Failed,
        })
    }

    /// Shows the rounds of copying until the migration has ended.
    fn follow(&self, client: &BlockingClient, id: u64) -> Result<MigrationStatus> {
        let deadline = Instant::now() + Duration::from_secs(self.wait);
        let (mut shown, mut follows) = (0, false);
        loop {
            let status = (self.daemon).ask(client, |client| client.migration(id))?;
            let new = |round: &RoundEntry| round.number > shown && !self.json;
            if let Some(round) = status.round.filter(new) {
                shown = round.number;
                println!("{}", progress(&round));
            }
            if let Some(memory) = &status.followed
                && !std::mem::replace(&mut follows, true)
                && !self.json
            {
                println!(
                    "it runs on {}; {:.1} MiB of its memory follow",
                    self.to,
                    mib(memory.bytes)
                );
            }
            if status.outcome != MigrationOutcome::Running {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!(
                    "after {} s migration {id} has no result; it goes on. --wait SECONDS waits longer",
                    self.wait
                );
            }
            sleep(LOOK);
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn progress(round: &RoundEntry) -> String {
    format!(
        "round {}: sent {:.1} MiB{} at {:.0} MiB/s; it changes {:.1} MiB/s; predicted freeze {:.1} ms",
        round.number,
        mib(round.copied_bytes),
        packed(round.copied_bytes, round.saved_bytes),
        mib(round.rate_bytes_per_s),
        mib(round.dirty_bytes_per_s),
        round.predicted_freeze_us / 1e3
    )
}

/// Describes the effect of compression, if any.
fn packed(sent: u64, saved: u64) -> String {
    match saved {
        0 => String::new(),
        saved => format!(" (compressed from {:.1})", mib(sent + saved)),
    }
}

fn text(status: &MigrationStatus) -> String {
    let (pid, to) = (status.pid, &status.to);
    let sent = status.copied_bytes + status.freeze_bytes;
    // A process that has ended, or never existed, has no name.
    let who = match status.name.as_str() {
        "" => format!("process {pid}"),
        name => format!("{name} ({pid})"),
    };
    match &status.outcome {
        MigrationOutcome::Running => format!("{who} is on its way to {to}\n"),
        MigrationOutcome::Kept { reason } if status.clone => {
            format!("{who} was not copied, and goes on: {reason}\n")
        }
        MigrationOutcome::Kept { reason } => format!("{who} stays here: {reason}\n"),
        MigrationOutcome::Cloned => format!(
            "a copy of {who} runs on {to}; the original stood still for {:.1} ms and goes on here, {:.1} MiB \
             sent before and {:.2} MiB meanwhile{}\n",
            status.freeze_us.unwrap_or(0.0) / 1e3,
            mib(status.copied_bytes),
            mib(status.freeze_bytes),
            packed(sent, status.saved_bytes)
        ),
        MigrationOutcome::Moved => {
            let phases = &status.phases_us;
            format!(
                "{who} runs on {to}; frozen {:.1} ms (extract {:.1}, transfer {:.1}, restore {:.1}, \
                 commit {:.1}), {:.1} MiB sent before and {:.2} MiB meanwhile{}\n",
                status.freeze_us.unwrap_or(0.0) / 1e3,
                phases.extract / 1e3,
                phases.transfer / 1e3,
                phases.restore / 1e3,
                phases.commit / 1e3,
                mib(status.copied_bytes),
                mib(status.freeze_bytes),
                packed(sent, status.saved_bytes)
            ) + &followed(status.followed.as_ref())
                + &forwarded(&status.forwarded)
        }
    }
}

/// Describes the post-copy of memory, if any.
fn followed(memory: Option<&FollowedMemory>) -> String {
    let Some(memory) = memory else {
        return String::new();
    };
    if let Some(why) = &memory.problem {
        return format!("it has ended there before all its memory had come: {why}\n");
    }
    format!(
        "then {:.1} MiB of its memory ({} pages) followed within {:.1} ms; it waited for some of it {} times\n",
        mib(memory.sent_bytes),
        memory.sent_pages,
        memory.us / 1e3,
        memory.on_demand
    )
}

/// Lists connections that are forwarded, because their other ends run no daemon.
pub(crate) fn forwarded(connections: &[String]) -> String {
    if connections.is_empty() {
        return String::new();
    }
    let lines: String = (connections.iter())
        .map(|flow| format!("forwarded: {flow}\n"))
        .collect();
    lines
        + "the other end of what is forwarded has no daemon that could send to the new node: the node with the local address does, \
           and must stay up\n"
}

#[cfg(test)]
mod tests {
    use holdfast_api::control::{MigrationPhasesUs, MigrationStepsUs};

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
            followed: None,
            phases_us: MigrationPhasesUs {
                restore: 1_200.0,
                ..MigrationPhasesUs::default()
            },
            steps_us: MigrationStepsUs::default(),
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
    fn what_was_copied_says_that_the_original_goes_on() {
        let mut status = status(MigrationOutcome::Cloned);
        status.clone = true;
        assert_eq!(
            text(&status),
            "a copy of game (4242) runs on n2; the original stood still for 2.5 ms and goes on here, 3.0 MiB sent \
             before and 0.25 MiB meanwhile\n"
        );
        let reason = "the process cannot move: it has io_uring".to_owned();
        status.outcome = MigrationOutcome::Kept { reason };
        assert!(text(&status).starts_with("game (4242) was not copied, and goes on: the process"));
    }

    #[test]
    fn compression_is_told_where_there_was_some() {
        let mut status = status(MigrationOutcome::Moved);
        status.saved_bytes = 1 << 20;
        let told = "0.25 MiB meanwhile (compressed from 4.2)\n";
        assert!(text(&status).ends_with(told), "{}", text(&status));
    }

    #[test]
    fn memory_that_followed_is_told() {
        let mut status = status(MigrationOutcome::Moved);
        let mut memory = FollowedMemory {
            bytes: 64 << 20,
            sent_bytes: 64 << 20,
            sent_pages: 16_384,
            on_demand: 12,
            us: 250_000.0,
            problem: None,
        };
        status.followed = Some(memory.clone());
        let told = "\nthen 64.0 MiB of its memory (16384 pages) followed within 250.0 ms; it waited for some of it 12 times\n";
        assert!(text(&status).ends_with(told), "{}", text(&status));
        memory.problem = Some("its donor was not heard for 30 s".to_owned());
        status.followed = Some(memory);
        let text = text(&status);
        assert!(
            text.ends_with("before all its memory had come: its donor was not heard for 30 s\n"),
            "{text}"
        );
    }

    #[test]
    fn what_is_forwarded_is_named() {
        let flow = "tcp:10.0.0.2:4242-10.0.9.1:3306";
        let mut status = status(MigrationOutcome::Moved);
        status.forwarded.push(flow.to_owned());
        let text = text(&status);
        assert!(text.contains(&format!("\nforwarded: {flow}\n")), "{text}");
        assert!(text.contains("must stay up"), "{text}");
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
