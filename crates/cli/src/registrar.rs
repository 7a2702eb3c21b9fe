//! `holdfast registrar`: replaces this process by the daemon.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::node::exec_daemon;

/// Run a registrar, which knows the elements of all pools (becomes rserpoold)
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  holdfast registrar\n  holdfast registrar --peer 10.0.0.2\n  holdfast registrar --config /etc/holdfast/registrar.toml --check"
)]
pub struct RegistrarArgs {
    /// The configuration file, optional; docs/configuration.md describes it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only check that a start would succeed; change nothing
    #[arg(long)]
    check: bool,
    /// Address of the registrar, overriding the file; repeatable
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<IpAddr>,
    /// Another registrar to contact at start; repeatable
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    peer: Vec<String>,
    /// Directory for the registrar's sockets (/run/holdfast)
    #[arg(long, value_name = "DIRECTORY")]
    run_dir: Option<PathBuf>,
}

/// Replaces this process by the daemon.
///
/// # Errors
/// `rserpoold` is not found.
pub fn run(args: &RegistrarArgs) -> Result<()> {
    exec_daemon("rserpoold", |command| {
        command.arg("registrar");
        if let Some(config) = &args.config {
            command.arg("--config").arg(config);
        }
        if args.check {
            command.arg("--check");
        }
        for address in &args.listen {
            command.arg("--listen").arg(address.to_string());
        }
        for peer in &args.peer {
            command.arg("--peer").arg(peer);
        }
        if let Some(directory) = &args.run_dir {
            command.arg("--run-dir").arg(directory);
        }
    })
}
