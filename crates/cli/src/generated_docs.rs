//! `holdfast completions` and `holdfast man`: generated from the command definitions.

use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::CommandLine;
use crate::bench_program::{PROGRAM, manual_pages_command};
use crate::output::output;

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast completions bash > /etc/bash_completion.d/holdfast")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Write the manual pages into a directory
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// The directory, created if missing
    dir: PathBuf,
}

/// Runs `holdfast completions`.
///
/// # Errors
/// The completions are not UTF-8, which does not happen.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(
        args.shell,
        &mut CommandLine::command(),
        "holdfast",
        &mut script,
    );
    output!("{}", String::from_utf8(script)?);
    Ok(())
}

/// Runs `holdfast man`.
///
/// # Errors
/// The directory cannot be written.
pub fn man(args: &ManArgs) -> Result<()> {
    let describe = || format!("write manual pages into {}", args.dir.display());
    std::fs::create_dir_all(&args.dir).with_context(describe)?;
    clap_mangen::generate_to(CommandLine::command(), &args.dir).with_context(describe)?;
    match manual_pages_command(&args.dir).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{PROGRAM} could not write its manual pages: {status}"),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            eprintln!(
                "holdfast: {PROGRAM} is not installed; the pages of `bench`, `repro` and `demo` name no arguments"
            );
            Ok(())
        }
        Err(error) => Err(error).with_context(describe),
    }
}
