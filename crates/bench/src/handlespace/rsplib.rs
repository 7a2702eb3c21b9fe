//! rsplib's handlespace under the same workload: a small program, compiled here against the installed library.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use tempfile::TempDir;

use super::operations::HandlespaceOperation;
use super::workload::PolicyName;
use super::{ComparedImplementation, HandlespaceArgs, HandlespaceRow, selected_operations};

const SOURCE: &str = include_str!("rsplib.c");

/// The program, in a temporary folder.
pub struct Rsplib {
    folder: TempDir,
}

impl Rsplib {
    /// Builds the program against rsplib in `prefix`.
    ///
    /// # Errors
    /// rsplib, its headers or a C compiler is missing.
    pub fn new(prefix: &Path) -> Result<Rsplib> {
        let headers = prefix.join("include/rserpool");
        ensure!(
            headers.join("poolhandlespacemanagement.h").exists(),
            "no rsplib with handlespace headers in {}: install rsplib 3.5 (librsphsmgt); Debian's packages of 3.4 lack \
             them",
            prefix.display()
        );
        let folder = tempfile::tempdir()?;
        let source = folder.path().join("rsplib.c");
        std::fs::write(&source, SOURCE)?;
        let library = prefix.join("lib");
        let mut compiler = Command::new("cc");
        compiler
            .args([
                "-O3",
                "-DINCLUDE_SIMPLEREDBLACKTREE",
                "-DUSE_SIMPLEREDBLACKTREE",
            ])
            .arg("-I")
            .arg(&headers)
            .arg("-o")
            .arg(folder.path().join("rsplib"))
            .arg(&source)
            .arg("-L")
            .arg(&library)
            // The old kind of run path, which also applies to the libraries that the library needs.
            .arg(format!(
                "-Wl,--disable-new-dtags,-rpath,{}",
                library.display()
            ))
            // Symbols that the library leaves to other libraries of rsplib are no part of the handlespace.
            .arg("-Wl,--unresolved-symbols=ignore-in-shared-libs")
            .args(["-lrsphsmgt", "-lm", "-lpthread"]);
        let output = compiler.output().context("run cc, the C compiler")?;
        if !output.status.success() {
            bail!(
                "cc cannot build against rsplib: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(Rsplib { folder })
    }

    /// Measures rsplib; returns rows like ours.
    ///
    /// # Errors
    /// The program fails.
    pub fn measure(
        &self,
        args: &HandlespaceArgs,
        policy: PolicyName,
        elements: u32,
        pools: u32,
    ) -> Result<Vec<HandlespaceRow>> {
        eprintln!(
            "{}, {elements} elements in {pools} pools, rsplib",
            policy.name()
        );
        let output = Command::new(self.folder.path().join("rsplib"))
            .args([policy.name(), &elements.to_string(), &pools.to_string()])
            .args([args.milliseconds.to_string(), args.rounds.to_string()])
            .output()?;
        if !output.status.success() {
            bail!(
                "the benchmark of rsplib failed: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let text = String::from_utf8(output.stdout)?;
        let rows: Result<Vec<HandlespaceRow>> = text
            .lines()
            .map(|line| parse_row(line, policy, elements, pools))
            .collect();
        let wanted = selected_operations(args);
        Ok(rows?
            .into_iter()
            .filter(|row| wanted.contains(&row.operation))
            .collect())
    }
}

fn parse_row(line: &str, policy: PolicyName, elements: u32, pools: u32) -> Result<HandlespaceRow> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let &[operation, ops_per_s, ns_median, bytes_per_element] = fields.as_slice() else {
        bail!("the benchmark of rsplib printed an invalid row: {line}");
    };
    let operation = HandlespaceOperation::from_str(operation, false);
    Ok(HandlespaceRow {
        policy: policy.name(),
        elements,
        pools,
        operation: operation.map_err(anyhow::Error::msg)?,
        ops_per_s: ops_per_s.parse()?,
        ns_median: ns_median.parse()?,
        bytes_per_element: bytes_per_element.parse()?,
        peer: Some(ComparedImplementation::Rsplib),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_line_parses_into_a_row() {
        let row = parse_row("resolve_3 1250000.0 801.50 612.0", PolicyName::Lu, 10, 1).unwrap();
        assert_eq!(
            (row.operation, row.ns_median),
            (HandlespaceOperation::Resolve3, 801.5)
        );
        assert!(parse_row("resolve_3 fast", PolicyName::Lu, 10, 1).is_err());
    }
}
