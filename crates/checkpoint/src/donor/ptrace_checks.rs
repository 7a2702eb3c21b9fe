//! Obstacles to a move that are visible only in a stopped process.

use super::halt::HaltedProcess;
use super::tracker_attachment::TrackerAttachment;
use crate::error::{Error, Result};
use crate::inspect::{Blocker, Obstacle};
use crate::trace::{CallBatch, SCRATCH_OFFSET, SystemCall, Tracee};

/// `BPF_RET | BPF_K`.
const RETURN: u16 = 6;
/// `SECCOMP_RET_USER_NOTIF`.
const ASK: u32 = 0x7fc0_0000;
/// Bits of a filter's result that give the action.
const ACTION: u32 = 0xffff_0000;

/// Checks a process before the tracker's objects are in it.
pub(super) fn check(halted: &HaltedProcess) -> Result<()> {
    for thread in &halted.threads {
        let tracee = thread.tracee;
        if tracee.has_syscall_dispatch() {
            return Err(blocked_error(halted.pid, Obstacle::SyscallDispatch));
        }
        refuse_supervised_filters(halted.pid, tracee)?;
    }
    Ok(())
}

/// Refuses a thread with a filter that asks a supervisor (`SECCOMP_RET_USER_NOTIF`). For a thread without filters the
/// first query fails.
pub(super) fn refuse_supervised_filters(pid: i32, tracee: Tracee) -> Result<()> {
    let mut index = 0;
    while let Ok(Some(code)) = tracee.seccomp_filter(index) {
        let asks = |[a, b, _, _, k @ ..]: &[u8; 8]| {
            u16::from_ne_bytes([*a, *b]) == RETURN && u32::from_ne_bytes(*k) & ACTION == ASK
        };
        if code.iter().any(asks) {
            return Err(blocked_error(pid, Obstacle::SeccompSupervised));
        }
        index += 1;
    }
    Ok(())
}

/// Queries the process itself. Returns the securebits of its first thread.
pub(super) fn query_ldt_and_secure_bits(
    halted: &HaltedProcess,
    attachment: &TrackerAttachment,
) -> Result<u32> {
    let mut batch = CallBatch::default();
    let ldt_address = attachment.stub.address + SCRATCH_OFFSET;
    batch.push(SystemCall::new(libc::SYS_modify_ldt, &[0, ldt_address, 64]));
    batch.push(SystemCall::new(
        libc::SYS_prctl,
        &[libc::PR_GET_SECUREBITS as u64],
    ));
    let outcome = attachment
        .stub
        .run(halted.first_thread(), &halted.memory, batch)?;
    // The kernel returns 32 bits.
    if outcome
        .results
        .first()
        .is_some_and(|result| *result as i32 > 0)
    {
        return Err(blocked_error(halted.pid, Obstacle::LdtSegments));
    }
    let secure_bits = outcome.results.get(1).copied().unwrap_or(0);
    Ok(u32::try_from(secure_bits).unwrap_or(0))
}

fn blocked_error(pid: i32, obstacle: Obstacle) -> Error {
    Error::Blocked(vec![Blocker { pid, obstacle }])
}
