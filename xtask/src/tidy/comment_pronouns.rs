//! Plain sentences in comments: few relative pronouns, and few lines that begin with a bare pronoun.

use std::collections::BTreeSet;

use super::Finding;
use crate::source_tree::SourceTree;

/// Pronouns that turn a sentence into a riddle when they pile up.
const RELATIVES: &[&str] = &["who", "whom", "whose", "what", "those"];

/// Words that leave the subject of a sentence in another sentence.
const BARE_STARTS: &[&str] = &[
    "it", "this", "that", "they", "those", "these", "who", "what", "which", "where", "whoever",
    "whatever",
];

/// Largest share of [`RELATIVES`] among the words of a folder's comments, per mille.
const RELATIVES_PER_MILLE: usize = 4;
/// Largest share of comment lines that begin with one of [`BARE_STARTS`], per mille.
const BARE_PER_MILLE: usize = 10;

/// Counts of one folder.
#[derive(Default)]
struct PronounCounts<'a> {
    words: usize,
    relatives: usize,
    lines: usize,
    /// Lines that begin with a bare pronoun.
    bare_starts: Vec<(&'a str, usize)>,
}

/// Checks that each crate keeps both limits.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let folders: BTreeSet<&str> = tree
        .texts(is_code)
        .map(|(path, _)| crate_folder(path))
        .collect();
    let mut findings = Vec::new();
    for name in folders {
        let counts = count_folder(tree, name);
        if counts.relatives * 1000 > counts.words * RELATIVES_PER_MILLE {
            let message = format!(
                "{} of {} comment words are {}; at most {RELATIVES_PER_MILLE} in 1,000 may be",
                counts.relatives,
                counts.words,
                RELATIVES.join(", ")
            );
            findings.push(Finding::new(name, 0, message));
        }
        if counts.bare_starts.len() * 1000 > counts.lines * BARE_PER_MILLE {
            findings.extend(counts.bare_starts.iter().map(|(path, line)| {
                Finding::new(path, *line, "a comment line begins with a bare pronoun")
            }));
        }
    }
    findings
}

/// Returns the crate of a file, such as `crates/wire`, or its folder at the root.
fn crate_folder(path: &str) -> &str {
    let parts = match path.starts_with("crates/") || path.starts_with("examples/") {
        true => 2,
        false => 1,
    };
    let end = path.match_indices('/').nth(parts - 1);
    end.map_or(path, |(end, _)| &path[..end])
}

fn count_folder<'a>(tree: &'a SourceTree, name: &'a str) -> PronounCounts<'a> {
    let mut counts = PronounCounts::default();
    let is_inside = move |path: &str| is_code(path) && crate_folder(path) == name;
    for (path, text) in tree.texts(is_inside) {
        for (number, line) in (1..).zip(text.lines()) {
            let Some(comment_words) = comment_text(line, is_c(path)) else {
                continue;
            };
            let words: Vec<String> = comment_words
                .split(|c: char| !c.is_ascii_alphabetic() && c != '\'')
                .filter(|word| !word.is_empty())
                .map(str::to_ascii_lowercase)
                .collect();
            if words.is_empty() {
                continue;
            }
            counts.lines += 1;
            counts.words += words.len();
            let is_relative = |word: &&String| RELATIVES.contains(&word.as_str());
            counts.relatives += words.iter().filter(is_relative).count();
            let begins_with_word = comment_words.starts_with(|c: char| c.is_ascii_alphabetic());
            if begins_with_word && BARE_STARTS.contains(&words[0].as_str()) {
                counts.bare_starts.push((path, number));
            }
        }
    }
    counts
}

fn is_code(path: &str) -> bool {
    path.ends_with(".rs") || is_c(path)
}

fn is_c(path: &str) -> bool {
    path.ends_with(".c") || path.ends_with(".h")
}

/// The words of a line that is a comment as a whole.
fn comment_text(line: &str, is_c: bool) -> Option<&str> {
    let line = line.trim_start();
    let marks: &[&str] = match is_c {
        true => &["/*", "*/", "*", "//"],
        false => &["///", "//!", "//"],
    };
    let rest = marks.iter().find_map(|mark| line.strip_prefix(mark))?;
    Some(rest.trim())
}

#[cfg(test)]
mod tests {
    use super::super::test_tree::{positions, tree};
    use super::*;

    fn findings_of(text: &str) -> Vec<String> {
        positions(&check(&tree(&[("crates/a/src/b.rs", text)])))
    }

    #[test]
    fn too_many_pronouns_are_found() {
        assert_eq!(
            findings_of("// Tells what came from those.\n"),
            ["crates/a:0"]
        );
        assert!(findings_of("// Returns the owner of the flow.\nlet what = those;\n").is_empty());
    }

    #[test]
    fn line_starting_with_bare_pronoun_is_found() {
        let text = "/// A flow.\n///\n/// It has an owner.\n";
        assert_eq!(findings_of(text), ["crates/a/src/b.rs:3"]);
        assert!(
            findings_of("/// An item.\n/// Italic text.\nlet it = 1; // it counts\n").is_empty()
        );
    }

    #[test]
    fn crates_are_counted_separately() {
        let plain = "// Returns the owner of the flow.\n".repeat(100);
        let files = [
            ("crates/a/b.rs", plain.as_str()),
            ("crates/c/d.rs", "// It is.\n"),
        ];
        assert_eq!(positions(&check(&tree(&files))), ["crates/c/d.rs:1"]);
    }
}
