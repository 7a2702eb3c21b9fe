//! Workspace chores, run as `cargo xtask CHORE`.
#![forbid(unsafe_code)]

mod source_tree;
mod test_run;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::source_tree::SourceTree;

const USAGE: &str = "\
Usage: cargo xtask CHORE

  tidy             check imports between crates, unsafe code, sizes, links and words
  tidy --ratchet   the same, after lowering the sizes in xtask/ratchet.toml to the present ones
  test ARGUMENTS   run tests with cargo nextest, and once more, alone, those that only exceeded their time;
                   ARGUMENTS choose them as for `cargo nextest run`: --workspace, --test NAME, --run-ignored only
";

fn main() -> ExitCode {
    match run() {
        Ok(status) => status,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["tidy"] => tidy(false),
        ["tidy", "--ratchet"] => tidy(true),
        ["test", selection @ ..] => test_run::run(&checkout()?, selection),
        [] | ["help" | "-h" | "--help"] => {
            print!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        _ => bail!("no such chore: {}\n\n{USAGE}", arguments.join(" ")),
    }
}

/// Returns the checkout's folder, the parent of this package's folder as set by `cargo run`.
fn checkout() -> Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").context("run this as `cargo xtask`")?;
    let root = Path::new(&package).parent().map(Path::to_path_buf);
    root.context("this package has no folder above it")
}

fn tidy(lower_ratchet: bool) -> Result<ExitCode> {
    let mut tree = SourceTree::read()?;
    if lower_ratchet {
        tidy::size_ratchet::lower_sizes(&mut tree)?;
    }
    let findings = tidy::check(&tree);
    for finding in &findings {
        println!("{finding}");
    }
    println!(
        "tidy: {} files, {} packages, {} findings",
        tree.files.len(),
        tree.packages.len(),
        findings.len()
    );
    Ok(if findings.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
