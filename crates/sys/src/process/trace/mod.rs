//! Control of other processes' threads by ptrace: stop them, access their memory and registers, and make system calls
//! in them.

mod memory;
mod patience;
mod registers;
mod rest_code;
mod sigframe;
mod stub;
mod tracee;

pub(crate) use memory::{Memory, pidfd_getfd, pidfd_open};
pub(crate) use patience::Patience;
pub(crate) use registers::RESTART_BLOCK;
pub use registers::Registers;
pub(crate) use rest_code::{CODE_BYTES, DATA_BYTES, RestData, STRUCTURES, code as rest_code};
pub(crate) use sigframe::build as frame;
pub(crate) use stub::{
    Batch, Call, Exit, Job, Outcome, SCRATCH, SCRATCH_BYTES, STUB_BYTES, Slot, Slots, Stub,
    code as stub_code, run_together,
};
pub(crate) use tracee::{STOP_LIMIT, Stop, Tracee, look, wait_for};
