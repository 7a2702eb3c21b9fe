//! Creation of processes with the PIDs, sessions and process groups of the originals.

use super::fd_channel::FdChannel;
use super::stub_process::StubProcess;
use crate::error::{Context, Error, Result, check_long};
use crate::image::{PAGE, ProcessLayout};
use crate::trace::{STUB_BYTES, StopReason, SystemCall, Tracee, stub_code, wait_for_stop};
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

/// Ptrace options: a stub process, its threads and its children die with the restorer.
const PTRACE_OPTIONS: i32 = libc::PTRACE_O_EXITKILL
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEFORK
    | PTRACE_O_SUSPEND_SECCOMP;
/// `PTRACE_O_SUSPEND_SECCOMP`: the process's own seccomp filters do not block the restorer's calls.
const PTRACE_O_SUSPEND_SECCOMP: i32 = 1 << 21;
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the child checks if it is traced.
const TRACE_POLL_NS: libc::c_long = 20_000;

/// Makes the root: a copy of the restorer that has a stub and traps in it. `groups` are process groups without a
/// leader in the tree.
pub(super) fn spawn_root(
    process: &ProcessLayout,
    stub: u64,
    groups: &[i32],
    fd_channel: &Rc<FdChannel>,
) -> Result<StubProcess> {
    let arguments = StubArguments {
        stub,
        channel_number: fd_channel.receiver_number(),
    };
    let own = std::process::id() as i32;
    let is_session_leader = process.session == process.pid;
    let pid = match process.session {
        _ if is_session_leader => fork_with_pid(process.pid, || enter_stub(arguments))?,
        // The session's leader was the first process of the donor's namespace, or a process outside of it. Here that
        // leader is the restorer.
        session if session == own => spawn_in_own_session(process.pid, arguments, groups)?,
        session => TemporaryLeader { session, groups }.spawn_child(process.pid, arguments)?,
    };
    Tracee::seize(pid, PTRACE_OPTIONS)?;
    let tracee = Tracee { tid: pid };
    set_traced(pid)?;
    loop {
        match wait_for_stop(pid, STOP_TIMEOUT)? {
            StopReason::Signal(libc::SIGTRAP) => break,
            StopReason::Ended(_) => return Err(Error::ProcessEnded(pid)),
            StopReason::Signal(signal) => tracee.resume(signal)?,
            _ => tracee.resume(0)?,
        }
    }
    let stub_process = StubProcess::new(pid, stub, process.generation, Rc::clone(fd_channel))?;
    stub_process.place_channel()?;
    if is_session_leader {
        let mut script = stub_process.script();
        script.add_call("setsid", libc::SYS_setsid, &[]);
        stub_process.run_script(script)?;
    }
    Ok(stub_process)
}

/// The process that makes a child, and the sharing between both.
#[derive(Clone, Copy)]
pub(super) struct Spawner<'a> {
    /// The parent, or a child of the parent. The new process inherits its session and process group.
    pub stub_process: &'a StubProcess,
    /// True if the new process shares the descriptor table too.
    pub shares_fd_table: bool,
}

/// Makes a child of a stub process.
pub(super) fn spawn_child(
    parent: &StubProcess,
    process: &ProcessLayout,
    spawner: Spawner<'_>,
) -> Result<StubProcess> {
    let Spawner {
        stub_process,
        shares_fd_table: shares,
    } = spawner;
    let shares = if shares { libc::CLONE_FILES } else { 0 };
    let sibling_flag = if stub_process.pid == parent.pid {
        0
    } else {
        libc::CLONE_PARENT
    };
    // With CLONE_PARENT the child has the maker's own exit signal.
    let signal = if sibling_flag == 0 {
        process.exit_signal
    } else {
        0
    };
    let mut child = spawn_copy(stub_process, process.pid, shares | sibling_flag, signal)?;
    child.generation = process.generation;
    if shares != 0 {
        child.fd_table = Rc::clone(&stub_process.fd_table);
    }
    Ok(child)
}

/// Makes a copy of a stub process.
fn spawn_copy(original: &StubProcess, pid: i32, flags: i32, signal: i32) -> Result<StubProcess> {
    let mut script = original.script();
    let id = script.add_bytes(&pid.to_ne_bytes())?;
    let how = script.add_words(&[flags as u64, 0, 0, 0, signal as u64, 0, 0, 0, id, 1, 0])?;
    script.push_call(None, SystemCall::new(libc::SYS_clone3, &[how, 88]));
    let results = original.run_script(script)?;
    let made = results.results.first().copied().unwrap_or(-1);
    if made != i64::from(pid) {
        return Err(spawn_error(pid, io::Error::from_raw_os_error(-made as i32)));
    }
    match wait_for_stop(pid, STOP_TIMEOUT)? {
        StopReason::Interrupt | StopReason::Signal(_) => {}
        other => {
            return Err(Error::Refused(format!(
                "unexpected stop of new process {pid}: {other:?}"
            )));
        }
    }
    let fd_channel = Rc::clone(&original.fd_channel);
    let mut stub_process =
        StubProcess::new(pid, original.stub.address, original.generation, fd_channel)?;
    stub_process
        .lowered_credentials
        .clone_from(&original.lowered_credentials);
    stub_process.directory.clone_from(&original.directory);
    stub_process.mappings.clone_from(&original.mappings);
    stub_process.fd_table = Rc::new(RefCell::new(original.fd_table.borrow().clone()));
    Ok(stub_process)
}

/// Ends a temporary stub process, which its parent reaps.
fn end_temporary(parent: &StubProcess, stub_process: &StubProcess) -> Result<()> {
    let mut script = stub_process.script();
    script.add_optional_call(libc::SYS_exit_group, &[0]);
    match stub_process.run_script(script) {
        Err(Error::ProcessEnded(_)) => {}
        other => drop(other?),
    }
    let mut script = parent.script();
    let arguments = [stub_process.pid as u64, 0, libc::__WALL as u64, 0];
    script.add_optional_call(libc::SYS_wait4, &arguments);
    parent.run_script(script).map(drop)
}

/// Makes a child in a session whose leader has ended. A temporary leader exists while the child is made.
pub(super) fn spawn_in_ended_session(
    parent: &StubProcess,
    process: &ProcessLayout,
) -> Result<StubProcess> {
    let leader = spawn_copy(parent, process.session, 0, process.exit_signal)?;
    let mut script = leader.script();
    script.add_call("setsid", libc::SYS_setsid, &[]);
    let made = leader.run_script(script).and_then(|_| {
        let spawner = Spawner {
            stub_process: &leader,
            shares_fd_table: false,
        };
        spawn_child(parent, process, spawner)
    });
    end_temporary(parent, &leader)?;
    made
}

/// Puts a stub process into a process group. If the group's leader has ended, a temporary one exists meanwhile.
fn join_group(stub_process: &StubProcess, group: i32) -> Result<()> {
    let arguments = [0, group as u64];
    let mut script = stub_process.script();
    script.add_optional_call(libc::SYS_setpgid, &arguments);
    if stub_process.run_script(script)?.results[0] == 0 {
        return Ok(());
    }
    let leader = spawn_copy(stub_process, group, 0, 0)?;
    let mut script = leader.script();
    script.add_call("setpgid", libc::SYS_setpgid, &[0, 0]);
    let joined = leader.run_script(script).and_then(|_| {
        let mut script = stub_process.script();
        script.add_call("setpgid", libc::SYS_setpgid, &arguments);
        stub_process.run_script(script)
    });
    end_temporary(stub_process, &leader)?;
    joined.map(drop)
}

/// Puts stub processes into their process groups, leaders first.
pub(super) fn restore_process_groups(
    stub_processes: &[(&ProcessLayout, &StubProcess)],
) -> Result<()> {
    let leaders = stub_processes
        .iter()
        .filter(|(process, _)| process.group == process.pid);
    let others = stub_processes
        .iter()
        .filter(|(process, _)| process.group != process.pid);
    for (process, stub_process) in leaders.chain(others) {
        let mut script = stub_process.script();
        script.add_call("getpgid", libc::SYS_getpgid, &[0]);
        script.add_call("getsid", libc::SYS_getsid, &[0]);
        let results = stub_process.run_script(script)?.results;
        if results[1] != i64::from(process.session) {
            return Err(Error::Refused(format!(
                "session {} of process {} cannot be recreated",
                process.session, process.pid
            )));
        }
        if results[0] != i64::from(process.group) {
            join_group(stub_process, process.group)?;
        }
    }
    Ok(())
}

fn spawn_error(pid: i32, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EEXIST) => Error::Refused(format!("PID {pid} is in use")),
        Some(libc::EINVAL) => Error::Refused(format!("PID {pid} exceeds kernel.pid_max")),
        _ => Error::Refused(format!("process {pid} cannot be created: {error}")),
    }
}

/// Forks with a chosen PID. The child runs `child_main`, which may use only its own memory and system calls.
fn fork_with_pid(pid: i32, child_main: impl FnOnce()) -> Result<i32> {
    clone_with_pid(pid, 0, child_main)
}

fn clone_with_pid(pid: i32, flags: u64, child_main: impl FnOnce()) -> Result<i32> {
    let ids = [pid];
    // SAFETY: plain numbers, for which zero is a value.
    let mut clone_args: libc::clone_args = unsafe { std::mem::zeroed() };
    clone_args.flags = flags;
    // With CLONE_PARENT the child has the parent's own exit signal.
    clone_args.exit_signal = if flags & libc::CLONE_PARENT as u64 == 0 {
        libc::SIGCHLD as u64
    } else {
        0
    };
    clone_args.set_tid = ids.as_ptr().addr() as u64;
    clone_args.set_tid_size = 1;
    // SAFETY: `how` has the kernel's layout and points to an array of one ID; the restorer has one thread, so that the
    // child's copy of its memory is whole.
    let made = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const clone_args,
            size_of_val(&clone_args),
        )
    };
    if made == 0 {
        child_main();
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(1) };
    }
    check_long(made)
        .map(|pid| pid as i32)
        .map_err(|error| spawn_error(pid, error))
}

/// Parameters of a stub process: the address of its stub, and the one descriptor that it keeps.
#[derive(Clone, Copy)]
struct StubArguments {
    stub: u64,
    channel_number: u32,
}

/// Runs in the child: waits for the tracer, makes the stub, and traps in it.
fn enter_stub(
    StubArguments {
        stub,
        channel_number,
    }: StubArguments,
) {
    // SAFETY: plain system calls on the child's own memory; the mapping is new, and holds the stub's code before the
    // jump. Control never returns.
    unsafe {
        while libc::getppid() >= 0 && !IS_TRACED.load(std::sync::atomic::Ordering::Relaxed) {
            let pause = libc::timespec {
                tv_sec: 0,
                tv_nsec: TRACE_POLL_NS,
            };
            libc::nanosleep(&raw const pause, std::ptr::null_mut());
        }
        libc::syscall(libc::SYS_close_range, 0, channel_number - 1, 0);
        libc::syscall(libc::SYS_close_range, channel_number + 1, u32::MAX, 0);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let readable = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = libc::mmap(
            stub as *mut libc::c_void,
            STUB_BYTES as usize,
            readable,
            flags,
            -1,
            0,
        );
        if mapped.addr() as u64 != stub {
            return;
        }
        let code = stub_code();
        std::ptr::copy_nonoverlapping(code.as_ptr(), mapped.cast::<u8>(), code.len());
        libc::mprotect(mapped, PAGE as usize, libc::PROT_READ | libc::PROT_EXEC);
        std::arch::asm!(
            "xor r12d, r12d",
            "xor r13d, r13d",
            "jmp {stub}",
            stub = in(reg) stub,
            options(noreturn)
        );
    }
}

/// Set by the tracer in the child's memory.
static IS_TRACED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

fn set_traced(pid: i32) -> Result<()> {
    let memory = crate::trace::ProcessMemory::open(pid)?;
    memory.write((&raw const IS_TRACED).addr() as u64, &[1])
}

/// Makes a child in the restorer's own session, and a placeholder process for each group.
fn spawn_in_own_session(pid: i32, arguments: StubArguments, groups: &[i32]) -> Result<i32> {
    let own = std::process::id() as i32;
    for group in groups.iter().filter(|group| **group != own) {
        clone_with_pid(*group, 0, idle_forever)?;
        // SAFETY: no pointers are passed.
        let outcome = unsafe { libc::setpgid(*group, *group) };
        check_long(outcome.into()).context(|| format!("creating process group {group}"))?;
    }
    fork_with_pid(pid, || enter_stub(arguments))
}

/// A temporary process with the PID of a session leader outside of the tree. Without that process the session could
/// not have its number.
struct TemporaryLeader<'a> {
    session: i32,
    /// Groups of the session whose leaders are outside of the tree too.
    groups: &'a [i32],
}

impl TemporaryLeader<'_> {
    /// Makes the leader. The leader makes the child and a placeholder for each group, and ends.
    fn spawn_child(self, pid: i32, arguments: StubArguments) -> Result<i32> {
        let [reader, writer] = pipe()?;
        let report = |byte: u8| {
            // SAFETY: the byte is readable and outlives the call.
            unsafe { libc::write(writer, (&raw const byte).cast(), 1) };
        };
        let parent = libc::CLONE_PARENT as u64;
        let leader = fork_with_pid(self.session, || {
            // SAFETY: no pointers are passed.
            unsafe { libc::setsid() };
            let other_groups = self.groups.iter().filter(|group| **group != self.session);
            let placeholders =
                other_groups.map(|group| clone_with_pid(*group, parent, || hold_group(writer)));
            let count = placeholders.fold(0, |count, made| count + u8::from(made.is_ok()));
            let made = clone_with_pid(pid, parent, || enter_stub(arguments));
            report(if made.is_ok() { 0x80 | count } else { 0 });
        });
        // SAFETY: the descriptor is ours and closed once.
        unsafe { libc::close(writer) };
        // The leader and each placeholder write one byte.
        let (mut received, mut flags) = (0, 0u8);
        let mut byte = 0u8;
        // SAFETY: the byte is writable and outlives the call; the descriptor is ours.
        while leader.is_ok() && unsafe { libc::read(reader, (&raw mut byte).cast(), 1) } == 1 {
            received += 1;
            flags |= byte;
            if flags & 0x80 != 0 && received > flags & 0x7f {
                break;
            }
        }
        // SAFETY: the descriptor is ours and closed once; nothing is written through the null pointer.
        unsafe {
            libc::close(reader);
            libc::waitpid(self.session, std::ptr::null_mut(), 0);
        }
        leader?;
        if flags & 0x80 == 0 {
            return Err(Error::Refused(format!("PID {pid} is in use")));
        }
        Ok(pid)
    }
}

/// Runs in a placeholder process, which exists only to keep its process group in existence.
fn hold_group(writer: i32) {
    // SAFETY: plain system calls; the byte is readable and outlives its call.
    unsafe {
        libc::setpgid(0, 0);
        libc::write(writer, (&raw const PLACEHOLDER_BYTE).cast(), 1);
    }
    idle_forever();
}

/// Runs in a process that is idle until it is killed.
fn idle_forever() {
    // SAFETY: plain system calls without pointers.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        loop {
            libc::pause();
        }
    }
}

static PLACEHOLDER_BYTE: u8 = 0;

fn pipe() -> Result<[i32; 2]> {
    let mut pipe = [0; 2];
    // SAFETY: `pipe` has space for two descriptors.
    let outcome = unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) };
    check_long(outcome.into()).context(|| "creating a pipe".to_owned())?;
    Ok(pipe)
}
