//! Threads of a stub process.

use super::stub_process::StubProcess;
use crate::error::{Error, Result};
use crate::image::ProcessLayout;
use crate::trace::{StopReason, SystemCall, Tracee, wait_for_stop};
use std::time::Duration;

const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// Makes and ends threads until the stub process has the threads of `process`.
pub(super) fn reconcile_threads(
    stub_process: &mut StubProcess,
    process: &ProcessLayout,
) -> Result<()> {
    let surplus: Vec<i32> = stub_process
        .threads
        .iter()
        .copied()
        .filter(|tid| !process.threads.contains(tid))
        .collect();
    for tid in surplus {
        end_thread(stub_process, tid)?;
    }
    let missing: Vec<i32> = process
        .threads
        .iter()
        .copied()
        .filter(|tid| !stub_process.threads.contains(tid))
        .collect();
    for tids in missing.chunks(256) {
        make_threads(stub_process, tids)?;
    }
    stub_process.threads.clone_from(&process.threads);
    Ok(())
}

fn make_threads(stub_process: &StubProcess, tids: &[i32]) -> Result<()> {
    let mut script = stub_process.script();
    for tid in tids {
        let id = script.add_bytes(&tid.to_ne_bytes())?;
        let how = script.add_words(&[THREAD_FLAGS as u64, 0, 0, 0, 0, 0, 0, 0, id, 1, 0])?;
        script.push_call(None, SystemCall::new(libc::SYS_clone3, &[how, 88]));
    }
    let results = stub_process.run_script(script)?.results;
    for (tid, made) in tids.iter().zip(results) {
        if made != i64::from(*tid) {
            let error = std::io::Error::from_raw_os_error(-made as i32);
            return Err(Error::Refused(format!(
                "thread {tid} cannot be created: {error}"
            )));
        }
        match wait_for_stop(*tid, STOP_TIMEOUT)? {
            StopReason::Interrupt => {}
            other => {
                return Err(Error::Refused(format!(
                    "unexpected stop of new thread {tid}: {other:?}"
                )));
            }
        }
    }
    Ok(())
}

fn end_thread(stub_process: &StubProcess, tid: i32) -> Result<()> {
    let mut script = stub_process.script();
    script.add_optional_call(libc::SYS_exit, &[0]);
    match stub_process.run_script_in(Tracee { tid }, script) {
        Err(Error::ProcessEnded(_)) => Ok(()),
        other => other.map(drop),
    }
}
