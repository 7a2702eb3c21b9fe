//! Messages from a daemon to a restorer, and their encoding on the channel.

use super::remote::ClockOffsets;
use crate::fd;
use crate::process::error::Error;
use crate::process::files::{LockStep, WantedLock};
use crate::process::image::{MESSAGE_MAX, Missing};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Most bytes of message memory that are kept for the next message.
const KEPT_MAX: usize = 4 << 20;

/// Type of the next message on the channel. All but `Start` carry bytes of an image, which their user decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Offsets of the tree's clocks from this machine's.
    Start = 1,
    /// Processes, threads and mappings of the tree.
    Tree = 2,
    /// Content of memory.
    Pages = 3,
    /// State of the stopped tree.
    Frozen = 4,
    /// Resume the tree.
    Go = 5,
    /// Descriptors, with numbers of sockets whose descriptors follow the message.
    Descriptors = 6,
    /// Descriptors of the stopped tree.
    LastDescriptors = 7,
    /// Checksums of the stopped tree.
    Digest = 8,
    /// The original is about to be stopped: raise the restorer's priority.
    Hurry = 9,
    /// Ranges of memory that post-copy will deliver.
    Missing = 10,
    /// Request for the `userfaultfd` descriptors of these ranges, and the ranges.
    Follow = 11,
    /// After `Go`: the descriptor behind this message watches a new child.
    Keep = 12,
    /// After `Go`: no page is missing in the memory of one `userfaultfd`, given by its number in order of arrival.
    Drop = 13,
    /// After `Go`: no page is missing in the tree.
    Complete = 14,
    /// Rights to open files; sent before any other message that opens files.
    Rights = 15,
    /// State of the running tree, as far as it is visible without stopping the tree.
    Outlook = 16,
    /// A [`LockWord`], after `Frozen`.
    Locks = 17,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        let all = [
            Self::Start,
            Self::Tree,
            Self::Pages,
            Self::Frozen,
            Self::Go,
            Self::Descriptors,
            Self::LastDescriptors,
            Self::Digest,
            Self::Hurry,
            Self::Missing,
            Self::Follow,
            Self::Keep,
            Self::Drop,
            Self::Complete,
            Self::Rights,
            Self::Outlook,
            Self::Locks,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// A request about exclusive file locks that another process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum LockWord {
    /// List the locks.
    List,
    /// Take this step of the locks' hand-over.
    Advance(LockStep),
    /// Resume the tree without these locks.
    Renounce,
}

/// Answer of a restorer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The request succeeded.
    Done,
    /// Ranges of missing memory. A descriptor for each process follows the answer.
    Following(Missing),
    /// Locks that another process holds.
    Locks(Vec<WantedLock>),
    /// The tree runs without these locks, which another process holds.
    Running(Vec<String>),
    /// The restorer's machine cannot take the tree. Nothing was begun.
    Refused(String),
    /// The request failed half-way: the restorer must be ended.
    Failed(String),
    /// After `go`: the root of the tree ended with this wait status.
    Ended(i32),
}

impl Reply {
    /// Converts the outcome of a request to an answer.
    pub(super) fn to(outcome: Result<(), Error>) -> Self {
        match outcome {
            Ok(()) => Self::Done,
            Err(Error::Refused(why)) => Self::Refused(why),
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// Sends a message whose content may lie in several places.
pub(super) fn send<P>(channel: &mut UnixStream, kind: Kind, parts: &[P]) -> io::Result<()>
where
    P: AsRef<[u8]>,
{
    let mut head = [0; 9];
    head[0] = kind as u8;
    let length: usize = parts.iter().map(|part| part.as_ref().len()).sum();
    head[1..].copy_from_slice(&(length as u64).to_le_bytes());
    channel.write_all(&head)?;
    parts
        .iter()
        .try_for_each(|part| channel.write_all(part.as_ref()))
}

/// Receives a message into memory that is reused for each message. Returns `None` at the end of the channel.
pub(crate) fn receive<'a>(
    channel: &mut UnixStream,
    memory: &'a mut Vec<u8>,
) -> io::Result<Option<(Kind, &'a [u8])>> {
    let mut head = [0; 9];
    match channel.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let wrong = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = Kind::from_byte(head[0]).ok_or_else(wrong)?;
    let length = u64::from_le_bytes(head[1..].try_into().map_err(|_| wrong())?);
    let length = usize::try_from(length)
        .ok()
        .filter(|length| *length <= MESSAGE_MAX)
        .ok_or_else(wrong)?;
    if memory.len() < length || memory.len() > KEPT_MAX.max(length) {
        *memory = vec![0; length];
    }
    let bytes = &mut memory[..length];
    channel.read_exact(bytes)?;
    Ok(Some((kind, bytes)))
}

/// Sends an answer.
pub(super) fn answer(channel: &mut UnixStream, reply: &Reply) -> io::Result<()> {
    let bytes = postcard::to_stdvec(reply).map_err(io::Error::other)?;
    channel.write_all(&(bytes.len() as u32).to_le_bytes())?;
    channel.write_all(&bytes)
}

/// Receives an answer.
pub(super) fn receive_answer(channel: &mut UnixStream) -> io::Result<Reply> {
    const REPLY_MAX: usize = MESSAGE_MAX;
    let mut head = [0; 4];
    channel.read_exact(&mut head)?;
    let length = u32::from_le_bytes(head) as usize;
    if length > REPLY_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    let mut bytes = vec![0; length];
    channel.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}

/// Sends descriptors, after a message that says how many.
pub(super) fn hand_over(channel: &UnixStream, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    for some in fds.chunks(fd::MAX_FDS) {
        fd::send_with_fds(channel.as_fd(), &[0], some)?;
    }
    Ok(())
}

/// Receives `count` descriptors.
pub(crate) fn take_over(channel: &UnixStream, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut fds = Vec::with_capacity(count);
    while fds.len() < count {
        let received = fd::recv_with_fds(channel.as_fd(), &mut [0])?;
        if received.fds.is_empty() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        fds.extend(received.fds);
    }
    Ok(fds)
}

pub(super) fn encode_offsets(offsets: ClockOffsets) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&offsets.monotonic_ns.to_le_bytes());
    bytes[8..].copy_from_slice(&offsets.boot_ns.to_le_bytes());
    bytes
}

pub(super) fn decode_offsets(bytes: &[u8]) -> Option<ClockOffsets> {
    let (monotonic, boot) = bytes.split_at_checked(8)?;
    Some(ClockOffsets {
        monotonic_ns: i64::from_le_bytes(monotonic.try_into().ok()?),
        boot_ns: i64::from_le_bytes(boot.try_into().ok()?),
    })
}
