//! Checks for words that do not belong in a committed file.

use proc_macro2::{Delimiter, TokenTree};

use super::Finding;
use super::rust_file::{RustFile, is_ident, is_punct, start_line, walk_tokens};
use crate::source_tree::SourceTree;

/// Folders of one particular machine. Split in two parts, so that this file passes its own check.
const MACHINE_PATHS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/fa", "rm/"),
];

/// Macros that stand for missing code.
const PLACEHOLDER_MACROS: &[&str] = &["todo", "unimplemented"];

/// Checks that no text file names a folder of a developer's machine, and that no Rust file has missing code or a test
/// skipped without reason.
pub fn check(tree: &SourceTree, sources: &[RustFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts(|_| true) {
        for (index, line) in text.lines().enumerate() {
            let found = MACHINE_PATHS
                .iter()
                .filter(|word| has_absolute_path(line, word));
            findings.extend(found.map(|word| {
                Finding::new(
                    path,
                    index + 1,
                    format!("`{word}` is a path that exists on one machine only"),
                )
            }));
        }
    }
    for source in sources {
        walk_tokens(&source.tokens, &mut |siblings, position| {
            if let Some(message) = find_placeholder(siblings, position)
                .or_else(|| find_bare_ignore(siblings, position))
            {
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

/// Returns true if an absolute path in `line` starts with `word`; in the middle of a longer path it is allowed.
fn has_absolute_path(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|before| before.is_alphanumeric() || "._-/}~*".contains(before))
    })
}

fn find_placeholder(siblings: &[TokenTree], position: usize) -> Option<String> {
    let name = PLACEHOLDER_MACROS
        .iter()
        .find(|name| is_ident(siblings.get(position), name))?;
    is_punct(siblings.get(position + 1), '!').then(|| format!("`{name}!`: unfinished code"))
}

/// Finds `#[ignore]`, also inside `#[cfg_attr(...)]`; `#[ignore = "reason"]` passes.
fn find_bare_ignore(siblings: &[TokenTree], position: usize) -> Option<String> {
    let Some(TokenTree::Group(group)) = siblings.get(position + 1) else {
        return None;
    };
    if !is_punct(siblings.get(position), '#') || group.delimiter() != Delimiter::Bracket {
        return None;
    }
    let mut found = false;
    let mut first = None;
    walk_tokens(&group.stream(), &mut |tokens, position| {
        let first = first.get_or_insert_with(|| tokens[position].to_string());
        let is_test_attribute = matches!(first.as_str(), "ignore" | "cfg_attr");
        found |= is_test_attribute
            && is_ident(tokens.get(position), "ignore")
            && !is_punct(tokens.get(position + 1), '=');
    });
    found.then(|| "`#[ignore]` without a reason".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::rust_file::parse;
    use super::super::test_tree::{positions, tree};
    use super::*;

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let tree = tree(&[(path, text)]);
        let (sources, _) = parse(&tree);
        positions(&check(&tree, &sources))
    }

    #[test]
    fn machine_path_is_found() {
        for word in MACHINE_PATHS {
            assert_eq!(
                findings_of("a.md", &format!("first\nsee `{word}notes`\n")),
                ["a.md:2"]
            );
            assert_eq!(
                findings_of("a.toml", &format!("path = \"{word}\"\n")),
                ["a.toml:1"]
            );
            assert!(
                findings_of(
                    "a.md",
                    &format!("see https://example.com{word}x and src{word}y\n")
                )
                .is_empty()
            );
        }
    }

    #[test]
    fn placeholder_code_is_found() {
        assert_eq!(
            findings_of("a.rs", "fn f() {\n    todo!()\n}\n"),
            ["a.rs:2"]
        );
        assert_eq!(
            findings_of("a.rs", "fn f() { m!(unimplemented!(\"x\")) }\n"),
            ["a.rs:1"]
        );
        assert!(findings_of("a.rs", "// todo!\nfn todo() { let _ = \"todo!()\"; }\n").is_empty());
    }

    #[test]
    fn test_ignored_without_reason_is_found() {
        assert_eq!(
            findings_of("a.rs", "#[test]\n#[ignore]\nfn f() {}\n"),
            ["a.rs:2"]
        );
        assert_eq!(
            findings_of("a.rs", "#[cfg_attr(x, ignore)]\nfn f() {}\n"),
            ["a.rs:1"]
        );
        assert_eq!(
            findings_of("a.rs", "m! {\n#[ignore]\nfn f() {}\n}\n"),
            ["a.rs:2"]
        );
        assert!(findings_of("a.rs", "#[ignore = \"needs two machines\"]\nfn f() {}\n").is_empty());
        assert!(findings_of("a.rs", "#[doc(alias = \"x\", ignore)]\nfn f() {}\n").is_empty());
    }
}
