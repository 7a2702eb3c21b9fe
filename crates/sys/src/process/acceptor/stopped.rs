//! Processes stopped by job control.

use super::husk::Husk;
use crate::process::error::{Context, unexpected};
use crate::process::error::{Error, Result, check_long};
use crate::process::image::{Frozen, Process, Tree};
use crate::process::trace::{Stop, Tracee, wait_for};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);

/// Stops the empty processes of stopped originals, so that they stay stopped when they are resumed. Signals that
/// parents receive for this stop are discarded later. A parent that has collected the stop at the donor collects it
/// here too.
pub(super) fn stop(tree: &Tree, husks: &[Option<Husk>], frozen: &Frozen) -> Result<()> {
    for ((process, husk), state) in tree.processes.iter().zip(husks).zip(&frozen.processes) {
        let (Some(husk), Some(state)) = (husk, state) else {
            continue;
        };
        let Some(signal) = state.stopped else {
            continue;
        };
        let signal = match is_orphaned(tree, process.group) {
            true => libc::SIGSTOP,
            false => signal,
        };
        if signal != libc::SIGSTOP {
            let mut script = husk.script();
            let default = script.words(&[0; 4])?;
            let arguments = [signal as u64, default, 0, 8];
            script.call("rt_sigaction", libc::SYS_rt_sigaction, &arguments);
            husk.run(script)?;
        }
        // SAFETY: no pointers are passed; an empty process belongs to the restorer alone.
        let outcome = unsafe { libc::kill(husk.pid, signal) };
        check_long(outcome.into()).context(|| format!("stopping {}", husk.pid))?;
        for tid in &husk.threads {
            let tracee = Tracee { tid: *tid };
            // The restorer may have been started with the signal blocked.
            tracee.set_mask(0)?;
            wait_until_stopped(tracee, signal)?;
        }
        let parent = process
            .parent
            .and_then(|parent| husks[parent as usize].as_ref());
        if let Some(parent) = parent.filter(|_| !state.stop_untold) {
            let how = (libc::WSTOPPED | libc::WNOHANG | libc::__WALL) as u64;
            let arguments = [libc::P_PID as u64, husk.pid as u64, 0, how, 0];
            let mut script = parent.script();
            script.call("waitid", libc::SYS_waitid, &arguments);
            parent.run(script)?;
        }
    }
    Ok(())
}

/// Returns true if a process group is orphaned: no member has a parent in another group of its session. The kernel
/// stops members of such a group only by `SIGSTOP`. The root's parent does not count.
fn is_orphaned(tree: &Tree, group: i32) -> bool {
    let mut members = tree
        .processes
        .iter()
        .filter(|process| process.group == group);
    !members.any(|process| {
        let parent = process
            .parent
            .map(|parent| &tree.processes[parent as usize]);
        let controls =
            |parent: &&Process| parent.group != group && parent.session == process.session;
        process.exit_status.is_none() && parent.filter(controls).is_some()
    })
}

/// Resumes a thread until it has stopped with its process. The thread executes no instruction before the stop.
fn wait_until_stopped(tracee: Tracee, signal: i32) -> Result<()> {
    let mut give = 0;
    loop {
        tracee.resume(give)?;
        match wait_for(tracee.tid, LIMIT)? {
            Stop::Group(_) => return Ok(()),
            Stop::Signal(received) if received == signal => give = signal,
            // Discard signals that the process received while it was made.
            Stop::Signal(_) | Stop::Interrupt => give = 0,
            Stop::Ended(_) => return Err(Error::Gone(tracee.tid)),
            other => return Err(unexpected(&format!("stopping a husk gave {other:?}"))),
        }
    }
}
