//! Plain sentences in comments: few relative pronouns, and few lines that begin with a bare pronoun.

use std::collections::BTreeSet;

use super::Finding;
use crate::tree::Tree;

/// Pronouns that turn a sentence into a riddle when they pile up.
const RELATIVES: &[&str] = &["who", "whom", "whose", "what", "those"];

/// Words that leave the subject of a sentence in another sentence.
const BARE: &[&str] = &[
    "it", "this", "that", "they", "those", "these", "who", "what", "which", "where", "whoever",
    "whatever",
];

/// Largest share of [`RELATIVES`] among the words of a folder's comments, per mille.
const RELATIVES_PER_MILLE: usize = 4;
/// Largest share of comment lines that begin with one of [`BARE`], per mille.
const BARE_PER_MILLE: usize = 10;

/// Counts of one folder.
#[derive(Default)]
struct Counts<'a> {
    words: usize,
    relatives: usize,
    lines: usize,
    /// Lines that begin with a bare pronoun.
    bare: Vec<(&'a str, usize)>,
}

/// Checks that each crate keeps both limits.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let folders: BTreeSet<&str> = tree.texts(is_code).map(|(path, _)| folder(path)).collect();
    let mut findings = Vec::new();
    for name in folders {
        let counts = count(tree, name);
        if counts.relatives * 1000 > counts.words * RELATIVES_PER_MILLE {
            let message = format!(
                "{} of {} comment words are {}; at most {RELATIVES_PER_MILLE} in 1,000 may be",
                counts.relatives,
                counts.words,
                RELATIVES.join(", ")
            );
            findings.push(Finding::new(name, 0, message));
        }
        if counts.bare.len() * 1000 > counts.lines * BARE_PER_MILLE {
            findings.extend(counts.bare.iter().map(|(path, line)| {
                Finding::new(path, *line, "a comment line begins with a bare pronoun")
            }));
        }
    }
    findings
}

/// Returns the crate of a file, such as `crates/wire`, or its folder at the root.
fn folder(path: &str) -> &str {
    let parts = match path.starts_with("crates/") || path.starts_with("examples/") {
        true => 2,
        false => 1,
    };
    let end = path.match_indices('/').nth(parts - 1);
    end.map_or(path, |(end, _)| &path[..end])
}

fn count<'a>(tree: &'a Tree, name: &'a str) -> Counts<'a> {
    let mut counts = Counts::default();
    let is_inside = move |path: &str| is_code(path) && folder(path) == name;
    for (path, text) in tree.texts(is_inside) {
        for (number, line) in (1..).zip(text.lines()) {
            let Some(comment) = comment(line, is_c(path)) else {
                continue;
            };
            let words: Vec<String> = comment
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
            let begins_with_word = comment.starts_with(|c: char| c.is_ascii_alphabetic());
            if begins_with_word && BARE.contains(&words[0].as_str()) {
                counts.bare.push((path, number));
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
fn comment(line: &str, is_c: bool) -> Option<&str> {
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
    use super::super::fixture::{places, tree};
    use super::*;

    fn found(text: &str) -> Vec<String> {
        places(&check(&tree(&[("crates/a/src/b.rs", text)])))
    }

    #[test]
    fn piled_up_pronouns_are_found() {
        assert_eq!(found("// Tells what came from those.\n"), ["crates/a:0"]);
        assert!(found("// Returns the owner of the flow.\nlet what = those;\n").is_empty());
    }

    #[test]
    fn line_with_bare_pronoun_is_found() {
        let text = "/// A flow.\n///\n/// It has an owner.\n";
        assert_eq!(found(text), ["crates/a/src/b.rs:3"]);
        assert!(found("/// An item.\n/// Italic text.\nlet it = 1; // it counts\n").is_empty());
    }

    #[test]
    fn crates_are_counted_apart() {
        let plain = "// Returns the owner of the flow.\n".repeat(100);
        let files = [
            ("crates/a/b.rs", plain.as_str()),
            ("crates/c/d.rs", "// It is.\n"),
        ];
        assert_eq!(places(&check(&tree(&files))), ["crates/c/d.rs:1"]);
    }
}
