//! Stub and `userfaultfd` of the tracker in a process that runs on.

use super::halt::HaltedProcess;
use super::sigreturn_chain;
use crate::error::{Context, Error, Result, unexpected_text};
use crate::image::{ADDRESS_END, PAGE};
use crate::procfs::{self, MapLine, ProcStatus};
use crate::trace::{
    ProcessMemory, Registers, STUB_BYTES, StopReason, Stub, StubExitSignal, SystemCall, Tracee,
    call_result, pidfd_getfd, pidfd_open, stub_code, wait_for_stop,
};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// `UFFD_USER_MODE_ONLY`.
const UFFD_USER_MODE_ONLY: u64 = 1;
/// Signals without effect unless a program catches them: `SIGURG`, `SIGWINCH`, `SIGCHLD`, `SIGCONT`.
const HARMLESS_SIGNALS: [i32; 4] = [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD, libc::SIGCONT];

/// The tracker's objects in a process.
#[derive(Debug)]
pub(super) struct TrackerAttachment {
    pub process: OwnedFd,
    pub userfault: OwnedFd,
    pub stub: Stub,
}

impl TrackerAttachment {
    /// Puts stub and `userfaultfd` into a stopped process.
    pub fn attach(halted: &HaltedProcess, maps: &[MapLine]) -> Result<Self> {
        let process = pidfd_open(halted.pid)?;
        let tracee = halted.first_thread();
        let exit = read_stub_exit_signal(halted.pid, halted.pid)?;
        let stub = Stub {
            address: install_stub(tracee, &halted.memory, maps, exit)?,
            exit,
        };
        let userfault = open_userfaultfd(&stub, halted, &process);
        if userfault.is_err() {
            let _ = remove_stub(&stub, halted, maps);
        }
        Ok(Self {
            userfault: userfault?,
            process,
            stub,
        })
    }

    /// Unmaps the stub from the process.
    pub fn remove_stub(&self, halted: &HaltedProcess, maps: &[MapLine]) -> Result<()> {
        remove_stub(&self.stub, halted, maps)
    }

    /// Returns true if the process still has the stub, which `exec` removes.
    pub fn has_stub(&self, maps: &[MapLine]) -> bool {
        let (start, end) = (self.stub.address, self.stub.address + STUB_BYTES);
        let is_stub = |map: &&MapLine| map.start >= start && map.end <= end;
        maps.iter()
            .filter(is_stub)
            .map(|map| map.end - map.start)
            .sum::<u64>()
            == STUB_BYTES
    }
}

/// Determines how a thread leaves the stub after a batch.
pub(super) fn read_stub_exit_signal(pid: i32, tid: i32) -> Result<StubExitSignal> {
    Ok(stub_exit_signal(pid, &ProcStatus::read(pid, tid)?))
}

/// Determines how a thread leaves the stub after a batch, for a thread of process `pid` with this procfs status.
pub(super) fn stub_exit_signal(pid: i32, status: &ProcStatus) -> StubExitSignal {
    let [of_thread, of_process, _, _, caught] = status.signals;
    let pending = of_thread | of_process;
    let harmless_outside = |set: u64| {
        let is_outside = |signal: &&i32| set & (1 << (**signal - 1)) == 0;
        HARMLESS_SIGNALS.iter().find(is_outside).copied()
    };
    let signal = harmless_outside(caught | pending);
    // If a program catches all of them, the signal reaches the program when its tracer dies. SIGCONT is then
    // excluded, as it would cancel stops.
    let signal =
        signal.or_else(|| harmless_outside(pending).filter(|signal| *signal != libc::SIGCONT));
    let signal = signal.unwrap_or(HARMLESS_SIGNALS[0]);
    StubExitSignal {
        process: status.process_ids.last().copied().unwrap_or(pid),
        thread: status.innermost_id(),
        signal,
        is_handled: caught & (1 << (signal - 1)) != 0,
        returns_without_tracer: true,
    }
}

fn install_stub(
    tracee: Tracee,
    memory: &ProcessMemory,
    maps: &[MapLine],
    exit: StubExitSignal,
) -> Result<u64> {
    let address = find_stub_address(maps)?;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let executable = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let writable = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let map = |at: u64, bytes: u64, protection: u64| [at, bytes, protection, flags, u64::MAX, 0];
    let calls = [
        (libc::SYS_mmap, map(address, PAGE, executable)),
        (
            libc::SYS_mmap,
            map(address + PAGE, STUB_BYTES - PAGE, writable),
        ),
        // A child must not inherit the mapping, as the tracker could not remove it there.
        (
            libc::SYS_madvise,
            [address, STUB_BYTES, libc::MADV_DONTFORK as u64, 0, 0, 0],
        ),
    ];
    make_stubless_calls(tracee, memory, maps, exit, &calls)?;
    // Fails if the mapping failed.
    memory.write_protected(address, stub_code())?;
    memory.write(address + PAGE, &[0])?;
    Ok(address)
}

/// Makes calls in the first thread of a process that has no stub. The calls' results are not returned.
pub(super) fn make_stubless_calls(
    tracee: Tracee,
    memory: &ProcessMemory,
    maps: &[MapLine],
    exit: StubExitSignal,
    calls: &[(libc::c_long, [u64; 6])],
) -> Result<()> {
    if !sigreturn_chain::run(tracee, memory, maps, exit, calls)? {
        let gadget = find_syscall_instruction(memory, maps)?;
        for (number, arguments) in calls {
            call_without_stub(tracee, gadget, *number, arguments)?;
        }
    }
    Ok(())
}

/// Unmaps a stub from a process that may outlive its tracer.
fn remove_stub(stub: &Stub, halted: &HaltedProcess, maps: &[MapLine]) -> Result<()> {
    let calls = [(libc::SYS_munmap, [stub.address, STUB_BYTES, 0, 0, 0, 0])];
    if sigreturn_chain::run(
        halted.first_thread(),
        &halted.memory,
        maps,
        stub.exit,
        &calls,
    )? {
        return Ok(());
    }
    remove_stub_directly(stub, halted.first_thread(), maps, &halted.memory)
}

/// Unmaps a stub from a process, by an instruction of the process's own.
fn remove_stub_directly(
    stub: &Stub,
    tracee: Tracee,
    maps: &[MapLine],
    memory: &ProcessMemory,
) -> Result<()> {
    let gadget = find_syscall_instruction(memory, maps)?;
    StublessCall::begin_stub_removal(stub, tracee, gadget)?
        .finish()
        .map(drop)
}

/// Opens a `userfaultfd` for the memory of a stopped process. The process does not keep a descriptor, also if this thread
/// dies meanwhile.
fn open_userfaultfd(stub: &Stub, halted: &HaltedProcess, process: &OwnedFd) -> Result<OwnedFd> {
    let copy = |number| pidfd_getfd(process.as_fd(), number);
    let copied = stub.with_open_file(
        halted.first_thread(),
        &halted.memory,
        userfaultfd_call(),
        copy,
    )?;
    let userfault = copied.context(|| "opening a userfaultfd in the process".to_owned())??;
    super::write_tracking::enable_write_protection(userfault.as_fd())?;
    Ok(userfault)
}

fn userfaultfd_call() -> SystemCall {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | UFFD_USER_MODE_ONLY;
    SystemCall::new(libc::SYS_userfaultfd, &[flags])
}

/// Makes one call without a stub, by an instruction that the process already has.
fn call_without_stub(
    tracee: Tracee,
    gadget: u64,
    number: libc::c_long,
    arguments: &[u64],
) -> Result<i64> {
    StublessCall::begin(tracee, gadget, number, arguments)?.finish()
}

/// A call that a thread makes without a stub.
#[derive(Debug)]
pub(crate) struct StublessCall {
    tracee: Tracee,
    number: libc::c_long,
    before: Registers,
    mask: u64,
}

impl StublessCall {
    /// Begins to unmap a stub from a process, by an instruction `syscall` of the process's own.
    pub fn begin_stub_removal(stub: &Stub, tracee: Tracee, gadget: u64) -> Result<Self> {
        let arguments = [stub.address, STUB_BYTES];
        Self::begin(tracee, gadget, libc::SYS_munmap, &arguments)
    }

    fn begin(tracee: Tracee, gadget: u64, number: libc::c_long, arguments: &[u64]) -> Result<Self> {
        let before = tracee.registers()?;
        let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
        tracee.set_registers(&Registers {
            rip: gadget,
            rax: number as u64,
            orig_rax: u64::MAX,
            rdi: argument(0),
            rsi: argument(1),
            rdx: argument(2),
            r10: argument(3),
            r8: argument(4),
            r9: argument(5),
            ..before
        })?;
        let mask = tracee.signal_mask()?;
        tracee.set_signal_mask(!0)?;
        // Not by a single step: it is reported by `SIGTRAP`, and the kernel would reset the program's handler of that
        // signal.
        tracee.resume_to_syscall()?;
        Ok(Self {
            tracee,
            number,
            before,
            mask,
        })
    }

    /// Waits for the call's end, restores the thread, and returns the result.
    pub fn finish(self) -> Result<i64> {
        let tracee = self.tracee;
        let mut stopped = false;
        let mut next = || -> Result<Option<StopReason>> {
            match wait_for_stop(tracee.tid, Duration::from_secs(10))? {
                StopReason::Ended(_) => Err(Error::ProcessEnded(tracee.tid)),
                // Sent again below, to wait until the thread runs on.
                StopReason::Signal(libc::SIGSTOP) => {
                    stopped = true;
                    Ok(None)
                }
                stop => Ok(Some(stop)),
            }
        };
        let mut call_stops = 0;
        let mut unexpected_stop = None;
        while call_stops < 2 && unexpected_stop.is_none() {
            match next()? {
                // All signals are blocked, so a SIGTRAP marks the border of the call.
                Some(StopReason::SystemCall | StopReason::Signal(libc::SIGTRAP)) => call_stops += 1,
                None | Some(StopReason::Group(_) | StopReason::Interrupt) => {}
                other => unexpected_stop = other,
            }
            if call_stops < 2 && unexpected_stop.is_none() {
                tracee.resume_to_syscall()?;
            }
        }
        let result = tracee.registers()?.rax as i64;
        tracee.set_registers(&self.before)?;
        if self.before.is_in_call() {
            // The kernel restarts an interrupted call only where a thread checks for signals, so pass such a point.
            tracee.interrupt()?;
            tracee.resume(0)?;
            while !matches!(next()?, Some(StopReason::Interrupt | StopReason::Group(_))) {
                tracee.resume(0)?;
            }
        }
        tracee.set_signal_mask(self.mask)?;
        if stopped {
            tracee.send_signal(libc::SIGSTOP);
        }
        if let Some(stop) = unexpected_stop {
            return Err(unexpected_text(&format!(
                "unexpected stop after a system call: {stop:?}"
            )));
        }
        let number = self.number;
        call_result(result).context(|| format!("system call {number} in process {}", tracee.tid))
    }
}

/// Returns the address of an instruction `syscall` in the process.
pub(crate) fn find_syscall_instruction(memory: &ProcessMemory, maps: &[MapLine]) -> Result<u64> {
    let vdso_first = |map: &&MapLine| (map.name != b"[vdso]", map.start);
    let mut executable: Vec<&MapLine> = maps
        .iter()
        .filter(|map| map.protection & libc::PROT_EXEC != 0 && map.end <= ADDRESS_END)
        .collect();
    executable.sort_by_key(vdso_first);
    for map in executable {
        if let Some(at) = find_syscall_instruction_in(memory, map.start, map.end) {
            return Ok(at);
        }
    }
    Err(unexpected_text("no system call instruction in the process"))
}

/// Returns the address of an instruction `syscall` in a range, if the range can be read.
pub(crate) fn find_syscall_instruction_in(
    memory: &ProcessMemory,
    start: u64,
    end: u64,
) -> Option<u64> {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let mut bytes = vec![0; (end - start).min(16 << 20) as usize];
    memory.read(start, &mut bytes).ok()?;
    let at = bytes.windows(2).position(|pair| pair == SYSCALL)?;
    Some(start + at as u64)
}

/// Returns a free range for the stub, far from addresses that the kernel assigns by itself.
fn find_stub_address(maps: &[MapLine]) -> Result<u64> {
    super::free_range::find(
        &maps
            .iter()
            .map(|map| (map.start, map.end))
            .collect::<Vec<_>>(),
        STUB_BYTES,
    )
    .ok_or_else(|| unexpected_text("no free address range in the process"))
}

/// Returns the process's own mappings, without the stub's.
pub(super) fn read_own_mappings(
    pid: i32,
    attachment: Option<&TrackerAttachment>,
    advice: bool,
) -> Result<Vec<MapLine>> {
    let maps = if advice {
        procfs::mappings_with_vm_flags(pid)?
    } else {
        procfs::mappings(pid)?
    };
    without_stub(maps, attachment)
}

/// Removes the stub's mappings from mappings that were read already.
pub(super) fn without_stub(
    mut maps: Vec<MapLine>,
    attachment: Option<&TrackerAttachment>,
) -> Result<Vec<MapLine>> {
    if let Some(attachment) = attachment {
        // During `exec` the known memory exists for a moment longer, while these mappings are the next program's.
        if !attachment.has_stub(&maps) {
            return Err(unexpected_text(
                "mappings changed: the process is calling exec",
            ));
        }
        let start = attachment.stub.address;
        maps.retain(|map| map.end <= start || map.start >= start + STUB_BYTES);
    }
    Ok(maps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// Returns true if a process has a descriptor of a `userfaultfd`.
    fn has_userfaultfd(pid: i32) -> bool {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it lives");
        let mut targets = entries.map(|entry| std::fs::read_link(entry.expect("a name").path()));
        let is_userfault =
            |target: &std::path::Path| target.as_os_str() == "anon_inode:[userfaultfd]";
        targets.any(|target| target.is_ok_and(|target| is_userfault(&target)))
    }

    #[test]
    fn process_keeps_no_userfaultfd_if_the_tracer_dies_meanwhile() {
        let mut child = Command::new("sleep").arg("100").spawn().expect("a process");
        let pid = child.id() as i32;
        let (opened, is_opened) = std::sync::mpsc::channel();
        // Not joined: the thread ends without unwinding, as if its process had been killed.
        std::thread::spawn(move || {
            let halted = HaltedProcess::stop(pid).expect("it stops");
            let maps = read_own_mappings(pid, None, false).expect("its mappings");
            let (tracee, memory) = (halted.first_thread(), &halted.memory);
            let exit = read_stub_exit_signal(pid, pid).expect("a signal");
            let address = install_stub(tracee, memory, &maps, exit).expect("a stub");
            let stub = Stub { address, exit };
            let die = |_| {
                opened.send(has_userfaultfd(pid)).expect("the test waits");
                // SAFETY: nobody joins the thread, and it holds no lock.
                unsafe { libc::syscall(libc::SYS_exit, 0) };
            };
            let _ = stub.with_open_file(tracee, memory, userfaultfd_call(), die);
        });
        let was_open = is_opened.recv().expect("the thread has come so far");
        assert!(was_open, "the process had the descriptor for a moment");
        while has_userfaultfd(pid) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        assert!(status.contains("TracerPid:\t0"), "{status}");
        child.kill().expect("it lives");
        child.wait().expect("it ends");
    }

    #[test]
    fn mappings_after_exec_are_rejected() {
        let mut command = Command::new("sh");
        command.args(["-c", "read go; exec sleep 100"]);
        let mut child = command.stdin(Stdio::piped()).spawn().expect("a shell");
        let pid = child.id() as i32;
        let halted = HaltedProcess::stop(pid).expect("it stops");
        let lines = read_own_mappings(pid, None, false).expect("its mappings");
        let attachment = TrackerAttachment::attach(&halted, &lines).expect("a stub");
        halted.thaw().expect("it goes on");
        read_own_mappings(pid, Some(&attachment), false).expect("its mappings");
        let mut pipe = child.stdin.take().expect("a pipe");
        pipe.write_all(b"go\n").expect("it reads");
        let name = || std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("it lives");
        while name().trim() != "sleep" {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(read_own_mappings(pid, Some(&attachment), false).is_err());
        child.kill().expect("it lives");
        child.wait().expect("it ends");
    }
}
