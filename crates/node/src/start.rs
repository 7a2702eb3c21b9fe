//! Why a daemon with an event loop of its own does not start.

use std::io;

/// The daemon cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct StartError {
    what: String,
    source: io::Error,
}

/// An error of the system, at something.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> StartError {
    let what = what.into();
    move |source| StartError { what, source }
}
