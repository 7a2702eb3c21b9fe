//! Husks become the processes.

use super::husk::Husk;
use crate::process::donor::remove_stub;
use crate::process::error::Result;
use crate::process::image::FrozenProcess;
use crate::process::procfs;
use crate::process::trace::Tracee;

/// Gives all threads their registers and lets them run. Nothing runs before everything is ready.
pub(super) fn all(husks: Vec<(Husk, FrozenProcess)>) -> Result<()> {
    for (husk, state) in &husks {
        prepare(husk, state)?;
    }
    for (husk, _) in &husks {
        for tid in &husk.threads {
            Tracee { tid: *tid }.detach()?;
        }
    }
    Ok(())
}

fn prepare(husk: &Husk, state: &FrozenProcess) -> Result<()> {
    let lines = procfs::mappings(husk.pid)?;
    remove_stub(&husk.stub, husk.first(), &lines, &husk.memory)?;
    for (tid, thread) in husk.threads.iter().zip(&state.threads) {
        let tracee = Tracee { tid: *tid };
        tracee.set_registers(&thread.registers)?;
        tracee.set_extended(&thread.extended)?;
        tracee.set_mask(thread.mask)?;
    }
    Ok(())
}
