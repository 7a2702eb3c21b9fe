//! `holdfast migrations`: the migrations from this node that its daemon remembers.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use holdfast_api::control::{
    BlockingControlClient, MigrationList, MigrationOutcome, MigrationStatus,
};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::migrate::migration_text;
use crate::output::{output, print_json};
use crate::table::TextTable;

/// Maximum time for a cancelled migration to end, and interval between queries.
const END_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Migrations from this node: running ones, and the last ones that have ended
#[derive(Debug, Args)]
pub struct MigrationsArgs {
    #[command(subcommand)]
    action: MigrationsAction,
}

#[derive(Debug, Subcommand)]
enum MigrationsAction {
    /// List the migrations that the daemon remembers, oldest first
    #[command(
        after_help = "Examples:\n  holdfast migrations list\n  holdfast migrations list --json"
    )]
    List(ListArgs),
    /// Show one migration
    #[command(after_help = "Example:\n  holdfast migrations show 3")]
    Show(OneMigrationArgs),
    /// Cancel a running migration: the process stays here. Impossible once the process runs at the other node
    #[command(
        after_help = "Example:\n  holdfast migrations cancel 3\n\nExit codes: 0 the process stays here, 1 the \
                      migration had ended, or the command failed."
    )]
    Cancel(OneMigrationArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct OneMigrationArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Number of the migration, which `holdfast migrate` and `holdfast migrations list` print
    #[arg(value_name = "NUMBER")]
    id: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast migrations`.
///
/// # Errors
/// The daemon does not answer, or does not know the migration.
pub fn run(args: &MigrationsArgs) -> Result<ExitResult> {
    match &args.action {
        MigrationsAction::List(args) => {
            let client = args.daemon.client()?;
            let list = args.daemon.ask(&client, |client| client.migrations())?;
            match args.json {
                true => print_json(&list)?,
                false => output!("{}", list_text(&list)),
            }
        }
        MigrationsAction::Show(args) => {
            let client = args.daemon.client()?;
            let status = (args.daemon).ask(&client, |client| client.migration(args.id))?;
            print_status(&status, args.json)?;
        }
        MigrationsAction::Cancel(args) => {
            let client = args.daemon.client()?;
            (args.daemon).ask(&client, |client| client.cancel_migration(args.id))?;
            let status = wait_for_end(args, &client)?;
            print_status(&status, args.json)?;
            if !matches!(status.outcome, MigrationOutcome::Kept { .. }) {
                return Ok(ExitResult::Failed);
            }
        }
    }
    Ok(ExitResult::Success)
}

/// Waits until the migration has ended: a cancelled one first takes back what it has done.
fn wait_for_end(
    args: &OneMigrationArgs,
    client: &BlockingControlClient,
) -> Result<MigrationStatus> {
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        let status = (args.daemon).ask(client, |client| client.migration(args.id))?;
        if status.outcome != MigrationOutcome::Running {
            return Ok(status);
        }
        ensure!(
            Instant::now() < deadline,
            "migration {id} has not ended after {} s; `holdfast migrations show {id}` shows how it goes on",
            END_TIMEOUT.as_secs(),
            id = args.id
        );
        sleep(POLL_INTERVAL);
    }
}

fn print_status(status: &MigrationStatus, json: bool) -> Result<()> {
    match json {
        true => print_json(status),
        false => {
            output!("{}", migration_text(status));
            Ok(())
        }
    }
}

fn list_text(list: &MigrationList) -> String {
    if list.migrations.is_empty() {
        return "no migrations\n".to_owned();
    }
    let mut table = TextTable::new(["number", "process", "name", "to", "freeze ms", "result"]);
    for status in &list.migrations {
        let freeze = status
            .freeze_us
            .map(|freeze| format!("{:.1}", freeze / 1e3));
        table.row([
            status.id.to_string(),
            status.pid.to_string(),
            status.name.clone(),
            status.to.clone(),
            freeze.unwrap_or_default(),
            result_text(status),
        ]);
    }
    table.text()
}

fn result_text(status: &MigrationStatus) -> String {
    match &status.outcome {
        MigrationOutcome::Running if status.clone => "being copied".to_owned(),
        MigrationOutcome::Running => "moving".to_owned(),
        MigrationOutcome::Moved => "moved".to_owned(),
        MigrationOutcome::Cloned => "cloned".to_owned(),
        MigrationOutcome::Kept { reason, .. } => format!("kept: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use holdfast_api::control::{Blame, MigrationPhasesUs, MigrationStepsUs};

    use super::*;

    #[test]
    fn list_names_each_migration_and_its_result() {
        let moved = MigrationStatus {
            id: 1,
            pid: 4242,
            name: "game".into(),
            to: "n2".into(),
            clone: false,
            outcome: MigrationOutcome::Moved,
            round: None,
            copied_bytes: 0,
            freeze_bytes: 0,
            saved_bytes: 0,
            predicted_freeze_us: None,
            freeze_us: Some(2_540.0),
            forwarded: Vec::new(),
            post_copy: None,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
        };
        let reason = "node n3 did not answer in time".to_owned();
        let kept = MigrationStatus {
            id: 2,
            to: "n3".into(),
            outcome: MigrationOutcome::Kept {
                reason,
                blame: Blame::Peer,
            },
            freeze_us: None,
            ..moved.clone()
        };
        let list = MigrationList {
            migrations: vec![moved, kept],
        };
        assert_eq!(
            list_text(&list),
            "number  process  name  to  freeze ms  result\n\
             1       4242     game  n2  2.5        moved\n\
             2       4242     game  n3  -          kept: node n3 did not answer in time\n"
        );
        assert_eq!(list_text(&MigrationList::default()), "no migrations\n");
    }
}
