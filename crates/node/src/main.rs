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
use holdfast_node::membership::{self, MembershipOptions};
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
    /// Only check that a start would succeed; change nothing.
    #[arg(long)]
    check: bool,
    /// Remove the service addresses, settings, filters and maps that the ended daemon left on this host, and end.
    #[arg(long, conflicts_with = "check")]
    clean: bool,
    /// With --clean: remove nothing, and print what would be removed.
    #[arg(long, requires = "clean")]
    dry_run: bool,
    /// With --clean: print what was removed as JSON.
    #[arg(long, requires = "clean")]
    json: bool,
    /// Begin a group that runs itself, with this node as its first contact node, and end. The next start of the daemon
    /// serves.
    #[arg(long, conflicts_with_all = ["check", "clean"])]
    create_group: bool,
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
        return check(arguments, &config);
    }
    if arguments.clean {
        return clean(arguments, &config);
    }
    if arguments.create_group {
        let _pid_file = PidFile::acquire(&config)?;
        membership::create_group(&MembershipOptions::new(&config, 1)?)?;
        println!(
            "node {} begins group {}; start the daemon",
            config.node.name, config.group.name
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

fn check(arguments: &Arguments, config: &Config) -> Result<(), Box<dyn Error>> {
    for change in engine::check_start(config)? {
        println!("{change}; the start carries the entries over");
    }
    println!(
        "{} is valid, and a start would succeed: node {} of group {}",
        arguments.config.display(),
        config.node.name,
        config.group.name
    );
    Ok(())
}

fn clean(arguments: &Arguments, config: &Config) -> Result<(), Box<dyn Error>> {
    // Without its directory no daemon runs, and none is made.
    let _pid_file = match config.node.run_dir.is_dir() {
        true => Some(PidFile::acquire(config)?),
        false => None,
    };
    let report = engine::clean_host(config, arguments.dry_run)?;
    match arguments.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{report}"),
    }
    Ok(())
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
