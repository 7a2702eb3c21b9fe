//! Checks the allowed imports between crates, from `cargo metadata`.

use super::Finding;
use crate::source_tree::{Package, SourceTree};

/// The allowed imports of a crate.
enum ImportRule {
    /// Only these crates.
    Only(&'static [&'static str]),
    /// All crates except these.
    AllExcept(&'static [&'static str]),
}

/// The arrows of ARCHITECTURE.md, by the name after `holdfast-`. A crate that is not listed has no place yet.
const IMPORT_RULES: &[(&str, ImportRule)] = &[
    ("wire", ImportRule::Only(&[])),
    ("handlespace", ImportRule::Only(&["wire"])),
    ("proto", ImportRule::Only(&["wire", "handlespace"])),
    ("sim", ImportRule::Only(&["wire", "handlespace", "proto"])),
    ("bpf", ImportRule::Only(&[])),
    ("sys", ImportRule::Only(&[])),
    ("tcp-repair", ImportRule::Only(&["sys"])),
    ("checkpoint", ImportRule::Only(&["sys", "tcp-repair"])),
    ("sctp", ImportRule::Only(&["sys"])),
    ("api", ImportRule::Only(&[])),
    ("daemon", ImportRule::Only(&["api"])),
    ("dns", ImportRule::Only(&[])),
    (
        "node",
        ImportRule::Only(&[
            "wire",
            "proto",
            "bpf",
            "sys",
            "tcp-repair",
            "checkpoint",
            "api",
            "daemon",
            "dns",
        ]),
    ),
    (
        "rserpoold",
        ImportRule::Only(&[
            "wire",
            "handlespace",
            "proto",
            "sys",
            "sctp",
            "api",
            "daemon",
        ]),
    ),
    ("lab", ImportRule::Only(&["api"])),
    ("ffi", ImportRule::Only(&["api"])),
    ("proxy", ImportRule::Only(&["api"])),
    ("testbed", ImportRule::Only(&["api", "lab"])),
    ("bench", ImportRule::AllExcept(&["cli"])),
    ("cli", ImportRule::Only(&["api", "sim", "lab", "proxy"])),
    ("fuzz", ImportRule::AllExcept(&["bench", "cli"])),
];

/// An example shows the library from a user's view, so it imports nothing else.
const EXAMPLE_RULE: ImportRule = ImportRule::Only(&["api"]);
/// The chores must build before everything else.
const XTASK_RULE: ImportRule = ImportRule::Only(&[]);
/// Crate that tests and examples of any crate may also use, to run in a lab.
const LAB_CRATE: &str = "lab";

/// Checks that every dependency between packages follows [`IMPORT_RULES`].
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    tree.packages.iter().flat_map(check_package).collect()
}

fn check_package(package: &Package) -> Vec<Finding> {
    let manifest = format!("{}/Cargo.toml", package.dir);
    let Some(import_rule) = rule_of(package) else {
        let message = format!(
            "package {} is missing in the table of xtask/src/tidy/crate_imports.rs",
            package.name
        );
        return vec![Finding::new(&manifest, 0, message)];
    };
    let is_allowed = |name: &str| match import_rule {
        ImportRule::Only(names) => names.contains(&name),
        ImportRule::AllExcept(names) => !names.contains(&name),
    };
    let mut findings = Vec::new();
    for dependency in &package.dependencies {
        let dependency_name = short_name(&dependency.name);
        if is_allowed(dependency_name) || dependency.dev && dependency_name == LAB_CRATE {
            continue;
        }
        let kind = if dependency.dev { "the tests of " } else { "" };
        let message = format!("{kind}{} may not import {}", package.name, dependency.name);
        findings.push(Finding::new(&manifest, 0, message));
    }
    findings
}

fn rule_of(package: &Package) -> Option<&'static ImportRule> {
    if package.name == "xtask" {
        return Some(&XTASK_RULE);
    }
    if package.dir.starts_with("examples/") {
        return Some(&EXAMPLE_RULE);
    }
    IMPORT_RULES
        .iter()
        .find(|(name, _)| *name == short_name(&package.name))
        .map(|(_, may)| may)
}

fn short_name(name: &str) -> &str {
    name.strip_prefix("holdfast-").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::super::test_tree::package;
    use super::*;

    fn messages(packages: Vec<Package>) -> Vec<String> {
        let tree = SourceTree {
            packages,
            ..SourceTree::default()
        };
        check(&tree)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn allowed_import_passes() {
        assert!(messages(vec![package("proto", &[("holdfast-wire", false)])]).is_empty());
        assert!(messages(vec![package("bench", &[("holdfast-node", false)])]).is_empty());
    }

    #[test]
    fn forbidden_import_is_found() {
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
    fn test_may_import_only_lab_beyond_rules() {
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
    fn unknown_package_is_found() {
        assert!(messages(vec![package("helpers", &[])])[0].contains("is missing in the table"));
    }

    #[test]
    fn example_may_import_only_api() {
        let mut example = package("echo", &[("holdfast-api", false), ("holdfast-sys", false)]);
        example.dir = "examples/echo".into();
        assert_eq!(
            messages(vec![example]),
            ["holdfast-echo may not import holdfast-sys"]
        );
    }

    #[test]
    fn xtask_may_import_no_product_crate() {
        let mut xtask = package("xtask", &[("holdfast-wire", false)]);
        xtask.name = "xtask".into();
        assert_eq!(messages(vec![xtask]).len(), 1);
    }
}
