//! Threads that execute vDSO code (`vdso(7)`) when the tree is stopped.

use super::halt::Halted;
use super::tracker::Tracker;
use crate::process::error::{Error, Result};
use crate::process::image::{Backing, Mapping};
use crate::process::procfs::{self, Status};
use crate::process::trace::{Stop, Tracee, wait_for};
use std::time::Duration;

/// Most instructions to step. Reading a clock takes about 60, but getting random bytes may take millions.
const STEPS_MAX: usize = 2000;
/// Signals that the processor raises. If such a signal is blocked, the kernel resets its handler.
const BY_PROCESSOR: [i32; 5] = [
    libc::SIGTRAP,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
];

impl Tracker {
    /// Steps threads out of the vDSO, since the acceptor's vDSO may differ and threads could not continue in the
    /// middle of it. The stepped instructions write memory, so this comes before the last scan of memory.
    pub(super) fn lead_out(&self, halted: &[Option<Halted>]) -> Result<()> {
        for (halted, tracked) in halted.iter().zip(&self.processes) {
            let (Some(halted), Some(watched)) = (halted, &tracked.watched) else {
                continue;
            };
            let code = match range(&watched.mappings) {
                None if watched.mappings.is_empty() => range_by_name(halted.pid)?,
                found => found,
            };
            let Some(code) = code else {
                continue;
            };
            for thread in &halted.threads {
                lead(halted.pid, thread.tracee, code)?;
            }
        }
        Ok(())
    }
}

type Range = (u64, u64);

fn range(mappings: &[Mapping]) -> Option<Range> {
    let is_code =
        |mapping: &&Mapping| matches!(&mapping.backing, Backing::Kernel(name) if name == "[vdso]");
    let found = mappings.iter().find(is_code)?;
    Some((found.start, found.end))
}

fn range_by_name(pid: i32) -> Result<Option<Range>> {
    let lines = procfs::mappings(pid)?;
    let code = lines.iter().find(|line| line.name == b"[vdso]");
    Ok(code.map(|line| (line.start, line.end)))
}

fn lead(pid: i32, tracee: Tracee, (start, end): Range) -> Result<()> {
    let inside = || -> Result<bool> { Ok((start..end).contains(&tracee.registers()?.rip)) };
    if !inside()? || !takes_steps(pid, tracee)? {
        return Ok(());
    }
    let mask = tracee.mask()?;
    tracee.set_mask(
        BY_PROCESSOR
            .iter()
            .fold(!0, |mask, signal| mask & !bit(*signal)),
    )?;
    let mut stopped = false;
    for _ in 0..STEPS_MAX {
        if !inside()? {
            break;
        }
        tracee.step()?;
        match wait_for(tracee.tid, Duration::from_secs(10))? {
            Stop::Ended(_) => return Err(Error::Gone(tracee.tid)),
            // Sent again below, to wait until the thread runs on.
            Stop::Signal(libc::SIGSTOP) => stopped = true,
            Stop::Signal(libc::SIGTRAP) | Stop::Group(_) | Stop::Interrupt => {}
            // The instruction raised a fault, and raises it again when the thread runs on.
            _ => break,
        }
    }
    if stopped {
        tracee.send(libc::SIGSTOP);
    }
    tracee.set_mask(mask)
}

/// Returns true if the program does not notice single steps. A step would reset an ignored `SIGTRAP` and merge with a
/// pending one.
fn takes_steps(pid: i32, tracee: Tracee) -> Result<bool> {
    let ignored = Status::read(pid, tracee.tid)?.signals[3];
    let mut waiting = tracee.pending(false)?;
    waiting.extend(tracee.pending(true)?);
    let number = |info: &[u8; 128]| i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
    let waits = waiting.iter().any(|info| number(info) == libc::SIGTRAP);
    Ok(!waits && ignored & bit(libc::SIGTRAP) == 0)
}

/// Returns the set of one signal.
fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}
