//! `holdfast bench`: measurements.

use anyhow::Result;
use clap::{Args, Subcommand};

/// Run a benchmark and write its numbers as JSON. Benchmarks of packets and connections need root
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Debug, Subcommand)]
enum Benchmark {
    /// Migrate servers with short-lived clients: success rate, and effects on the clients
    Churn(holdfast_bench::churn::ChurnArgs),
    /// Failover of a group that runs itself: gaps of new and old clients at each fault of a contact node
    Group(holdfast_bench::group::GroupArgs),
    /// Operations per second on a registrar's handlespace, by policy and number of elements
    Handlespace(holdfast_bench::handlespace::HandlespaceArgs),
    /// Cost of handing off live connections: freeze, gap seen by the client, resets, retransmissions
    Handoff(holdfast_bench::handoff::HandoffArgs),
    /// Cost of migrating a running process: freeze, gap seen by the client, bytes in the freeze, resets
    Migrate(holdfast_bench::migrate::MigrateArgs),
    /// Capacity of one registrar on one processor, compared with a bare echo over the same transport
    Registrar(holdfast_bench::registrar::RegistrarArgs),
    /// Packets per second and CPU time of the contact node, compared with the kernel's own forwarding
    Steer(holdfast_bench::steer::SteerArgs),
    /// Events per second of the simulator, on one processor
    Sim(holdfast_bench::simulator_speed::SimulatorSpeedArgs),
}

/// Runs `holdfast bench`.
///
/// # Errors
/// Errors of the benchmark.
pub fn run(args: BenchArgs) -> Result<()> {
    match args.benchmark {
        Benchmark::Churn(args) => holdfast_bench::churn::run(&args),
        Benchmark::Group(args) => holdfast_bench::group::run(&args),
        Benchmark::Handlespace(args) => holdfast_bench::handlespace::run(&args),
        Benchmark::Handoff(args) => holdfast_bench::handoff::run(&args),
        Benchmark::Migrate(args) => holdfast_bench::migrate::run(&args),
        Benchmark::Registrar(args) => holdfast_bench::registrar::run(&args),
        Benchmark::Steer(args) => holdfast_bench::steer::run(args),
        Benchmark::Sim(args) => holdfast_bench::simulator_speed::run(&args),
    }
}
