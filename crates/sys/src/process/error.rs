//! What fails while a process is inspected, saved or recreated.

use super::files::FilesError;
use super::inspect::Blocker;
use super::sockets::SocketError;
use std::io;
use thiserror::Error;

/// Why a step was not taken. Before the commit each of them leads back to the running original.
#[derive(Debug, Error)]
pub enum Error {
    /// The process or a thread of it ended.
    #[error("process {0} has ended")]
    Gone(i32),
    /// Something the tree uses cannot move.
    #[error("cannot move: {}", list(.0))]
    Blocked(Vec<Blocker>),
    /// A thread did not stop in time (uninterruptible sleep, `vfork`).
    #[error(
        "thread {0} did not stop in time: it waits in the kernel where it cannot be interrupted; try again later"
    )]
    WouldNotStop(i32),
    /// This machine cannot take the process; the text names what is missing or differs.
    #[error("this machine cannot take the process: {0}")]
    Refused(String),
    /// A TCP or UDP socket.
    #[error("{0}")]
    Socket(#[from] SocketError),
    /// What the other side sent makes no sense.
    #[error("malformed image: {0}")]
    Image(&'static str),
    /// The kernel or procfs said something unexpected.
    #[error("{what}: {source}")]
    Kernel {
        /// What was asked.
        what: String,
        /// What the kernel answered.
        source: io::Error,
    },
}

impl From<FilesError> for Error {
    fn from(error: FilesError) -> Self {
        match error {
            FilesError::Blocked(blockers) => {
                Self::Blocked(blockers.into_iter().map(Blocker::from).collect())
            }
            FilesError::Kernel { step, source } => Self::Kernel { what: step, source },
            FilesError::Refused(_) | FilesError::Malformed(_) => Self::Refused(error.to_string()),
        }
    }
}

fn list(blockers: &[Blocker]) -> String {
    let texts: Vec<String> = blockers.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// Short for results of this module.
pub type Result<T> = std::result::Result<T, Error>;

/// Names what was asked when the kernel says no.
pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Kernel {
            what: what(),
            source,
        })
    }
}

/// An answer of procfs that does not parse.
pub(crate) fn unexpected(what: &str) -> Error {
    Error::Kernel {
        what: what.to_owned(),
        source: io::Error::from(io::ErrorKind::InvalidData),
    }
}

/// The result of a system call that returns -1 on failure.
pub(crate) fn check_long(outcome: libc::c_long) -> io::Result<libc::c_long> {
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(outcome)
}
