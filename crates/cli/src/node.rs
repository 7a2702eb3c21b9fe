//! `holdfast node`: replaces this process by the daemon, makes this host a node, or changes the nodes of the group.

mod join;
mod members;
pub mod node_files;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_api::ca::NodeRole;

/// Run the daemon of this node (becomes holdfastd), make this host a node, change the nodes of the group, or remove what
/// an ended daemon left on this host
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  holdfast node\n  holdfast node --config /etc/holdfast/holdfast.toml --check\n  \
                  holdfast node join --token - 10.0.0.11\n  holdfast node list\n  holdfast node promote n2\n  \
                  holdfast node clean --dry-run"
)]
pub struct NodeArgs {
    #[command(subcommand)]
    command: Option<NodeCommand>,
    /// The configuration file; docs/configuration.md describes it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only check that a start would succeed; change nothing
    #[arg(long)]
    check: bool,
}

/// Role in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// May become contact node.
    Backup,
    /// Only serves.
    Server,
}

impl From<RoleArg> for NodeRole {
    fn from(role: RoleArg) -> NodeRole {
        match role {
            RoleArg::Backup => NodeRole::Backup,
            RoleArg::Server => NodeRole::Server,
        }
    }
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    Join(Box<join::JoinArgs>),
    List(members::ListArgs),
    Leave(members::LeaveArgs),
    Remove(members::RemoveArgs),
    Promote(members::PromoteArgs),
    Clean(CleanArgs),
}

/// Remove the service addresses, settings, filters and maps that the ended daemon left on this host
///
/// The node gives up all its connections. Refused while the daemon runs. Addresses that no daemon added stay.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  holdfast node clean --dry-run\n  holdfast node clean --json")]
struct CleanArgs {
    /// The configuration file; docs/configuration.md describes it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Remove nothing, and print what would be removed
    #[arg(long)]
    dry_run: bool,
    /// Print what was removed as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast node`: a command, or else the daemon in place of this process.
///
/// # Errors
/// The command fails, or `holdfastd` is not found.
pub fn run(args: &NodeArgs) -> Result<()> {
    match &args.command {
        Some(NodeCommand::Join(args)) => return join::run(args),
        Some(NodeCommand::List(args)) => return members::list(args),
        Some(NodeCommand::Leave(args)) => return members::leave(args),
        Some(NodeCommand::Remove(args)) => return members::remove(args),
        Some(NodeCommand::Promote(args)) => return members::promote(args),
        Some(NodeCommand::Clean(_)) | None => {}
    }
    exec_daemon("holdfastd", |command| {
        command.args(daemon_arguments(args));
    })
}

/// Returns the arguments with which the daemon does what `args` ask for.
fn daemon_arguments(args: &NodeArgs) -> Vec<OsString> {
    let (config, flags) = match &args.command {
        Some(NodeCommand::Clean(clean)) => (
            clean.config.as_deref(),
            vec![
                ("--clean", true),
                ("--dry-run", clean.dry_run),
                ("--json", clean.json),
            ],
        ),
        _ => (args.config.as_deref(), vec![("--check", args.check)]),
    };
    let config = config
        .iter()
        .flat_map(|path| ["--config".into(), OsString::from(path)]);
    let set = flags.iter().filter(|(_, is_set)| *is_set);
    config.chain(set.map(|(flag, _)| (*flag).into())).collect()
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        node: NodeArgs,
    }

    fn arguments(words: &[&str]) -> Vec<OsString> {
        let line = Line::try_parse_from([&["node"], words].concat()).unwrap();
        daemon_arguments(&line.node)
    }

    #[test]
    fn daemon_gets_what_the_command_line_says() {
        assert_eq!(arguments(&[]), [""; 0]);
        assert_eq!(
            arguments(&["--config", "a.toml", "--check"]),
            ["--config", "a.toml", "--check"]
        );
        assert_eq!(
            arguments(&["clean", "--dry-run", "--json", "--config", "a.toml"]),
            ["--config", "a.toml", "--clean", "--dry-run", "--json"]
        );
        assert!(Line::try_parse_from(["node", "--check", "clean"]).is_err());
    }
}
