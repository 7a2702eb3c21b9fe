//! Checksums of the original.

use super::freeze::StoppedTree;
use super::tracker_attachment::read_own_mappings;
use crate::digest::{DigestedPart, DigestedProcess, TreeDigest, checksum_file, checksum_thread};
use crate::error::{Context, Result};
use crate::image::ProcessTreeState;

impl StoppedTree {
    /// Returns checksums of registers, memory and descriptors, for [`Restorer::compare_digest`]. `frozen` is the result of
    /// [`StoppedTree::read_state`].
    ///
    /// [`Restorer::compare_digest`]: crate::acceptor::Restorer::compare_digest
    ///
    /// # Errors
    /// The kernel's error.
    pub fn digest(&self, frozen: &ProcessTreeState) -> Result<TreeDigest> {
        let mut digest = TreeDigest::default();
        let mut pids = Vec::new();
        let tracked = self.tracker.processes.iter();
        let processes = self.tree().processes.iter().zip(&frozen.processes);
        for (tracked, (process, state)) in tracked.zip(processes) {
            let (Some(watched), Some(state)) = (&tracked.watched, state) else {
                continue;
            };
            for (tid, thread) in process.threads.iter().zip(&state.threads) {
                let part = DigestedPart::Thread {
                    process: process.pid,
                    thread: *tid,
                };
                digest.insert(
                    part,
                    checksum_thread(&thread.registers, &thread.extended_registers),
                );
            }
            let live_process = DigestedProcess {
                pid: tracked.pid,
                lines: read_own_mappings(tracked.pid, Some(&watched.attachment), false)?,
                memory: &watched.memory,
                state,
                locks: None,
            };
            digest.add_process(process, &live_process)?;
            pids.push((process.pid, tracked.pid));
        }
        digest.add_sharing(&pids)?;
        for index in 0..self.tree().shared_memory.len() as u32 {
            let file = self.tracker.catalogue.object_handle(index as usize);
            let checksum = checksum_file(file).context(|| "reading shared memory".to_owned())?;
            digest.insert(DigestedPart::Shared(index), checksum);
        }
        Ok(digest)
    }
}
