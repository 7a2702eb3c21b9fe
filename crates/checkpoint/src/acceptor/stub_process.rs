//! A stub process: an empty process that becomes the restored one.

use super::credentials::LoweredCredentials;
use super::fd_channel::FdChannel;
use super::fd_table::FdTable;
use super::foreign_vdso::VdsoPlacement;
use crate::address_ranges::AddressRanges;
use crate::error::{Context, Error, Result};
use crate::image::{MemoryMapping, PageRun};
use crate::trace::{
    CallBatch, ProcessMemory, SCRATCH_BYTES, SCRATCH_OFFSET, Stub, StubExitSignal, SystemCall,
    ThreadCallBatch, ThreadStubSlot, Tracee, call_result, run_batches,
};
use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

/// Size in words of a control message with one descriptor: header, number and padding.
const CONTROL_WORDS: usize = 3;
/// Most open files that are sent before the stub process takes them. A socket's queue holds more.
const SENT_FDS_MAX: usize = 32;

/// Signals in which batches may end. The kernel sends none of them by itself to a stopped process.
const EXIT_SIGNALS: [i32; 4] = [libc::SIGSTKFLT, libc::SIGPWR, libc::SIGXFSZ, libc::SIGURG];

/// A stub process, which becomes the restored one: stopped in its stub, traced, and killed with the restorer.
#[derive(Debug)]
pub(super) struct StubProcess {
    pub pid: i32,
    /// Distinguishes successive processes of the donor that used the same PID.
    pub generation: u64,
    pub stub: Stub,
    pub memory: ProcessMemory,
    /// Mappings made from the image.
    pub mappings: Vec<MemoryMapping>,
    /// Guard pages in these mappings.
    pub guards: AddressRanges,
    /// Addresses of both vDSOs, if the donor's differs from this kernel's.
    pub foreign_vdso: Option<VdsoPlacement>,
    /// TIDs, the first thread's first.
    pub threads: Vec<i32>,
    /// The process's descriptors, which other stub processes may share.
    pub fd_table: Rc<RefCell<FdTable>>,
    /// Socket pair over which the process receives open files.
    pub fd_channel: Rc<FdChannel>,
    /// The process's identity, once it has given up the restorer's rights. `None` if it keeps them until it gets its
    /// state.
    pub lowered_credentials: Option<LoweredCredentials>,
    /// Working directory that the process entered with the restorer's rights.
    pub directory: Option<Vec<u8>>,
}

impl StubProcess {
    /// Creates the record of a process that has just trapped in its stub.
    pub fn new(pid: i32, stub: u64, generation: u64, fd_channel: Rc<FdChannel>) -> Result<Self> {
        Ok(Self {
            pid,
            generation,
            stub: Stub {
                address: stub,
                exit: StubExitSignal {
                    process: pid,
                    thread: pid,
                    signal: EXIT_SIGNALS[0],
                    is_handled: true,
                    returns_without_tracer: false,
                },
            },
            memory: ProcessMemory::open(pid)?.with_high_fd()?,
            mappings: Vec::new(),
            guards: AddressRanges::default(),
            foreign_vdso: None,
            threads: vec![pid],
            fd_table: Rc::default(),
            fd_channel,
            lowered_credentials: None,
            directory: None,
        })
    }

    /// Returns true if a run of pages lies in private memory that the image has mapped here. [`StubProcess::mappings`] is
    /// validated and excludes the stub.
    pub fn contains_run(&self, run: &PageRun) -> bool {
        MemoryMapping::covers(&self.mappings, run)
    }

    /// Chooses a signal outside of this set for the end of batches, if possible.
    pub fn choose_stub_exit_signal(&mut self, signals: u64) {
        let is_unused = |signal: &i32| signals & (1 << (signal - 1)) == 0;
        self.stub.exit.signal = EXIT_SIGNALS
            .into_iter()
            .find(is_unused)
            .unwrap_or(EXIT_SIGNALS[0]);
    }

    fn stub_for(&self, tracee: Tracee) -> Stub {
        let exit = StubExitSignal {
            thread: tracee.tid,
            ..self.stub.exit
        };
        Stub { exit, ..self.stub }
    }

    pub fn first_thread(&self) -> Tracee {
        Tracee { tid: self.pid }
    }

    pub fn script(&self) -> CallScript {
        self.script_at(SCRATCH_OFFSET)
    }

    /// Returns a script whose bytes are placed at this offset in the stub.
    pub fn script_at(&self, scratch: u64) -> CallScript {
        CallScript {
            base: self.stub.address + scratch,
            batch: CallBatch::default(),
            scratch: Vec::new(),
            names: Vec::new(),
            sent_fds: 0,
        }
    }

    /// Sends an open file, which the script's next call receives. Returns the number that it gets: the lowest free
    /// one.
    pub fn pass_fd(&self, script: &mut CallScript, fd: BorrowedFd<'_>) -> Result<u64> {
        let slots = self.fd_table.borrow();
        script.add_receive(&self.fd_channel, slots.channel_number()?, fd)?;
        Ok(u64::from(slots.lowest_free()))
    }

    /// Makes all calls of a script in the first thread. Each call must succeed.
    pub fn run_script(&self, script: CallScript) -> Result<CallResults> {
        self.run_script_in(self.first_thread(), script)
    }

    /// Makes all calls of a script in a thread. Each call must succeed.
    pub fn run_script_in(&self, tracee: Tracee, script: CallScript) -> Result<CallResults> {
        let part = ThreadCallScript {
            stub_process: self,
            tracee,
            script,
            slot: ThreadStubSlot::WHOLE_STUB,
        };
        Ok(run_scripts(vec![part])?.pop().unwrap_or_default())
    }
}

/// A script for one thread of a stub process.
#[derive(Debug)]
pub(super) struct ThreadCallScript<'a> {
    pub stub_process: &'a StubProcess,
    pub tracee: Tracee,
    pub script: CallScript,
    /// The part of the stub that the script uses.
    pub slot: ThreadStubSlot,
}

/// Makes all calls of several scripts at the same time. Each call must succeed. Scripts of one process need
/// slots that do not overlap.
pub(super) fn run_scripts(parts: Vec<ThreadCallScript<'_>>) -> Result<Vec<CallResults>> {
    let (mut jobs, mut call_names) = (Vec::new(), Vec::new());
    for part in parts {
        let (stub_process, script) = (part.stub_process, part.script);
        if script.batch.is_empty() {
            continue;
        }
        stub_process.memory.write(script.base, &script.scratch)?;
        let stub = stub_process.stub_for(part.tracee);
        let job = ThreadCallBatch::new(stub, part.tracee, &stub_process.memory, script.batch);
        jobs.push(job.in_frameless_slot(part.slot));
        call_names.push((stub_process.pid, script.names));
    }
    let mut results = Vec::with_capacity(jobs.len());
    for (outcome, (pid, names)) in run_batches(jobs)?.into_iter().zip(call_names) {
        for (result, name) in outcome.results.iter().zip(&names) {
            if let Some(name) = name {
                call_result(*result).context(|| format!("{name} in process {pid}"))?;
            }
        }
        results.push(CallResults {
            results: outcome.results,
        });
    }
    Ok(results)
}

/// Results of a script's calls.
#[derive(Debug, Default)]
pub(super) struct CallResults {
    pub results: Vec<i64>,
}

/// System calls for a stub process, and the bytes that their arguments point to.
#[derive(Debug)]
pub(super) struct CallScript {
    /// Address at which the bytes are placed.
    base: u64,
    batch: CallBatch,
    scratch: Vec<u8>,
    /// Name of each call that must succeed.
    names: Vec<Option<&'static str>>,
    /// Number of open files sent that the process has not received yet.
    sent_fds: usize,
}

impl CallScript {
    /// Places bytes in memory of the process. Returns their address there.
    pub fn add_bytes(&mut self, bytes: &[u8]) -> Result<u64> {
        let at = self.scratch.len().next_multiple_of(16);
        if (at + bytes.len()) as u64 > SCRATCH_BYTES {
            return Err(Error::Image("arguments of a system call are too large"));
        }
        self.scratch.resize(at, 0);
        self.scratch.extend_from_slice(bytes);
        Ok(self.base + at as u64)
    }

    /// Places words in memory of the process. Returns their address there.
    pub fn add_words(&mut self, words: &[u64]) -> Result<u64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.add_bytes(&bytes)
    }

    /// Places text with a terminating NUL in memory of the process.
    pub fn add_text(&mut self, text: &[u8]) -> Result<u64> {
        self.add_bytes(&[text, &[0]].concat())
    }

    /// Adds a call that must succeed.
    pub fn add_call(&mut self, name: &'static str, number: libc::c_long, arguments: &[u64]) {
        self.push_call(Some(name), SystemCall::new(number, arguments));
    }

    /// Adds a call whose failure is ignored.
    pub fn add_optional_call(&mut self, number: libc::c_long, arguments: &[u64]) {
        self.push_call(None, SystemCall::new(number, arguments));
    }

    /// Sends an open file, and adds the call that receives it from socket `number` of the process.
    pub fn add_receive(
        &mut self,
        fd_channel: &FdChannel,
        number: u32,
        fd: BorrowedFd<'_>,
    ) -> Result<()> {
        let byte = self.add_words(&[0])?;
        let part = self.add_words(&[byte, 1])?;
        let control = self.add_words(&[0; CONTROL_WORDS])?;
        let message = self.add_words(&[0, 0, part, 1, control, CONTROL_WORDS as u64 * 8, 0])?;
        let flags = (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64;
        let arguments = [u64::from(number), message, flags];
        self.add_call("recvmsg", libc::SYS_recvmsg, &arguments);
        self.sent_fds += 1;
        fd_channel.send_fd(fd)
    }

    /// Adds a prepared call.
    pub fn push_call(&mut self, name: Option<&'static str>, call: SystemCall) {
        self.batch.push(call);
        self.names.push(name);
    }

    /// Runs the script if it is full, and begins a new one.
    pub fn flush(&mut self, stub_process: &StubProcess) -> Result<()> {
        if self.is_full() {
            let script = std::mem::replace(self, stub_process.script());
            stub_process.run_script(script)?;
        }
        Ok(())
    }

    /// Returns the number of calls, and of bytes that they point to.
    pub fn size(&self) -> (usize, usize) {
        (self.batch.len(), self.scratch.len())
    }

    /// Returns true if the script must run before more calls are added.
    pub fn is_full(&self) -> bool {
        self.names.len() >= 500
            || self.sent_fds >= SENT_FDS_MAX
            || self.scratch.len() as u64 > SCRATCH_BYTES / 2
    }
}
