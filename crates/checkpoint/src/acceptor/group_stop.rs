//! Processes stopped by job control.

use super::stub_process::StubProcess;
use crate::error::{Context, unexpected_text};
use crate::error::{Error, Result, check_long};
use crate::image::{ProcessLayout, ProcessTreeState, TreeLayout};
use crate::trace::{StopReason, Tracee, wait_for_stop};
use std::time::Duration;

const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Stops the stub processes of stopped originals, so that they stay stopped when they are resumed. Signals that
/// parents receive for this stop are discarded later. A parent that has collected the stop at the donor collects it
/// here too.
pub(super) fn stop_like_originals(
    tree: &TreeLayout,
    stub_processes: &[Option<StubProcess>],
    frozen: &ProcessTreeState,
) -> Result<()> {
    for ((process, stub_process), state) in tree
        .processes
        .iter()
        .zip(stub_processes)
        .zip(&frozen.processes)
    {
        let (Some(stub_process), Some(state)) = (stub_process, state) else {
            continue;
        };
        let Some(signal) = state.group_stop else {
            continue;
        };
        let signal = match is_orphaned(tree, process.group) {
            true => libc::SIGSTOP,
            false => signal,
        };
        if signal != libc::SIGSTOP {
            let mut script = stub_process.script();
            let default = script.add_words(&[0; 4])?;
            let arguments = [signal as u64, default, 0, 8];
            script.add_call("rt_sigaction", libc::SYS_rt_sigaction, &arguments);
            stub_process.run_script(script)?;
        }
        // SAFETY: no pointers are passed; a stub process belongs to the restorer alone.
        let outcome = unsafe { libc::kill(stub_process.pid, signal) };
        check_long(outcome.into()).context(|| format!("stopping process {}", stub_process.pid))?;
        for tid in &stub_process.threads {
            let tracee = Tracee { tid: *tid };
            // The restorer may have been started with the signal blocked.
            tracee.set_signal_mask(0)?;
            wait_until_stopped(tracee, signal)?;
        }
        let parent = process
            .parent
            .and_then(|parent| stub_processes[parent as usize].as_ref());
        if let Some(parent) = parent.filter(|_| !state.is_stop_unreported) {
            let options = (libc::WSTOPPED | libc::WNOHANG | libc::__WALL) as u64;
            let arguments = [libc::P_PID as u64, stub_process.pid as u64, 0, options, 0];
            let mut script = parent.script();
            script.add_call("waitid", libc::SYS_waitid, &arguments);
            parent.run_script(script)?;
        }
    }
    Ok(())
}

/// Returns true if a process group is orphaned: no member has a parent in another group of its session. The kernel
/// stops members of such a group only by `SIGSTOP`. The root's parent does not count.
fn is_orphaned(tree: &TreeLayout, group: i32) -> bool {
    let mut members = tree
        .processes
        .iter()
        .filter(|process| process.group == group);
    !members.any(|process| {
        let parent = process
            .parent
            .map(|parent| &tree.processes[parent as usize]);
        let is_controlling =
            |parent: &&ProcessLayout| parent.group != group && parent.session == process.session;
        process.exit_status.is_none() && parent.filter(is_controlling).is_some()
    })
}

/// Resumes a thread until it has stopped with its process. The thread executes no instruction before the stop.
fn wait_until_stopped(tracee: Tracee, signal: i32) -> Result<()> {
    let mut signal_to_deliver = 0;
    loop {
        tracee.resume(signal_to_deliver)?;
        match wait_for_stop(tracee.tid, STOP_TIMEOUT)? {
            StopReason::Group(_) => return Ok(()),
            StopReason::Signal(received) if received == signal => signal_to_deliver = signal,
            // Discard signals that the process received while it was made.
            StopReason::Signal(_) | StopReason::Interrupt => signal_to_deliver = 0,
            StopReason::Ended(_) => return Err(Error::ProcessEnded(tracee.tid)),
            other => {
                return Err(unexpected_text(&format!(
                    "unexpected stop of a stub process: {other:?}"
                )));
            }
        }
    }
}
