//! `holdfastd`: the daemon of a node.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use holdfast_node::config::Config;
use holdfast_node::pid_file::PidFile;
use holdfast_node::{engine, logs};

/// The daemon of a Holdfast node: owns service addresses, keeps connections alive, hands them to other nodes.
#[derive(Parser)]
#[command(
    name = "holdfastd",
    version,
    after_help = "Example: holdfastd --config /etc/holdfast/holdfast.toml"
)]
struct Arguments {
    /// The configuration file.
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
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("holdfastd: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::load(&arguments.config)?;
    if arguments.check {
        println!(
            "{} is fine: node {} of group {}",
            arguments.config.display(),
            config.node.name,
            config.group.name
        );
        return Ok(());
    }
    engine::check_capabilities()?;
    logs::init(&config.log)?;
    // Held to the end: two daemons would take each other's filters away.
    let _pid_file = PidFile::take(&config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Work before a freeze yields between slices: frames that came meanwhile are to be seen each time.
        .event_interval(1)
        .build()?;
    let local = tokio::task::LocalSet::new();
    Ok(local.block_on(&runtime, engine::start(config))?)
}
