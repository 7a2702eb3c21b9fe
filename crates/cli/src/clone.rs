//! `holdfast clone`: a copy of a running process at another node.

use anyhow::Result;
use clap::Args;
use holdfast_api::control::SocketStrategy;

use crate::ExitResult;
use crate::migrate::MoveArgs;

/// Copy a running process of this node, with all its children, to another node; the original keeps running
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast clone 4242 --to n2
  holdfast clone $(pidof oa_ded) --to n2 --max-freeze-ms 5
  holdfast clone game.service --to n2
  holdfast clone 4242 --to n2 --json | jq .freeze_us

Run the command on the node where the process runs. The copy has the same memory, files, listeners and UDP sockets.
Connections stay with the original; the copy sees them as reset by their clients. The original is frozen while the last
changes are copied, and continues even if the copy fails. Exit codes: 0 the copy runs, 1 there is no copy or the command
failed.")]
pub struct CloneArgs {
    #[command(flatten)]
    options: MoveArgs,
}

/// Runs `holdfast clone`.
///
/// # Errors
/// The daemon refuses, or there is no result within the time limit.
pub fn run(args: &CloneArgs) -> Result<ExitResult> {
    args.options.run(SocketStrategy::default(), true, false)
}
