//! Checks that unsafe code is only in three crates, with a comment that explains its soundness.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::Finding;
use super::source::{Source, is_block, is_ident, is_punct, line, walk};
use crate::tree::Tree;

/// The crates in which `unsafe` is allowed.
const MAY_BE_UNSAFE: &[&str] = &["holdfast-sys", "holdfast-bpf", "holdfast-ffi"];

/// Checks that crates other than [`MAY_BE_UNSAFE`] forbid unsafe code and have none in their tests either, and that in
/// the others every unsafe block and implementation has a `SAFETY:` comment above it.
pub fn check(tree: &Tree, sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        let package = tree.package_of(source.path);
        if package.is_some_and(|package| MAY_BE_UNSAFE.contains(&package.name.as_str())) {
            let mut scan = Scan {
                lines: source.text.lines().collect(),
                found: Vec::new(),
            };
            scan.tokens(&source.tokens, &[]);
            let message = "an unsafe block or implementation without a `// SAFETY:` line above it";
            findings.extend(
                scan.found
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
        walk(&source.tokens, &mut |siblings, position| {
            if is_ident(siblings.get(position), "unsafe") {
                let message = format!("unsafe code outside {}", MAY_BE_UNSAFE.join(", "));
                findings.push(Finding::new(
                    source.path,
                    line(&siblings[position]),
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
struct Scan<'a> {
    lines: Vec<&'a str>,
    found: Vec<usize>,
}

impl Scan<'_> {
    /// Scans tokens. `around` are the start lines of the statements with parentheses that enclose these tokens; a
    /// comment above one of the statements is sufficient.
    fn tokens(&mut self, tokens: &TokenStream, around: &[usize]) {
        let siblings: Vec<TokenTree> = tokens.clone().into_iter().collect();
        let mut statement = None;
        for (position, tree) in siblings.iter().enumerate() {
            let start = *statement.get_or_insert(line(tree));
            let places: Vec<usize> = around.iter().copied().chain([start, line(tree)]).collect();
            let next = siblings.get(position + 1);
            if is_ident(Some(tree), "unsafe") && (is_block(next) || is_ident(next, "impl")) {
                self.need_comment(&places, line(tree));
            }
            if let TokenTree::Group(group) = tree {
                let is_block = group.delimiter() == Delimiter::Brace;
                self.tokens(&group.stream(), if is_block { &[] } else { &places });
            }
            if is_block(Some(tree)) || is_punct(Some(tree), ';') || is_punct(Some(tree), ',') {
                statement = None;
            }
        }
    }

    fn need_comment(&mut self, places: &[usize], at: usize) {
        if !places.iter().any(|line| self.comment_above(*line)) {
            self.found.push(at);
        }
    }

    /// Returns true if the comments and attributes directly above a line (counted from 1) contain the word.
    fn comment_above(&self, line: usize) -> bool {
        let above = self.lines[..line - 1]
            .iter()
            .rev()
            .map(|line| line.trim_start());
        let mut comments =
            above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
        comments.any(|line| line.contains("SAFETY:"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{package, places, tree};
    use super::super::source::parse;
    use super::*;

    fn found(name: &str, text: &str) -> Vec<String> {
        let path = format!("crates/{name}/src/lib.rs");
        let mut tree = tree(&[(&path, text)]);
        tree.packages.push(package(name, &[]));
        let (sources, _) = parse(&tree);
        places(&check(&tree, &sources))
    }

    #[test]
    fn a_crate_without_the_attribute_is_found() {
        assert!(found("wire", "//! Docs.\n#![forbid(unsafe_code)]\n").is_empty());
        assert!(found("wire", "#![forbid(missing_docs, unsafe_code)]\n").is_empty());
        assert_eq!(found("wire", "//! Docs.\n"), ["crates/wire/src/lib.rs:1"]);
        assert_eq!(
            found("wire", "#![deny(unsafe_code)]\n"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert!(found("sys", "//! Docs.\n").is_empty());
    }

    #[test]
    fn unsafe_code_in_the_tests_of_a_safe_crate_is_found() {
        let mut tree = tree(&[(
            "crates/wire/tests/a.rs",
            "fn f() {\n    m!(unsafe { g() });\n}\n",
        )]);
        tree.packages.push(package("wire", &[]));
        let (sources, _) = parse(&tree);
        assert_eq!(
            places(&check(&tree, &sources)),
            ["crates/wire/tests/a.rs:2"]
        );
    }

    #[test]
    fn an_unsafe_block_without_its_comment_is_found() {
        assert_eq!(
            found("sys", "fn f() {\n    unsafe { g() }\n}\n"),
            ["crates/sys/src/lib.rs:2"]
        );
        let other = "fn f() {\n    // SAFETY: a.\n    unsafe { g() };\n    unsafe { g() }\n}\n";
        assert_eq!(found("sys", other), ["crates/sys/src/lib.rs:4"]);
        assert_eq!(
            found("sys", "unsafe impl Send for T {}\n"),
            ["crates/sys/src/lib.rs:1"]
        );
    }

    #[test]
    fn a_comment_on_the_function_does_not_cover_its_body() {
        let text = "// SAFETY: a.\nfn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(found("sys", text), ["crates/sys/src/lib.rs:3"]);
    }

    #[test]
    fn a_comment_above_the_block_or_its_statement_will_do() {
        assert!(
            found(
                "sys",
                "fn f() {\n    // SAFETY: a,\n    // and b.\n    unsafe { g() }\n}\n"
            )
            .is_empty()
        );
        assert!(found("sys", "fn f() {\n    // SAFETY: a.\n    let x = check(\n        unsafe { g() },\n    );\n}\n").is_empty());
        assert!(
            found(
                "sys",
                "fn f() {\n    // SAFETY: a.\n    #[cfg(x)]\n    unsafe { g() };\n}\n"
            )
            .is_empty()
        );
        assert!(found("sys", "// SAFETY: a.\nunsafe impl Send for T {}\n").is_empty());
    }

    #[test]
    fn declarations_and_attributes_need_none() {
        assert!(
            found(
                "sys",
                "unsafe fn f() {}\nunsafe extern \"C\" {}\n#[unsafe(no_mangle)]\nfn g() {}\n"
            )
            .is_empty()
        );
    }
}
