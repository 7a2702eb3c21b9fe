//! `holdfast bench`, `holdfast repro` and `holdfast demo`: replaces this process by the program `holdfast-bench`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Result, bail};
use clap::Args;

use crate::node::sibling_command;

/// Arguments that are passed on. `holdfast-bench` explains them, also for `--help`.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct BenchProgramArgs {
    /// Arguments of the command; `--help` explains them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    arguments: Vec<OsString>,
}

/// Name of the program.
pub const PROGRAM: &str = "holdfast-bench";

/// Replaces this process by `holdfast-bench` with this command.
///
/// # Errors
/// The program is not found.
pub fn exec(command: &str, args: &BenchProgramArgs) -> Result<()> {
    // Returns only on failure.
    let error = sibling_command(PROGRAM)
        .arg(command)
        .args(&args.arguments)
        .exec();
    bail!("cannot run {PROGRAM}: {error}; it is looked for beside `holdfast`, then in PATH")
}

/// Returns the command that writes the manual pages of these commands into a directory.
pub fn manual_pages_command(directory: &std::path::Path) -> Command {
    let mut command = sibling_command(PROGRAM);
    command.arg("man").arg(directory);
    command
}
