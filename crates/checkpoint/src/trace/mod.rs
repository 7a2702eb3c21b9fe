//! Control of other processes' threads by ptrace: stop them, access their memory and registers, and make system calls
//! in them.

mod continuation_code;
mod memory;
mod registers;
mod sigframe;
mod stop_wait;
mod stub;
mod tracee;

pub(crate) use continuation_code::{
    CODE_BYTES, ContinuationData, DATA_BYTES, STRUCTURES_OFFSET, code as rest_code,
};
pub(crate) use memory::{ProcessMemory, pidfd_getfd, pidfd_open};
pub(crate) use registers::RESTART_BLOCK;
pub use registers::Registers;
pub(crate) use sigframe::build_sigframe as frame;
pub(crate) use stop_wait::StopWait;
pub(crate) use stub::{
    CallBatch, CallBatchOutcome, SCRATCH_BYTES, SCRATCH_OFFSET, STUB_BYTES, Stub, StubExitSignal,
    SystemCall, ThreadCallBatch, ThreadStubSlot, ThreadStubSlotAllocator, call_result,
    code as stub_code, run_batches,
};
pub(crate) use tracee::{STOP_LIMIT, StopReason, Tracee, poll_stop, wait_for_stop};
