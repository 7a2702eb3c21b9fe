//! Start errors of daemons with an event loop of their own.

use std::io;

/// Reason why the daemon cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct StartError {
    what: String,
    source: io::Error,
}

/// Returns a function that adds the failed operation to a system error.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> StartError {
    let what = what.into();
    move |source| StartError { what, source }
}
