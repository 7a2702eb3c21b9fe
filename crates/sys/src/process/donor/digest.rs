//! Checksums of the original.

use super::attach::read_own_mappings;
use super::freeze::StoppedTree;
use crate::process::digest::{Digest, Part, StoppedProcess, checksum_file, checksum_thread};
use crate::process::error::{Context, Result};
use crate::process::image::FrozenTree;

impl StoppedTree {
    /// Returns checksums of registers, memory and descriptors, for [`Restorer::compare`]. `frozen` is the result of
    /// [`StoppedTree::read_state`].
    ///
    /// [`Restorer::compare`]: crate::process::acceptor::Restorer::compare
    ///
    /// # Errors
    /// The kernel's error.
    pub fn digest(&self, frozen: &FrozenTree) -> Result<Digest> {
        let mut digest = Digest::default();
        let mut pids = Vec::new();
        let tracked = self.tracker.processes.iter();
        let processes = self.tree().processes.iter().zip(&frozen.processes);
        for (tracked, (process, state)) in tracked.zip(processes) {
            let (Some(watched), Some(state)) = (&tracked.watched, state) else {
                continue;
            };
            for (tid, thread) in process.threads.iter().zip(&state.threads) {
                let part = Part::Thread {
                    process: process.pid,
                    thread: *tid,
                };
                digest.insert(
                    part,
                    checksum_thread(&thread.registers, &thread.extended_registers),
                );
            }
            let live_process = StoppedProcess {
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
            digest.insert(Part::Shared(index), checksum);
        }
        Ok(digest)
    }
}
