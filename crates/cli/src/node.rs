//! `holdfast node`: becomes the daemon.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};
use clap::Args;

/// Run the daemon of this node (becomes holdfastd)
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  holdfast node\n  holdfast node --config /etc/holdfast/holdfast.toml --check"
)]
pub struct NodeArgs {
    /// The configuration file; docs/configuration.md describes it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only check the configuration
    #[arg(long)]
    check: bool,
}

/// Replaces this process by the daemon.
///
/// # Errors
/// There is no `holdfastd`.
pub fn run(args: &NodeArgs) -> Result<()> {
    become_daemon(|command| {
        if let Some(config) = &args.config {
            command.arg("--config").arg(config);
        }
        if args.check {
            command.arg("--check");
        }
    })
}

/// Replaces this process by the daemon with the arguments that `fill` gives it.
///
/// # Errors
/// There is no `holdfastd`.
pub fn become_daemon(fill: impl FnOnce(&mut Command)) -> Result<()> {
    let mut command = daemon_command();
    fill(&mut command);
    // Only comes back when it fails.
    let error = command.exec();
    bail!("{}", no_daemon(&error))
}

/// `holdfastd`, without arguments: the one beside this program, else as PATH has it.
pub fn daemon_command() -> Command {
    let own = std::env::current_exe().ok();
    let beside = own
        .and_then(|own| Some(own.parent()?.join("holdfastd")))
        .filter(|path| path.is_file());
    Command::new(beside.unwrap_or_else(|| "holdfastd".into()))
}

/// What to say when it does not run.
pub fn no_daemon(error: &std::io::Error) -> String {
    format!("cannot run holdfastd: {error}; it is looked for beside `holdfast`, then in PATH")
}
