//! What can go wrong, sorted by who can help.

use std::{io, process::ExitStatus};

/// The result of a lab operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a lab operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller asked for something that cannot be: a bad name, too many hosts, a topology file with an error.
    #[error("{0}")]
    Invalid(String),
    /// A lab of this name is up.
    #[error("lab {0} is up already")]
    Exists(String),
    /// No lab of this name is known.
    #[error("there is no lab named {0}")]
    NoLab(String),
    /// The lab has no such host.
    #[error("lab {lab} has no host {host}")]
    NoHost {
        /// The lab's name.
        lab: String,
        /// The name asked for.
        host: String,
    },
    /// The host's init process is gone, and the host with it.
    #[error("host {0} is gone: its init process has ended")]
    HostGone(String),
    /// Another process is bringing this lab up or down.
    #[error("lab {0} is being changed by another process")]
    Busy(String),
    /// The machine lacks something a lab needs.
    #[error("{0}")]
    Machine(String),
    /// A helper program failed.
    #[error("{program} failed ({status}): {output}")]
    Program {
        /// The program and what it was asked.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote to its standard error.
        output: String,
    },
    /// A system call failed.
    #[error("{action}: {source}")]
    Io {
        /// What was being done.
        action: String,
        /// The system's answer.
        source: io::Error,
    },
}

/// Adds what was being done to a system error.
pub(crate) trait Context<T> {
    /// Turns the error into [`Error::Io`] with the action named.
    fn context(self, action: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Error::Io {
            action: action(),
            source: error.into(),
        })
    }
}
