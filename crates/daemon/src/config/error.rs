//! Errors in a configuration, with position and remedy.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// File with the error.
    pub file: PathBuf,
    /// Line of the error, counted from 1, if there is a specific one.
    pub line: Option<usize>,
    /// Key with the error, such as `node.port`, if there is a specific one.
    pub key: Option<String>,
    /// Description of the problem.
    pub problem: String,
    /// Remedy for the problem.
    pub what_to_do: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(key) = &self.key {
            write!(f, ": {key}")?;
        }
        write!(f, ": {}; {}", self.problem, self.what_to_do)
    }
}

impl std::error::Error for ConfigError {}

impl ConfigError {
    /// Returns an error of the file as a whole.
    pub fn for_file(file: &Path, problem: String, what_to_do: &str) -> ConfigError {
        ConfigError {
            file: file.to_owned(),
            line: None,
            key: None,
            problem,
            what_to_do: what_to_do.to_owned(),
        }
    }

    /// Returns an error at the bytes `span` of `text`.
    pub(super) fn at(
        file: &Path,
        text: &str,
        span: Range<usize>,
        problem: String,
        what_to_do: &str,
    ) -> ConfigError {
        ConfigError {
            line: Some(line_of(text, span.start)),
            key: key_at(text, span.start),
            ..ConfigError::for_file(file, problem, what_to_do)
        }
    }

    /// Converts an error of the TOML reader or of a key's type.
    pub(super) fn from_toml(file: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
        let message = error.message().trim();
        let what_to_do = match message {
            m if m.starts_with("unknown field") => "remove the key or use one of those listed",
            m if m.starts_with("missing field") => {
                "add the key; docs/configuration.md describes it"
            }
            m if m.starts_with("unknown variant") => "use one of the values listed",
            _ => "docs/configuration.md describes the format",
        };
        match error.span() {
            Some(span) => ConfigError::at(file, text, span, message.to_owned(), what_to_do),
            None => ConfigError::for_file(file, message.to_owned(), what_to_do),
        }
    }
}

/// Returns the line, counted from 1, that contains byte `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

/// Returns the key that contains byte `offset`: the preceding table header, the text before the line's `=`, and the key
/// within an inline table.
fn key_at(text: &str, offset: usize) -> Option<String> {
    let number = line_of(text, offset);
    let lines: Vec<&str> = text.lines().take(number).collect();
    let line = lines.last()?;
    let table = lines.iter().rev().find_map(|line| header(line));
    let key = if header(line).is_some() {
        None
    } else {
        line.split_once('=').map(|(key, _)| key.trim())
    };
    let before = line.get(..offset - line_start(text, offset));
    let inline_key = key.and(before).and_then(inline_table_key);
    let parts: Vec<&str> = [table, key, inline_key].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("."))
}

/// Returns the offset of the first byte in the line that contains byte `offset`.
fn line_start(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    let newline = before.iter().rposition(|byte| *byte == b'\n');
    newline.map_or(0, |at| at + 1)
}

/// Returns the last key of an inline table in the beginning of a line that ends within the key's value.
fn inline_table_key(before: &str) -> Option<&str> {
    let (_, value) = before.split_once('=')?;
    let (_, entry) = value.rsplit_once(['{', ','])?;
    let (key, _) = entry.split_once('=')?;
    Some(key.trim())
}

/// Returns the name in a table header, `[name]` or `[[name]]`.
fn header(line: &str) -> Option<&str> {
    let line = line.split('#').next().unwrap_or_default().trim();
    let inner = line.strip_prefix('[')?.strip_suffix(']')?;
    Some(inner.trim_start_matches('[').trim_end_matches(']').trim())
}
