//! Messages from a daemon to a restorer, and their encoding on the channel.

use super::restorer::ClockOffsets;
use crate::error::Error;
use crate::files::{ContendedLock, LockHandoverStep};
use crate::image::{MESSAGE_MAX, MissingPages};
use holdfast_sys::fd_passing;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Most bytes of message memory that are kept for the next message.
const BUFFER_KEPT_MAX: usize = 4 << 20;

/// Type of the next message on the channel. All but `Start` carry bytes of an image, which their user decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RestorerMessageKind {
    /// Offsets of the tree's clocks from this machine's.
    Start = 1,
    /// Processes, threads and mappings of the tree.
    Tree = 2,
    /// Content of memory.
    Pages = 3,
    /// State of the stopped tree.
    State = 4,
    /// Resume the tree.
    Resume = 5,
    /// Descriptors, with numbers of sockets whose descriptors follow the message.
    Descriptors = 6,
    /// Descriptors of the stopped tree.
    LastDescriptors = 7,
    /// Checksums of the stopped tree.
    Digest = 8,
    /// The original is about to be stopped: raise the restorer's priority.
    RaisePriority = 9,
    /// Ranges of memory that post-copy will deliver.
    MissingPages = 10,
    /// Request for the `userfaultfd` descriptors of these ranges, and the ranges.
    GetUserfaults = 11,
    /// After `Resume`: the descriptor behind this message watches a new child.
    KeepUserfault = 12,
    /// After `Resume`: no page is missing in the memory of one `userfaultfd`, given by its number in order of arrival.
    DropUserfault = 13,
    /// After `Resume`: no page is missing in the tree.
    PostcopyComplete = 14,
    /// Rights to open files; sent before any other message that opens files.
    Rights = 15,
    /// State of the running tree, as far as it is visible without stopping the tree.
    StatePreview = 16,
    /// A [`LockRequest`], after `State`.
    Locks = 17,
}

impl RestorerMessageKind {
    fn from_byte(byte: u8) -> Option<Self> {
        let kinds = [
            Self::Start,
            Self::Tree,
            Self::Pages,
            Self::State,
            Self::Resume,
            Self::Descriptors,
            Self::LastDescriptors,
            Self::Digest,
            Self::RaisePriority,
            Self::MissingPages,
            Self::GetUserfaults,
            Self::KeepUserfault,
            Self::DropUserfault,
            Self::PostcopyComplete,
            Self::Rights,
            Self::StatePreview,
            Self::Locks,
        ];
        kinds.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// A request about exclusive file locks that another process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum LockRequest {
    /// List the exclusive locks that another process holds.
    List,
    /// Take this step of the locks' hand-over.
    Advance(LockHandoverStep),
    /// Resume the tree without these locks.
    Renounce,
}

/// Answer of a restorer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestorerReply {
    /// The request succeeded.
    Done,
    /// Ranges of missing memory. A descriptor for each process follows the answer.
    MissingPages(MissingPages),
    /// Locks that another process holds.
    Locks(Vec<ContendedLock>),
    /// The tree runs without these locks, which another process holds.
    Running(Vec<String>),
    /// The restorer's machine cannot take the tree. Nothing was begun.
    Refused(String),
    /// The request failed half-way: the restorer must be ended.
    Failed(String),
    /// After `go`: the root of the tree ended with this wait status.
    Ended(i32),
}

impl RestorerReply {
    /// Converts the outcome of a request to an answer.
    pub(super) fn from_outcome(outcome: Result<(), Error>) -> Self {
        match outcome {
            Ok(()) => Self::Done,
            Err(Error::Refused(why)) => Self::Refused(why),
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// Sends a message whose content may lie in several places.
pub(super) fn send<P>(
    channel: &mut UnixStream,
    kind: RestorerMessageKind,
    parts: &[P],
) -> io::Result<()>
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
    buffer: &'a mut Vec<u8>,
) -> io::Result<Option<(RestorerMessageKind, &'a [u8])>> {
    let mut head = [0; 9];
    match channel.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = RestorerMessageKind::from_byte(head[0]).ok_or_else(invalid)?;
    let length = u64::from_le_bytes(head[1..].try_into().map_err(|_| invalid())?);
    let length = usize::try_from(length)
        .ok()
        .filter(|length| *length <= MESSAGE_MAX)
        .ok_or_else(invalid)?;
    if buffer.len() < length || buffer.len() > BUFFER_KEPT_MAX.max(length) {
        *buffer = vec![0; length];
    }
    let bytes = &mut buffer[..length];
    channel.read_exact(bytes)?;
    Ok(Some((kind, bytes)))
}

/// Sends the restorer's answer to the daemon.
pub(super) fn send_reply(channel: &mut UnixStream, reply: &RestorerReply) -> io::Result<()> {
    let bytes = postcard::to_stdvec(reply).map_err(io::Error::other)?;
    channel.write_all(&(bytes.len() as u32).to_le_bytes())?;
    channel.write_all(&bytes)
}

/// Receives the restorer's answer.
pub(super) fn receive_reply(channel: &mut UnixStream) -> io::Result<RestorerReply> {
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
pub(super) fn send_descriptors(channel: &UnixStream, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    for chunk in fds.chunks(fd_passing::MAX_FDS) {
        fd_passing::send_with_fds(channel.as_fd(), &[0], chunk)?;
    }
    Ok(())
}

/// Receives `count` descriptors.
pub(crate) fn receive_descriptors(channel: &UnixStream, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut fds = Vec::with_capacity(count);
    while fds.len() < count {
        let received = fd_passing::recv_with_fds(channel.as_fd(), &mut [0])?;
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
