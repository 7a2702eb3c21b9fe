//! What travels: the tree's shape while it runs ([`Tree`]), memory ([`Pages`]), and the rest in the freeze ([`Frozen`]).
//!
//! All of it may come from a peer that lies: [`decode`] takes any bytes, bounds every length, and checks what the types
//! cannot say. Identities are those the processes see themselves, in their own PID namespace.

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
/// Bytes of a page; the only size in use on x86_64 below huge pages.
pub const PAGE: u64 = 4096;
/// `MADV_GUARD_INSTALL`.
pub(crate) const GUARD_INSTALL: i32 = 102;
/// First address that is not the program's (47 bits; mappings above are a blocker).
pub const ADDRESS_END: u64 = 0x7fff_ffff_f000;

/// A message that can be checked beyond its types.
pub trait Checked: Serialize + for<'de> Deserialize<'de> {
    /// Checks numbers and references.
    ///
    /// # Errors
    /// [`Error::Image`] names what makes no sense.
    fn check(&self) -> Result<()>;
}

/// Bytes of a message.
///
/// # Errors
/// [`Error::Image`] if it is too large.
pub fn encode<T: Checked>(message: &T) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).map_err(|_| Error::Image("it cannot be encoded"))?;
    if bytes.len() > MESSAGE_MAX {
        return Err(Error::Image("too large"));
    }
    Ok(bytes)
}

/// Reads a message from anybody.
///
/// # Errors
/// [`Error::Image`] names what makes no sense.
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
