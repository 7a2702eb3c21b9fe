//! `holdfastd`: the daemon of a node.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use holdfast_daemon::logs;
use holdfast_node::config::Config;
use holdfast_node::pid_file::PidFile;
use holdfast_node::{engine, migration};

/// The daemon of a node: owns service addresses, keeps connections alive and hands them off to other nodes.
#[derive(Parser)]
#[command(
    name = "holdfastd",
    version,
    after_help = "Example: holdfastd --config /etc/holdfast/holdfast.toml"
)]
struct Arguments {
    /// Configuration file.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/holdfast/holdfast.toml"
    )]
    config: PathBuf,
    /// Only check the configuration.
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    // The restorer of processes that move here is this program too, started by the daemon.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == migration::RESTORER_ARG)
    {
        std::process::exit(holdfast_checkpoint::acceptor::run_restorer());
    }
    match run_node(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("holdfastd: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_node(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::load(&arguments.config)?;
    if arguments.check {
        println!(
            "{} is valid: node {} of group {}",
            arguments.config.display(),
            config.node.name,
            config.group.name
        );
        return Ok(());
    }
    engine::check_capabilities(&config)?;
    logs::init(&config.log)?;
    // Held until the end, because two daemons would remove each other's filters.
    let _pid_file = PidFile::acquire(&config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Work before a freeze yields between slices, and each time the frames that arrived meanwhile must be seen.
        .event_interval(1)
        .build()?;
    let local = tokio::task::LocalSet::new();
    Ok(local.block_on(&runtime, engine::run_until_signal(config))?)
}
