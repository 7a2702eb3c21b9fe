//! The program behind `holdfast bench`, `holdfast repro` and `holdfast demo`, which the command line starts with the same
//! arguments.
#![forbid(unsafe_code)]

mod benchmarks;
mod demo;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};

/// Benchmarks, demonstrations, and the papers' experiments.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    bin_name = "holdfast",
    version,
    max_term_width = 100
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(benchmarks::BenchArgs),
    Demo(demo::DemoArgs),
    Repro(holdfast_bench::repro::ReproArgs),
    /// Write the manual pages of these commands into a directory
    #[command(hide = true)]
    Man {
        /// The directory
        dir: PathBuf,
    },
}

fn main() -> ExitCode {
    // A lab's hosts are instances of this program, started with a hidden argument.
    holdfast_lab::run_hidden_role();
    match run(CommandLine::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("holdfast: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command. Returns false if the command ran, but its check failed, as already reported.
fn run(command_line: CommandLine) -> Result<bool> {
    let done = |result: Result<()>| result.map(|()| true);
    match command_line.command {
        Command::Bench(args) => done(benchmarks::run(args)),
        Command::Demo(args) => demo::run(&args),
        Command::Repro(args) => done(holdfast_bench::repro::run(&args)),
        Command::Man { dir } => done(write_manual_pages(&dir)),
    }
}

fn write_manual_pages(directory: &std::path::Path) -> Result<()> {
    let mut root = CommandLine::command();
    root.build();
    for command in root.get_subcommands().filter(|one| !one.is_hide_set()) {
        clap_mangen::generate_to(command.clone(), directory)
            .with_context(|| format!("write manual pages into {}", directory.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_definitions_are_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn usage_names_the_command_of_the_user() {
        let words = ["/x/holdfast-bench", "bench", "migrate", "--help"];
        let help = CommandLine::try_parse_from(words).expect_err("help");
        assert!(
            help.to_string().contains("Usage: holdfast bench migrate"),
            "{help}"
        );
    }

    #[test]
    fn every_argument_has_help() {
        let mut root = CommandLine::command();
        root.build();
        let mut stack: Vec<_> = root.get_subcommands().cloned().collect();
        while let Some(command) = stack.pop() {
            let name = command.get_name();
            assert!(name == "help" || command.get_about().is_some(), "{name}");
            for argument in command.get_arguments() {
                assert!(
                    argument.get_help().is_some(),
                    "{name} {}",
                    argument.get_id()
                );
            }
            stack.extend(command.get_subcommands().cloned());
        }
    }

    #[test]
    fn invalid_arguments_are_named() {
        for (words, names) in [
            ("holdfast demo balance", "possible values: handoff"),
            ("holdfast demo --family 5", "possible values: 4, 6"),
            ("holdfast demo --nodes 1", "1 is not in 2..=20"),
            ("holdfast bench nothing", "unrecognized subcommand"),
        ] {
            let error = CommandLine::try_parse_from(words.split(' ')).expect_err(words);
            assert!(error.to_string().contains(names), "{words}: {error}");
        }
    }

    #[test]
    fn manual_pages_have_the_names_of_the_commands() {
        let directory = tempfile::tempdir().expect("a directory");
        write_manual_pages(directory.path()).expect("written");
        for page in [
            "holdfast-bench.1",
            "holdfast-bench-churn.1",
            "holdfast-demo.1",
        ] {
            assert!(directory.path().join(page).is_file(), "{page}");
        }
    }
}
