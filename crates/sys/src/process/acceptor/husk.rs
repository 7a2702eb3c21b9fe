//! A process in the making.

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

/// A control message with one descriptor: header, number and padding.
const CONTROL_WORDS: usize = 3;
/// Most open files that are sent before a husk takes them: fewer than a socket holds.
const HANDED_MAX: usize = 32;

/// Signals in which batches may end: the kernel sends none of them by itself to a process that stands still.
const SIGNALS: [i32; 4] = [libc::SIGSTKFLT, libc::SIGPWR, libc::SIGXFSZ, libc::SIGURG];

/// A process that stands still in its stub, traced, and dies with the restorer.
#[derive(Debug)]
pub(super) struct Husk {
    pub pid: i32,
    /// Which process of the donor's this is, if PIDs are used again.
    pub generation: u64,
    pub stub: Stub,
    pub memory: Memory,
    /// What is mapped.
    pub mappings: Vec<Mapping>,
    /// Guard pages in them.
    pub guards: Ranges,
    /// The code of two kernels, if the original's is another.
    pub foreign: Option<Placed>,
    /// Threads, the first one first.
    pub threads: Vec<i32>,
    /// Its descriptors, which other husks may share.
    pub slots: Rc<RefCell<Slots>>,
    /// How it gets them.
    pub door: Rc<Door>,
    /// Who it is, if it gave up the restorer's rights; else it has them until it gets its state.
    pub who: Option<Who>,
    /// The working directory that it got while it had the restorer's rights.
    pub directory: Option<Vec<u8>>,
}

impl Husk {
    /// A process that has just trapped in its stub.
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

    /// Whether a run of pages lies in private memory that the image has mapped here: what [`Husk::mappings`] has is validated,
    /// and free of the stub.
    pub fn may_hold(&self, run: &Run) -> bool {
        Mapping::cover(&self.mappings, run)
    }

    /// Batches end in none of these signals from now on, as far as that can be.
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

    /// A script whose bytes go to this place in the stub.
    pub fn script_at(&self, scratch: u64) -> Script {
        Script {
            base: self.stub.address + scratch,
            batch: Batch::default(),
            scratch: Vec::new(),
            names: Vec::new(),
            handed: 0,
        }
    }

    /// Hands an open file over, which the script's next call takes under the number that this gives: the lowest free one.
    pub fn receive(&self, script: &mut Script, fd: BorrowedFd<'_>) -> Result<u64> {
        let slots = self.slots.borrow();
        script.receive(&self.door, slots.door()?, fd)?;
        Ok(u64::from(slots.lowest_free()))
    }

    /// Makes all calls of a script in the first thread; each must succeed.
    pub fn run(&self, script: Script) -> Result<Ran> {
        self.run_in(self.first(), script)
    }

    /// Makes all calls of a script in a thread; each must succeed.
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

/// A script for a thread of a husk.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub husk: &'a Husk,
    pub tracee: Tracee,
    pub script: Script,
    /// Where in the stub it is.
    pub slot: Slot,
}

/// Makes all calls of several scripts at the same time; each must succeed. Scripts of one husk are in slots that do not overlap.
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

/// What a script gave.
#[derive(Debug, Default)]
pub(super) struct Ran {
    pub results: Vec<i64>,
}

/// Calls for a husk, with the bytes they point to.
#[derive(Debug)]
pub(super) struct Script {
    /// Where its bytes go.
    base: u64,
    batch: Batch,
    scratch: Vec<u8>,
    /// What each call is, where it must succeed.
    names: Vec<Option<&'static str>>,
    /// Open files that are on their way to the husk.
    handed: usize,
}

impl Script {
    /// Puts bytes where the husk can read them.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<u64> {
        let at = self.scratch.len().next_multiple_of(16);
        if (at + bytes.len()) as u64 > SCRATCH_BYTES {
            return Err(Error::Image("more bytes than a call may take"));
        }
        self.scratch.resize(at, 0);
        self.scratch.extend_from_slice(bytes);
        Ok(self.base + at as u64)
    }

    /// Puts words where the husk can read them.
    pub fn words(&mut self, words: &[u64]) -> Result<u64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }

    /// Text with a NUL behind it.
    pub fn text(&mut self, text: &[u8]) -> Result<u64> {
        self.bytes(&[text, &[0]].concat())
    }

    /// A call that must succeed.
    pub fn call(&mut self, name: &'static str, number: libc::c_long, arguments: &[u64]) {
        self.push(Some(name), Call::new(number, arguments));
    }

    /// A call whose failure is of no matter.
    pub fn attempt(&mut self, number: libc::c_long, arguments: &[u64]) {
        self.push(None, Call::new(number, arguments));
    }

    /// Hands an open file over, and takes it from the husk's end of the door, which is `number` there.
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

    /// A prepared call.
    pub fn push(&mut self, name: Option<&'static str>, call: Call) {
        self.batch.push(call);
        self.names.push(name);
    }

    /// Runs it before more is added, if it is time, and begins anew.
    pub fn flush(&mut self, husk: &Husk) -> Result<()> {
        if self.is_full() {
            let script = std::mem::replace(self, husk.script());
            husk.run(script)?;
        }
        Ok(())
    }

    /// How many calls it has, and how many bytes they point to.
    pub fn size(&self) -> (usize, usize) {
        (self.batch.len(), self.scratch.len())
    }

    /// Whether it is time to run it before more is added.
    pub fn is_full(&self) -> bool {
        self.names.len() >= 500
            || self.handed >= HANDED_MAX
            || self.scratch.len() as u64 > SCRATCH_BYTES / 2
    }
}
