//! A few pages in another process from which it makes system calls for us, many for one stop.
//!
//! At the donor the calls end in a signal that the process ignores: a tracer sees it, and without a tracer the
//! code gives back what it was lent and goes on to `rt_sigreturn`, which puts back what the thread did before. So a tracer may die at any moment.

use super::super::error::{Error, Result, unexpected};
use super::registers::NO_CALL;
use super::sigframe;
use super::{Memory, Registers, Stop, Tracee, wait_for};
use crate::priority::{Loan, ORDINARY, is_ordinary, is_realtime};
use std::cell::Cell;
use std::time::Duration;

/// Pages of a stub: code, table of calls, frame, scratch.
pub(crate) const STUB_BYTES: u64 = 0x20000;
const TABLE: u64 = 0x1000;
/// Behind them is room for what a thread does that its tracer has left.
const TABLE_CALLS: usize = 511;
const FRAME: u64 = 0x9000;
/// Where calls may read and write, from the stub's beginning.
pub(crate) const SCRATCH: u64 = 0xe000;
/// Bytes of it.
pub(crate) const SCRATCH_BYTES: u64 = STUB_BYTES - SCRATCH;
/// At the end of it, for the priority that is given back.
const PARAMETERS_BYTES: u64 = 8;
/// Bytes of a call in the table: number, six arguments, result.
const CALL_BYTES: usize = 64;
/// How long one batch may take: the kernel does all of it without waiting for anybody.
const LIMIT: Duration = Duration::from_secs(30);

/// The result stays for later calls.
const KEEP: u64 = 1 << 32;
/// The kept result is the fifth argument (a mapping's descriptor).
const KEPT_FIFTH: u64 = 1 << 33;
/// The kept result is the first argument.
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
    "3: bt rax, 33",
    "jnc 4f",
    "mov r8, rbp",
    "4: mov eax, eax",
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
    "8: mov eax, 15",
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

/// The code of a stub, to be written at its first address.
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

/// A system call for another process to make.
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

    /// With the kept result as fifth argument.
    pub fn kept_fifth(mut self) -> Self {
        self.number |= KEPT_FIFTH;
        self
    }

    /// With the kept result as first argument.
    pub fn kept_first(mut self) -> Self {
        self.number |= KEPT_FIRST;
        self
    }
}

/// How a batch ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Exit {
    /// In a trap, which kills a process that nobody traces: for processes that must not outlive their tracer.
    Trap,
    /// In a signal that the process ignores, then back to what the thread did.
    Resume {
        /// Process and thread in their own PID namespace.
        process: i32,
        thread: i32,
        /// A signal that has no effect on the process.
        signal: i32,
    },
}

/// Calls, made in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    calls: Vec<Call>,
    /// Of at most three arguments; made behind them by a thread whose tracer has died.
    alone: Option<Call>,
}

impl Batch {
    /// Adds a call and gives the place of its result.
    pub fn push(&mut self, call: Call) -> usize {
        self.calls.push(call);
        self.calls.len() - 1
    }

    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }
}

/// What came of a batch.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// What each call returned, errors as negative numbers.
    pub results: Vec<i64>,
    /// A stop signal came meanwhile and must be sent again.
    pub stopped: bool,
}

/// The stub of one process.
#[derive(Debug)]
pub(crate) struct Stub {
    pub address: u64,
    pub exit: Exit,
}

impl Stub {
    /// [`Stub::run`] with more than the caller's priority, if that is real-time: the thread would wait behind others while all of
    /// its process waits for it. If its tracer dies meanwhile it gives the priority back itself.
    pub fn run_in_hurry(
        &self,
        tracee: Tracee,
        memory: &Memory,
        mut batch: Batch,
    ) -> Result<Outcome> {
        let place = self.address + STUB_BYTES - PARAMETERS_BYTES;
        let lends = is_realtime() && is_ordinary(tracee.tid);
        if !lends || memory.write(place, &[0; 8]).is_err() {
            return self.run(tracee, memory, &batch);
        }
        let back = [0, ORDINARY as u64, place];
        batch.alone = Some(Call::new(libc::SYS_sched_setscheduler, &back));
        let loan = Cell::new(None);
        let begin = || loan.set(loan.take().or_else(|| Loan::begin(tracee.tid)));
        let end = || {
            if let Some(loan) = loan.take() {
                loan.end();
            }
        };
        self.run_between(tracee, memory, &batch, (&begin, &end))
    }

    /// Runs calls in a stopped thread, whose registers and signal mask are as before afterwards.
    pub fn run(&self, tracee: Tracee, memory: &Memory, batch: &Batch) -> Result<Outcome> {
        self.run_between(tracee, memory, batch, (&|| (), &|| ()))
    }

    /// The same; something is done before it runs, when it would make all calls without its tracer, and before its registers are
    /// put back.
    fn run_between(
        &self,
        tracee: Tracee,
        memory: &Memory,
        batch: &Batch,
        (begin, end): (&dyn Fn(), &dyn Fn()),
    ) -> Result<Outcome> {
        let before = tracee.registers()?;
        let mask = tracee.mask()?;
        let done = self.run_from(tracee, memory, (batch, begin), &before, mask);
        end();
        if !matches!(done, Err(Error::Gone(_))) {
            tracee.set_registers(&before)?;
            tracee.set_mask(mask)?;
        }
        if let Ok(Outcome { stopped: true, .. }) = done {
            // It waits until the thread runs on.
            // SAFETY: no pointers are passed.
            unsafe { libc::syscall(libc::SYS_tkill, tracee.tid, libc::SIGSTOP) };
        }
        done
    }

    fn run_from(
        &self,
        tracee: Tracee,
        memory: &Memory,
        (batch, begin): (&Batch, &dyn Fn()),
        before: &Registers,
        mask: u64,
    ) -> Result<Outcome> {
        let mut registers = self.prepare(tracee, memory, before, mask)?;
        let mut outcome = Outcome::default();
        for calls in batch.calls.chunks(TABLE_CALLS) {
            let table = encode(calls, batch.alone.as_ref());
            memory.write(self.address + TABLE, &table)?;
            registers.rbx = self.address + TABLE;
            registers.r12 = calls.len() as u64;
            tracee.set_registers(&registers)?;
            begin();
            let after = self.finish(tracee, &mut outcome)?;
            registers.rbp = after.rbp;
            let mut table = vec![0; calls.len() * CALL_BYTES];
            memory.read(self.address + TABLE, &mut table)?;
            outcome
                .results
                .extend(table.chunks_exact(CALL_BYTES).map(result));
        }
        Ok(outcome)
    }

    /// Registers for the code, and at the donor the way back without a tracer.
    fn prepare(
        &self,
        tracee: Tracee,
        memory: &Memory,
        before: &Registers,
        mask: u64,
    ) -> Result<Registers> {
        let mut registers = Registers {
            rip: self.address,
            orig_rax: NO_CALL,
            eflags: 0x202,
            // Calls that make threads take a stack from here; nothing is pushed.
            rsp: self.address + SCRATCH,
            r13: 0,
            ..*before
        };
        if let Exit::Resume {
            process,
            thread,
            signal,
        } = self.exit
        {
            let frame = sigframe::build(
                self.address + FRAME,
                &before.restarted(),
                &tracee.extended()?,
                mask,
            );
            memory.write(self.address + FRAME, &frame)?;
            registers.rsp = self.address + FRAME;
            registers.r13 = process as u64;
            registers.r14 = thread as u64;
            registers.r15 = signal as u64;
            tracee.set_mask(!(1 << (signal - 1)))?;
        } else {
            tracee.set_mask(!0)?;
        }
        Ok(registers)
    }

    /// Lets the code run to its end.
    fn finish(&self, tracee: Tracee, outcome: &mut Outcome) -> Result<Registers> {
        loop {
            tracee.resume(0)?;
            match wait_for(tracee.tid, LIMIT)? {
                Stop::Ended(_) => return Err(Error::Gone(tracee.tid)),
                Stop::Signal(libc::SIGSTOP) => outcome.stopped = true,
                Stop::Signal(signal) => {
                    let registers = tracee.registers()?;
                    if self.is_end(signal, registers.rip) {
                        return Ok(registers);
                    }
                    if !matches!(self.exit, Exit::Resume { signal: ours, .. } if ours == signal) {
                        return Err(self.disturbed(signal, &registers));
                    }
                }
                Stop::Interrupt | Stop::Group(_) | Stop::Event(_) | Stop::Call => {}
            }
        }
    }

    /// Says where in its code it was, and about to make which call.
    fn disturbed(&self, signal: i32, registers: &Registers) -> Error {
        unexpected(&format!(
            "a stub at {:#x} got signal {signal} at {:#x}: call {:#x}, {} left, from {:#x}",
            self.address, registers.rip, registers.rax, registers.r12, registers.rbx
        ))
    }

    fn is_end(&self, signal: i32, at: u64) -> bool {
        match self.exit {
            Exit::Trap => signal == libc::SIGTRAP && at == self.address + code().len() as u64,
            Exit::Resume { signal: ours, .. } => {
                signal == ours && at == self.address + done_offset()
            }
        }
    }
}

/// A table with one more entry, which is 0 where there is none.
fn encode(calls: &[Call], alone: Option<&Call>) -> Vec<u8> {
    let size = (calls.len() + 1) * CALL_BYTES;
    let mut bytes = Vec::with_capacity(size);
    for call in calls.iter().chain(alone) {
        bytes.extend(call.number.to_ne_bytes());
        for argument in call.arguments {
            bytes.extend(argument.to_ne_bytes());
        }
        bytes.extend([0; 8]);
    }
    bytes.resize(size, 0);
    bytes
}

fn result(entry: &[u8]) -> i64 {
    let mut word = [0; 8];
    word.copy_from_slice(&entry[CALL_BYTES - 8..]);
    i64::from_ne_bytes(word)
}
