//! Plain sentences in comments: few relative pronouns, and few lines that begin with a bare pronoun.

use super::Finding;
use crate::tree::Tree;

/// Folders held to the limits.
const FOLDERS: &[&str] = &[];

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

/// Each folder of [`FOLDERS`] keeps both limits.
pub fn check(tree: &Tree) -> Vec<Finding> {
    check_folders(tree, FOLDERS)
}

fn check_folders(tree: &Tree, folders: &[&str]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for folder in folders {
        let counts = count(tree, folder);
        if counts.relatives * 1000 > counts.words * RELATIVES_PER_MILLE {
            let message = format!(
                "{} of {} comment words are {}; at most {RELATIVES_PER_MILLE} in 1,000 may be",
                counts.relatives,
                counts.words,
                RELATIVES.join(", ")
            );
            findings.push(Finding::new(folder, 0, message));
        }
        if counts.bare.len() * 1000 > counts.lines * BARE_PER_MILLE {
            findings.extend(counts.bare.iter().map(|(path, line)| {
                Finding::new(path, *line, "a line begins with a bare pronoun")
            }));
        }
    }
    findings
}

fn count<'a>(tree: &'a Tree, folder: &str) -> Counts<'a> {
    let mut counts = Counts::default();
    let is_inside = |path: &str| {
        let inside = path.strip_prefix(folder);
        inside.is_some_and(|rest| rest.starts_with('/')) && (is_rust(path) || is_c(path))
    };
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
            let begins = |word: &&str| {
                let rest = comment.get(word.len()..).unwrap_or_default();
                words[0] == **word && comment.starts_with(char::is_alphabetic) && !rest.starts_with('`')
            };
            if BARE.iter().any(|word| begins(&word)) {
                counts.bare.push((path, number));
            }
        }
    }
    counts
}

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
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
        places(&check_folders(&tree(&[("a/b.rs", text)]), &["a"]))
    }

    #[test]
    fn piled_up_pronouns_are_found() {
        assert_eq!(found("// Tells what came from those.\n"), ["a:0"]);
        assert!(found("// Returns the owner of the flow.\nlet what = those;\n").is_empty());
    }

    #[test]
    fn a_line_that_begins_with_a_bare_pronoun_is_found() {
        assert_eq!(found("/// A flow.\n///\n/// It has an owner.\n"), ["a/b.rs:3"]);
        assert!(found("/// An item.\n/// Italic text.\nlet it = 1; // it counts\n").is_empty());
    }

    #[test]
    fn other_folders_are_left_alone() {
        let tree = tree(&[("ab/c.rs", "// It is what it is.\n")]);
        assert!(check_folders(&tree, &["a"]).is_empty());
    }
}
