//! State of a process and its threads, set in a complete stub process.

use super::credentials;
use super::mapped_object_store::MappedObjectStore;
use super::memory_fields::add_original_memory_fields;
use super::stub_process::{CallScript, StubProcess, ThreadCallScript, run_scripts};
use crate::error::{Context, Error, Result, check_long};
use crate::image::{
    IntervalTimer, PosixTimer, ProcessLayout, ProcessState, ResourceLimit, Scheduling, SignalInfo,
    ThreadState,
};
use crate::trace::{SystemCall, ThreadStubSlot, ThreadStubSlotAllocator, Tracee};
use holdfast_sys::priority::{run_parallel, set_timer_slack_ns};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `PR_SET_MEMORY_MERGE`.
const PR_SET_MEMORY_MERGE: u64 = 67;
/// `PR_SET_MDWE`.
const PR_SET_MDWE: u64 = 65;
/// `PR_TIMER_CREATE_RESTORE_IDS`.
const PR_TIMER_CREATE_RESTORE_IDS: u64 = 77;

/// A stub process, the process that it becomes, and the state of that process.
pub(super) type ProcessRestoreTarget<'a> = (&'a StubProcess, &'a ProcessLayout, &'a ProcessState);

/// Gives stub processes all state but registers. Threads make their own calls at the same time.
pub(super) fn restore_processes(
    targets: &[ProcessRestoreTarget<'_>],
    objects: &MappedObjectStore,
) -> Result<()> {
    for (stub_process, _, _) in targets {
        super::mappings::lock_memory(stub_process)?;
    }
    // A script relies on the lowest free descriptor number, so processes that share a table take turns.
    let (unshared, sharing): (
        Vec<&ProcessRestoreTarget<'_>>,
        Vec<&ProcessRestoreTarget<'_>>,
    ) = targets
        .iter()
        .partition(|(_, process, _)| process.shares_table_with.is_none());
    let scripts: Result<Vec<ThreadCallScript<'_>>> = (unshared.into_iter())
        .map(|target| process_script(*target, objects))
        .collect();
    run_scripts(scripts?)?;
    for target in sharing {
        run_scripts(vec![process_script(*target, objects)?])?;
    }
    for (stub_process, _, state) in targets {
        match stub_process.lowered_credentials {
            // No limit is above the process's present one, so the process sets the limits itself.
            Some(_) => set_own_limits(stub_process, &state.limits)?,
            None => set_limits(stub_process.pid, &state.limits)?,
        }
        for (file, value) in [
            ("oom_score_adj", state.oom_score_adjustment.to_string()),
            ("coredump_filter", format!("{:08x}", state.dump_filter)),
        ] {
            write_proc_file(stub_process.pid, file, &value)?;
        }
    }
    let mut common_filters = Vec::with_capacity(targets.len());
    for (stub_process, _, state) in targets {
        let common = credentials::count_common_filters(&state.threads);
        common_filters.push(common);
        if common > 0 {
            let mut script = stub_process.script();
            credentials::add_common_filters(stub_process, &state.threads[0], common, &mut script)?;
            stub_process.run_script(script)?;
        }
    }
    // First threads come last and set the dumpable flag, which a change of another thread's credentials would clear.
    for first in [false, true] {
        restore_threads(targets, &common_filters, objects, first)?;
    }
    let threads = targets
        .iter()
        .flat_map(|(_, process, state)| process.threads.iter().zip(&state.threads));
    let threads: Vec<_> = threads.collect();
    let scheduled = run_parallel(&threads, |(tid, thread)| {
        set_scheduling(**tid, &thread.scheduling)
            .context(|| format!("restoring the scheduling of thread {tid}"))?;
        // A thread with a raised priority has no timer slack, so the slack is set after the scheduling.
        set_timer_slack_ns(**tid, thread.timer_slack_ns);
        Ok(())
    });
    scheduled.into_iter().collect()
}

/// Returns the signals that will be pending for the process or that its timers may send, as a set.
pub(super) fn expected_signals(state: &ProcessState) -> u64 {
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
fn process_script<'a>(
    (stub_process, process, state): ProcessRestoreTarget<'a>,
    objects: &MappedObjectStore,
) -> Result<ThreadCallScript<'a>> {
    // Run these calls at once: all stub processes share the socket over which the file arrives.
    let mut script = stub_process.script();
    let executable = stub_process.pass_fd(&mut script, objects.mapped_file(process.executable))?;
    stub_process.run_script(script)?;
    let mut script = stub_process.script();
    add_original_memory_fields(&mut script, state, executable)?;
    add_signal_actions(&mut script, state)?;
    add_simple_attributes(&mut script, state)?;
    if enters_directory_as_restorer(stub_process, state, objects) {
        change_directory(&mut script, state)?;
    }
    add_timers(stub_process, &mut script, state)?;
    for info in &state.pending {
        add_signal(&mut script, info, |signal, at| {
            SystemCall::new(
                libc::SYS_rt_sigqueueinfo,
                &[stub_process.pid as u64, signal, at],
            )
        })?;
    }
    Ok(ThreadCallScript {
        stub_process,
        tracee: stub_process.first_thread(),
        script,
        slot: ThreadStubSlot::WHOLE_STUB,
    })
}

/// Returns true if the process enters its working directory with the restorer's rights, since the policy allows a
/// directory that the process itself may not enter. Otherwise the process enters it with its final credentials.
fn enters_directory_as_restorer(
    stub_process: &StubProcess,
    state: &ProcessState,
    objects: &MappedObjectStore,
) -> bool {
    let directory = Path::new(OsStr::from_bytes(&state.directory));
    stub_process.lowered_credentials.is_none() && objects.rights().is_exempt(directory)
}

/// Gives all first threads, or all others, their state. As many scripts as the stubs can hold run at the same time.
/// `common_filters` is the number of filters that the threads of each process have in common.
fn restore_threads(
    targets: &[ProcessRestoreTarget<'_>],
    common_filters: &[usize],
    objects: &MappedObjectStore,
    first: bool,
) -> Result<()> {
    let mut slots: Vec<ThreadStubSlotAllocator> = targets
        .iter()
        .map(|_| ThreadStubSlotAllocator::new())
        .collect();
    let mut parts = Vec::new();
    for (at, target) in targets.iter().enumerate() {
        let (stub_process, process, state) = *target;
        for (tid, thread) in process.threads.iter().zip(&state.threads) {
            if (*tid == stub_process.pid) != first {
                continue;
            }
            let script_in_slot =
                |slots: &mut ThreadStubSlotAllocator| -> Result<Option<ThreadCallScript<'_>>> {
                    let mut script = stub_process.script_at(slots.next_scratch());
                    add_thread_state(
                        *target,
                        (*tid, thread),
                        common_filters[at],
                        objects,
                        &mut script,
                    )?;
                    let (calls, bytes) = script.size();
                    Ok(slots
                        .allocate(calls, 0, bytes)
                        .map(|slot| ThreadCallScript {
                            stub_process,
                            tracee: Tracee { tid: *tid },
                            script,
                            slot,
                        }))
                };
            if let Some(part) = script_in_slot(&mut slots[at])? {
                parts.push(part);
                continue;
            }
            run_scripts(std::mem::take(&mut parts))?;
            slots.fill_with(ThreadStubSlotAllocator::new);
            if let Some(part) = script_in_slot(&mut slots[at])? {
                parts.push(part);
                continue;
            }
            // A script this long has the stub for itself and runs in parts.
            let mut script = stub_process.script();
            add_thread_state(
                *target,
                (*tid, thread),
                common_filters[at],
                objects,
                &mut script,
            )?;
            stub_process.run_script_in(Tracee { tid: *tid }, script)?;
        }
    }
    run_scripts(parts).map(drop)
}

fn add_thread_state(
    (stub_process, _, state): ProcessRestoreTarget<'_>,
    (tid, thread): (i32, &ThreadState),
    shared_filters: usize,
    objects: &MappedObjectStore,
    script: &mut CallScript,
) -> Result<()> {
    add_thread_calls(stub_process, (tid, thread), shared_filters, script)?;
    if tid == stub_process.pid {
        let is_there = stub_process.directory.as_ref() == Some(&state.directory);
        if !enters_directory_as_restorer(stub_process, state, objects) && !is_there {
            // With the thread's final credentials.
            change_directory(script, state)?;
        }
        // A change of credentials makes a process undumpable.
        let dumpable = state.dumpable.min(1);
        script.add_optional_call(libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as u64, dumpable]);
    }
    Ok(())
}

/// Tests if a stub process can get this state: its threads' credentials and its working directory. With the
/// restorer's rights, the test detects only missing directories.
pub(super) fn check_restorable(stub_process: &StubProcess, state: &ProcessState) -> Result<()> {
    if let Some(who) = &stub_process.lowered_credentials {
        for thread in &state.threads {
            who.check(
                stub_process.pid,
                &thread.credentials,
                thread.no_new_privileges,
            )?;
        }
    }
    if stub_process.directory.as_ref() == Some(&state.directory) {
        return Ok(());
    }
    // Entering the directory early does no harm: the process does not use it before it gets its state.
    let mut script = stub_process.script();
    change_directory(&mut script, state)?;
    stub_process.run_script(script).map(drop)
}

fn change_directory(script: &mut CallScript, state: &ProcessState) -> Result<()> {
    let directory = script.add_text(&state.directory)?;
    script.add_call("its working directory", libc::SYS_chdir, &[directory]);
    Ok(())
}

/// Adds the calls that would prevent mapping memory, as the last ones.
fn add_final_restrictions(script: &mut CallScript, state: &ProcessState) {
    if state.mlockall_flags != 0 {
        script.add_call("mlockall", libc::SYS_mlockall, &[state.mlockall_flags]);
    }
    if state.mdwe != 0 {
        let arguments = [PR_SET_MDWE, state.mdwe, 0, 0, 0];
        script.add_call("PR_SET_MDWE", libc::SYS_prctl, &arguments);
    }
}

fn add_signal_actions(script: &mut CallScript, state: &ProcessState) -> Result<()> {
    // Ignoring a signal discards pending ones, so the process loses signals received while it was made.
    let ignore = script.add_words(&[libc::SIG_IGN as u64, 0, 0, 0])?;
    for (number, action) in (1u64..).zip(&state.signal_actions) {
        if [libc::SIGKILL as u64, libc::SIGSTOP as u64].contains(&number) {
            continue;
        }
        script.add_call(
            "rt_sigaction",
            libc::SYS_rt_sigaction,
            &[number, ignore, 0, 8],
        );
        let at = script.add_words(&[action.handler, action.flags, action.restorer, action.mask])?;
        script.add_call("rt_sigaction", libc::SYS_rt_sigaction, &[number, at, 0, 8]);
    }
    Ok(())
}

fn add_simple_attributes(script: &mut CallScript, state: &ProcessState) -> Result<()> {
    script.add_call("umask", libc::SYS_umask, &[u64::from(state.umask)]);
    let mut prctl = |option: u64, value: u64, more: u64| {
        script.add_call("prctl", libc::SYS_prctl, &[option, value, more, 0, 0]);
    };
    let thp_disable = state.thp_disable;
    prctl(
        libc::PR_SET_THP_DISABLE as u64,
        thp_disable & 1,
        thp_disable & !1,
    );
    let reaps = u64::from(state.child_subreaper);
    prctl(libc::PR_SET_CHILD_SUBREAPER as u64, reaps, 0);
    if state.is_merging {
        prctl(PR_SET_MEMORY_MERGE, 1, 0);
    }
    // Registrations have the numbers of the commands that make them.
    for command in (0..32).map(|bit| 1 << bit) {
        if state.membarrier_registrations & command != 0 {
            script.add_call("membarrier", libc::SYS_membarrier, &[command, 0, 0]);
        }
    }
    add_final_restrictions(script, state);
    Ok(())
}

fn add_timers(
    stub_process: &StubProcess,
    script: &mut CallScript,
    state: &ProcessState,
) -> Result<()> {
    for (which, timer) in (0u64..).zip(&state.interval_timers) {
        if *timer != IntervalTimer::default() {
            let split = |us: u64| [us / 1_000_000, us % 1_000_000];
            let at = script
                .add_words(&[split(timer.interval_us), split(timer.remaining_us)].concat())?;
            script.add_call("setitimer", libc::SYS_setitimer, &[which, at, 0]);
        }
    }
    if state.posix_timers.is_empty() {
        return Ok(());
    }
    // Linux 6.15 can assign the requested number. Older kernels assign numbers one after the other.
    let mut id_query = stub_process.script();
    id_query.add_optional_call(libc::SYS_prctl, &[PR_TIMER_CREATE_RESTORE_IDS, 1, 0, 0, 0]);
    let chooses_ids = stub_process.run_script(id_query)?.results[0] == 0;
    let mut next = 0;
    for timer in &state.posix_timers {
        while !chooses_ids && next < timer.id {
            add_timer(
                script,
                &PosixTimer {
                    id: next,
                    notify: libc::SIGEV_NONE,
                    ..PosixTimer::default()
                },
            )?;
            script.add_call("timer_delete", libc::SYS_timer_delete, &[next as u64]);
            next += 1;
        }
        next = timer.id + 1;
        add_timer(script, timer)?;
        let split = |ns: u64| [ns / 1_000_000_000, ns % 1_000_000_000];
        let at =
            script.add_words(&[split(timer.interval_ns), split(timer.remaining_ns)].concat())?;
        script.add_call(
            "timer_settime",
            libc::SYS_timer_settime,
            &[timer.id as u64, 0, at, 0],
        );
    }
    if chooses_ids {
        script.add_optional_call(libc::SYS_prctl, &[PR_TIMER_CREATE_RESTORE_IDS, 0, 0, 0, 0]);
    }
    Ok(())
}

fn add_timer(script: &mut CallScript, timer: &PosixTimer) -> Result<()> {
    let kind = u64::from(timer.signal as u32) | (timer.notify as u64) << 32;
    let event = script.add_words(&[timer.value, kind, timer.thread as u64, 0, 0, 0, 0, 0])?;
    let id = script.add_words(&[timer.id as u64])?;
    script.add_call(
        "timer_create",
        libc::SYS_timer_create,
        &[timer.clock as i64 as u64, event, id],
    );
    Ok(())
}

fn add_signal(
    script: &mut CallScript,
    info: &SignalInfo,
    call: impl FnOnce(u64, u64) -> SystemCall,
) -> Result<()> {
    let at = script.add_bytes(&info.0)?;
    let number = info.number() as u64;
    script.push_call(Some("rt_sigqueueinfo"), call(number, at));
    Ok(())
}

fn add_thread_calls(
    stub_process: &StubProcess,
    (tid, thread): (i32, &ThreadState),
    shared_filters: usize,
    script: &mut CallScript,
) -> Result<()> {
    let name = script.add_text(&thread.name)?;
    script.add_call(
        "PR_SET_NAME",
        libc::SYS_prctl,
        &[libc::PR_SET_NAME as u64, name, 0, 0, 0],
    );
    let slack = [libc::PR_SET_TIMERSLACK as u64, thread.timer_slack_ns];
    script.add_optional_call(libc::SYS_prctl, &slack);
    add_thread_attributes(thread, script);
    for info in &thread.pending {
        add_signal(script, info, |signal, at| {
            SystemCall::new(
                libc::SYS_rt_tgsigqueueinfo,
                &[stub_process.pid as u64, tid as u64, signal, at],
            )
        })?;
    }
    credentials::add_credentials(stub_process, thread, shared_filters, script)?;
    // The kernel follows these addresses of the image from here on (an abort handler of rseq runs when the thread is
    // preempted). By now the thread has no more rights than the original.
    add_registered_addresses(thread, script)?;
    let signal = thread.parent_death_signal as u64;
    script.add_call(
        "PR_SET_PDEATHSIG",
        libc::SYS_prctl,
        &[libc::PR_SET_PDEATHSIG as u64, signal, 0, 0, 0],
    );
    Ok(())
}

/// Sets attributes that each thread has for itself, although most processes set them only once.
fn add_thread_attributes(thread: &ThreadState, script: &mut CallScript) {
    let persona = u64::from(thread.personality);
    script.add_call("personality", libc::SYS_personality, &[persona]);
    let priority = u64::from(thread.io_priority);
    script.add_call("ioprio_set", libc::SYS_ioprio_set, &[1, 0, priority]);
    // PR_TSC_ENABLE is the mode of new threads.
    if thread.tsc_mode == libc::PR_TSC_SIGSEGV as u32 {
        let mode = u64::from(thread.tsc_mode);
        let arguments = [libc::PR_SET_TSC as u64, mode];
        script.add_call("PR_SET_TSC", libc::SYS_prctl, &arguments);
    }
    let set = libc::PR_MCE_KILL_SET as u64;
    let policy = u64::from(thread.mce_policy);
    script.add_optional_call(
        libc::SYS_prctl,
        &[libc::PR_MCE_KILL as u64, set, policy, 0, 0],
    );
}

/// Registers the places in memory that the thread has told the kernel.
fn add_registered_addresses(thread: &ThreadState, script: &mut CallScript) -> Result<()> {
    let (address, bytes) = thread.robust_list;
    if address != 0 {
        script.add_call(
            "set_robust_list",
            libc::SYS_set_robust_list,
            &[address, bytes],
        );
    }
    script.add_call(
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
        script.add_call("rseq", libc::SYS_rseq, &arguments);
    }
    let (address, flags, bytes) = thread.alternate_stack;
    // The kernel reports this flag while a thread is on the stack, and rejects it as an argument.
    let flags = flags & !(libc::SS_ONSTACK as u32);
    let stack = script.add_words(&[address, u64::from(flags), bytes])?;
    script.add_call("sigaltstack", libc::SYS_sigaltstack, &[stack, 0]);
    Ok(())
}

fn set_own_limits(stub_process: &StubProcess, limits: &[ResourceLimit]) -> Result<()> {
    let mut script = stub_process.script();
    for (resource, limit) in (0u64..).zip(limits) {
        let wanted = script.add_words(&[limit.soft, limit.hard])?;
        script.add_call("prlimit64", libc::SYS_prlimit64, &[0, resource, wanted, 0]);
    }
    stub_process.run_script(script).map(drop)
}

fn set_limits(pid: i32, limits: &[ResourceLimit]) -> Result<()> {
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
                "resource limit {resource} cannot be set to {} (hard limit {}): {error}",
                limit.soft, limit.hard
            );
            return Err(Error::Refused(message));
        }
    }
    Ok(())
}

/// Writes a procfs file of the process unless the file has that value already.
fn write_proc_file(pid: i32, name: &str, value: &str) -> Result<()> {
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

fn set_scheduling(tid: i32, wanted: &Scheduling) -> io::Result<()> {
    /// `SCHED_FLAG_RESET_ON_FORK`.
    const RESET_ON_FORK: u64 = 1;
    let attributes = crate::donor::SchedulingAttributes {
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
