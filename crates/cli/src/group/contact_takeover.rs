//! `holdfast group takeover`: makes this node the contact node without a majority.

use anyhow::{Result, ensure};
use clap::Args;

use crate::daemon_client::DaemonArgs;
use crate::output::output_line;

/// Make this node the contact node although a majority of the voters is lost for good
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  holdfast group takeover --force\n\nIn a group of two, nobody can tell whether the other node is \
                  dead or only cut off. Make sure that no other voter runs, and force one node only: two contact nodes \
                  break the connections of clients."
)]
pub struct TakeoverArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// No other voter runs: I have made sure
    #[arg(long)]
    force: bool,
}

/// Runs `holdfast group takeover`.
///
/// # Errors
/// `--force` is missing, the daemon does not answer, or the contact node lives.
pub fn run(args: &TakeoverArgs) -> Result<()> {
    ensure!(
        args.force,
        "nothing was changed: make sure that the other voters are dead, then add --force"
    );
    let client = args.daemon.client()?;
    let change = args.daemon.ask(&client, |client| client.force_takeover())?;
    output_line!("this node is the contact node (view {})", change.epoch);
    Ok(())
}
