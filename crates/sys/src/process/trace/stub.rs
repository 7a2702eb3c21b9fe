//! A stub: a few pages in another process from which it makes system calls for the tracer, many in one stop.
//!
//! A batch ends in a signal that the thread sends to itself. The tracer sees the signal, however the process
//! handles it. No batch ends in a trap: the kernel resets the handler of `SIGTRAP` in a thread that traps while it
//! blocks or ignores that signal. If the tracer has died at the donor, the code returns the lent priority and calls
//! `rt_sigreturn`, which restores the thread's previous state. So a tracer may die at any moment.

use super::super::error::{Error, Result, unexpected};
use super::registers::NO_CALL;
use super::sigframe;
use super::{Memory, Registers, Stop, Tracee, wait_for};
use crate::priority::{Loan, ORDINARY, is_ordinary, set_timer_slack_ns, share_out, timer_slack_ns};
use std::time::Duration;

/// Size of a stub in bytes: code, table of calls, frame, scratch area.
pub(crate) const STUB_BYTES: u64 = 0x20000;
const TABLE: u64 = 0x1000;
/// Most calls in the table. The entry behind them is for the call of a thread that has lost its tracer.
const TABLE_CALLS: usize = 511;
const FRAME: u64 = 0x9000;
/// Offset in the stub of the scratch area, which calls may read and write.
pub(crate) const SCRATCH: u64 = 0xe000;
/// Size of the scratch area in bytes.
pub(crate) const SCRATCH_BYTES: u64 = STUB_BYTES - SCRATCH;
/// Bytes at the end of the scratch area for the scheduling parameters with which priority is returned.
const PARAMETERS_BYTES: u64 = 8;
/// Size of a table entry in bytes: number, six arguments, result.
const CALL_BYTES: usize = 64;
/// Time limit of one batch. The kernel makes all of the calls without waiting for other processes.
const LIMIT: Duration = Duration::from_secs(30);

/// Flag: keep the result for later calls.
const KEEP: u64 = 1 << 32;
/// Flag: pass the kept result as the first argument.
const KEPT_FIRST: u64 = 1 << 34;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global holdfast_stub_begin, holdfast_stub_done, holdfast_stub_end",
    "holdfast_stub_begin:",
    "2: test r12, r12",
    "jz 6f",
    "mov rax, [rbx]",
    "mov rdi, [rbx + 8]",
    "mov rsi, [rbx + 16]",
    "mov rdx, [rbx + 24]",
    "mov r10, [rbx + 32]",
    "mov r8, [rbx + 40]",
    "mov r9, [rbx + 48]",
    "bt rax, 34",
    "jnc 3f",
    "mov rdi, rbp",
    "3: mov eax, eax",
    "syscall",
    "mov [rbx + 56], rax",
    "mov rcx, [rbx]",
    "bt rcx, 32",
    "jnc 5f",
    "mov rbp, rax",
    "5: add rbx, 64",
    "dec r12",
    "jmp 2b",
    "6: test r13, r13",
    "jz 7f",
    "mov rdi, r13",
    "mov rsi, r14",
    "mov rdx, r15",
    "mov eax, 234",
    "syscall",
    "holdfast_stub_done:",
    "mov rax, [rbx]",
    "test rax, rax",
    "jz 8f",
    "mov rdi, [rbx + 8]",
    "mov rsi, [rbx + 16]",
    "mov rdx, [rbx + 24]",
    "syscall",
    "8: mov rsp, [rbx + 56]",
    "mov eax, 15",
    "syscall",
    "7: int3",
    "holdfast_stub_end:",
    ".popsection",
);

unsafe extern "C" {
    static holdfast_stub_begin: u8;
    static holdfast_stub_done: u8;
    static holdfast_stub_end: u8;
}

/// Returns the code of a stub, to be written at its first address.
pub(crate) fn code() -> &'static [u8] {
    let begin = &raw const holdfast_stub_begin;
    let length = (&raw const holdfast_stub_end).addr() - begin.addr();
    // SAFETY: both labels are in the same read-only section above, the second behind the first.
    unsafe { std::slice::from_raw_parts(begin, length) }
}

fn done_offset() -> u64 {
    let begin = &raw const holdfast_stub_begin;
    ((&raw const holdfast_stub_done).addr() - begin.addr()) as u64
}

/// A system call to be made in another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    number: u64,
    arguments: [u64; 6],
}

impl Call {
    pub fn new(number: libc::c_long, arguments: &[u64]) -> Self {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        Self {
            number: number as u64,
            arguments: all,
        }
    }

    /// Keeps the result for later calls.
    pub fn keep(mut self) -> Self {
        self.number |= KEEP;
        self
    }

    /// Passes the kept result as the first argument.
    pub fn kept_first(mut self) -> Self {
        self.number |= KEPT_FIRST;
        self
    }
}

/// End of a batch: a signal that the thread sends to itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exit {
    /// PID in the process's own PID namespace.
    pub process: i32,
    /// TID in the same namespace.
    pub thread: i32,
    /// Signal that ends the batch.
    pub signal: i32,
    /// True if the process reacts to the signal: a second one that arrives during the batch is then sent again.
    pub is_heard: bool,
    /// True if a thread that has lost its tracer returns to its previous state; otherwise the thread ends.
    pub returns: bool,
}

/// System calls, made in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    calls: Vec<Call>,
    /// Call with at most three arguments that a thread makes after the others if its tracer has died.
    alone: Option<Call>,
}

impl Batch {
    /// Adds a call and returns the index of its result.
    pub fn push(&mut self, call: Call) -> usize {
        self.calls.push(call);
        self.calls.len() - 1
    }

    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub fn len(&self) -> usize {
        self.calls.len()
    }
}

/// Result of a batch.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Return value of each call; errors are negative numbers.
    pub results: Vec<i64>,
    /// The thread's state before the batch, restored after it.
    pub before: Option<Before>,
    /// Timer slack, in nanoseconds, of a thread that ran with lent priority. A real-time thread has no slack, so the
    /// value must be restored.
    pub slack_ns: Option<u64>,
    /// A stop signal arrived during the batch and must be sent again.
    stopped: bool,
    /// A second signal of the number that ends the batch arrived during the batch.
    signalled: bool,
}

/// State of a thread before it makes calls.
#[derive(Debug)]
pub(crate) struct Before {
    pub registers: Registers,
    pub mask: u64,
    /// Vector registers; read only if the thread may outlive its tracer.
    pub extended: Vec<u8>,
}

/// The stub of one process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stub {
    pub address: u64,
    pub exit: Exit,
}

impl Stub {
    /// Runs calls in a stopped thread. Registers and signal mask are restored afterwards.
    pub fn run(&self, tracee: Tracee, memory: &Memory, batch: Batch) -> Result<Outcome> {
        let mut outcomes = run_together(vec![Job::new(*self, tracee, memory, batch)])?;
        Ok(outcomes.pop().unwrap_or_default())
    }

    /// Describes an unexpected signal: the thread's position in the code and its next call.
    fn disturbed(&self, signal: i32, registers: &Registers) -> Error {
        unexpected(&format!(
            "a stub at {:#x} got signal {signal} at {:#x}: call {:#x}, {} left, from {:#x}",
            self.address, registers.rip, registers.rax, registers.r12, registers.rbx
        ))
    }

    fn is_end(&self, signal: i32, at: u64) -> bool {
        signal == self.exit.signal && at == self.address + done_offset()
    }
}

/// Part of a stub that one of several threads uses: its table, frame and scratch area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    table: u64,
    frame: u64,
    /// Offset of the scratch area that the thread's calls may read and write.
    pub scratch: u64,
}

/// Divides a stub among threads that make a few calls each at the same time.
#[derive(Debug)]
pub(crate) struct Slots {
    next: u64,
}

impl Slots {
    pub fn new() -> Self {
        Self { next: TABLE }
    }

    /// Returns the offset in the stub of the next slot's scratch area.
    pub fn next_scratch(&self) -> u64 {
        self.next
    }

    /// Reserves a slot for `calls` calls, `extended` bytes of vector registers (0 if no frame is needed) and
    /// `scratch` bytes; `None` when the stub is full.
    pub fn take(&mut self, calls: usize, extended: usize, scratch: usize) -> Option<Slot> {
        let behind = |at: u64, bytes: usize| (at + bytes as u64).next_multiple_of(64);
        let frame_bytes = match extended {
            0 => 0,
            extended => sigframe::bytes(extended),
        };
        let frame = behind(self.next, scratch);
        let table = behind(frame, frame_bytes);
        // `encode` adds one entry.
        let end = behind(table, (calls + 1) * CALL_BYTES);
        if calls > TABLE_CALLS || end > STUB_BYTES - PARAMETERS_BYTES {
            return None;
        }
        let slot = Slot {
            table,
            frame,
            scratch: self.next,
        };
        self.next = end;
        Some(slot)
    }
}

impl Slot {
    /// Slot that spans a whole stub, for a single thread.
    pub const WHOLE: Self = Self {
        table: TABLE,
        frame: FRAME,
        scratch: SCRATCH,
    };
}

/// Calls for one of several threads.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    stub: Stub,
    tracee: Tracee,
    memory: &'a Memory,
    batch: Batch,
    slot: Slot,
    /// Vector registers, if they were read already.
    extended: Option<Vec<u8>>,
    lends: bool,
    loan: Option<Loan>,
    /// The thread's previous state.
    before: Option<Before>,
    /// Registers with which the code starts.
    registers: Registers,
    /// Address of the frame with which the thread returns by itself, or 0.
    frame: u64,
    outcome: Outcome,
    /// Number of calls that have been made.
    made: usize,
    running: usize,
}

impl<'a> Job<'a> {
    /// Creates a job for a thread that has all of its process's stub.
    pub fn new(stub: Stub, tracee: Tracee, memory: &'a Memory, batch: Batch) -> Self {
        Self {
            stub,
            tracee,
            memory,
            batch,
            slot: Slot::WHOLE,
            extended: None,
            lends: false,
            loan: None,
            before: None,
            registers: Registers::default(),
            frame: 0,
            outcome: Outcome::default(),
            made: 0,
            running: 0,
        }
    }

    /// Limits the job to a part of the stub, and supplies the thread's vector registers.
    pub fn in_slot(self, slot: Slot, extended: Vec<u8>) -> Self {
        Self {
            slot,
            extended: Some(extended),
            ..self
        }
    }

    /// Limits the job to a part of the stub, for a thread of an empty process, which needs no frame.
    pub fn in_husk_slot(self, slot: Slot) -> Self {
        Self { slot, ..self }
    }

    /// Lends the thread more than the caller's priority, if the caller is real-time. Otherwise the thread might wait
    /// behind others while all of its process waits for it. If the tracer dies meanwhile, the thread returns the
    /// priority itself.
    pub fn in_hurry(mut self, caller_is_realtime: bool) -> Self {
        self.lends = caller_is_realtime && is_ordinary(self.tracee.tid);
        self
    }

    fn place(&self) -> u64 {
        self.stub.address + STUB_BYTES - PARAMETERS_BYTES
    }

    /// Prepares the registers for the code and, at the donor, the frame for a return without a tracer.
    fn prepare(&mut self) -> Result<()> {
        let (tracee, stub, exit) = (self.tracee, self.stub, self.stub.exit);
        let (before, mask) = (tracee.registers()?, tracee.mask()?);
        self.registers = Registers {
            rip: stub.address,
            orig_rax: NO_CALL,
            eflags: 0x202,
            r13: exit.process as u64,
            r14: exit.thread as u64,
            r15: exit.signal as u64,
            ..before
        };
        let mut extended = Vec::new();
        if exit.returns {
            extended = match self.extended.take() {
                Some(read) => read,
                None => tracee.extended()?,
            };
            self.frame = stub.address + self.slot.frame;
            let frame = sigframe::build(self.frame, &before.restarted(), &extended, mask);
            self.memory.write(self.frame, &frame)?;
        } else {
            // Calls that create threads take a stack address from here. Nothing is pushed on that stack.
            self.registers.rsp = stub.address + self.slot.scratch;
        }
        self.lends = self.lends && self.memory.write(self.place(), &[0; 8]).is_ok();
        if self.lends {
            let back = [0, ORDINARY as u64, self.place()];
            self.batch.alone = Some(Call::new(libc::SYS_sched_setscheduler, &back));
        }
        // From here on, `restore` undoes the changes to the thread.
        self.before = Some(Before {
            registers: before,
            mask,
            extended,
        });
        tracee.set_mask(!(1 << (exit.signal - 1)))
    }

    fn has_more(&self) -> bool {
        self.made < self.batch.calls.len()
    }

    /// Starts the code, with as many calls as the table holds.
    fn begin(&mut self) -> Result<()> {
        let calls = &self.batch.calls[self.made..];
        let calls = &calls[..calls.len().min(TABLE_CALLS)];
        let at = self.stub.address + self.slot.table;
        let alone = self.batch.alone.as_ref();
        self.memory.write(at, &encode(calls, alone, self.frame))?;
        self.registers.rbx = at;
        self.registers.r12 = calls.len() as u64;
        self.tracee.set_registers(&self.registers)?;
        if self.lends && self.loan.is_none() {
            self.loan = Loan::begin(self.tracee.tid);
        }
        self.running = calls.len();
        self.tracee.resume(0)
    }

    /// Waits for the end of the code and collects the results.
    fn finish(&mut self) -> Result<()> {
        let calls = std::mem::take(&mut self.running);
        self.registers.rbp = self.wait_for_end()?.rbp;
        self.made += calls;
        let mut table = vec![0; calls * CALL_BYTES];
        self.memory
            .read(self.stub.address + self.slot.table, &mut table)?;
        let results = table.chunks_exact(CALL_BYTES).map(result);
        self.outcome.results.extend(results);
        Ok(())
    }

    fn wait_for_end(&mut self) -> Result<Registers> {
        let tracee = self.tracee;
        loop {
            match wait_for(tracee.tid, LIMIT)? {
                Stop::Ended(_) => return Err(Error::Gone(tracee.tid)),
                Stop::Signal(libc::SIGSTOP) => self.outcome.stopped = true,
                Stop::Signal(signal) => {
                    let registers = tracee.registers()?;
                    if self.stub.is_end(signal, registers.rip) {
                        return Ok(registers);
                    }
                    if signal != self.stub.exit.signal {
                        return Err(self.stub.disturbed(signal, &registers));
                    }
                    self.outcome.signalled = true;
                }
                Stop::Interrupt | Stop::Group(_) | Stop::Event(_) | Stop::Call => {}
            }
            tracee.resume(0)?;
        }
    }

    /// Restores the thread's previous state.
    fn restore(&mut self) -> Result<()> {
        if let Some(loan) = self.loan.take() {
            loan.end();
        }
        let Some(before) = &self.before else {
            return Ok(());
        };
        self.tracee.set_registers(&before.registers)?;
        self.tracee.set_mask(before.mask)?;
        if self.outcome.stopped {
            self.tracee.send(libc::SIGSTOP);
        }
        let exit = self.stub.exit;
        let waited = before.mask & 1 << (exit.signal - 1) != 0;
        if self.outcome.signalled && (exit.is_heard || waited) {
            self.tracee.send(exit.signal);
        }
        Ok(())
    }
}

/// Makes calls in several stopped threads at the same time, and restores each thread afterwards. Threads of one
/// process must have slots of its stub that do not overlap. Returns an outcome for each job, or the first error.
pub(crate) fn run_together(mut jobs: Vec<Job<'_>>) -> Result<Vec<Outcome>> {
    let mut outcome = Ok(());
    for job in &mut jobs {
        outcome = outcome.and_then(|()| job.prepare());
    }
    let lent: Vec<i32> = (jobs.iter().filter(|job| job.lends))
        .map(|job| job.tracee.tid)
        .collect();
    let slacks = share_out(&lent, |tid| timer_slack_ns(*tid));
    for (job, slack_ns) in jobs.iter_mut().filter(|job| job.lends).zip(&slacks) {
        job.outcome.slack_ns = *slack_ns;
    }
    while outcome.is_ok() && jobs.iter().any(Job::has_more) {
        for job in jobs.iter_mut().filter(|job| job.has_more()) {
            outcome = outcome.and_then(|()| job.begin());
        }
        // Even after an error, wait for the jobs that have started.
        for job in jobs.iter_mut().filter(|job| job.running > 0) {
            let finished = job.finish();
            outcome = outcome.and(finished);
        }
    }
    for job in &mut jobs {
        match job.restore() {
            Err(Error::Gone(_)) if outcome.is_err() => {}
            restored => outcome = outcome.and(restored),
        }
    }
    let slacks: Vec<(i32, Option<u64>)> = lent.into_iter().zip(slacks).collect();
    share_out(&slacks, |(tid, slack_ns)| {
        if let Some(slack_ns) = slack_ns {
            set_timer_slack_ns(*tid, *slack_ns);
        }
    });
    outcome?;
    let outcomes = jobs.into_iter().map(|job| Outcome {
        before: job.before,
        ..job.outcome
    });
    Ok(outcomes.collect())
}

/// Encodes the table with one more entry: the call to make without a tracer, or 0. The result field of that entry
/// holds the frame's address.
fn encode(calls: &[Call], alone: Option<&Call>, frame: u64) -> Vec<u8> {
    let none = Call::new(0, &[]);
    let last = (alone.unwrap_or(&none), frame);
    let entries = calls.iter().map(|call| (call, 0)).chain([last]);
    let mut bytes = Vec::with_capacity((calls.len() + 1) * CALL_BYTES);
    let mut put = |word: u64| bytes.extend_from_slice(&word.to_ne_bytes());
    for (call, result) in entries {
        put(call.number);
        call.arguments.into_iter().for_each(&mut put);
        put(result);
    }
    bytes
}

fn result(entry: &[u8]) -> i64 {
    let mut word = [0; 8];
    word.copy_from_slice(&entry[CALL_BYTES - 8..]);
    i64::from_ne_bytes(word)
}
