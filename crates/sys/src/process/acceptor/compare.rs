//! Verification that a restored tree equals its original.

use super::husk::Husk;
use super::plan::Restoration;
use crate::process::digest::{Digest, Part, Standing, of_thread, planned_locks};
use crate::process::error::{Error, Result};
use crate::process::files::image::Lock;
use crate::process::image::{FrozenProcess, Process};
use crate::process::procfs;
use crate::process::trace::{STUB_BYTES, Tracee};

impl Restoration {
    /// Compares a complete tree with the original's checksums.
    pub fn compare(&self, theirs: &Digest) -> Result<()> {
        let frozen = self.state().ok_or(Error::Image("checksums before state"))?;
        let mut ours = Digest::default();
        let mut seen = Vec::new();
        let states = self.husks.iter().zip(&frozen.processes);
        for (process, (husk, state)) in self.tree.processes.iter().zip(states) {
            if let (Some(husk), Some(state)) = (husk, state) {
                let locks = self.stock.as_ref();
                let locks = locks.map(|stock| planned_locks(stock.image(), process.pid));
                add(&mut ours, process, (husk, state), locks.unwrap_or_default())?;
                seen.push((process.pid, husk.pid));
            }
        }
        ours.add_sharing(&seen)?;
        self.objects.add_to(&mut ours)?;
        theirs.compare(&ours)
    }
}

fn add(
    digest: &mut Digest,
    process: &Process,
    (husk, state): (&Husk, &FrozenProcess),
    locks: Vec<(u32, Lock)>,
) -> Result<()> {
    for (tid, thread) in husk.threads.iter().zip(&state.threads) {
        let tracee = Tracee { tid: *tid };
        // Only `go` gives the thread its final registers, so set them for the comparison and restore the previous
        // ones.
        let before = tracee.registers()?;
        tracee.set_registers(&thread.registers)?;
        tracee.set_extended(&thread.extended)?;
        let part = Part::Thread {
            process: process.pid,
            thread: *tid,
        };
        digest.insert(part, of_thread(&tracee.registers()?, &tracee.extended()?));
        tracee.set_registers(&before)?;
    }
    let mut lines = procfs::mappings(husk.pid)?;
    let (start, end) = (husk.stub.address, husk.stub.address + STUB_BYTES);
    lines.retain(|line| line.end <= start || line.start >= end);
    let standing = Standing {
        pid: husk.pid,
        lines,
        memory: &husk.memory,
        state,
        locks: Some(locks),
    };
    digest.add_process(process, &standing)
}
