//! Failures of system calls, and features that a kernel lacks.

use super::{SystemError, Text};
use serde::{Deserialize, Serialize};

/// A failure for which the kernel is usually to blame.
///
/// The order of the variants is part of the format: append new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum KernelFault {
    /// A system call, or a library call that makes system calls, failed.
    #[error("{action}: {error}")]
    SystemCall {
        /// The attempted action, or the file that it concerns.
        action: Text,
        /// The kernel's error.
        error: SystemError,
    },
    /// An eBPF program or map could not be used.
    #[error("{0}")]
    Ebpf(Text),
    /// The kernel cannot put connections into accept queues.
    #[error("the acceptor's kernel does not support adding connections to accept queues")]
    AcceptQueuesUnsupported,
    /// The restorer has ended.
    #[error("the restorer has died, and the process with it")]
    RestorerDied,
    /// The kernel refuses the eBPF programs for shared ports.
    #[error(
        "this kernel cannot restore the clients and programs of a shared port; the log says why"
    )]
    SharedPortsUnsupported,
    /// A thread did not stop in time.
    #[error(
        "thread {0} did not stop in time, because it is in an uninterruptible system call: try again later"
    )]
    StopTimeout(i32),
}
