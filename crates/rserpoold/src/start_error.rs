//! Start errors of daemons with an event loop of their own.

use std::io;

/// Reason why the daemon cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct StartError {
    operation: String,
    source: io::Error,
}

/// Returns a function that adds the failed operation to a system error.
pub(crate) fn start_error(operation: impl Into<String>) -> impl FnOnce(io::Error) -> StartError {
    let operation = operation.into();
    move |source| StartError { operation, source }
}
