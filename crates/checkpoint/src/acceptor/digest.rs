//! Verification that a restored tree equals its original.

use super::stub_process::StubProcess;
use super::tree_restoration::TreeRestoration;
use crate::digest::{DigestedPart, DigestedProcess, TreeDigest, checksum_thread, planned_locks};
use crate::error::{Error, Result};
use crate::files::image::FileLock;
use crate::image::{ProcessLayout, ProcessState};
use crate::procfs;
use crate::trace::{STUB_BYTES, Tracee};

impl TreeRestoration {
    /// Compares a complete tree with the original's checksums.
    pub fn compare(&self, original: &TreeDigest) -> Result<()> {
        let frozen = self
            .received_state()
            .ok_or(Error::Image("checksums came before the state"))?;
        let mut restored = TreeDigest::default();
        let mut pids = Vec::new();
        let states = self.stub_processes.iter().zip(&frozen.processes);
        for (process, (stub_process, state)) in self.tree.processes.iter().zip(states) {
            if let (Some(stub_process), Some(state)) = (stub_process, state) {
                let locks = self.fd_store.as_ref();
                let locks = locks.map(|store| planned_locks(store.image(), process.pid));
                add_process(
                    &mut restored,
                    process,
                    (stub_process, state),
                    locks.unwrap_or_default(),
                )?;
                pids.push((process.pid, stub_process.pid));
            }
        }
        restored.add_sharing(&pids)?;
        self.objects.add_checksums(&mut restored)?;
        original.compare(&restored)
    }
}

fn add_process(
    digest: &mut TreeDigest,
    process: &ProcessLayout,
    (stub_process, state): (&StubProcess, &ProcessState),
    locks: Vec<(u32, FileLock)>,
) -> Result<()> {
    for (tid, thread) in stub_process.threads.iter().zip(&state.threads) {
        let tracee = Tracee { tid: *tid };
        // Only `go` gives the thread its final registers, so set them for the comparison and restore the previous
        // ones.
        let before = tracee.registers()?;
        tracee.set_registers(&thread.registers)?;
        tracee.set_extended_registers(&thread.extended_registers)?;
        let part = DigestedPart::Thread {
            process: process.pid,
            thread: *tid,
        };
        digest.insert(
            part,
            checksum_thread(&tracee.registers()?, &tracee.extended_registers()?),
        );
        tracee.set_registers(&before)?;
    }
    let mut lines = procfs::mappings(stub_process.pid)?;
    let (start, end) = (
        stub_process.stub.address,
        stub_process.stub.address + STUB_BYTES,
    );
    lines.retain(|line| line.end <= start || line.start >= end);
    let live_process = DigestedProcess {
        pid: stub_process.pid,
        lines,
        memory: &stub_process.memory,
        state,
        locks: Some(locks),
    };
    digest.add_process(process, &live_process)
}
