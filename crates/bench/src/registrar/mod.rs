//! `holdfast bench registrar`: what one registrar carries on one processor, beside a bare echo over the same transport.

pub mod echo;

use anyhow::Result;
use std::path::PathBuf;
use std::process::Command;

use echo::{EchoLoad, EchoPart, EchoRow};
use serde::Serialize;

/// Flags of `holdfast bench registrar`.
#[derive(Debug, clap::Args)]
pub struct RegistrarArgs {
    /// What the echo carries.
    #[command(flatten)]
    echo: EchoLoad,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(subcommand)]
    part: Option<Part>,
}

/// Roles in which this program starts itself.
#[derive(Debug, clap::Subcommand)]
enum Part {
    /// A process of the bare echo.
    #[command(hide = true, subcommand)]
    Echo(EchoPart),
}

#[derive(Serialize)]
struct Report<'a> {
    bench: &'static str,
    echo: &'a [EchoRow],
}

/// Runs the benchmark.
///
/// # Errors
/// Fewer than two processors, no SCTP, or associations that do not hold.
pub fn run(args: &RegistrarArgs) -> Result<()> {
    if let Some(Part::Echo(part)) = &args.part {
        return echo::run_part(part);
    }
    let program = std::env::current_exe()?;
    let row = echo::measure(&args.echo, |part| {
        let mut command = Command::new(&program);
        command.args(["bench", "registrar", "echo"]).args(part);
        command
    })?;
    println!(
        "echo over {}: {:.0} operations/s on one processor, {:.0} ns each, {:.0} % busy",
        row.transport,
        row.operations_per_s,
        row.server_cpu_ns,
        row.server_cpu_share * 100.0
    );
    if let Some(path) = &args.json {
        let report = Report {
            bench: "registrar",
            echo: &[row],
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}
