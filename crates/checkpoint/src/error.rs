//! Errors of inspecting, saving and recreating processes.

use super::files::FilesError;
use super::inspect::Blocker;
use super::sockets::SocketError;
use std::io;
use thiserror::Error;

/// Reason for a failed step. Before the commit, every error leads back to the running original.
#[derive(Debug, Error)]
pub enum Error {
    /// The process or one of its threads ended.
    #[error("process {0} has ended")]
    ProcessEnded(i32),
    /// The tree uses something that cannot move.
    #[error("cannot move: {}", join_blockers(.0))]
    Blocked(Vec<Blocker>),
    /// A thread did not stop in time (uninterruptible sleep, `vfork`).
    #[error(
        "thread {0} did not stop in time, because it is in an uninterruptible system call: try again later"
    )]
    StopTimeout(i32),
    /// The local machine cannot take the process. The text names the missing or different property.
    #[error("this machine cannot take the process: {0}")]
    Refused(String),
    /// A TCP or UDP socket could not be saved or restored.
    #[error("{0}")]
    Socket(#[from] SocketError),
    /// The image from the other node is malformed.
    #[error("malformed image: {0}")]
    Image(&'static str),
    /// A system call or procfs gave an unexpected result.
    #[error("{operation}: {source}")]
    Kernel {
        /// The attempted operation.
        operation: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl From<FilesError> for Error {
    fn from(error: FilesError) -> Self {
        match error {
            FilesError::Blocked(blockers) => {
                Self::Blocked(blockers.into_iter().map(Blocker::from).collect())
            }
            FilesError::Kernel { step, source } => Self::Kernel {
                operation: step,
                source,
            },
            FilesError::Refused(_) | FilesError::Malformed(_) => Self::Refused(error.to_string()),
        }
    }
}

fn join_blockers(blockers: &[Blocker]) -> String {
    let texts: Vec<String> = blockers.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds the attempted operation to an error of the kernel.
pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Kernel {
            operation: what(),
            source,
        })
    }
}

/// Returns the error for a procfs file that does not parse.
pub(crate) fn unexpected_text(name: &str) -> Error {
    Error::Kernel {
        operation: name.to_owned(),
        source: io::Error::from(io::ErrorKind::InvalidData),
    }
}

/// Converts the result of a system call that returns -1 on failure.
pub(crate) fn check_long(outcome: libc::c_long) -> io::Result<libc::c_long> {
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(outcome)
}
