//! Data sent to the acceptor: the tree's shape while the tree runs ([`Tree`]), memory ([`Pages`]), and the remaining
//! state during the freeze ([`Frozen`]).
//!
//! All of it may come from a malicious peer: [`decode`] accepts any bytes, bounds every length, and checks
//! constraints that the types cannot express. PIDs and TIDs are from the processes' own PID namespace.

mod descriptors;
mod frozen;
mod missing;
mod pages;
mod tree;
mod validate;

pub use descriptors::{Descriptors, Files};
pub use frozen::{
    Action, Credentials, Frozen, FrozenProcess, FrozenThread, IntervalTimer, Limit, MemoryFields,
    PosixTimer, Rseq, Scheduling, SignalInfo,
};
pub use missing::{Missing, MissingOf};
pub(crate) use pages::each;
pub use pages::{Content, Pages, PagesIn, Run, Space};
pub(crate) use tree::POSIX_MEMORY;
pub use tree::{Backing, BackingFile, Clocks, Mapping, Process, Segment, Shared, SharedKind, Tree};
pub(crate) use validate::guards_fit;

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
pub trait Checked: Serialize + for<'de> Deserialize<'de> {
    /// Checks the numbers and references in the message.
    ///
    /// # Errors
    /// [`Error::Image`] names the invalid value.
    fn check(&self) -> Result<()>;
}

/// Encodes a message.
///
/// # Errors
/// [`Error::Image`] if the message is too large.
pub fn encode<T: Checked>(message: &T) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).map_err(|_| Error::Image("it cannot be encoded"))?;
    if bytes.len() > MESSAGE_MAX {
        return Err(Error::Image("too large"));
    }
    Ok(bytes)
}

/// Decodes and checks a message from an untrusted peer.
///
/// # Errors
/// [`Error::Image`] names the invalid value.
pub fn decode<T: Checked>(bytes: &[u8]) -> Result<T> {
    if bytes.len() > MESSAGE_MAX {
        return Err(Error::Image("too large"));
    }
    let (message, rest): (T, _) =
        postcard::take_from_bytes(bytes).map_err(|_| Error::Image("it does not parse"))?;
    if !rest.is_empty() {
        return Err(Error::Image("bytes behind its end"));
    }
    message.check()?;
    Ok(message)
}
