//! State of a process and its threads, given to a complete husk.

use super::credentials;
use super::husk::{Husk, Script};
use super::objects::Objects;
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::image::{
    FrozenProcess, FrozenThread, IntervalTimer, Limit, PosixTimer, Process, Scheduling, SignalInfo,
};
use crate::process::trace::{Call, Tracee};
use std::io;

/// `PR_SET_MM` with `PR_SET_MM_MAP`.
const SET_MAP: [u64; 2] = [35, 14];
/// `PR_TIMER_CREATE_RESTORE_IDS`.
const RESTORE_IDS: u64 = 77;

/// Gives a husk all state but registers.
pub(super) fn restore(
    husk: &Husk,
    process: &Process,
    state: &FrozenProcess,
    objects: &Objects,
) -> Result<()> {
    super::mapper::lock(husk)?;
    memory_fields(husk, process, state, objects)?;
    let mut script = husk.script();
    actions(&mut script, state)?;
    simple(&mut script, state)?;
    timers(husk, &mut script, state)?;
    for info in &state.pending {
        queue(&mut script, info, |signal, at| {
            Call::new(libc::SYS_rt_sigqueueinfo, &[husk.pid as u64, signal, at])
        })?;
    }
    husk.run(script)?;
    limits(husk.pid, &state.limits)?;
    adjust_score(husk.pid, state.oom_score_adjustment)?;
    for (tid, thread) in process.threads.iter().zip(&state.threads) {
        let mut script = husk.script();
        thread_calls(husk.pid, *tid, thread, &mut script)?;
        schedule(*tid, &thread.scheduling).context(|| format!("scheduling of thread {tid}"))?;
        if *tid == husk.pid {
            // Changed credentials make a process undumpable.
            script.attempt(
                libc::SYS_prctl,
                &[libc::PR_SET_DUMPABLE as u64, state.dumpable.min(1)],
            );
        }
        husk.run_in(Tracee { tid: *tid }, script)?;
    }
    Ok(())
}

fn memory_fields(
    husk: &Husk,
    process: &Process,
    state: &FrozenProcess,
    objects: &Objects,
) -> Result<()> {
    let mut script = husk.script();
    let path = script.text(objects.executable_path(process.executable).as_bytes())?;
    let mode = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    script.call(
        "open",
        libc::SYS_openat,
        &[libc::AT_FDCWD as u64, path, mode],
    );
    let executable = husk.run(script)?.results[0] as u64;
    let mut script = husk.script();
    let fields = &state.memory;
    let auxiliary = script.bytes(&fields.auxiliary)?;
    let mut words = fields.addresses.to_vec();
    words.push(auxiliary);
    words.push(fields.auxiliary.len() as u64 | executable << 32);
    let map = script.words(&words)?;
    script.call(
        "PR_SET_MM_MAP",
        libc::SYS_prctl,
        &[SET_MAP[0], SET_MAP[1], map, words.len() as u64 * 8, 0],
    );
    script.call("close", libc::SYS_close, &[executable]);
    husk.run(script).map(drop)
}

fn actions(script: &mut Script, state: &FrozenProcess) -> Result<()> {
    for (number, action) in (1u64..).zip(&state.actions) {
        if [libc::SIGKILL as u64, libc::SIGSTOP as u64].contains(&number) {
            continue;
        }
        let at = script.words(&[action.handler, action.flags, action.restorer, action.mask])?;
        script.call("rt_sigaction", libc::SYS_rt_sigaction, &[number, at, 0, 8]);
    }
    Ok(())
}

fn simple(script: &mut Script, state: &FrozenProcess) -> Result<()> {
    script.call("umask", libc::SYS_umask, &[u64::from(state.umask)]);
    let directory = script.text(&state.directory)?;
    script.call("chdir", libc::SYS_chdir, &[directory]);
    script.call(
        "personality",
        libc::SYS_personality,
        &[u64::from(state.personality)],
    );
    let mut prctl = |option: i32, value: bool| {
        script.call(
            "prctl",
            libc::SYS_prctl,
            &[option as u64, u64::from(value), 0, 0, 0],
        );
    };
    prctl(libc::PR_SET_THP_DISABLE, state.huge_pages_off);
    prctl(libc::PR_SET_CHILD_SUBREAPER, state.child_subreaper);
    Ok(())
}

fn timers(husk: &Husk, script: &mut Script, state: &FrozenProcess) -> Result<()> {
    for (which, timer) in (0u64..).zip(&state.interval_timers) {
        if *timer != IntervalTimer::default() {
            let split = |us: u64| [us / 1_000_000, us % 1_000_000];
            let at = script.words(&[split(timer.interval_us), split(timer.left_us)].concat())?;
            script.call("setitimer", libc::SYS_setitimer, &[which, at, 0]);
        }
    }
    if state.posix_timers.is_empty() {
        return Ok(());
    }
    // Linux 6.15 gives the number that is asked for; before, numbers come one after the other.
    let mut ask = husk.script();
    ask.attempt(libc::SYS_prctl, &[RESTORE_IDS, 1, 0, 0, 0]);
    let chooses = husk.run(ask)?.results[0] == 0;
    let mut next = 0;
    for timer in &state.posix_timers {
        while !chooses && next < timer.id {
            create(
                script,
                &PosixTimer {
                    id: next,
                    notify: libc::SIGEV_NONE,
                    ..PosixTimer::default()
                },
            )?;
            script.call("timer_delete", libc::SYS_timer_delete, &[next as u64]);
            next += 1;
        }
        next = timer.id + 1;
        create(script, timer)?;
        let split = |ns: u64| [ns / 1_000_000_000, ns % 1_000_000_000];
        let at = script.words(&[split(timer.interval_ns), split(timer.left_ns)].concat())?;
        script.call(
            "timer_settime",
            libc::SYS_timer_settime,
            &[timer.id as u64, 0, at, 0],
        );
    }
    if chooses {
        script.attempt(libc::SYS_prctl, &[RESTORE_IDS, 0, 0, 0, 0]);
    }
    Ok(())
}

fn create(script: &mut Script, timer: &PosixTimer) -> Result<()> {
    let kind = u64::from(timer.signal as u32) | (timer.notify as u64) << 32;
    let event = script.words(&[timer.value, kind, timer.thread as u64, 0, 0, 0, 0, 0])?;
    let id = script.words(&[timer.id as u64])?;
    script.call(
        "timer_create",
        libc::SYS_timer_create,
        &[timer.clock as i64 as u64, event, id],
    );
    Ok(())
}

fn queue(
    script: &mut Script,
    info: &SignalInfo,
    call: impl FnOnce(u64, u64) -> Call,
) -> Result<()> {
    let at = script.bytes(&info.0)?;
    let number = info
        .0
        .get(..4)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, i32::from_ne_bytes);
    script.push(Some("queueing a signal"), call(number as u64, at));
    Ok(())
}

fn thread_calls(pid: i32, tid: i32, thread: &FrozenThread, script: &mut Script) -> Result<()> {
    registrations(thread, script)?;
    let name = script.text(&thread.name)?;
    script.call(
        "PR_SET_NAME",
        libc::SYS_prctl,
        &[libc::PR_SET_NAME as u64, name, 0, 0, 0],
    );
    script.attempt(
        libc::SYS_prctl,
        &[
            libc::PR_SET_TIMERSLACK as u64,
            thread.timer_slack_ns,
            0,
            0,
            0,
        ],
    );
    for info in &thread.pending {
        queue(script, info, |signal, at| {
            Call::new(
                libc::SYS_rt_tgsigqueueinfo,
                &[pid as u64, tid as u64, signal, at],
            )
        })?;
    }
    credentials::calls(thread, script)?;
    let signal = thread.parent_death_signal as u64;
    script.call(
        "PR_SET_PDEATHSIG",
        libc::SYS_prctl,
        &[libc::PR_SET_PDEATHSIG as u64, signal, 0, 0, 0],
    );
    Ok(())
}

/// What a thread has told the kernel of places in its memory.
fn registrations(thread: &FrozenThread, script: &mut Script) -> Result<()> {
    let (address, bytes) = thread.robust_list;
    if address != 0 {
        script.call(
            "set_robust_list",
            libc::SYS_set_robust_list,
            &[address, bytes],
        );
    }
    script.call(
        "set_tid_address",
        libc::SYS_set_tid_address,
        &[thread.clear_tid],
    );
    if let Some(rseq) = thread.rseq {
        let arguments = [
            rseq.address,
            u64::from(rseq.bytes),
            0,
            u64::from(rseq.signature),
        ];
        script.call("rseq", libc::SYS_rseq, &arguments);
    }
    let (address, flags, bytes) = thread.alternate_stack;
    // The kernel says so itself while a thread is on it, and takes it from nobody.
    let flags = flags & !(libc::SS_ONSTACK as u32);
    let stack = script.words(&[address, u64::from(flags), bytes])?;
    script.call("sigaltstack", libc::SYS_sigaltstack, &[stack, 0]);
    Ok(())
}

fn limits(pid: i32, limits: &[Limit]) -> Result<()> {
    for (resource, limit) in (0u32..).zip(limits) {
        let wanted = libc::rlimit64 {
            rlim_cur: limit.soft,
            rlim_max: limit.hard,
        };
        let mut present = libc::rlimit64 {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `present` is writable and outlives the call; nothing is set.
        unsafe { libc::prlimit64(pid, resource, std::ptr::null(), &raw mut present) };
        if (present.rlim_cur, present.rlim_max) == (limit.soft, limit.hard) {
            continue;
        }
        // SAFETY: `wanted` is readable and outlives the call; nothing is asked back.
        let outcome =
            unsafe { libc::prlimit64(pid, resource, &raw const wanted, std::ptr::null_mut()) };
        if outcome < 0 {
            let error = io::Error::last_os_error();
            let message = format!(
                "limit {resource} cannot be {} (at most {}): {error}",
                limit.soft, limit.hard
            );
            return Err(Error::Refused(message));
        }
    }
    Ok(())
}

fn adjust_score(pid: i32, score: i32) -> Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    let present = std::fs::read_to_string(&path).unwrap_or_default();
    if present.trim().parse() == Ok(score) {
        return Ok(());
    }
    std::fs::write(&path, score.to_string()).context(|| path)
}

fn schedule(tid: i32, wanted: &Scheduling) -> io::Result<()> {
    /// `SCHED_FLAG_RESET_ON_FORK`.
    const RESET_ON_FORK: u64 = 1;
    let attributes = crate::process::donor::SchedulingAttributes {
        size: 48,
        policy: wanted.policy,
        flags: wanted.flags & RESET_ON_FORK,
        nice: wanted.nice,
        priority: wanted.priority,
        times_ns: wanted.times_ns,
    };
    // SAFETY: `attributes` has the kernel's layout and outlives the call.
    check_long(unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attributes, 0) })?;
    let mut set = [0u64; 128];
    for cpu in wanted.affinity.iter().filter(|cpu| **cpu < 8192) {
        set[*cpu as usize / 64] |= 1 << (cpu % 64);
    }
    if wanted.affinity.is_empty() {
        set = [!0; 128];
    }
    // SAFETY: `set` has as many readable bytes as is said and outlives the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_sched_setaffinity,
            tid,
            size_of_val(&set),
            set.as_ptr(),
        )
    };
    match check_long(outcome).map(drop) {
        // None of its processors is here: all will do.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}
