//! Checks that links between the project's pages lead to existing targets, and that every page can be reached.

use std::collections::{BTreeSet, HashMap};

use super::Finding;
use crate::source_tree::SourceTree;

/// The pages at the root; pages below `docs/` are checked too.
const ROOT_PAGES: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
];
/// Every page below `docs/` must be linked from one of these; the last one is the index of its folder.
const ENTRY_PAGES: &[&str] = &["README.md", "ARCHITECTURE.md", "docs/decisions/README.md"];

/// Checks that every relative link of a page names a file of the tree and, with `#`, a heading in it, and that no page
/// is an orphan.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut linked_pages = BTreeSet::new();
    let is_page = |path: &str| {
        ROOT_PAGES.contains(&path) || path.starts_with("docs/") && path.ends_with(".md")
    };
    for (page, text) in tree.texts(is_page) {
        for (line, link) in links_with_lines(text) {
            match resolve_link(tree, page, &link) {
                Ok(target) if ENTRY_PAGES.contains(&page) => {
                    linked_pages.insert(target);
                }
                Ok(_) => {}
                Err(reason) => {
                    findings.push(Finding::new(page, line, format!("link `{link}`: {reason}")))
                }
            }
        }
    }
    for (page, _) in tree.texts(|path| is_page(path) && path.starts_with("docs/")) {
        if !linked_pages.contains(page) {
            findings.push(Finding::new(
                page,
                0,
                format!("not linked from {}", ENTRY_PAGES.join(" or ")),
            ));
        }
    }
    findings
}

/// Returns the path of a link's target; links to other hosts are returned unchanged.
fn resolve_link(tree: &SourceTree, page: &str, link: &str) -> Result<String, String> {
    let is_external = ["http://", "https://", "mailto:"]
        .iter()
        .any(|scheme| link.starts_with(scheme));
    if is_external {
        return Ok(link.to_owned());
    }
    let (path, anchor) = link
        .split_once('#')
        .map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() {
        page.to_owned()
    } else {
        join_path(page, path).ok_or("leaves the checkout")?
    };
    let is_folder = || {
        tree.files.keys().any(|file| {
            file.strip_prefix(&target)
                .is_some_and(|rest| rest.starts_with('/'))
        })
    };
    match (tree.files.get(&target), anchor) {
        (Some(Some(text)), Some(anchor)) if target.ends_with(".md") => {
            let has_anchor = anchors(text).contains(anchor);
            if has_anchor {
                Ok(target)
            } else {
                Err(format!("no heading #{anchor} in {target}"))
            }
        }
        (Some(_), _) => Ok(target),
        (None, None) if is_folder() => Ok(target),
        (None, _) => Err(format!("no file {target}")),
    }
}

/// Resolves `path` relative to the folder of `page`.
fn join_path(page: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in path.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the links of a page with their lines: `](target)`, `[name]: target`, and `src` and `href` of HTML.
fn links_with_lines(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in lines_outside_code(text) {
        let line = strip_inline_code(line);
        for (start, end) in [
            ("](", ')'),
            ("src=\"", '"'),
            ("srcset=\"", '"'),
            ("href=\"", '"'),
        ] {
            for part in line.split(start).skip(1) {
                let inside = part.split(end).next().unwrap_or("");
                // The address may be followed by a title.
                found.extend(
                    inside
                        .split_whitespace()
                        .next()
                        .map(|link| (number, link.to_owned())),
                );
            }
        }
        if let Some((_, target)) = line
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("]: "))
        {
            found.extend(
                target
                    .split_whitespace()
                    .next()
                    .map(|link| (number, link.to_owned())),
            );
        }
    }
    found.retain(|(_, link)| !link.is_empty());
    found
}

/// Returns the lines outside fenced code, counted from 1.
fn lines_outside_code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((index + 1, line))
    })
}

fn strip_inline_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// Returns the anchors of a page's headings, as GitHub generates them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut slug_counts: HashMap<String, usize> = HashMap::new();
    let headings = lines_outside_code(text).filter_map(|(_, line)| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len())
            .then(|| title.strip_prefix(' '))
            .flatten()
    });
    headings
        .map(|title| {
            let slug = heading_slug(title.trim());
            let count = slug_counts.entry(slug.clone()).or_default();
            *count += 1;
            if *count == 1 {
                slug
            } else {
                format!("{slug}-{}", *count - 1)
            }
        })
        .collect()
}

fn heading_slug(title: &str) -> String {
    // A link in a heading contributes only its text.
    let mut text = String::new();
    let mut rest = title;
    while let Some((before, after)) = rest.split_once("](") {
        text.push_str(before);
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let kept = text
        .chars()
        .filter(|character| character.is_alphanumeric() || "-_ ".contains(*character));
    kept.flat_map(char::to_lowercase)
        .map(|character| if character == ' ' { '-' } else { character })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::test_tree::tree;
    use super::*;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        check(&tree(files))
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn valid_links_pass() {
        let readme = "[a](docs/a.md), [h](docs/a.md#one-two), [s](#self) [c](crates/) <img src=\"p.svg\">\n# Self\n";
        let a = "# One, `two`\n[up](../README.md#self \"title\") [web](https://example.com/x)\n";
        let files = [
            ("README.md", readme),
            ("docs/a.md", a),
            ("p.svg", ""),
            ("crates/x/Cargo.toml", ""),
        ];
        assert_eq!(messages(&files), [""; 0]);
    }

    #[test]
    fn link_to_missing_file_is_found() {
        assert_eq!(
            messages(&[("README.md", "\n[a](docs/a.md)\n")]),
            ["README.md:2: link `docs/a.md`: no file docs/a.md"]
        );
        assert_eq!(messages(&[("README.md", "<img src=\"p.svg\">")]).len(), 1);
        assert_eq!(messages(&[("README.md", "[a]: b.md\n")]).len(), 1);
        assert!(messages(&[("README.md", "[a](../b.md)\n")])[0].contains("leaves the checkout"));
    }

    #[test]
    fn link_to_missing_heading_is_found() {
        let found = messages(&[("README.md", "[a](#nowhere)\n# Somewhere\n")]);
        assert_eq!(
            found,
            ["README.md:1: link `#nowhere`: no heading #nowhere in README.md"]
        );
    }

    #[test]
    fn code_contains_no_links_or_headings() {
        assert!(messages(&[("README.md", "`[a](b.md)`\n```\n[a](b.md)\n```\n")]).is_empty());
        assert_eq!(
            messages(&[("README.md", "[a](#x)\n```\n# x\n```\n")]).len(),
            1
        );
    }

    #[test]
    fn orphan_page_is_found() {
        let found = messages(&[
            ("README.md", ""),
            ("docs/a.md", ""),
            ("CONTRIBUTING.md", "[a](docs/a.md)"),
        ]);
        assert_eq!(
            found,
            ["docs/a.md: not linked from README.md or ARCHITECTURE.md or docs/decisions/README.md"]
        );
    }

    #[test]
    fn heading_anchors_match_github() {
        let found = anchors("# A b\n## A b\n### What's `x --y`?\n#### [Link](z.md) c\n#no\n");
        assert_eq!(
            found,
            ["a-b", "a-b-1", "whats-x---y", "link-c"]
                .map(String::from)
                .into()
        );
    }
}
