//! Data sent to the acceptor: the tree's shape while the tree runs ([`TreeLayout`]), memory ([`PagesMessage`]), and the remaining
//! state during the freeze ([`ProcessTreeState`]).
//!
//! All of it may come from a malicious peer: [`decode`] accepts any bytes, bounds every length, and checks
//! constraints that the types cannot express. PIDs and TIDs are from the processes' own PID namespace.

mod descriptors;
mod missing_pages;
mod pages;
mod tree;
mod tree_state;
mod validate;

pub use descriptors::{DescriptorUpdate, OpenFilesUpdate};
pub use missing_pages::{MissingPages, ProcessMissingPages};
pub(crate) use pages::runs_with_content;
pub use pages::{BorrowedPages, MemorySpace, PageContent, PageRun, PagesMessage};
pub(crate) use tree::POSIX_MEMORY_DIRECTORY;
pub use tree::{
    BackingFile, ClockReadings, MappingBacking, MemoryMapping, ProcessLayout, SharedMemory,
    SharedMemoryKind, SystemVSegment, TreeLayout,
};
pub use tree_state::{
    Credentials, IntervalTimer, PosixTimer, PrctlMmMap, ProcessState, ProcessTreeState,
    ResourceLimit, Rseq, Scheduling, SignalAction, SignalInfo, ThreadState,
};
pub(crate) use validate::are_guards_within_limits;

use super::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Most bytes of one message.
pub const MESSAGE_MAX: usize = 256 << 20;
/// Bytes of a page; on x86_64, the only size in use except huge pages.
pub const PAGE: u64 = 4096;
/// Number of the advice `MADV_GUARD_INSTALL`.
pub(crate) const GUARD_INSTALL: i32 = 102;
/// First address outside the program's address space (47 bits; mappings above are a blocker).
pub const ADDRESS_END: u64 = 0x7fff_ffff_f000;

/// A message with values that are checked beyond their types.
pub trait Validate: Serialize + for<'de> Deserialize<'de> {
    /// Checks the numbers and references in the message.
    ///
    /// # Errors
    /// [`Error::Image`] names the invalid value.
    fn check(&self) -> Result<()>;
}

/// Encodes a message of a process image.
///
/// # Errors
/// [`Error::Image`] if the message is too large.
pub fn encode<T: Validate>(message: &T) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).map_err(|_| Error::Image("cannot be encoded"))?;
    if bytes.len() > MESSAGE_MAX {
        return Err(Error::Image("message too large"));
    }
    Ok(bytes)
}

/// Decodes and checks a message of a process image from an untrusted peer.
///
/// # Errors
/// [`Error::Image`] names the invalid value.
pub fn decode<T: Validate>(bytes: &[u8]) -> Result<T> {
    if bytes.len() > MESSAGE_MAX {
        return Err(Error::Image("message too large"));
    }
    let (message, rest): (T, _) =
        postcard::take_from_bytes(bytes).map_err(|_| Error::Image("cannot be decoded"))?;
    if !rest.is_empty() {
        return Err(Error::Image("trailing bytes"));
    }
    message.check()?;
    Ok(message)
}
