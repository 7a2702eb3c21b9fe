//! Threads that execute vDSO code (`vdso(7)`) when the tree is stopped.

use super::halt::HaltedProcess;
use super::tree_tracker::TreeTracker;
use crate::error::{Error, Result};
use crate::image::{MappingBacking, MemoryMapping};
use crate::procfs::{self, ProcStatus};
use crate::trace::{StopReason, Tracee, wait_for_stop};
use std::time::Duration;

/// Most instructions to step. Reading a clock takes about 60, but getting random bytes may take millions.
const STEPS_MAX: usize = 2000;
/// Signals that the processor raises. If such a signal is blocked, the kernel resets its handler.
const FAULT_SIGNALS: [i32; 5] = [
    libc::SIGTRAP,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
];

impl TreeTracker {
    /// Steps threads out of the vDSO, since the acceptor's vDSO may differ and threads could not continue in the
    /// middle of it. The stepped instructions write memory, so this comes before the last scan of memory.
    pub(super) fn step_out_of_vdso(&self, halted: &[Option<HaltedProcess>]) -> Result<()> {
        for (halted, tracked) in halted.iter().zip(&self.processes) {
            let (Some(halted), Some(watched)) = (halted, &tracked.watched) else {
                continue;
            };
            let code = match vdso_range(&watched.mappings) {
                None if watched.mappings.is_empty() => vdso_range_by_name(halted.pid)?,
                found => found,
            };
            let Some(code) = code else {
                continue;
            };
            for thread in &halted.threads {
                step_out_of_range(halted.pid, thread.tracee, code)?;
            }
        }
        Ok(())
    }
}

type CodeRange = (u64, u64);

fn vdso_range(mappings: &[MemoryMapping]) -> Option<CodeRange> {
    let is_code = |mapping: &&MemoryMapping| matches!(&mapping.backing, MappingBacking::Kernel(name) if name == "[vdso]");
    let found = mappings.iter().find(is_code)?;
    Some((found.start, found.end))
}

fn vdso_range_by_name(pid: i32) -> Result<Option<CodeRange>> {
    let lines = procfs::mappings(pid)?;
    let code = lines.iter().find(|line| line.name == b"[vdso]");
    Ok(code.map(|line| (line.start, line.end)))
}

fn step_out_of_range(pid: i32, tracee: Tracee, (start, end): CodeRange) -> Result<()> {
    let is_inside = || -> Result<bool> { Ok((start..end).contains(&tracee.registers()?.rip)) };
    if !is_inside()? || !can_single_step(pid, tracee)? {
        return Ok(());
    }
    let mask = tracee.signal_mask()?;
    tracee.set_signal_mask(
        FAULT_SIGNALS
            .iter()
            .fold(!0, |mask, signal| mask & !signal_bit(*signal)),
    )?;
    let mut stopped = false;
    for _ in 0..STEPS_MAX {
        if !is_inside()? {
            break;
        }
        tracee.step()?;
        match wait_for_stop(tracee.tid, Duration::from_secs(10))? {
            StopReason::Ended(_) => return Err(Error::ProcessEnded(tracee.tid)),
            // Sent again below, to wait until the thread runs on.
            StopReason::Signal(libc::SIGSTOP) => stopped = true,
            StopReason::Signal(libc::SIGTRAP) | StopReason::Group(_) | StopReason::Interrupt => {}
            // The instruction raised a fault, and raises it again when the thread runs on.
            _ => break,
        }
    }
    if stopped {
        tracee.send_signal(libc::SIGSTOP);
    }
    tracee.set_signal_mask(mask)
}

/// Returns true if the program does not notice single steps. A step would reset an ignored `SIGTRAP` and merge with a
/// pending one.
fn can_single_step(pid: i32, tracee: Tracee) -> Result<bool> {
    let ignored = ProcStatus::read(pid, tracee.tid)?.signals[3];
    let mut pending = tracee.pending_signals(false)?;
    pending.extend(tracee.pending_signals(true)?);
    let number = |info: &[u8; 128]| i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
    let is_trap_pending = pending.iter().any(|info| number(info) == libc::SIGTRAP);
    Ok(!is_trap_pending && ignored & signal_bit(libc::SIGTRAP) == 0)
}

/// Returns the set of one signal.
fn signal_bit(signal: i32) -> u64 {
    1 << (signal - 1)
}
