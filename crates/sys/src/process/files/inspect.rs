//! What stands in a move's way.

use super::donor::{Draft, Limits};
use super::error::{Blocker, FilesError};

/// Which descriptors of these processes cannot move, and why. Nothing is changed; the processes run on.
///
/// # Errors
/// [`FilesError::Kernel`], as when the caller may not look at them.
pub fn inspect(pids: &[i32], limits: &Limits) -> Result<Vec<Blocker>, FilesError> {
    match Draft::save(pids, limits) {
        Ok(_) => Ok(Vec::new()),
        Err(FilesError::Blocked(blockers)) => Ok(blockers),
        Err(error) => Err(error),
    }
}
