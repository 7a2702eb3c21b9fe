//! Stub and `userfaultfd` of the tracker in a process that runs on.

use super::chain;
use super::halt::Halted;
use crate::process::error::{Context, Error, Result, unexpected};
use crate::process::image::{ADDRESS_END, PAGE};
use crate::process::procfs::{self, MapLine, Status};
use crate::process::trace::{
    Batch, Call, Exit, Memory, Registers, STUB_BYTES, Stop, Stub, Tracee, pidfd_getfd, pidfd_open,
    stub_code, wait_for,
};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: u64 = 1;
/// Signals without effect unless a program catches them: `SIGURG`, `SIGWINCH`, `SIGCHLD`, `SIGCONT`.
const HARMLESS: [i32; 4] = [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD, libc::SIGCONT];

/// The tracker's objects in a process.
#[derive(Debug)]
pub(super) struct Attachment {
    pub process: OwnedFd,
    pub userfault: OwnedFd,
    pub stub: Stub,
}

impl Attachment {
    /// Puts stub and `userfaultfd` into a stopped process.
    pub fn make(halted: &Halted, maps: &[MapLine]) -> Result<Self> {
        let process = pidfd_open(halted.pid)?;
        let tracee = halted.first();
        let exit = exit_of(halted.pid, halted.pid)?;
        let stub = Stub {
            address: install(tracee, &halted.memory, maps, exit)?,
            exit,
        };
        let made = userfault(&stub, halted, &process);
        if made.is_err() {
            let _ = remove_safely(&stub, halted, maps);
        }
        Ok(Self {
            userfault: made?,
            process,
            stub,
        })
    }

    /// Unmaps the stub from the process.
    pub fn remove(&self, halted: &Halted, maps: &[MapLine]) -> Result<()> {
        remove_safely(&self.stub, halted, maps)
    }

    /// Returns true if the process still has the stub, which `exec` removes.
    pub fn is_in(&self, maps: &[MapLine]) -> bool {
        let (start, end) = (self.stub.address, self.stub.address + STUB_BYTES);
        let ours = |map: &&MapLine| map.start >= start && map.end <= end;
        maps.iter()
            .filter(ours)
            .map(|map| map.end - map.start)
            .sum::<u64>()
            == STUB_BYTES
    }
}

/// Determines how batches end in a thread.
pub(super) fn exit_of(pid: i32, tid: i32) -> Result<Exit> {
    Ok(exit_for(pid, &Status::read(pid, tid)?))
}

/// Determines how batches end in a thread of process `pid` with this procfs status.
pub(super) fn exit_for(pid: i32, status: &Status) -> Exit {
    let [of_thread, of_process, _, _, caught] = status.signals;
    let waiting = of_thread | of_process;
    let outside = |set: u64| {
        let is_outside = |signal: &&i32| set & (1 << (**signal - 1)) == 0;
        HARMLESS.iter().find(is_outside).copied()
    };
    let signal = outside(caught | waiting);
    // If a program catches all of them, the signal reaches the program when its tracer dies. SIGCONT is then
    // excluded, as it would cancel stops.
    let signal = signal.or_else(|| outside(waiting).filter(|signal| *signal != libc::SIGCONT));
    let signal = signal.unwrap_or(HARMLESS[0]);
    Exit {
        process: status.process_ids.last().copied().unwrap_or(pid),
        thread: status.own_id(),
        signal,
        is_heard: caught & (1 << (signal - 1)) != 0,
        returns: true,
    }
}

fn install(tracee: Tracee, memory: &Memory, maps: &[MapLine], exit: Exit) -> Result<u64> {
    let address = gap(maps)?;
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
    make_calls(tracee, memory, maps, exit, &calls)?;
    // Fails if the mapping failed.
    memory.write_any(address, stub_code())?;
    memory.write(address + PAGE, &[0])?;
    Ok(address)
}

/// Makes calls in the first thread of a process that has no stub. The calls' results are not returned.
pub(super) fn make_calls(
    tracee: Tracee,
    memory: &Memory,
    maps: &[MapLine],
    exit: Exit,
    calls: &[(libc::c_long, [u64; 6])],
) -> Result<()> {
    if !chain::run(tracee, memory, maps, exit, calls)? {
        let gadget = call_instruction(memory, maps)?;
        for (number, arguments) in calls {
            call_once(tracee, gadget, *number, arguments)?;
        }
    }
    Ok(())
}

/// Unmaps a stub from a process that may outlive its tracer.
fn remove_safely(stub: &Stub, halted: &Halted, maps: &[MapLine]) -> Result<()> {
    let calls = [(libc::SYS_munmap, [stub.address, STUB_BYTES, 0, 0, 0, 0])];
    if chain::run(halted.first(), &halted.memory, maps, stub.exit, &calls)? {
        return Ok(());
    }
    remove(stub, halted.first(), maps, &halted.memory)
}

/// Unmaps a stub from a process, by an instruction of the process's own.
fn remove(stub: &Stub, tracee: Tracee, maps: &[MapLine], memory: &Memory) -> Result<()> {
    let gadget = call_instruction(memory, maps)?;
    LoneCall::remove(stub, tracee, gadget)?.finish().map(drop)
}

fn userfault(stub: &Stub, halted: &Halted, process: &OwnedFd) -> Result<OwnedFd> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | USER_MODE_ONLY;
    let number = run_one(stub, halted, Call::new(libc::SYS_userfaultfd, &[flags]))
        .context(|| "making a userfaultfd in the process".to_owned())?;
    let copy = pidfd_getfd(process.as_fd(), number as i32);
    run_one(stub, halted, Call::new(libc::SYS_close, &[number as u64]))
        .context(|| "closing the userfaultfd in the process".to_owned())?;
    let userfault = copy?;
    super::userfault::start(userfault.as_fd())?;
    Ok(userfault)
}

fn run_one(stub: &Stub, halted: &Halted, call: Call) -> std::io::Result<i64> {
    let mut batch = Batch::default();
    batch.push(call);
    let outcome = stub
        .run(halted.first(), &halted.memory, batch)
        .map_err(std::io::Error::other)?;
    value(outcome.results.first().copied().unwrap_or(-1))
}

/// Converts the result of a system call as the kernel returns it.
pub(crate) fn value(result: i64) -> std::io::Result<i64> {
    if (-4095..0).contains(&result) {
        return Err(std::io::Error::from_raw_os_error(-result as i32));
    }
    Ok(result)
}

/// Makes one call without a stub, by an instruction that the process already has.
fn call_once(tracee: Tracee, gadget: u64, number: libc::c_long, arguments: &[u64]) -> Result<i64> {
    LoneCall::begin(tracee, gadget, number, arguments)?.finish()
}

/// A call that a thread makes without a stub.
#[derive(Debug)]
pub(crate) struct LoneCall {
    tracee: Tracee,
    number: libc::c_long,
    before: Registers,
    mask: u64,
}

impl LoneCall {
    /// Begins to unmap a stub from a process, by an instruction `syscall` of the process's own.
    pub fn remove(stub: &Stub, tracee: Tracee, gadget: u64) -> Result<Self> {
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
        let mask = tracee.mask()?;
        tracee.set_mask(!0)?;
        // Not by a single step: it is reported by `SIGTRAP`, and the kernel would reset the program's handler of that
        // signal.
        tracee.resume_to_call()?;
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
        let mut next = || -> Result<Option<Stop>> {
            match wait_for(tracee.tid, Duration::from_secs(10))? {
                Stop::Ended(_) => Err(Error::Gone(tracee.tid)),
                // Sent again below, to wait until the thread runs on.
                Stop::Signal(libc::SIGSTOP) => {
                    stopped = true;
                    Ok(None)
                }
                stop => Ok(Some(stop)),
            }
        };
        let mut borders = 0;
        let mut ended = None;
        while borders < 2 && ended.is_none() {
            match next()? {
                // All signals are blocked, so a SIGTRAP marks the border of the call.
                Some(Stop::Call | Stop::Signal(libc::SIGTRAP)) => borders += 1,
                None | Some(Stop::Group(_) | Stop::Interrupt) => {}
                other => ended = other,
            }
            if borders < 2 && ended.is_none() {
                tracee.resume_to_call()?;
            }
        }
        let result = tracee.registers()?.rax as i64;
        tracee.set_registers(&self.before)?;
        if self.before.in_call() {
            // The kernel restarts an interrupted call only where a thread checks for signals, so pass such a point.
            tracee.interrupt()?;
            tracee.resume(0)?;
            while !matches!(next()?, Some(Stop::Interrupt | Stop::Group(_))) {
                tracee.resume(0)?;
            }
        }
        tracee.set_mask(self.mask)?;
        if stopped {
            tracee.send(libc::SIGSTOP);
        }
        if let Some(stop) = ended {
            return Err(unexpected(&format!("one call ended in {stop:?}")));
        }
        let number = self.number;
        value(result).context(|| format!("call {number} in process {}", tracee.tid))
    }
}

/// Returns the address of an instruction `syscall` in the process.
pub(crate) fn call_instruction(memory: &Memory, maps: &[MapLine]) -> Result<u64> {
    let vdso_first = |map: &&MapLine| (map.name != b"[vdso]", map.start);
    let mut executable: Vec<&MapLine> = maps
        .iter()
        .filter(|map| map.protection & libc::PROT_EXEC != 0 && map.end <= ADDRESS_END)
        .collect();
    executable.sort_by_key(vdso_first);
    for map in executable {
        if let Some(at) = call_instruction_in(memory, map.start, map.end) {
            return Ok(at);
        }
    }
    Err(unexpected("no system call instruction in the process"))
}

/// Returns the address of an instruction `syscall` in a range, if the range can be read.
pub(crate) fn call_instruction_in(memory: &Memory, start: u64, end: u64) -> Option<u64> {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let mut bytes = vec![0; (end - start).min(16 << 20) as usize];
    memory.read(start, &mut bytes).ok()?;
    let at = bytes.windows(2).position(|pair| pair == SYSCALL)?;
    Some(start + at as u64)
}

/// Returns a free range for the stub, far from addresses that the kernel assigns by itself.
fn gap(maps: &[MapLine]) -> Result<u64> {
    super::gap::find(
        &maps
            .iter()
            .map(|map| (map.start, map.end))
            .collect::<Vec<_>>(),
        STUB_BYTES,
    )
    .ok_or_else(|| unexpected("no free addresses in the process"))
}

/// Returns the process's own mappings, without the stub's.
pub(super) fn own_maps(
    pid: i32,
    attachment: Option<&Attachment>,
    advice: bool,
) -> Result<Vec<MapLine>> {
    let maps = if advice {
        procfs::mappings_with_advice(pid)?
    } else {
        procfs::mappings(pid)?
    };
    without_stub(maps, attachment)
}

/// Removes the stub's mappings from mappings that were read already.
pub(super) fn without_stub(
    mut maps: Vec<MapLine>,
    attachment: Option<&Attachment>,
) -> Result<Vec<MapLine>> {
    if let Some(attachment) = attachment {
        // During `exec` the known memory exists for a moment longer, while these mappings are the next program's.
        if !attachment.is_in(&maps) {
            return Err(unexpected("mappings of a process that calls exec"));
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

    #[test]
    fn mappings_of_the_next_program_are_not_taken_for_those_of_this() {
        let mut command = Command::new("sh");
        command.args(["-c", "read go; exec sleep 100"]);
        let mut child = command.stdin(Stdio::piped()).spawn().expect("a shell");
        let pid = child.id() as i32;
        let halted = Halted::stop(pid).expect("it stops");
        let lines = own_maps(pid, None, false).expect("its mappings");
        let attachment = Attachment::make(&halted, &lines).expect("a stub");
        halted.thaw().expect("it goes on");
        own_maps(pid, Some(&attachment), false).expect("its mappings");
        let mut pipe = child.stdin.take().expect("a pipe");
        pipe.write_all(b"go\n").expect("it reads");
        let name = || std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("it lives");
        while name().trim() != "sleep" {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(own_maps(pid, Some(&attachment), false).is_err());
        child.kill().expect("it lives");
        child.wait().expect("it ends");
    }
}
