//! Errors of the lab, by the party that can correct them.

use std::{io, process::ExitStatus};

/// The result of a lab operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason that a lab operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is invalid: a bad name, too many hosts, an error in a topology file.
    #[error("{0}")]
    Invalid(String),
    /// A lab of this name is already up.
    #[error("lab {0} is up already")]
    Exists(String),
    /// No lab of this name exists.
    #[error("there is no lab named {0}")]
    NoLab(String),
    /// The lab has no such host.
    #[error("lab {lab} has no host {host}")]
    NoHost {
        /// The lab's name.
        lab: String,
        /// The requested name.
        host: String,
    },
    /// The host's init process has ended, and the host with it.
    #[error("host {0} is gone: its init process has ended")]
    HostGone(String),
    /// Another process is bringing this lab up or down.
    #[error("lab {0} is being changed by another process")]
    Busy(String),
    /// The machine lacks a prerequisite of labs.
    #[error("{0}")]
    Machine(String),
    /// A helper program failed.
    #[error("{program} failed ({status}): {output}")]
    Program {
        /// The program and its arguments.
        program: String,
        /// The program's exit status.
        status: ExitStatus,
        /// The program's output on standard error.
        output: String,
    },
    /// A system call failed.
    #[error("{action}: {source}")]
    Io {
        /// The attempted action.
        action: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Adds the attempted action to a system error.
pub(crate) trait ErrorContext<T> {
    /// Converts the error into [`Error::Io`] with this action.
    fn context(self, action: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> ErrorContext<T> for std::result::Result<T, E> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Error::Io {
            action: action(),
            source: error.into(),
        })
    }
}
