//! Creation of processes with the PIDs, sessions and process groups of the originals.

use super::door::Door;
use super::husk::Husk;
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::image::{PAGE, Process};
use crate::process::trace::{Call, STUB_BYTES, Stop, Tracee, stub_code, wait_for};
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

/// Ptrace options: an empty process, its threads and its children die with the restorer.
const OPTIONS: i32 = libc::PTRACE_O_EXITKILL
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEFORK
    | SUSPEND_SECCOMP;
/// `PTRACE_O_SUSPEND_SECCOMP`: the process's own seccomp filters do not block the restorer's calls.
const SUSPEND_SECCOMP: i32 = 1 << 21;
const LIMIT: Duration = Duration::from_secs(10);
/// Interval at which the child checks if it is traced.
const WAIT_NS: libc::c_long = 20_000;

/// Makes the root: a copy of the restorer that has a stub and traps in it. `groups` are process groups without a
/// leader in the tree.
pub(super) fn root(process: &Process, stub: u64, groups: &[i32], door: &Rc<Door>) -> Result<Husk> {
    let born = Born {
        stub,
        door: door.number(),
    };
    let own = std::process::id() as i32;
    let leads = process.session == process.pid;
    let pid = match process.session {
        _ if leads => fork_with_pid(process.pid, || become_husk(born))?,
        // The session's leader was the first process of the donor's namespace, or a process outside of it. Here that
        // leader is the restorer.
        session if session == own => born_beside(process.pid, born, groups)?,
        session => Helper { session, groups }.child(process.pid, born)?,
    };
    Tracee::seize(pid, OPTIONS)?;
    let tracee = Tracee { tid: pid };
    tell_traced(pid)?;
    loop {
        match wait_for(pid, LIMIT)? {
            Stop::Signal(libc::SIGTRAP) => break,
            Stop::Ended(_) => return Err(Error::Gone(pid)),
            Stop::Signal(signal) => tracee.resume(signal)?,
            _ => tracee.resume(0)?,
        }
    }
    let husk = Husk::new(pid, stub, process.generation, Rc::clone(door))?;
    husk.place_door()?;
    if leads {
        let mut script = husk.script();
        script.call("setsid", libc::SYS_setsid, &[]);
        husk.run(script)?;
    }
    Ok(husk)
}

/// The process that makes a child, and the sharing between both.
#[derive(Clone, Copy)]
pub(super) struct Maker<'a> {
    /// The parent, or a child of the parent. The new process inherits its session and process group.
    pub husk: &'a Husk,
    /// True if the new process shares the descriptor table too.
    pub shares: bool,
}

/// Makes a child of an empty process.
pub(super) fn child(parent: &Husk, process: &Process, maker: Maker<'_>) -> Result<Husk> {
    let Maker { husk, shares } = maker;
    let shares = if shares { libc::CLONE_FILES } else { 0 };
    let beside = if husk.pid == parent.pid {
        0
    } else {
        libc::CLONE_PARENT
    };
    // With CLONE_PARENT the child has the maker's own exit signal.
    let signal = if beside == 0 { process.exit_signal } else { 0 };
    let mut born = bear(husk, process.pid, shares | beside, signal)?;
    born.generation = process.generation;
    if shares != 0 {
        born.slots = Rc::clone(&husk.slots);
    }
    Ok(born)
}

/// Makes a copy of an empty process.
fn bear(maker: &Husk, pid: i32, flags: i32, signal: i32) -> Result<Husk> {
    let mut script = maker.script();
    let id = script.bytes(&pid.to_ne_bytes())?;
    let how = script.words(&[flags as u64, 0, 0, 0, signal as u64, 0, 0, 0, id, 1, 0])?;
    script.push(None, Call::new(libc::SYS_clone3, &[how, 88]));
    let ran = maker.run(script)?;
    let made = ran.results.first().copied().unwrap_or(-1);
    if made != i64::from(pid) {
        return Err(taken(pid, io::Error::from_raw_os_error(-made as i32)));
    }
    match wait_for(pid, LIMIT)? {
        Stop::Interrupt | Stop::Signal(_) => {}
        other => {
            return Err(Error::Refused(format!("child {pid} stopped by {other:?}")));
        }
    }
    let door = Rc::clone(&maker.door);
    let mut husk = Husk::new(pid, maker.stub.address, maker.generation, door)?;
    husk.who.clone_from(&maker.who);
    husk.directory.clone_from(&maker.directory);
    husk.mappings.clone_from(&maker.mappings);
    husk.slots = Rc::new(RefCell::new(maker.slots.borrow().clone()));
    Ok(husk)
}

/// Ends a temporary empty process, which its parent reaps.
fn end(parent: &Husk, husk: &Husk) -> Result<()> {
    let mut script = husk.script();
    script.attempt(libc::SYS_exit_group, &[0]);
    match husk.run(script) {
        Err(Error::Gone(_)) => {}
        other => drop(other?),
    }
    let mut script = parent.script();
    let arguments = [husk.pid as u64, 0, libc::__WALL as u64, 0];
    script.attempt(libc::SYS_wait4, &arguments);
    parent.run(script).map(drop)
}

/// Makes a child in a session whose leader has ended. A temporary leader exists while the child is made.
pub(super) fn child_of_ended_session(parent: &Husk, process: &Process) -> Result<Husk> {
    let leader = bear(parent, process.session, 0, process.exit_signal)?;
    let mut script = leader.script();
    script.call("setsid", libc::SYS_setsid, &[]);
    let made = leader.run(script).and_then(|_| {
        let maker = Maker {
            husk: &leader,
            shares: false,
        };
        child(parent, process, maker)
    });
    end(parent, &leader)?;
    made
}

/// Puts an empty process into a process group. If the group's leader has ended, a temporary one exists meanwhile.
fn join_group(husk: &Husk, group: i32) -> Result<()> {
    let arguments = [0, group as u64];
    let mut script = husk.script();
    script.attempt(libc::SYS_setpgid, &arguments);
    if husk.run(script)?.results[0] == 0 {
        return Ok(());
    }
    let leader = bear(husk, group, 0, 0)?;
    let mut script = leader.script();
    script.call("setpgid", libc::SYS_setpgid, &[0, 0]);
    let joined = leader.run(script).and_then(|_| {
        let mut script = husk.script();
        script.call("setpgid", libc::SYS_setpgid, &arguments);
        husk.run(script)
    });
    end(husk, &leader)?;
    joined.map(drop)
}

/// Puts empty processes into their process groups, leaders first.
pub(super) fn groups(husks: &[(&Process, &Husk)]) -> Result<()> {
    let leaders = husks
        .iter()
        .filter(|(process, _)| process.group == process.pid);
    let others = husks
        .iter()
        .filter(|(process, _)| process.group != process.pid);
    for (process, husk) in leaders.chain(others) {
        let mut script = husk.script();
        script.call("getpgid", libc::SYS_getpgid, &[0]);
        script.call("getsid", libc::SYS_getsid, &[0]);
        let results = husk.run(script)?.results;
        if results[1] != i64::from(process.session) {
            return Err(Error::Refused(format!(
                "session {} of process {} cannot be made again",
                process.session, process.pid
            )));
        }
        if results[0] != i64::from(process.group) {
            join_group(husk, process.group)?;
        }
    }
    Ok(())
}

fn taken(pid: i32, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EEXIST) => Error::Refused(format!("PID {pid} is taken")),
        Some(libc::EINVAL) => {
            Error::Refused(format!("PID {pid} is beyond this machine's kernel.pid_max"))
        }
        _ => Error::Refused(format!("process {pid} cannot be made: {error}")),
    }
}

/// Forks with a chosen PID. The child runs `then`, which may use only its own memory and system calls.
fn fork_with_pid(pid: i32, then: impl FnOnce()) -> Result<i32> {
    clone_with_pid(pid, 0, then)
}

fn clone_with_pid(pid: i32, flags: u64, then: impl FnOnce()) -> Result<i32> {
    let ids = [pid];
    // SAFETY: plain numbers, for which zero is a value.
    let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
    how.flags = flags;
    // With CLONE_PARENT the child has the parent's own exit signal.
    how.exit_signal = if flags & libc::CLONE_PARENT as u64 == 0 {
        libc::SIGCHLD as u64
    } else {
        0
    };
    how.set_tid = ids.as_ptr().addr() as u64;
    how.set_tid_size = 1;
    // SAFETY: `how` has the kernel's layout and points to an array of one ID; the restorer has one thread, so that the
    // child's copy of its memory is whole.
    let made = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of_val(&how)) };
    if made == 0 {
        then();
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(1) };
    }
    check_long(made)
        .map(|pid| pid as i32)
        .map_err(|error| taken(pid, error))
}

/// Parameters of an empty process: the address of its stub, and the one descriptor that it keeps.
#[derive(Clone, Copy)]
struct Born {
    stub: u64,
    door: u32,
}

/// Runs in the child: waits for the tracer, makes the stub, and traps in it.
fn become_husk(Born { stub, door }: Born) {
    // SAFETY: plain system calls on the child's own memory; the mapping is new, and holds the stub's code before the
    // jump. Control never returns.
    unsafe {
        while libc::getppid() >= 0 && !IS_TRACED.load(std::sync::atomic::Ordering::Relaxed) {
            let pause = libc::timespec {
                tv_sec: 0,
                tv_nsec: WAIT_NS,
            };
            libc::nanosleep(&raw const pause, std::ptr::null_mut());
        }
        libc::syscall(libc::SYS_close_range, 0, door - 1, 0);
        libc::syscall(libc::SYS_close_range, door + 1, u32::MAX, 0);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let readable = libc::PROT_READ | libc::PROT_WRITE;
        let place = libc::mmap(
            stub as *mut libc::c_void,
            STUB_BYTES as usize,
            readable,
            flags,
            -1,
            0,
        );
        if place.addr() as u64 != stub {
            return;
        }
        let code = stub_code();
        std::ptr::copy_nonoverlapping(code.as_ptr(), place.cast::<u8>(), code.len());
        libc::mprotect(place, PAGE as usize, libc::PROT_READ | libc::PROT_EXEC);
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

fn tell_traced(pid: i32) -> Result<()> {
    let memory = crate::process::trace::Memory::open(pid)?;
    memory.write((&raw const IS_TRACED).addr() as u64, &[1])
}

/// Makes a child in the restorer's own session, and a placeholder process for each group.
fn born_beside(pid: i32, born: Born, groups: &[i32]) -> Result<i32> {
    let own = std::process::id() as i32;
    for group in groups.iter().filter(|group| **group != own) {
        clone_with_pid(*group, 0, rest)?;
        // SAFETY: no pointers are passed.
        let outcome = unsafe { libc::setpgid(*group, *group) };
        check_long(outcome.into()).context(|| format!("process group {group}"))?;
    }
    fork_with_pid(pid, || become_husk(born))
}

/// A temporary process with the PID of a session leader outside of the tree. Without that process the session could
/// not have its number.
struct Helper<'a> {
    session: i32,
    /// Groups of the session whose leaders are outside of the tree too.
    groups: &'a [i32],
}

impl Helper<'_> {
    /// Makes the leader. The leader makes the child and a placeholder for each group, and ends.
    fn child(self, pid: i32, born: Born) -> Result<i32> {
        let [reader, writer] = pipe()?;
        let say = |byte: u8| {
            // SAFETY: the byte is readable and outlives the call.
            unsafe { libc::write(writer, (&raw const byte).cast(), 1) };
        };
        let parent = libc::CLONE_PARENT as u64;
        let leader = fork_with_pid(self.session, || {
            // SAFETY: no pointers are passed.
            unsafe { libc::setsid() };
            let bearers = self.groups.iter().filter(|group| **group != self.session);
            let all = bearers.map(|group| clone_with_pid(*group, parent, || bear_group(writer)));
            let count = all.fold(0, |count, made| count + u8::from(made.is_ok()));
            let made = clone_with_pid(pid, parent, || become_husk(born));
            say(if made.is_ok() { 0x80 | count } else { 0 });
        });
        // SAFETY: the descriptor is ours and closed once.
        unsafe { libc::close(writer) };
        // The leader and each placeholder write one byte.
        let (mut said, mut answer) = (0, 0u8);
        let mut byte = 0u8;
        // SAFETY: the byte is writable and outlives the call; the descriptor is ours.
        while leader.is_ok() && unsafe { libc::read(reader, (&raw mut byte).cast(), 1) } == 1 {
            said += 1;
            answer |= byte;
            if answer & 0x80 != 0 && said > answer & 0x7f {
                break;
            }
        }
        // SAFETY: the descriptor is ours and closed once; nothing is written through the null pointer.
        unsafe {
            libc::close(reader);
            libc::waitpid(self.session, std::ptr::null_mut(), 0);
        }
        leader?;
        if answer & 0x80 == 0 {
            return Err(Error::Refused(format!("PID {pid} is taken")));
        }
        Ok(pid)
    }
}

/// Runs in a placeholder process, which exists only to keep its process group in existence.
fn bear_group(writer: i32) {
    // SAFETY: plain system calls; the byte is readable and outlives its call.
    unsafe {
        libc::setpgid(0, 0);
        libc::write(writer, (&raw const BORN).cast(), 1);
    }
    rest();
}

/// Runs in a process that is idle until it is killed.
fn rest() {
    // SAFETY: plain system calls without pointers.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        loop {
            libc::pause();
        }
    }
}

static BORN: u8 = 0;

fn pipe() -> Result<[i32; 2]> {
    let mut pipe = [0; 2];
    // SAFETY: `pipe` has space for two descriptors.
    let outcome = unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) };
    check_long(outcome.into()).context(|| "a pipe".to_owned())?;
    Ok(pipe)
}
