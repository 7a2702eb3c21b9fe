//! Checks the allowed imports between crates, from `cargo metadata`.

use super::Finding;
use crate::tree::{Package, Tree};

/// The allowed imports of a crate.
enum May {
    /// Only these crates.
    Import(&'static [&'static str]),
    /// All crates except these.
    ImportAllBut(&'static [&'static str]),
}

/// The arrows of ARCHITECTURE.md, by the name after `holdfast-`. A crate that is not listed has no place yet.
const ARROWS: &[(&str, May)] = &[
    ("wire", May::Import(&[])),
    ("handlespace", May::Import(&["wire"])),
    ("proto", May::Import(&["wire", "handlespace"])),
    ("sim", May::Import(&["wire", "handlespace", "proto"])),
    ("bpf", May::Import(&[])),
    ("sys", May::Import(&[])),
    ("api", May::Import(&[])),
    (
        "node",
        May::Import(&["wire", "handlespace", "proto", "bpf", "sys", "api"]),
    ),
    ("lab", May::Import(&["api"])),
    ("ffi", May::Import(&["api"])),
    ("bench", May::ImportAllBut(&["cli"])),
    ("cli", May::Import(&["api", "sim", "lab", "bench"])),
    ("fuzz", May::ImportAllBut(&["bench", "cli"])),
];

/// An example shows the library from a user's view, so it imports nothing else.
const EXAMPLE: May = May::Import(&["api"]);
/// The chores must build before everything else.
const XTASK: May = May::Import(&[]);
/// Crate that tests and examples of any crate may also use, to run in a lab.
const TESTS_MAY_USE: &str = "lab";

/// Checks that every dependency between packages follows [`ARROWS`].
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.packages.iter().flat_map(check_package).collect()
}

fn check_package(package: &Package) -> Vec<Finding> {
    let manifest = format!("{}/Cargo.toml", package.dir);
    let Some(may) = rule(package) else {
        let message = format!(
            "package {} has no place in the table of xtask/src/tidy/arrows.rs",
            package.name
        );
        return vec![Finding::new(&manifest, 0, message)];
    };
    let allowed = |name: &str| match may {
        May::Import(names) => names.contains(&name),
        May::ImportAllBut(names) => !names.contains(&name),
    };
    let mut findings = Vec::new();
    for dependency in &package.dependencies {
        let name = short(&dependency.name);
        if allowed(name) || dependency.dev && name == TESTS_MAY_USE {
            continue;
        }
        let kind = if dependency.dev { "the tests of " } else { "" };
        let message = format!("{kind}{} may not import {}", package.name, dependency.name);
        findings.push(Finding::new(&manifest, 0, message));
    }
    findings
}

fn rule(package: &Package) -> Option<&'static May> {
    if package.name == "xtask" {
        return Some(&XTASK);
    }
    if package.dir.starts_with("examples/") {
        return Some(&EXAMPLE);
    }
    ARROWS
        .iter()
        .find(|(name, _)| *name == short(&package.name))
        .map(|(_, may)| may)
}

fn short(name: &str) -> &str {
    name.strip_prefix("holdfast-").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::package;
    use super::*;

    fn messages(packages: Vec<Package>) -> Vec<String> {
        let tree = Tree {
            packages,
            ..Tree::default()
        };
        check(&tree)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn an_allowed_arrow_passes() {
        assert!(messages(vec![package("proto", &[("holdfast-wire", false)])]).is_empty());
        assert!(messages(vec![package("bench", &[("holdfast-node", false)])]).is_empty());
    }

    #[test]
    fn an_arrow_against_the_table_is_found() {
        let found = messages(vec![package("wire", &[("holdfast-proto", false)])]);
        assert_eq!(found, ["holdfast-wire may not import holdfast-proto"]);
        assert_eq!(
            messages(vec![package("lab", &[("holdfast-node", false)])]).len(),
            1
        );
        assert_eq!(
            messages(vec![package("bench", &[("holdfast-cli", false)])]).len(),
            1
        );
    }

    #[test]
    fn a_test_may_use_the_lab_and_nothing_else_beyond_the_table() {
        assert!(messages(vec![package("sys", &[("holdfast-lab", true)])]).is_empty());
        assert_eq!(
            messages(vec![package("sys", &[("holdfast-lab", false)])]).len(),
            1
        );
        let found = messages(vec![package("sys", &[("holdfast-node", true)])]);
        assert_eq!(
            found,
            ["the tests of holdfast-sys may not import holdfast-node"]
        );
    }

    #[test]
    fn an_unknown_package_is_found() {
        assert!(messages(vec![package("helpers", &[])])[0].contains("has no place"));
    }

    #[test]
    fn an_example_sees_only_the_library() {
        let mut example = package("echo", &[("holdfast-api", false), ("holdfast-sys", false)]);
        example.dir = "examples/echo".into();
        assert_eq!(
            messages(vec![example]),
            ["holdfast-echo may not import holdfast-sys"]
        );
    }

    #[test]
    fn xtask_imports_no_product_crate() {
        let mut xtask = package("xtask", &[("holdfast-wire", false)]);
        xtask.name = "xtask".into();
        assert_eq!(messages(vec![xtask]).len(), 1);
    }
}
