//! Checks that unsafe code is only in few crates, with a comment that explains its soundness.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::Finding;
use super::rust_file::{RustFile, is_block, is_ident, is_punct, start_line, walk_tokens};
use crate::source_tree::SourceTree;

/// The crates in which `unsafe` is allowed.
const UNSAFE_CRATES: &[&str] = &[
    "holdfast-sys",
    "holdfast-tcp-repair",
    "holdfast-checkpoint",
    "holdfast-sctp",
    "holdfast-bpf",
    "holdfast-ffi",
];

/// Checks that crates other than [`UNSAFE_CRATES`] forbid unsafe code and have none in their tests either, and that in
/// the others every unsafe block and implementation has a `SAFETY:` comment above it.
pub fn check(tree: &SourceTree, sources: &[RustFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        let package = tree.package_of(source.path);
        if package.is_some_and(|package| UNSAFE_CRATES.contains(&package.name.as_str())) {
            let mut scan = UnsafeScan {
                lines: source.text.lines().collect(),
                uncommented_lines: Vec::new(),
            };
            scan.scan_tokens(&source.tokens, &[]);
            let message = "an unsafe block or implementation without a `// SAFETY:` line above it";
            findings.extend(
                scan.uncommented_lines
                    .into_iter()
                    .map(|line| Finding::new(source.path, line, message)),
            );
            continue;
        }
        let is_root =
            package.is_some_and(|package| package.roots.iter().any(|root| root == source.path));
        if is_root && !forbids_unsafe(&source.file) {
            findings.push(Finding::new(source.path, 1, "no #![forbid(unsafe_code)]"));
        }
        walk_tokens(&source.tokens, &mut |siblings, position| {
            if is_ident(siblings.get(position), "unsafe") {
                let message = format!("unsafe code outside {}", UNSAFE_CRATES.join(", "));
                findings.push(Finding::new(
                    source.path,
                    start_line(&siblings[position]),
                    message,
                ));
            }
        });
    }
    findings
}

fn forbids_unsafe(file: &syn::File) -> bool {
    file.attrs.iter().any(|attribute| {
        let mut found = false;
        if attribute.path().is_ident("forbid") {
            // An argument that is not a plain name belongs to another lint.
            let _ = attribute.parse_nested_meta(|meta| {
                found |= meta.path.is_ident("unsafe_code");
                Ok(())
            });
        }
        found
    })
}

/// Searches for unsafe blocks and the comments above them.
struct UnsafeScan<'a> {
    lines: Vec<&'a str>,
    uncommented_lines: Vec<usize>,
}

impl UnsafeScan<'_> {
    /// Scans tokens. `enclosing_lines` are the start lines of the statements with parentheses that enclose these tokens; a
    /// comment above one of the statements is sufficient.
    fn scan_tokens(&mut self, tokens: &TokenStream, enclosing_lines: &[usize]) {
        let siblings: Vec<TokenTree> = tokens.clone().into_iter().collect();
        let mut statement = None;
        for (position, tree) in siblings.iter().enumerate() {
            let start = *statement.get_or_insert(start_line(tree));
            let candidate_lines: Vec<usize> = enclosing_lines
                .iter()
                .copied()
                .chain([start, start_line(tree)])
                .collect();
            let next = siblings.get(position + 1);
            if is_ident(Some(tree), "unsafe") && (is_block(next) || is_ident(next, "impl")) {
                self.require_comment(&candidate_lines, start_line(tree));
            }
            if let TokenTree::Group(group) = tree {
                let is_block = group.delimiter() == Delimiter::Brace;
                self.scan_tokens(
                    &group.stream(),
                    if is_block { &[] } else { &candidate_lines },
                );
            }
            if is_block(Some(tree)) || is_punct(Some(tree), ';') || is_punct(Some(tree), ',') {
                statement = None;
            }
        }
    }

    fn require_comment(&mut self, candidate_lines: &[usize], unsafe_line: usize) {
        if !candidate_lines
            .iter()
            .any(|line| self.has_safety_comment_above(*line))
        {
            self.uncommented_lines.push(unsafe_line);
        }
    }

    /// Returns true if the comments and attributes directly above a line (counted from 1) contain the word.
    fn has_safety_comment_above(&self, line: usize) -> bool {
        let lines_above = self.lines[..line - 1]
            .iter()
            .rev()
            .map(|line| line.trim_start());
        let mut comments =
            lines_above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
        comments.any(|line| line.contains("SAFETY:"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::rust_file::parse;
    use super::super::test_tree::{package, positions, tree};
    use super::*;

    fn findings_of(name: &str, text: &str) -> Vec<String> {
        let path = format!("crates/{name}/src/lib.rs");
        let mut tree = tree(&[(&path, text)]);
        tree.packages.push(package(name, &[]));
        let (sources, _) = parse(&tree);
        positions(&check(&tree, &sources))
    }

    #[test]
    fn crate_without_forbid_attribute_is_found() {
        assert!(findings_of("wire", "//! Docs.\n#![forbid(unsafe_code)]\n").is_empty());
        assert!(findings_of("wire", "#![forbid(missing_docs, unsafe_code)]\n").is_empty());
        assert_eq!(
            findings_of("wire", "//! Docs.\n"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert_eq!(
            findings_of("wire", "#![deny(unsafe_code)]\n"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert!(findings_of("sys", "//! Docs.\n").is_empty());
    }

    #[test]
    fn unsafe_test_of_safe_crate_is_found() {
        let mut tree = tree(&[(
            "crates/wire/tests/a.rs",
            "fn f() {\n    m!(unsafe { g() });\n}\n",
        )]);
        tree.packages.push(package("wire", &[]));
        let (sources, _) = parse(&tree);
        assert_eq!(
            positions(&check(&tree, &sources)),
            ["crates/wire/tests/a.rs:2"]
        );
    }

    #[test]
    fn unsafe_block_without_comment_is_found() {
        assert_eq!(
            findings_of("sys", "fn f() {\n    unsafe { g() }\n}\n"),
            ["crates/sys/src/lib.rs:2"]
        );
        let other = "fn f() {\n    // SAFETY: a.\n    unsafe { g() };\n    unsafe { g() }\n}\n";
        assert_eq!(findings_of("sys", other), ["crates/sys/src/lib.rs:4"]);
        assert_eq!(
            findings_of("sys", "unsafe impl Send for T {}\n"),
            ["crates/sys/src/lib.rs:1"]
        );
    }

    #[test]
    fn function_comment_does_not_cover_body() {
        let text = "// SAFETY: a.\nfn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(findings_of("sys", text), ["crates/sys/src/lib.rs:3"]);
    }

    #[test]
    fn comment_above_block_or_statement_passes() {
        assert!(
            findings_of(
                "sys",
                "fn f() {\n    // SAFETY: a,\n    // and b.\n    unsafe { g() }\n}\n"
            )
            .is_empty()
        );
        assert!(findings_of("sys", "fn f() {\n    // SAFETY: a.\n    let x = check(\n        unsafe { g() },\n    );\n}\n").is_empty());
        assert!(
            findings_of(
                "sys",
                "fn f() {\n    // SAFETY: a.\n    #[cfg(x)]\n    unsafe { g() };\n}\n"
            )
            .is_empty()
        );
        assert!(findings_of("sys", "// SAFETY: a.\nunsafe impl Send for T {}\n").is_empty());
    }

    #[test]
    fn declarations_and_attributes_need_no_comment() {
        assert!(
            findings_of(
                "sys",
                "unsafe fn f() {}\nunsafe extern \"C\" {}\n#[unsafe(no_mangle)]\nfn g() {}\n"
            )
            .is_empty()
        );
    }
}
