//! `holdfast clone`: a copy of a running process at another node.

use anyhow::Result;
use clap::Args;
use holdfast_api::control::SocketsWay;

use crate::Ending;
use crate::migrate::Journey;

/// Copy a running process of this node, with all its children, to another node; the original keeps running
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast clone 4242 --to n2
  holdfast clone $(pidof oa_ded) --to n2 --max-freeze-ms 5
  holdfast clone game.service --to n2
  holdfast clone 4242 --to n2 --json | jq .freeze_us

It is asked on the node where the process runs. The copy runs with the same memory, files, listeners and UDP
sockets; connections stay with the original, and for the copy they are as if their clients had reset them. The
original stands still while the last of it is copied, and runs on whatever becomes of the copy. Exit codes: 0 the
copy runs, 1 there is none or the command failed.")]
pub struct CloneArgs {
    #[command(flatten)]
    journey: Journey,
}

/// Runs `holdfast clone`.
///
/// # Errors
/// The daemon refuses, or there is no result within the time limit.
pub fn run(args: &CloneArgs) -> Result<Ending> {
    args.journey.make(SocketsWay::default(), true, false)
}
