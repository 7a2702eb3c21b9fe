//! State of a process and its threads, set in a complete empty process.

use super::credentials;
use super::husk::{Husk, Part, Script, run_all};
use super::objects::Objects;
use crate::priority::{set_timer_slack_ns, share_out};
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::image::{
    FrozenProcess, FrozenThread, IntervalTimer, Limit, PosixTimer, Process, Scheduling, SignalInfo,
};
use crate::process::trace::{Call, Slot, Slots, Tracee};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `PR_SET_MM` with `PR_SET_MM_MAP`.
const SET_MAP: [u64; 2] = [35, 14];
/// `PR_SET_MEMORY_MERGE`.
const SET_MERGE: u64 = 67;
/// `PR_SET_MDWE`.
const SET_MDWE: u64 = 65;
/// `PR_TIMER_CREATE_RESTORE_IDS`.
const RESTORE_IDS: u64 = 77;

/// An empty process, the process that it becomes, and the state of that process.
pub(super) type Becoming<'a> = (&'a Husk, &'a Process, &'a FrozenProcess);

/// Gives empty processes all state but registers. Threads make their own calls at the same time.
pub(super) fn restore_all(all: &[Becoming<'_>], objects: &Objects) -> Result<()> {
    for (husk, _, _) in all {
        super::mapper::lock(husk)?;
    }
    // A script relies on the lowest free descriptor number, so processes that share a table take turns.
    let (alone, sharing): (Vec<&Becoming<'_>>, Vec<&Becoming<'_>>) = all
        .iter()
        .partition(|(_, process, _)| process.table_of.is_none());
    let parts: Result<Vec<Part<'_>>> = (alone.into_iter())
        .map(|of| process_part(*of, objects))
        .collect();
    run_all(parts?)?;
    for of in sharing {
        run_all(vec![process_part(*of, objects)?])?;
    }
    for (husk, _, state) in all {
        match husk.who {
            // No limit is above the process's present one, so the process sets the limits itself.
            Some(_) => own_limits(husk, &state.limits)?,
            None => limits(husk.pid, &state.limits)?,
        }
        for (file, value) in [
            ("oom_score_adj", state.oom_score_adjustment.to_string()),
            ("coredump_filter", format!("{:08x}", state.dump_filter)),
        ] {
            set_file(husk.pid, file, &value)?;
        }
    }
    let mut shared = Vec::with_capacity(all.len());
    for (husk, _, state) in all {
        let common = credentials::common_filters(&state.threads);
        shared.push(common);
        if common > 0 {
            let mut script = husk.script();
            credentials::share_filters(husk, &state.threads[0], common, &mut script)?;
            husk.run(script)?;
        }
    }
    // First threads come last and set the dumpable flag, which a change of another thread's credentials would clear.
    for first in [false, true] {
        restore_threads(all, &shared, objects, first)?;
    }
    let threads = all
        .iter()
        .flat_map(|(_, process, state)| process.threads.iter().zip(&state.threads));
    let threads: Vec<_> = threads.collect();
    let scheduled = share_out(&threads, |(tid, thread)| {
        schedule(**tid, &thread.scheduling).context(|| format!("scheduling of thread {tid}"))?;
        // A thread with a raised priority has no timer slack, so the slack is set after the scheduling.
        set_timer_slack_ns(**tid, thread.timer_slack_ns);
        Ok(())
    });
    scheduled.into_iter().collect()
}

/// Returns the signals that will be pending for the process or that its timers may send, as a set.
pub(super) fn signals_to_come(state: &FrozenProcess) -> u64 {
    let of_threads = state.threads.iter().flat_map(|thread| &thread.pending);
    let waiting = state.pending.iter().chain(of_threads);
    let timers = state.posix_timers.iter().map(|timer| timer.signal);
    waiting
        .map(SignalInfo::number)
        .chain(timers)
        .filter(|signal| (1..=64).contains(signal))
        .fold(0, |set, signal| set | 1 << (signal - 1))
}

/// Prepares the calls that a process's first thread makes for the whole process.
fn process_part<'a>((husk, process, state): Becoming<'a>, objects: &Objects) -> Result<Part<'a>> {
    // Run these calls at once: all empty processes share the socket over which the file arrives.
    let mut script = husk.script();
    let executable = husk.receive(&mut script, objects.file(process.executable))?;
    husk.run(script)?;
    let mut script = husk.script();
    memory_fields(&mut script, state, executable)?;
    actions(&mut script, state)?;
    simple(&mut script, state)?;
    if enters_early(husk, state, objects) {
        change_directory(&mut script, state)?;
    }
    timers(husk, &mut script, state)?;
    for info in &state.pending {
        queue(&mut script, info, |signal, at| {
            Call::new(libc::SYS_rt_sigqueueinfo, &[husk.pid as u64, signal, at])
        })?;
    }
    Ok(Part {
        husk,
        tracee: husk.first(),
        script,
        slot: Slot::WHOLE,
    })
}

/// Returns true if the process enters its working directory with the restorer's rights, since the policy allows a
/// directory that the process itself may not enter. Otherwise the process enters it with its final credentials.
fn enters_early(husk: &Husk, state: &FrozenProcess, objects: &Objects) -> bool {
    let directory = Path::new(OsStr::from_bytes(&state.directory));
    husk.who.is_none() && objects.rights().exempts(directory)
}

/// Gives all first threads, or all others, their state. As many scripts as the stubs can hold run at the same time.
/// `shared` is the number of filters that the threads of each process have in common.
fn restore_threads(
    all: &[Becoming<'_>],
    shared: &[usize],
    objects: &Objects,
    first: bool,
) -> Result<()> {
    let mut slots: Vec<Slots> = all.iter().map(|_| Slots::new()).collect();
    let mut parts = Vec::new();
    for (at, of) in all.iter().enumerate() {
        let (husk, process, state) = *of;
        for (tid, thread) in process.threads.iter().zip(&state.threads) {
            if (*tid == husk.pid) != first {
                continue;
            }
            let part = |slots: &mut Slots| -> Result<Option<Part<'_>>> {
                let mut script = husk.script_at(slots.next_scratch());
                thread_script(*of, (*tid, thread), shared[at], objects, &mut script)?;
                let (calls, bytes) = script.size();
                Ok(slots.take(calls, 0, bytes).map(|slot| Part {
                    husk,
                    tracee: Tracee { tid: *tid },
                    script,
                    slot,
                }))
            };
            if let Some(part) = part(&mut slots[at])? {
                parts.push(part);
                continue;
            }
            run_all(std::mem::take(&mut parts))?;
            slots.fill_with(Slots::new);
            if let Some(part) = part(&mut slots[at])? {
                parts.push(part);
                continue;
            }
            // A script this long has the stub for itself and runs in parts.
            let mut script = husk.script();
            thread_script(*of, (*tid, thread), shared[at], objects, &mut script)?;
            husk.run_in(Tracee { tid: *tid }, script)?;
        }
    }
    run_all(parts).map(drop)
}

fn thread_script(
    (husk, _, state): Becoming<'_>,
    (tid, thread): (i32, &FrozenThread),
    shared_filters: usize,
    objects: &Objects,
    script: &mut Script,
) -> Result<()> {
    thread_calls(husk, (tid, thread), shared_filters, script)?;
    if tid == husk.pid {
        let is_there = husk.directory.as_ref() == Some(&state.directory);
        if !enters_early(husk, state, objects) && !is_there {
            // With the thread's final credentials.
            change_directory(script, state)?;
        }
        // A change of credentials makes a process undumpable.
        let dumpable = state.dumpable.min(1);
        script.attempt(libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as u64, dumpable]);
    }
    Ok(())
}

/// Tests if an empty process can get this state: its threads' credentials and its working directory. With the
/// restorer's rights, the test detects only missing directories.
pub(super) fn try_out(husk: &Husk, state: &FrozenProcess) -> Result<()> {
    if let Some(who) = &husk.who {
        for thread in &state.threads {
            who.check(husk.pid, &thread.credentials, thread.no_new_privileges)?;
        }
    }
    if husk.directory.as_ref() == Some(&state.directory) {
        return Ok(());
    }
    // Entering the directory early does no harm: the process does not use it before it gets its state.
    let mut script = husk.script();
    change_directory(&mut script, state)?;
    husk.run(script).map(drop)
}

fn change_directory(script: &mut Script, state: &FrozenProcess) -> Result<()> {
    let directory = script.text(&state.directory)?;
    script.call("its working directory", libc::SYS_chdir, &[directory]);
    Ok(())
}

/// Adds the calls that would prevent mapping memory, as the last ones.
fn last_words(script: &mut Script, state: &FrozenProcess) {
    if state.locks != 0 {
        script.call("mlockall", libc::SYS_mlockall, &[state.locks]);
    }
    if state.no_new_code != 0 {
        let arguments = [SET_MDWE, state.no_new_code, 0, 0, 0];
        script.call("PR_SET_MDWE", libc::SYS_prctl, &arguments);
    }
}

fn memory_fields(script: &mut Script, state: &FrozenProcess, executable: u64) -> Result<()> {
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
    Ok(())
}

fn actions(script: &mut Script, state: &FrozenProcess) -> Result<()> {
    // Ignoring a signal discards pending ones, so the process loses signals received while it was made.
    let ignore = script.words(&[libc::SIG_IGN as u64, 0, 0, 0])?;
    for (number, action) in (1u64..).zip(&state.actions) {
        if [libc::SIGKILL as u64, libc::SIGSTOP as u64].contains(&number) {
            continue;
        }
        script.call(
            "rt_sigaction",
            libc::SYS_rt_sigaction,
            &[number, ignore, 0, 8],
        );
        let at = script.words(&[action.handler, action.flags, action.restorer, action.mask])?;
        script.call("rt_sigaction", libc::SYS_rt_sigaction, &[number, at, 0, 8]);
    }
    Ok(())
}

fn simple(script: &mut Script, state: &FrozenProcess) -> Result<()> {
    script.call("umask", libc::SYS_umask, &[u64::from(state.umask)]);
    let mut prctl = |option: u64, value: u64, more: u64| {
        script.call("prctl", libc::SYS_prctl, &[option, value, more, 0, 0]);
    };
    let off = state.huge_pages_off;
    prctl(libc::PR_SET_THP_DISABLE as u64, off & 1, off & !1);
    let reaps = u64::from(state.child_subreaper);
    prctl(libc::PR_SET_CHILD_SUBREAPER as u64, reaps, 0);
    if state.merges {
        prctl(SET_MERGE, 1, 0);
    }
    // Registrations have the numbers of the commands that make them.
    for command in (0..32).map(|bit| 1 << bit) {
        if state.barriers & command != 0 {
            script.call("membarrier", libc::SYS_membarrier, &[command, 0, 0]);
        }
    }
    last_words(script, state);
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
    // Linux 6.15 can assign the requested number. Older kernels assign numbers one after the other.
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
    let number = info.number() as u64;
    script.push(Some("queueing a signal"), call(number, at));
    Ok(())
}

fn thread_calls(
    husk: &Husk,
    (tid, thread): (i32, &FrozenThread),
    shared_filters: usize,
    script: &mut Script,
) -> Result<()> {
    let name = script.text(&thread.name)?;
    script.call(
        "PR_SET_NAME",
        libc::SYS_prctl,
        &[libc::PR_SET_NAME as u64, name, 0, 0, 0],
    );
    let slack = [libc::PR_SET_TIMERSLACK as u64, thread.timer_slack_ns];
    script.attempt(libc::SYS_prctl, &slack);
    habits(thread, script);
    for info in &thread.pending {
        queue(script, info, |signal, at| {
            Call::new(
                libc::SYS_rt_tgsigqueueinfo,
                &[husk.pid as u64, tid as u64, signal, at],
            )
        })?;
    }
    credentials::calls(husk, thread, shared_filters, script)?;
    // The kernel follows these addresses of the image from here on (an abort handler of rseq runs when the thread is
    // preempted). By now the thread has no more rights than the original.
    registrations(thread, script)?;
    let signal = thread.parent_death_signal as u64;
    script.call(
        "PR_SET_PDEATHSIG",
        libc::SYS_prctl,
        &[libc::PR_SET_PDEATHSIG as u64, signal, 0, 0, 0],
    );
    Ok(())
}

/// Sets attributes that each thread has for itself, although most processes set them only once.
fn habits(thread: &FrozenThread, script: &mut Script) {
    let persona = u64::from(thread.personality);
    script.call("personality", libc::SYS_personality, &[persona]);
    let priority = u64::from(thread.io_priority);
    script.call("ioprio_set", libc::SYS_ioprio_set, &[1, 0, priority]);
    // PR_TSC_ENABLE is the mode of new threads.
    if thread.time_stamps == libc::PR_TSC_SIGSEGV as u32 {
        let mode = u64::from(thread.time_stamps);
        let arguments = [libc::PR_SET_TSC as u64, mode];
        script.call("PR_SET_TSC", libc::SYS_prctl, &arguments);
    }
    let set = libc::PR_MCE_KILL_SET as u64;
    let policy = u64::from(thread.machine_checks);
    script.attempt(
        libc::SYS_prctl,
        &[libc::PR_MCE_KILL as u64, set, policy, 0, 0],
    );
}

/// Registers the places in memory that the thread has told the kernel.
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
    // The kernel reports this flag while a thread is on the stack, and rejects it as an argument.
    let flags = flags & !(libc::SS_ONSTACK as u32);
    let stack = script.words(&[address, u64::from(flags), bytes])?;
    script.call("sigaltstack", libc::SYS_sigaltstack, &[stack, 0]);
    Ok(())
}

fn own_limits(husk: &Husk, limits: &[Limit]) -> Result<()> {
    let mut script = husk.script();
    for (resource, limit) in (0u64..).zip(limits) {
        let wanted = script.words(&[limit.soft, limit.hard])?;
        script.call("a limit", libc::SYS_prlimit64, &[0, resource, wanted, 0]);
    }
    husk.run(script).map(drop)
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
        // SAFETY: `wanted` is readable and outlives the call; no old value is requested.
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

/// Writes a procfs file of the process unless the file has that value already.
fn set_file(pid: i32, name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/{pid}/{name}");
    let present = std::fs::read_to_string(&path).unwrap_or_default();
    if present.trim() == value {
        return Ok(());
    }
    let value = if name == "coredump_filter" {
        format!("0x{value}")
    } else {
        value.to_owned()
    };
    std::fs::write(&path, value).context(|| path)
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
    // SAFETY: `set` has as many readable bytes as the call is told, and outlives the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_sched_setaffinity,
            tid,
            size_of_val(&set),
            set.as_ptr(),
        )
    };
    match check_long(outcome).map(drop) {
        // None of the thread's processors exists here, so the thread may use all.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}
