//! Processes that job control has stopped.

use super::husk::Husk;
use crate::process::error::{Context, unexpected};
use crate::process::error::{Error, Result, check_long};
use crate::process::image::{Frozen, Tree};
use crate::process::trace::{Stop, Tracee, wait_for};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);

/// Stops the husks of stopped processes, so that they stay so when they are let go. Their parents are told of it while what they
/// are told is still forgotten: they know already.
pub(super) fn stop(tree: &Tree, husks: &[Option<Husk>], frozen: &Frozen) -> Result<()> {
    for ((process, husk), state) in tree.processes.iter().zip(husks).zip(&frozen.processes) {
        let (Some(husk), Some(state)) = (husk, state) else {
            continue;
        };
        if state.stopped.is_none() {
            continue;
        }
        // SAFETY: no pointers are passed; a husk is ours alone.
        let outcome = unsafe { libc::kill(husk.pid, libc::SIGSTOP) };
        check_long(outcome.into()).context(|| format!("stopping {}", husk.pid))?;
        for tid in &husk.threads {
            wait_until_stopped(Tracee { tid: *tid })?;
        }
        let parent = process
            .parent
            .and_then(|parent| husks[parent as usize].as_ref());
        if let Some(parent) = parent {
            let how = (libc::WSTOPPED | libc::WNOHANG | libc::__WALL) as u64;
            let arguments = [libc::P_PID as u64, husk.pid as u64, 0, how, 0];
            let mut script = parent.script();
            script.call("waitid", libc::SYS_waitid, &arguments);
            parent.run(script)?;
        }
    }
    Ok(())
}

/// Lets a thread run until it has stopped with its process; it comes to no instruction before.
fn wait_until_stopped(tracee: Tracee) -> Result<()> {
    let mut give = 0;
    loop {
        tracee.resume(give)?;
        match wait_for(tracee.tid, LIMIT)? {
            Stop::Group(_) => return Ok(()),
            Stop::Signal(libc::SIGSTOP) => give = libc::SIGSTOP,
            // What has come to the husk while it was made is of no matter.
            Stop::Signal(_) | Stop::Interrupt => give = 0,
            Stop::Ended(_) => return Err(Error::Gone(tracee.tid)),
            other => return Err(unexpected(&format!("stopping a husk gave {other:?}"))),
        }
    }
}
