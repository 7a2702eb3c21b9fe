//! A stub: a few pages in another process from which it makes system calls for the tracer, many in one stop.
//!
//! A batch ends in a signal that the thread sends to itself. The tracer sees the signal, however the process
//! handles it. No batch ends in a trap: the kernel resets the handler of `SIGTRAP` in a thread that traps while it
//! blocks or ignores that signal. If the tracer has died at the donor, the code returns the lent priority, or closes the
//! descriptor that it has opened for the tracer, and calls `rt_sigreturn`, which restores the thread's previous state. So
//! a tracer may die at any moment.

use super::super::error::{Error, Result, unexpected_text};
use super::registers::NO_CALL;
use super::sigframe;
use super::{ProcessMemory, Registers, StopReason, Tracee, wait_for_stop};
use holdfast_sys::priority::{
    ORDINARY_POLICY, PriorityBoost, has_ordinary_policy, run_parallel, set_timer_slack_ns,
    timer_slack_ns,
};
use std::time::Duration;

/// Size of a stub in bytes: code, table of calls, frame, scratch area.
pub(crate) const STUB_BYTES: u64 = 0x20000;
const TABLE_OFFSET: u64 = 0x1000;
/// Most calls in the table. The entry behind them is for the call of a thread that has lost its tracer.
const TABLE_CALLS: usize = 511;
const FRAME_OFFSET: u64 = 0x9000;
/// Offset in the stub of the scratch area, which calls may read and write.
pub(crate) const SCRATCH_OFFSET: u64 = 0xe000;
/// Size of the scratch area in bytes.
pub(crate) const SCRATCH_BYTES: u64 = STUB_BYTES - SCRATCH_OFFSET;
/// Bytes at the end of the scratch area for the scheduling parameters with which priority is returned.
const PARAMETERS_BYTES: u64 = 8;
/// Size of a table entry in bytes: number, six arguments, result.
const CALL_BYTES: usize = 64;
/// Time limit of one batch. The kernel makes all of the calls without waiting for other processes.
const BATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// Flag: keep the result for later calls.
const KEEP_RESULT: u64 = 1 << 32;
/// Flag: pass the kept result as the first argument.
const PASS_KEPT_FIRST: u64 = 1 << 34;

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
    "bt rax, 34",
    "jnc 9f",
    "mov rdi, rbp",
    "9: mov eax, eax",
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
pub(crate) struct SystemCall {
    number: u64,
    arguments: [u64; 6],
}

impl SystemCall {
    pub fn new(number: libc::c_long, arguments: &[u64]) -> Self {
        let mut padded = [0; 6];
        padded[..arguments.len()].copy_from_slice(arguments);
        Self {
            number: number as u64,
            arguments: padded,
        }
    }

    /// Keeps the result for later calls.
    pub fn keep_result(mut self) -> Self {
        self.number |= KEEP_RESULT;
        self
    }

    /// Passes the kept result as the first argument.
    pub fn pass_kept_first(mut self) -> Self {
        self.number |= PASS_KEPT_FIRST;
        self
    }
}

/// Unix signal that a traced thread sends to itself at the end of the stub's code, so that the tracer sees the end of a
/// batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StubExitSignal {
    /// PID in the process's own PID namespace.
    pub process: i32,
    /// TID in the same namespace.
    pub thread: i32,
    /// Signal that ends the batch.
    pub signal: i32,
    /// True if the process reacts to the signal: a second one that arrives during the batch is then sent again.
    pub is_handled: bool,
    /// True if a thread that has lost its tracer returns to its previous state; otherwise the thread ends.
    pub returns_without_tracer: bool,
}

/// System calls, made in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallBatch {
    calls: Vec<SystemCall>,
    /// Call with at most three arguments that a thread makes after the others if its tracer has died.
    orphan_call: Option<SystemCall>,
}

impl CallBatch {
    /// Adds a call and returns the index of its result.
    pub fn push(&mut self, call: SystemCall) -> usize {
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
pub(crate) struct CallBatchOutcome {
    /// Return value of each call; errors are negative numbers.
    pub results: Vec<i64>,
    /// The thread's state before the batch, restored after it.
    pub saved: Option<SavedThreadContext>,
    /// Timer slack, in nanoseconds, of a thread that ran with lent priority. A real-time thread has no slack, so the
    /// value must be restored.
    pub slack_ns: Option<u64>,
    /// A stop signal arrived during the batch and must be sent again.
    stop_arrived: bool,
    /// A second signal of the number that ends the batch arrived during the batch.
    signal_repeated: bool,
}

/// State of a thread before it makes calls.
#[derive(Debug)]
pub(crate) struct SavedThreadContext {
    pub registers: Registers,
    pub mask: u64,
    /// Vector registers; read only if the thread may outlive its tracer.
    pub extended: Vec<u8>,
}

/// The stub of one process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stub {
    pub address: u64,
    pub exit: StubExitSignal,
}

impl Stub {
    /// Runs calls in a stopped thread. Registers and signal mask are restored afterwards.
    pub fn run(
        &self,
        tracee: Tracee,
        memory: &ProcessMemory,
        batch: CallBatch,
    ) -> Result<CallBatchOutcome> {
        let mut outcomes = run_batches(vec![ThreadCallBatch::new(*self, tracee, memory, batch)])?;
        Ok(outcomes.pop().unwrap_or_default())
    }

    /// Opens a file in a stopped thread by a call that returns a descriptor, gives the descriptor's number to `copy`, and
    /// closes the descriptor. If the tracer dies meanwhile, the thread closes the descriptor itself.
    ///
    /// # Errors
    /// The outer one: the thread has ended or behaves unexpectedly. The inner one: the call failed.
    pub fn with_open_file<T>(
        &self,
        tracee: Tracee,
        memory: &ProcessMemory,
        open: SystemCall,
        copy: impl FnOnce(i32) -> T,
    ) -> Result<std::io::Result<T>> {
        let close = SystemCall::new(libc::SYS_close, &[]).pass_kept_first();
        let mut batch = CallBatch::default();
        batch.push(open.keep_result());
        batch.orphan_call = Some(close);
        let mut job = ThreadCallBatch::new(*self, tracee, memory, batch);
        let copied = job.prepare().and_then(|()| {
            job.begin()?;
            job.collect_results()?;
            let number = call_result(job.outcome.results.first().copied().unwrap_or(-1));
            let copied = number.map(|number| copy(number as i32));
            // The call to close has a table of its own. A thread that loses its tracer closes the descriptor by the first table
            // until it has the registers for the second one. Never by both: another thread may have the number by then.
            job.slot.table = job.slot.scratch;
            job.batch.orphan_call = None;
            job.batch.push(close);
            job.begin()?;
            job.collect_results()?;
            Ok(copied)
        });
        job.restore()?;
        copied
    }

    /// Describes an unexpected signal: the thread's position in the code and its next call.
    fn unexpected_signal(&self, signal: i32, registers: &Registers) -> Error {
        unexpected_text(&format!(
            "a stub at {:#x} got signal {signal} at {:#x}: call {:#x}, {} left, from {:#x}",
            self.address, registers.rip, registers.rax, registers.r12, registers.rbx
        ))
    }

    fn is_batch_end(&self, signal: i32, at: u64) -> bool {
        signal == self.exit.signal && at == self.address + done_offset()
    }
}

/// Part of a stub that one of several threads uses: its table, frame and scratch area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadStubSlot {
    table: u64,
    frame: u64,
    /// Offset of the scratch area that the thread's calls may read and write.
    pub scratch: u64,
}

/// Divides a stub among threads that make a few calls each at the same time.
#[derive(Debug)]
pub(crate) struct ThreadStubSlotAllocator {
    next: u64,
}

impl ThreadStubSlotAllocator {
    pub fn new() -> Self {
        Self { next: TABLE_OFFSET }
    }

    /// Returns the offset in the stub of the next slot's scratch area.
    pub fn next_scratch(&self) -> u64 {
        self.next
    }

    /// Reserves a slot for `calls` calls, `extended` bytes of vector registers (0 if no frame is needed) and
    /// `scratch` bytes; `None` when the stub is full.
    pub fn allocate(
        &mut self,
        calls: usize,
        extended: usize,
        scratch: usize,
    ) -> Option<ThreadStubSlot> {
        let aligned_end = |at: u64, bytes: usize| (at + bytes as u64).next_multiple_of(64);
        let frame_bytes = match extended {
            0 => 0,
            extended => sigframe::frame_bytes(extended),
        };
        let frame = aligned_end(self.next, scratch);
        let table = aligned_end(frame, frame_bytes);
        // `encode_table` adds one entry.
        let end = aligned_end(table, (calls + 1) * CALL_BYTES);
        if calls > TABLE_CALLS || end > STUB_BYTES - PARAMETERS_BYTES {
            return None;
        }
        let slot = ThreadStubSlot {
            table,
            frame,
            scratch: self.next,
        };
        self.next = end;
        Some(slot)
    }
}

impl ThreadStubSlot {
    /// Slot that spans a whole stub, for a single thread.
    pub const WHOLE_STUB: Self = Self {
        table: TABLE_OFFSET,
        frame: FRAME_OFFSET,
        scratch: SCRATCH_OFFSET,
    };
}

/// Calls for one of several threads.
#[derive(Debug)]
pub(crate) struct ThreadCallBatch<'a> {
    stub: Stub,
    tracee: Tracee,
    memory: &'a ProcessMemory,
    batch: CallBatch,
    slot: ThreadStubSlot,
    /// Vector registers, if they were read already.
    extended: Option<Vec<u8>>,
    boosts_priority: bool,
    boost: Option<PriorityBoost>,
    /// The thread's previous state.
    saved: Option<SavedThreadContext>,
    /// Registers with which the code starts.
    registers: Registers,
    /// Address of the frame with which the thread returns by itself, or 0.
    frame: u64,
    outcome: CallBatchOutcome,
    /// Number of calls that have been made.
    calls_made: usize,
    calls_running: usize,
}

impl<'a> ThreadCallBatch<'a> {
    /// Creates a job for a thread that has all of its process's stub.
    pub fn new(stub: Stub, tracee: Tracee, memory: &'a ProcessMemory, batch: CallBatch) -> Self {
        Self {
            stub,
            tracee,
            memory,
            batch,
            slot: ThreadStubSlot::WHOLE_STUB,
            extended: None,
            boosts_priority: false,
            boost: None,
            saved: None,
            registers: Registers::default(),
            frame: 0,
            outcome: CallBatchOutcome::default(),
            calls_made: 0,
            calls_running: 0,
        }
    }

    /// Limits the job to a part of the stub, and supplies the thread's vector registers.
    pub fn in_slot(self, slot: ThreadStubSlot, extended: Vec<u8>) -> Self {
        Self {
            slot,
            extended: Some(extended),
            ..self
        }
    }

    /// Limits the job to a part of the stub, for a thread of a stub process, which needs no frame.
    pub fn in_frameless_slot(self, slot: ThreadStubSlot) -> Self {
        Self { slot, ..self }
    }

    /// Lends the thread more than the caller's priority, if the caller is real-time. Otherwise the thread might wait
    /// behind others while all of its process waits for it. If the tracer dies meanwhile, the thread returns the
    /// priority itself.
    pub fn with_boost(mut self, caller_is_realtime: bool) -> Self {
        self.boosts_priority = caller_is_realtime && has_ordinary_policy(self.tracee.tid);
        self
    }

    fn parameters_address(&self) -> u64 {
        self.stub.address + STUB_BYTES - PARAMETERS_BYTES
    }

    /// Prepares the registers for the code and, at the donor, the frame for a return without a tracer.
    fn prepare(&mut self) -> Result<()> {
        let (tracee, stub, exit) = (self.tracee, self.stub, self.stub.exit);
        let (before, mask) = (tracee.registers()?, tracee.signal_mask()?);
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
        if exit.returns_without_tracer {
            extended = match self.extended.take() {
                Some(read) => read,
                None => tracee.extended_registers()?,
            };
            self.frame = stub.address + self.slot.frame;
            let frame = sigframe::build_sigframe(
                self.frame,
                &before.with_call_restarted(),
                &extended,
                mask,
            );
            self.memory.write(self.frame, &frame)?;
        } else {
            // Calls that create threads take a stack address from here. Nothing is pushed on that stack.
            self.registers.rsp = stub.address + self.slot.scratch;
        }
        self.boosts_priority = self.boosts_priority
            && self
                .memory
                .write(self.parameters_address(), &[0; 8])
                .is_ok();
        if self.boosts_priority {
            let reset_arguments = [0, ORDINARY_POLICY as u64, self.parameters_address()];
            self.batch.orphan_call = Some(SystemCall::new(
                libc::SYS_sched_setscheduler,
                &reset_arguments,
            ));
        }
        // From here on, `restore` undoes the changes to the thread.
        self.saved = Some(SavedThreadContext {
            registers: before,
            mask,
            extended,
        });
        tracee.set_signal_mask(!(1 << (exit.signal - 1)))
    }

    fn has_more_calls(&self) -> bool {
        self.calls_made < self.batch.calls.len()
    }

    /// Starts the code, with as many calls as the table holds.
    fn begin(&mut self) -> Result<()> {
        let calls = &self.batch.calls[self.calls_made..];
        let calls = &calls[..calls.len().min(TABLE_CALLS)];
        let at = self.stub.address + self.slot.table;
        let alone = self.batch.orphan_call.as_ref();
        self.memory
            .write(at, &encode_table(calls, alone, self.frame))?;
        self.registers.rbx = at;
        self.registers.r12 = calls.len() as u64;
        self.tracee.set_registers(&self.registers)?;
        if self.boosts_priority && self.boost.is_none() {
            self.boost = PriorityBoost::begin(self.tracee.tid);
        }
        self.calls_running = calls.len();
        self.tracee.resume(0)
    }

    /// Waits for the end of the code and collects the results.
    fn collect_results(&mut self) -> Result<()> {
        let calls = std::mem::take(&mut self.calls_running);
        self.registers.rbp = self.wait_for_end()?.rbp;
        self.calls_made += calls;
        let mut table = vec![0; calls * CALL_BYTES];
        self.memory
            .read(self.stub.address + self.slot.table, &mut table)?;
        let results = table.chunks_exact(CALL_BYTES).map(entry_result);
        self.outcome.results.extend(results);
        Ok(())
    }

    fn wait_for_end(&mut self) -> Result<Registers> {
        let tracee = self.tracee;
        loop {
            match wait_for_stop(tracee.tid, BATCH_TIMEOUT)? {
                StopReason::Ended(_) => return Err(Error::ProcessEnded(tracee.tid)),
                StopReason::Signal(libc::SIGSTOP) => self.outcome.stop_arrived = true,
                StopReason::Signal(signal) => {
                    let registers = tracee.registers()?;
                    if self.stub.is_batch_end(signal, registers.rip) {
                        return Ok(registers);
                    }
                    if signal != self.stub.exit.signal {
                        return Err(self.stub.unexpected_signal(signal, &registers));
                    }
                    self.outcome.signal_repeated = true;
                }
                StopReason::Interrupt
                | StopReason::Group(_)
                | StopReason::Event(_)
                | StopReason::SystemCall => {}
            }
            tracee.resume(0)?;
        }
    }

    /// Restores the thread's previous state.
    fn restore(&mut self) -> Result<()> {
        if let Some(loan) = self.boost.take() {
            loan.end();
        }
        let Some(before) = &self.saved else {
            return Ok(());
        };
        self.tracee.set_registers(&before.registers)?;
        self.tracee.set_signal_mask(before.mask)?;
        if self.outcome.stop_arrived {
            self.tracee.send_signal(libc::SIGSTOP);
        }
        let exit = self.stub.exit;
        let is_blocked = before.mask & 1 << (exit.signal - 1) != 0;
        if self.outcome.signal_repeated && (exit.is_handled || is_blocked) {
            self.tracee.send_signal(exit.signal);
        }
        Ok(())
    }
}

/// Makes calls in several stopped threads at the same time, and restores each thread afterwards. Threads of one
/// process must have slots of its stub that do not overlap. Returns an outcome for each job, or the first error.
pub(crate) fn run_batches(mut jobs: Vec<ThreadCallBatch<'_>>) -> Result<Vec<CallBatchOutcome>> {
    let mut outcome = Ok(());
    for job in &mut jobs {
        outcome = outcome.and_then(|()| job.prepare());
    }
    let boosted: Vec<i32> = (jobs.iter().filter(|job| job.boosts_priority))
        .map(|job| job.tracee.tid)
        .collect();
    let slacks = run_parallel(&boosted, |tid| timer_slack_ns(*tid));
    for (job, slack_ns) in jobs
        .iter_mut()
        .filter(|job| job.boosts_priority)
        .zip(&slacks)
    {
        job.outcome.slack_ns = *slack_ns;
    }
    while outcome.is_ok() && jobs.iter().any(ThreadCallBatch::has_more_calls) {
        for job in jobs.iter_mut().filter(|job| job.has_more_calls()) {
            outcome = outcome.and_then(|()| job.begin());
        }
        // Even after an error, wait for the jobs that have started.
        for job in jobs.iter_mut().filter(|job| job.calls_running > 0) {
            let finished = job.collect_results();
            outcome = outcome.and(finished);
        }
    }
    for job in &mut jobs {
        match job.restore() {
            Err(Error::ProcessEnded(_)) if outcome.is_err() => {}
            restored => outcome = outcome.and(restored),
        }
    }
    let slacks: Vec<(i32, Option<u64>)> = boosted.into_iter().zip(slacks).collect();
    run_parallel(&slacks, |(tid, slack_ns)| {
        if let Some(slack_ns) = slack_ns {
            set_timer_slack_ns(*tid, *slack_ns);
        }
    });
    outcome?;
    let outcomes = jobs.into_iter().map(|job| CallBatchOutcome {
        saved: job.saved,
        ..job.outcome
    });
    Ok(outcomes.collect())
}

/// Encodes the table with one more entry: the call to make without a tracer, or 0. The result field of that entry
/// holds the frame's address.
fn encode_table(calls: &[SystemCall], orphan_call: Option<&SystemCall>, frame: u64) -> Vec<u8> {
    let none = SystemCall::new(0, &[]);
    let last = (orphan_call.unwrap_or(&none), frame);
    let entries = calls.iter().map(|call| (call, 0)).chain([last]);
    let mut bytes = Vec::with_capacity((calls.len() + 1) * CALL_BYTES);
    let mut put_word = |word: u64| bytes.extend_from_slice(&word.to_ne_bytes());
    for (call, result) in entries {
        put_word(call.number);
        call.arguments.into_iter().for_each(&mut put_word);
        put_word(result);
    }
    bytes
}

/// Converts the result of a system call as the kernel returns it.
pub(crate) fn call_result(result: i64) -> std::io::Result<i64> {
    if (-4095..0).contains(&result) {
        return Err(std::io::Error::from_raw_os_error(-result as i32));
    }
    Ok(result)
}

fn entry_result(entry: &[u8]) -> i64 {
    let mut word = [0; 8];
    word.copy_from_slice(&entry[CALL_BYTES - 8..]);
    i64::from_ne_bytes(word)
}
