//! An empty process, which becomes the restored one.

use super::credentials::Who;
use super::door::Door;
use super::foreign::Placed;
use super::slots::Slots;
use crate::process::donor::value;
use crate::process::error::{Context, Error, Result};
use crate::process::image::{Mapping, Run};
use crate::process::ranges::Ranges;
use crate::process::trace::{
    Batch, Call, Exit, Job, Memory, SCRATCH, SCRATCH_BYTES, Slot, Stub, Tracee, run_together,
};
use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

/// Size in words of a control message with one descriptor: header, number and padding.
const CONTROL_WORDS: usize = 3;
/// Most open files that are sent before the empty process takes them. A socket's queue holds more.
const HANDED_MAX: usize = 32;

/// Signals in which batches may end. The kernel sends none of them by itself to a stopped process.
const SIGNALS: [i32; 4] = [libc::SIGSTKFLT, libc::SIGPWR, libc::SIGXFSZ, libc::SIGURG];

/// The empty process that becomes the restored one: stopped in its stub, traced, and killed with the restorer.
#[derive(Debug)]
pub(super) struct Husk {
    pub pid: i32,
    /// Distinguishes successive processes of the donor that used the same PID.
    pub generation: u64,
    pub stub: Stub,
    pub memory: Memory,
    /// Mappings made from the image.
    pub mappings: Vec<Mapping>,
    /// Guard pages in these mappings.
    pub guards: Ranges,
    /// Addresses of both vDSOs, if the donor's differs from this kernel's.
    pub foreign: Option<Placed>,
    /// TIDs, the first thread's first.
    pub threads: Vec<i32>,
    /// The process's descriptors, which other empty processes may share.
    pub slots: Rc<RefCell<Slots>>,
    /// Socket pair over which the process receives open files.
    pub door: Rc<Door>,
    /// The process's identity, once it has given up the restorer's rights. `None` if it keeps them until it gets its
    /// state.
    pub who: Option<Who>,
    /// Working directory that the process entered with the restorer's rights.
    pub directory: Option<Vec<u8>>,
}

impl Husk {
    /// Creates the record of a process that has just trapped in its stub.
    pub fn new(pid: i32, stub: u64, generation: u64, door: Rc<Door>) -> Result<Self> {
        Ok(Self {
            pid,
            generation,
            stub: Stub {
                address: stub,
                exit: Exit {
                    process: pid,
                    thread: pid,
                    signal: SIGNALS[0],
                    is_heard: true,
                    returns: false,
                },
            },
            memory: Memory::open(pid)?.lift()?,
            mappings: Vec::new(),
            guards: Ranges::default(),
            foreign: None,
            threads: vec![pid],
            slots: Rc::default(),
            door,
            who: None,
            directory: None,
        })
    }

    /// Returns true if a run of pages lies in private memory that the image has mapped here. [`Husk::mappings`] is
    /// validated and excludes the stub.
    pub fn may_hold(&self, run: &Run) -> bool {
        Mapping::cover(&self.mappings, run)
    }

    /// Chooses a signal outside of this set for the end of batches, if possible.
    pub fn avoid(&mut self, signals: u64) {
        let is_free = |signal: &i32| signals & (1 << (signal - 1)) == 0;
        self.stub.exit.signal = SIGNALS.into_iter().find(is_free).unwrap_or(SIGNALS[0]);
    }

    fn stub_of(&self, tracee: Tracee) -> Stub {
        let exit = Exit {
            thread: tracee.tid,
            ..self.stub.exit
        };
        Stub { exit, ..self.stub }
    }

    pub fn first(&self) -> Tracee {
        Tracee { tid: self.pid }
    }

    pub fn script(&self) -> Script {
        self.script_at(SCRATCH)
    }

    /// Returns a script whose bytes are placed at this offset in the stub.
    pub fn script_at(&self, scratch: u64) -> Script {
        Script {
            base: self.stub.address + scratch,
            batch: Batch::default(),
            scratch: Vec::new(),
            names: Vec::new(),
            handed: 0,
        }
    }

    /// Sends an open file, which the script's next call receives. Returns the number that it gets: the lowest free
    /// one.
    pub fn receive(&self, script: &mut Script, fd: BorrowedFd<'_>) -> Result<u64> {
        let slots = self.slots.borrow();
        script.receive(&self.door, slots.door()?, fd)?;
        Ok(u64::from(slots.lowest_free()))
    }

    /// Makes all calls of a script in the first thread. Each call must succeed.
    pub fn run(&self, script: Script) -> Result<Ran> {
        self.run_in(self.first(), script)
    }

    /// Makes all calls of a script in a thread. Each call must succeed.
    pub fn run_in(&self, tracee: Tracee, script: Script) -> Result<Ran> {
        let part = Part {
            husk: self,
            tracee,
            script,
            slot: Slot::WHOLE,
        };
        Ok(run_all(vec![part])?.pop().unwrap_or_default())
    }
}

/// A script for one thread of an empty process.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub husk: &'a Husk,
    pub tracee: Tracee,
    pub script: Script,
    /// The part of the stub that the script uses.
    pub slot: Slot,
}

/// Makes all calls of several scripts at the same time. Each call must succeed. Scripts of one process need
/// slots that do not overlap.
pub(super) fn run_all(parts: Vec<Part<'_>>) -> Result<Vec<Ran>> {
    let (mut jobs, mut named) = (Vec::new(), Vec::new());
    for part in parts {
        let (husk, script) = (part.husk, part.script);
        if script.batch.is_empty() {
            continue;
        }
        husk.memory.write(script.base, &script.scratch)?;
        let stub = husk.stub_of(part.tracee);
        let job = Job::new(stub, part.tracee, &husk.memory, script.batch);
        jobs.push(job.in_husk_slot(part.slot));
        named.push((husk.pid, script.names));
    }
    let mut ran = Vec::with_capacity(jobs.len());
    for (outcome, (pid, names)) in run_together(jobs)?.into_iter().zip(named) {
        for (result, name) in outcome.results.iter().zip(&names) {
            if let Some(name) = name {
                value(*result).context(|| format!("{name} in process {pid}"))?;
            }
        }
        ran.push(Ran {
            results: outcome.results,
        });
    }
    Ok(ran)
}

/// Results of a script's calls.
#[derive(Debug, Default)]
pub(super) struct Ran {
    pub results: Vec<i64>,
}

/// System calls for an empty process, and the bytes that their arguments point to.
#[derive(Debug)]
pub(super) struct Script {
    /// Address at which the bytes are placed.
    base: u64,
    batch: Batch,
    scratch: Vec<u8>,
    /// Name of each call that must succeed.
    names: Vec<Option<&'static str>>,
    /// Number of open files sent that the process has not received yet.
    handed: usize,
}

impl Script {
    /// Places bytes in memory of the process. Returns their address there.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<u64> {
        let at = self.scratch.len().next_multiple_of(16);
        if (at + bytes.len()) as u64 > SCRATCH_BYTES {
            return Err(Error::Image("more bytes than a call may take"));
        }
        self.scratch.resize(at, 0);
        self.scratch.extend_from_slice(bytes);
        Ok(self.base + at as u64)
    }

    /// Places words in memory of the process. Returns their address there.
    pub fn words(&mut self, words: &[u64]) -> Result<u64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }

    /// Places text with a terminating NUL in memory of the process.
    pub fn text(&mut self, text: &[u8]) -> Result<u64> {
        self.bytes(&[text, &[0]].concat())
    }

    /// Adds a call that must succeed.
    pub fn call(&mut self, name: &'static str, number: libc::c_long, arguments: &[u64]) {
        self.push(Some(name), Call::new(number, arguments));
    }

    /// Adds a call whose failure is ignored.
    pub fn attempt(&mut self, number: libc::c_long, arguments: &[u64]) {
        self.push(None, Call::new(number, arguments));
    }

    /// Sends an open file, and adds the call that receives it from socket `number` of the process.
    pub fn receive(&mut self, door: &Door, number: u32, fd: BorrowedFd<'_>) -> Result<()> {
        let byte = self.words(&[0])?;
        let part = self.words(&[byte, 1])?;
        let control = self.words(&[0; CONTROL_WORDS])?;
        let message = self.words(&[0, 0, part, 1, control, CONTROL_WORDS as u64 * 8, 0])?;
        let flags = (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64;
        let arguments = [u64::from(number), message, flags];
        self.call("recvmsg", libc::SYS_recvmsg, &arguments);
        self.handed += 1;
        door.send(fd)
    }

    /// Adds a prepared call.
    pub fn push(&mut self, name: Option<&'static str>, call: Call) {
        self.batch.push(call);
        self.names.push(name);
    }

    /// Runs the script if it is full, and begins a new one.
    pub fn flush(&mut self, husk: &Husk) -> Result<()> {
        if self.is_full() {
            let script = std::mem::replace(self, husk.script());
            husk.run(script)?;
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
            || self.handed >= HANDED_MAX
            || self.scratch.len() as u64 > SCRATCH_BYTES / 2
    }
}
