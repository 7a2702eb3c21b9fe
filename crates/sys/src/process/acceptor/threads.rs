//! Threads of an empty process.

use super::husk::Husk;
use crate::process::error::{Error, Result};
use crate::process::image::Process;
use crate::process::trace::{Call, Stop, Tracee, wait_for};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);
const FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// Makes and ends threads until the empty process has the threads of `process`.
pub(super) fn reconcile(husk: &mut Husk, process: &Process) -> Result<()> {
    let surplus: Vec<i32> = husk
        .threads
        .iter()
        .copied()
        .filter(|tid| !process.threads.contains(tid))
        .collect();
    for tid in surplus {
        end(husk, tid)?;
    }
    let missing: Vec<i32> = process
        .threads
        .iter()
        .copied()
        .filter(|tid| !husk.threads.contains(tid))
        .collect();
    for tids in missing.chunks(256) {
        make(husk, tids)?;
    }
    husk.threads.clone_from(&process.threads);
    Ok(())
}

fn make(husk: &Husk, tids: &[i32]) -> Result<()> {
    let mut script = husk.script();
    for tid in tids {
        let id = script.bytes(&tid.to_ne_bytes())?;
        let how = script.words(&[FLAGS as u64, 0, 0, 0, 0, 0, 0, 0, id, 1, 0])?;
        script.push(None, Call::new(libc::SYS_clone3, &[how, 88]));
    }
    let results = husk.run(script)?.results;
    for (tid, made) in tids.iter().zip(results) {
        if made != i64::from(*tid) {
            let error = std::io::Error::from_raw_os_error(-made as i32);
            return Err(Error::Refused(format!(
                "thread {tid} cannot be made: {error}"
            )));
        }
        match wait_for(*tid, LIMIT)? {
            Stop::Interrupt => {}
            other => {
                return Err(Error::Refused(format!(
                    "new thread {tid} stopped by {other:?}"
                )));
            }
        }
    }
    Ok(())
}

fn end(husk: &Husk, tid: i32) -> Result<()> {
    let mut script = husk.script();
    script.attempt(libc::SYS_exit, &[0]);
    match husk.run_in(Tracee { tid }, script) {
        Err(Error::Gone(_)) => Ok(()),
        other => other.map(drop),
    }
}
