//! `holdfast node`: replaces this process by the daemon.

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
/// `holdfastd` is not found.
pub fn run(args: &NodeArgs) -> Result<()> {
    exec_daemon("holdfastd", |command| {
        if let Some(config) = &args.config {
            command.arg("--config").arg(config);
        }
        if args.check {
            command.arg("--check");
        }
    })
}

/// Replaces this process by a daemon with the arguments that `add_arguments` gives it.
///
/// # Errors
/// The daemon is not found.
pub fn exec_daemon(daemon: &str, add_arguments: impl FnOnce(&mut Command)) -> Result<()> {
    let mut command = sibling_command(daemon);
    add_arguments(&mut command);
    // Returns only on failure.
    let error = command.exec();
    bail!("{}", no_daemon_text(daemon, &error))
}

/// Returns the command of another program of Holdfast, without arguments: the program in this one's directory, otherwise
/// from PATH.
pub fn sibling_command(name: &str) -> Command {
    let current_exe = std::env::current_exe().ok();
    let sibling = current_exe
        .and_then(|own| Some(own.parent()?.join(name)))
        .filter(|path| path.is_file());
    Command::new(sibling.unwrap_or_else(|| name.into()))
}

/// Returns the error text for a failed start of a daemon.
pub fn no_daemon_text(daemon: &str, error: &std::io::Error) -> String {
    format!("cannot run {daemon}: {error}; it is looked for beside `holdfast`, then in PATH")
}
