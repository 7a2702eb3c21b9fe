//! `holdfastd`: the daemon of a node.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_daemon::{logs, service_manager};
use holdfast_node::config::Config;
use holdfast_node::engine::SetupError;
use holdfast_node::pid_file::{PidFile, PidFileError};
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
    /// Remove the service addresses, filters and maps that the ended daemon left on this host, and end.
    #[arg(long, conflicts_with = "check")]
    detach: bool,
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
            service_manager::report_failure(&error.to_string());
            exit_code(error.as_ref()).into()
        }
    }
}

fn exit_code(error: &(dyn Error + 'static)) -> DaemonExitCode {
    if let Some(error) = error.downcast_ref::<SetupError>() {
        return error.exit_code();
    }
    match error.downcast_ref::<PidFileError>() {
        Some(PidFileError::Taken { .. }) => DaemonExitCode::AlreadyRunning,
        _ => DaemonExitCode::of(error),
    }
}

fn run_node(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
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
    if arguments.detach {
        let _pid_file = PidFile::acquire(&config)?;
        return Ok(engine::detach(&config)?);
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn manual_page_names_every_option() {
        let page = include_str!("../../../packaging/man/holdfastd.8").replace('\\', "");
        for argument in Arguments::command().get_arguments() {
            let name = argument.get_long().expect("an option");
            assert!(page.contains(&format!("--{name}")), "--{name} is missing");
        }
    }
}
