//! State preview: state of processes and threads that is visible while they run.
//!
//! An acceptor checks a state preview like the final state, and so can refuse before the freeze instead of in it.

use super::process_state::parse_posix_timers;
use super::thread_state::scheduling;
use super::tree_tracker::{TrackedProcess, TreeTracker};
use crate::error::{Context, Error, Result, unexpected_text};
use crate::image::{
    Credentials, ProcessState, ProcessTreeState, ResourceLimit, SignalAction, ThreadState,
};
use crate::image_judge::RESOURCE_COUNT;
use crate::procfs::{self, ProcStatus};
use serde_bytes::ByteBuf;
use std::os::unix::ffi::OsStringExt;

/// Number of signals with actions.
const SIGNAL_COUNT: usize = 64;
/// Width in bytes of the names at the beginnings of lines of `/proc/PID/limits`.
const NAME_BYTES: usize = 26;
/// `IOPRIO_WHO_PROCESS`.
const IOPRIO_WHO_PROCESS: i32 = 1;

impl TreeTracker {
    /// Returns the state of the tree of the last round, without the parts that only a stopped thread shows:
    /// registers, signals, timers' times, instructions of filters. Securebits are the first threads', read when the
    /// tracker attached to them.
    ///
    /// # Errors
    /// The kernel's error; a process or thread that has ended meanwhile is left out.
    pub fn preview_state(&self) -> Result<ProcessTreeState> {
        let processes = self
            .processes
            .iter()
            .map(|tracked| match preview_process(tracked) {
                Err(Error::ProcessEnded(_)) => Ok(None),
                other => other,
            });
        Ok(ProcessTreeState {
            processes: processes.collect::<Result<_>>()?,
        })
    }
}

fn preview_process(tracked: &TrackedProcess) -> Result<Option<ProcessState>> {
    let Some(watched) = &tracked.watched else {
        return Ok(None);
    };
    let pid = tracked.pid;
    let mut threads = Vec::new();
    for tid in procfs::threads(pid)? {
        match preview_thread(pid, tid) {
            Ok(thread) => threads.push(thread),
            // A thread may end at any time.
            Err(_) if tid != pid && procfs::read(pid, &format!("task/{tid}/stat")).is_err() => {}
            Err(error) => return Err(error),
        }
    }
    let Some(first) = threads.first_mut() else {
        return Err(Error::ProcessEnded(pid));
    };
    first.credentials.secure_bits = watched.secure_bits;
    Ok(Some(ProcessState {
        threads,
        signal_actions: vec![SignalAction::default(); SIGNAL_COUNT],
        posix_timers: parse_posix_timers(&procfs::read(pid, "timers")?),
        limits: parse_limits(&procfs::read(pid, "limits")?)
            .ok_or_else(|| unexpected_text("cannot parse limits"))?,
        directory: procfs::link_target(pid, "cwd")?.into_os_string().into_vec(),
        oom_score_adjustment: (procfs::read(pid, "oom_score_adj")?.trim())
            .parse()
            .unwrap_or(0),
        ..ProcessState::default()
    }))
}

fn preview_thread(pid: i32, tid: i32) -> Result<ThreadState> {
    let status = ProcStatus::read(pid, tid)?;
    Ok(ThreadState {
        credentials: Credentials {
            uids: status.uids,
            gids: status.gids,
            groups: status.groups,
            capabilities: status.capabilities,
            secure_bits: 0,
        },
        scheduling: scheduling(tid)
            .context(|| format!("reading the scheduling of thread {tid}"))?,
        io_priority: io_priority(tid),
        no_new_privileges: status.no_new_privileges,
        seccomp_filters: vec![ByteBuf::new(); status.seccomp_filters as usize],
        ..ThreadState::default()
    })
}

/// Returns the I/O priority of a thread, 0 if the thread has none of its own.
fn io_priority(tid: i32) -> u32 {
    // SAFETY: no pointers are passed.
    let found = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, tid) };
    u32::try_from(found).unwrap_or(0)
}

/// Parses limits, which procfs lists by number of resource. `prlimit(2)` of another user's process would need
/// `CAP_SYS_RESOURCE`.
fn parse_limits(text: &str) -> Option<Vec<ResourceLimit>> {
    let number = |word: &str| match word {
        "unlimited" => Some(u64::MAX),
        word => word.parse().ok(),
    };
    let limit = |line: &str| {
        let mut words = line.get(NAME_BYTES..)?.split_whitespace();
        let (soft, hard) = (number(words.next()?)?, number(words.next()?)?);
        Some(ResourceLimit { soft, hard })
    };
    let found: Option<Vec<ResourceLimit>> = text.lines().skip(1).map(limit).collect();
    found.filter(|found| found.len() == RESOURCE_COUNT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_limits_of_this_process() {
        let own = procfs::read(std::process::id() as i32, "limits").expect("procfs");
        let own = parse_limits(&own).expect("limits");
        for (resource, limit) in own.iter().enumerate() {
            let mut found = libc::rlimit64 {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: `found` is writable and outlives the call; nothing is set.
            unsafe { libc::prlimit64(0, resource as u32, std::ptr::null(), &raw mut found) };
            assert_eq!((limit.soft, limit.hard), (found.rlim_cur, found.rlim_max));
        }
        assert!(parse_limits("Limit Soft Limit\n").is_none());
    }
}
