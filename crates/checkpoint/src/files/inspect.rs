//! Check for descriptors that cannot move.

use super::donor::{FilesSnapshot, SaveLimits};
use super::error::{DescriptorBlocker, FilesError};

/// Returns the descriptors of these processes that cannot move, with reasons. Nothing is changed; the processes keep
/// running.
///
/// # Errors
/// [`FilesError::Kernel`], for example if the caller may not inspect the processes.
pub fn find_descriptor_blockers(
    pids: &[i32],
    limits: &SaveLimits,
) -> Result<Vec<DescriptorBlocker>, FilesError> {
    match FilesSnapshot::save(pids, limits) {
        Ok(_) => Ok(Vec::new()),
        Err(FilesError::Blocked(blockers)) => Ok(blockers),
        Err(error) => Err(error),
    }
}
