//! The `holdfast` command line.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout)]

mod balance;
mod bench_program;
mod ca;
mod check;
mod clone;
mod daemon_client;
mod drain;
mod flow;
mod generated_docs;
mod group;
mod handoff;
mod lab;
mod load;
mod migrate;
mod migrations;
mod node;
mod output;
mod pool;
mod process_arg;
mod proxy;
mod registrar;
mod replicate;
mod service;
mod sim;
mod status;
mod table;
#[cfg(test)]
mod tests;
mod top;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// A group of servers that answers as one, and moves connections between them while they are in use.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version, max_term_width = 100, after_help = EXIT_CODES)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 failed, 2 invalid arguments, 3 some flows stayed where they were.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Demonstrate Holdfast on this machine, in network namespaces. Needs root
    Demo(bench_program::BenchProgramArgs),
    Lab(lab::LabArgs),
    Ca(ca::CaArgs),
    Group(group::GroupArgs),
    Node(node::NodeArgs),
    Registrar(registrar::RegistrarArgs),
    Pool(Box<pool::PoolArgs>),
    Service(service::ServiceArgs),
    Replicate(replicate::ReplicateArgs),
    Status(status::StatusArgs),
    Load(load::LoadArgs),
    Flow(flow::FlowArgs),
    Handoff(handoff::HandoffArgs),
    Check(check::CheckArgs),
    Migrate(migrate::MigrateArgs),
    Migrations(migrations::MigrationsArgs),
    Clone(clone::CloneArgs),
    Drain(drain::DrainArgs),
    Undrain(drain::UndrainArgs),
    Balance(balance::BalanceArgs),
    Top(top::TopArgs),
    Proxy(proxy::ProxyArgs),
    /// Run a benchmark and write its numbers as JSON
    Bench(bench_program::BenchProgramArgs),
    /// Repeat the measurements of the papers' tables and figures
    Repro(bench_program::BenchProgramArgs),
    Sim(sim::SimArgs),
    Completions(generated_docs::CompletionsArgs),
    Man(generated_docs::ManArgs),
}

/// Result of a command that returned no error.
enum ExitResult {
    /// The command succeeded.
    Success,
    /// The command ran, but its check failed, as already reported.
    Failed,
    /// Some flows stayed on this node, as already reported.
    PartlyKept,
    /// A started program ended with this exit code.
    Exited(u8),
}

fn main() -> ExitCode {
    // A lab's hosts are instances of this program, started with a hidden argument.
    holdfast_lab::run_hidden_role();
    match run(CommandLine::parse()) {
        Ok(ExitResult::Success) => ExitCode::SUCCESS,
        Ok(ExitResult::Failed) => ExitCode::FAILURE,
        Ok(ExitResult::PartlyKept) => ExitCode::from(3),
        Ok(ExitResult::Exited(code)) => ExitCode::from(code),
        Err(error) => {
            eprintln!("holdfast: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command_line: CommandLine) -> Result<ExitResult> {
    let done = |result: Result<()>| result.map(|()| ExitResult::Success);
    match command_line.command {
        Command::Demo(args) => done(bench_program::exec("demo", &args)),
        Command::Lab(args) => done(lab::run(args)),
        Command::Ca(args) => done(ca::run(args)),
        Command::Group(args) => done(group::run(&args)),
        Command::Node(args) => done(node::run(&args)),
        Command::Registrar(args) => done(registrar::run(&args)),
        Command::Pool(args) => pool::run(&args),
        Command::Service(args) => done(service::run(&args)),
        Command::Replicate(args) => done(replicate::run(&args)),
        Command::Status(args) => done(status::run(&args)),
        Command::Load(args) => load::run(&args),
        Command::Flow(args) => done(flow::run(&args)),
        Command::Handoff(args) => handoff::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Migrations(args) => migrations::run(&args),
        Command::Clone(args) => clone::run(&args),
        Command::Drain(args) => drain::run(&args),
        Command::Undrain(args) => done(drain::undrain(&args)),
        Command::Balance(args) => done(balance::run(&args)),
        Command::Top(args) => done(top::run(&args)),
        Command::Proxy(args) => proxy::run(&args),
        Command::Bench(args) => done(bench_program::exec("bench", &args)),
        Command::Repro(args) => done(bench_program::exec("repro", &args)),
        Command::Sim(args) => sim::run(&args),
        Command::Completions(args) => done(generated_docs::completions(&args)),
        Command::Man(args) => done(generated_docs::man(&args)),
    }
}
