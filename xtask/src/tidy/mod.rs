//! Style checks as a test: each module is one check, a pure function from the tree to findings.

mod comment_pronouns;
mod crate_imports;
mod forbidden_words;
mod function_sizes;
mod links;
mod purity;
mod rust_file;
mod size_limits;
pub mod size_ratchet;
mod unsafe_code;

use std::fmt;

use crate::source_tree::SourceTree;

/// A defect to correct.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: String,
    /// First line is 1; 0 for the file as a whole.
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Runs every check; returns the findings sorted by position.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = crate_imports::check(tree);
    let (sources, parse_findings) = rust_file::parse(tree);
    findings.extend(parse_findings);
    findings.extend(purity::check(&sources));
    findings.extend(unsafe_code::check(tree, &sources));
    findings.extend(forbidden_words::check(tree, &sources));
    findings.extend(comment_pronouns::check(tree));
    findings.extend(size_ratchet::check(
        tree,
        &size_limits::find_oversized_items(tree, &sources),
    ));
    findings.extend(links::check(tree));
    findings.sort();
    findings.dedup();
    findings
}

#[cfg(test)]
mod test_tree {
    //! Small trees for the checks' tests.

    use super::Finding;
    use crate::source_tree::{Dependency, Package, SourceTree};

    /// A tree of text files.
    pub fn tree(files: &[(&str, &str)]) -> SourceTree {
        let files = files
            .iter()
            .map(|(path, text)| (path.to_string(), Some(text.to_string())))
            .collect();
        SourceTree {
            files,
            ..SourceTree::default()
        }
    }

    /// Returns package `holdfast-NAME` in `crates/NAME`, with dependencies given by their full names.
    pub fn package(name: &str, dependencies: &[(&str, bool)]) -> Package {
        Package {
            name: format!("holdfast-{name}"),
            dir: format!("crates/{name}"),
            dependencies: (dependencies.iter())
                .map(|(name, dev)| Dependency {
                    name: name.to_string(),
                    dev: *dev,
                })
                .collect(),
            roots: vec![format!("crates/{name}/src/lib.rs")],
        }
    }

    /// Returns the positions of findings: `path:line`.
    pub fn positions(findings: &[Finding]) -> Vec<String> {
        findings
            .iter()
            .map(|finding| format!("{}:{}", finding.path, finding.line))
            .collect()
    }
}
