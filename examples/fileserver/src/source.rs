//! The data source of a response.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::synthetic;

/// A data source by name, so that any node can open it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The stream of [`synthetic`].
    Synthetic,
    /// A file below the root.
    File(PathBuf),
}

/// An open source.
pub enum Reader {
    Synthetic,
    File(File),
}

impl Source {
    /// Opens the source.
    ///
    /// # Errors
    /// Same as open(2); `NotFound` without a root.
    pub fn open(&self, root: Option<&Path>) -> io::Result<Reader> {
        match (self, root) {
            (Source::Synthetic, _) => Ok(Reader::Synthetic),
            (Source::File(name), Some(root)) => Ok(Reader::File(File::open(root.join(name))?)),
            (Source::File(_), None) => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Reader {
    /// Reads at `offset` until `buffer` is full.
    ///
    /// # Errors
    /// Same as pread(2); `UnexpectedEof` for a file that became shorter.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Reader::Synthetic => synthetic::fill(offset, buffer),
            Reader::File(file) => file.read_exact_at(buffer, offset)?,
        }
        Ok(())
    }
}

/// Returns the relative path of a request's path; `None` if it would leave the root or is empty.
pub fn relative_path(path: &str) -> Option<PathBuf> {
    let path = Path::new(path.strip_prefix('/')?);
    let is_plain = path
        .components()
        .all(|component| matches!(component, Component::Normal(_)));
    (is_plain && path.file_name().is_some()).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_never_leave_the_root() {
        for path in [
            "/../etc/passwd",
            "/a/../../b",
            "//etc/passwd",
            "/",
            "",
            "a",
            "/./a",
        ] {
            assert_eq!(relative_path(path), None, "{path}");
        }
        assert_eq!(relative_path("/a/b.txt"), Some("a/b.txt".into()));
    }
}
