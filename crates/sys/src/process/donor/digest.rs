//! Checksums of the original.

use super::attach::own_maps;
use super::freeze::StoppedTree;
use crate::process::digest::{Digest, Part, Standing, of_file, of_thread};
use crate::process::error::{Context, Result};
use crate::process::image::Frozen;

impl StoppedTree {
    /// Returns checksums of registers, memory and descriptors, for [`Restorer::compare`]. `frozen` is the result of
    /// [`StoppedTree::state`].
    ///
    /// [`Restorer::compare`]: crate::process::acceptor::Restorer::compare
    ///
    /// # Errors
    /// The kernel's error.
    pub fn digest(&self, frozen: &Frozen) -> Result<Digest> {
        let mut digest = Digest::default();
        let mut seen = Vec::new();
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
                digest.insert(part, of_thread(&thread.registers, &thread.extended));
            }
            let standing = Standing {
                pid: tracked.pid,
                lines: own_maps(tracked.pid, Some(&watched.attachment), false)?,
                memory: &watched.memory,
                state,
                locks: None,
            };
            digest.add_process(process, &standing)?;
            seen.push((process.pid, tracked.pid));
        }
        digest.add_sharing(&seen)?;
        for index in 0..self.tree().shared.len() as u32 {
            let file = self.tracker.catalogue.handle(index as usize);
            let checksum = of_file(file).context(|| "reading shared memory".to_owned())?;
            digest.insert(Part::Shared(index), checksum);
        }
        Ok(digest)
    }
}
