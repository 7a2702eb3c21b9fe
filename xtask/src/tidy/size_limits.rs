//! The sizes of files and functions, against their limits.

use super::function_sizes::{self, FunctionSize};
use super::rust_file::RustFile;
use crate::source_tree::SourceTree;

/// Maximum number of lines in a file.
pub const FILE_LINES_MAX: usize = 800;
/// Maximum number of lines in a function, from its signature to its closing brace.
pub const FUNCTION_LINES_MAX: usize = 100;

/// A kind of object with a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizedItem {
    File,
    Function,
}

/// An object over its limit.
#[derive(Debug, PartialEq, Eq)]
pub struct OversizedItem {
    pub kind: SizedItem,
    /// Name in the ratchet: `PATH` or `PATH::NAME`.
    pub key: String,
    pub path: String,
    /// First line; 0 for a file.
    pub line: usize,
    pub lines: usize,
}

impl SizedItem {
    /// Returns the limit, in lines.
    pub fn lines_max(self) -> usize {
        match self {
            SizedItem::File => FILE_LINES_MAX,
            SizedItem::Function => FUNCTION_LINES_MAX,
        }
    }
}

/// Returns everything over its limit: hand-written code in Rust, C and shell.
pub fn find_oversized_items(tree: &SourceTree, sources: &[RustFile]) -> Vec<OversizedItem> {
    let mut offenders = Vec::new();
    for (path, text) in tree.texts(is_code) {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            offenders.push(OversizedItem {
                kind: SizedItem::File,
                key: path.into(),
                path: path.into(),
                line: 0,
                lines,
            });
        }
    }
    for source in sources {
        offenders.extend(over_limit(
            source.path,
            function_sizes::rust_functions(source),
        ));
    }
    for (path, text) in tree.texts(is_c) {
        offenders.extend(over_limit(path, function_sizes::c_functions(text)));
    }
    offenders
}

fn over_limit(path: &str, functions: Vec<FunctionSize>) -> impl Iterator<Item = OversizedItem> {
    let long_functions = functions
        .into_iter()
        .filter(|function| function.lines > FUNCTION_LINES_MAX);
    long_functions.map(move |function| OversizedItem {
        kind: SizedItem::Function,
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
    use super::super::rust_file::parse;
    use super::super::test_tree::tree;
    use super::*;

    fn offender_keys(path: &str, text: &str) -> Vec<(String, usize)> {
        let tree = tree(&[(path, text)]);
        let (sources, _) = parse(&tree);
        find_oversized_items(&tree, &sources)
            .into_iter()
            .map(|offender| (offender.key, offender.lines))
            .collect()
    }

    #[test]
    fn only_file_over_limit_is_found() {
        assert!(offender_keys("a.rs", &"\n".repeat(FILE_LINES_MAX)).is_empty());
        let found = [("a.rs".to_owned(), FILE_LINES_MAX + 1)];
        assert_eq!(
            offender_keys("a.rs", &"\n".repeat(FILE_LINES_MAX + 1)),
            found
        );
        assert_eq!(
            offender_keys("notes.md", &"\n".repeat(FILE_LINES_MAX + 1)),
            []
        );
    }

    #[test]
    fn only_function_over_limit_is_found() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    ();\n".repeat(lines - 2));
        assert!(offender_keys("a.rs", &function(FUNCTION_LINES_MAX)).is_empty());
        let found = [("a.rs::f".to_owned(), FUNCTION_LINES_MAX + 1)];
        assert_eq!(
            offender_keys("a.rs", &function(FUNCTION_LINES_MAX + 1)),
            found
        );
    }

    #[test]
    fn long_c_function_is_found() {
        let text = format!(
            "static int f(void)\n{{\n{}}}\n",
            "\t;\n".repeat(FUNCTION_LINES_MAX)
        );
        assert_eq!(
            offender_keys("a.c", &text),
            [("a.c::f".to_owned(), FUNCTION_LINES_MAX + 3)]
        );
    }
}
