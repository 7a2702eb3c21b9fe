//! The sizes of files and functions, against their limits.

use super::functions::{self, Function};
use super::source::Source;
use crate::tree::Tree;

/// Maximum number of lines in a file.
pub const FILE_LINES_MAX: usize = 800;
/// Maximum number of lines in a function, from its signature to its closing brace.
pub const FUNCTION_LINES_MAX: usize = 100;

/// A kind of object with a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Function,
}

/// An object over its limit.
#[derive(Debug, PartialEq, Eq)]
pub struct Offender {
    pub kind: Kind,
    /// Name in the ratchet: `PATH` or `PATH::NAME`.
    pub key: String,
    pub path: String,
    /// First line; 0 for a file.
    pub line: usize,
    pub lines: usize,
}

impl Kind {
    /// Returns the limit, in lines.
    pub fn lines_max(self) -> usize {
        match self {
            Kind::File => FILE_LINES_MAX,
            Kind::Function => FUNCTION_LINES_MAX,
        }
    }
}

/// Returns everything over its limit: hand-written code in Rust, C and shell.
pub fn measure(tree: &Tree, sources: &[Source]) -> Vec<Offender> {
    let mut offenders = Vec::new();
    for (path, text) in tree.texts(is_code) {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            offenders.push(Offender {
                kind: Kind::File,
                key: path.into(),
                path: path.into(),
                line: 0,
                lines,
            });
        }
    }
    for source in sources {
        offenders.extend(over_limit(source.path, functions::rust(source)));
    }
    for (path, text) in tree.texts(is_c) {
        offenders.extend(over_limit(path, functions::c(text)));
    }
    offenders
}

fn over_limit(path: &str, functions: Vec<Function>) -> impl Iterator<Item = Offender> {
    let long = functions
        .into_iter()
        .filter(|function| function.lines > FUNCTION_LINES_MAX);
    long.map(move |function| Offender {
        kind: Kind::Function,
        key: format!("{path}::{}", function.name),
        path: path.into(),
        line: function.line,
        lines: function.lines,
    })
}

fn is_code(path: &str) -> bool {
    is_c(path)
        || path.ends_with(".rs")
        || path.ends_with(".sh")
        || path == "x"
        || path.starts_with(".ci/")
}

fn is_c(path: &str) -> bool {
    path.ends_with(".c") || path.ends_with(".h")
}

#[cfg(test)]
mod tests {
    use super::super::fixture::tree;
    use super::super::source::parse;
    use super::*;

    fn keys(path: &str, text: &str) -> Vec<(String, usize)> {
        let tree = tree(&[(path, text)]);
        let (sources, _) = parse(&tree);
        measure(&tree, &sources)
            .into_iter()
            .map(|offender| (offender.key, offender.lines))
            .collect()
    }

    #[test]
    fn a_file_over_the_limit_is_found_and_one_at_it_is_not() {
        assert!(keys("a.rs", &"\n".repeat(FILE_LINES_MAX)).is_empty());
        let found = [("a.rs".to_owned(), FILE_LINES_MAX + 1)];
        assert_eq!(keys("a.rs", &"\n".repeat(FILE_LINES_MAX + 1)), found);
        assert_eq!(keys("notes.md", &"\n".repeat(FILE_LINES_MAX + 1)), []);
    }

    #[test]
    fn a_function_over_the_limit_is_found_and_one_at_it_is_not() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    ();\n".repeat(lines - 2));
        assert!(keys("a.rs", &function(FUNCTION_LINES_MAX)).is_empty());
        let found = [("a.rs::f".to_owned(), FUNCTION_LINES_MAX + 1)];
        assert_eq!(keys("a.rs", &function(FUNCTION_LINES_MAX + 1)), found);
    }

    #[test]
    fn a_long_c_function_is_found() {
        let text = format!(
            "static int f(void)\n{{\n{}}}\n",
            "\t;\n".repeat(FUNCTION_LINES_MAX)
        );
        assert_eq!(
            keys("a.c", &text),
            [("a.c::f".to_owned(), FUNCTION_LINES_MAX + 3)]
        );
    }
}
