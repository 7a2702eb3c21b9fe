//! `holdfast bench`: measurements.

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::Ending;

/// Measure, and write the numbers as JSON. What measures packets and connections needs root
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Which,
}

#[derive(Debug, Subcommand)]
enum Which {
    /// Moves of servers whose clients come and go: how many succeed, and what clients see of them
    Churn(holdfast_bench::churn::ChurnArgs),
    /// Operations a second on a registrar's handlespace, by policy and number of elements
    Handlespace(holdfast_bench::handlespace::HandlespaceArgs),
    /// What moving live connections costs: freeze, gap seen by the client, resets, retransmissions
    Handoff(holdfast_bench::handoff::HandoffArgs),
    /// What moving a running process costs: freeze, gap seen by the client, bytes in the freeze, resets
    Migrate(holdfast_bench::migrate::MigrateArgs),
    /// What one registrar carries on one processor, beside a bare echo over the same transport
    Registrar(holdfast_bench::registrar::RegistrarArgs),
    /// Packets a second and CPU time of the contact node, beside the kernel's own forwarding
    Steer(holdfast_bench::steer::SteerArgs),
    /// Events a second of the simulator, on one processor
    Sim(holdfast_bench::sim::SimArgs),
}

/// Carries out `holdfast bench`.
///
/// # Errors
/// What the measurement answers.
pub fn run(args: BenchArgs) -> Result<Ending> {
    match args.which {
        Which::Churn(args) => holdfast_bench::churn::run(&args)?,
        Which::Handlespace(args) => holdfast_bench::handlespace::run(&args)?,
        Which::Handoff(args) => holdfast_bench::handoff::run(&args)?,
        Which::Migrate(args) => holdfast_bench::migrate::run(&args)?,
        Which::Registrar(args) => holdfast_bench::registrar::run(&args)?,
        Which::Steer(args) => holdfast_bench::steer::run(args)?,
        Which::Sim(args) => holdfast_bench::sim::run(&args)?,
    }
    Ok(Ending::Done)
}
