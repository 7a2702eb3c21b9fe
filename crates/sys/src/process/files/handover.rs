//! Hand-over of locks between two nodes, on a file system that both nodes see.
//!
//! A file system regards two nodes as two lock owners, and no call passes a lock to another owner. So an exclusive lock
//! is released and taken in steps. Between the steps, donor and acceptor together hold enough of the lock that no other
//! owner can take all of it. A lock on a range moves in two parts, one of which is exclusive at all times; a `flock(2)`
//! lock has no ranges, and is shared for a while.
//!
//! | step | donor | acceptor |
//! | --- | --- | --- |
//! | [`LockStep::Share`] | all but the first byte: shared | the same: shared |
//! | commit | | |
//! | [`LockStep::Rest`] | all but the first byte: free | the same: exclusive |
//! | [`LockStep::First`] | first byte: shared | first byte: shared |
//! | [`LockStep::Last`] | first byte: free | first byte: exclusive |
//!
//! A file that is open for writing only cannot have shared locks on ranges: the donor releases the part that it would
//! share, and the acceptor takes that part exclusively. A lock that cannot be divided (`flock(2)`, or a range of one
//! byte) moves as a whole where the table says "all but the first byte".

use super::image::{Lock, LockHolder};
use super::raw;
use rustix::fs::{FlockOperation, flock, fstat, fstatfs, fstatvfs};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::BorrowedFd;

/// Most locks of a process tree that are handed over at once.
pub const LOCKS_MAX: usize = 4096;

/// A step of the hand-over of locks; the module documentation lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LockStep {
    /// Step before the commit.
    Share,
    /// First step after the commit.
    Rest,
    /// Second step after the commit, for locks in two parts.
    First,
    /// Last step, for locks in two parts.
    Last,
}

/// Identity of a file, which distinguishes the file from all others on every node that sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Type of the file system (`statfs(2)`).
    kind: u32,
    /// ID of the file system (`f_fsid`), 0 if it has none.
    system: u64,
    inode: u64,
    /// Type and bytes of the file's handle, which distinguish successive files with one inode number.
    handle: Option<(i32, Vec<u8>)>,
}

impl FileIdentity {
    /// Reads the identity of an open file.
    ///
    /// # Errors
    /// Errors of `fstatfs(2)`, `fstatvfs(2)` and `fstat(2)`.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            kind: file_system(fd)?,
            system: fstatvfs(fd)?.f_fsid,
            inode: fstat(fd)?.st_ino,
            handle: raw::file_handle(fd),
        })
    }
}

/// An exclusive lock that the acceptor could not take, because another owner, most likely the donor, has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedLock {
    /// A process that has the descriptor, by its PID inside the tree.
    pub process: i32,
    /// Descriptor number.
    pub fd: u32,
    /// The wanted lock.
    pub lock: Lock,
    /// True if the file is open for reading, so that a range of the file can have a shared lock.
    pub readable: bool,
    /// Identity of the acceptor's file.
    pub identity: FileIdentity,
}

impl WantedLock {
    /// Returns true if the lock moves in two parts.
    #[must_use]
    pub fn has_two_parts(&self) -> bool {
        has_two_parts(&self.lock)
    }
}

/// Lock mode of a range of a file, or of the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Free,
    Shared,
    Exclusive,
}

/// A change to a part of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockChange {
    pub mode: Mode,
    pub start: u64,
    /// Last byte; `None` is the end of the file.
    pub end: Option<u64>,
}

impl LockChange {
    /// Returns the change that sets a lock's mode on all of its range again.
    pub(crate) fn whole(lock: &Lock) -> Self {
        Self {
            mode: if lock.write {
                Mode::Exclusive
            } else {
                Mode::Shared
            },
            start: lock.start,
            end: lock.end,
        }
    }

    /// Returns the donor's change in a step.
    pub(crate) fn of_donor(step: LockStep, lock: &Lock, readable: bool) -> Option<Self> {
        let mode = match step {
            LockStep::Share | LockStep::First if is_shareable(lock, readable) => Mode::Shared,
            _ => Mode::Free,
        };
        part(step, lock).map(|(start, end)| Self { mode, start, end })
    }

    /// Returns the acceptor's change in a step, which follows the donor's.
    pub(crate) fn of_acceptor(step: LockStep, lock: &Lock, readable: bool) -> Option<Self> {
        let mode = match step {
            LockStep::Share | LockStep::First if is_shareable(lock, readable) => Mode::Shared,
            _ => Mode::Exclusive,
        };
        part(step, lock).map(|(start, end)| Self { mode, start, end })
    }

    /// Returns a `struct flock` as words: type and whence of two bytes each, start, length, PID.
    pub(crate) fn words(&self) -> [u64; 4] {
        let kind = self.kind() as u16;
        [
            u64::from(kind) | (libc::SEEK_SET as u64) << 16,
            self.start,
            self.length() as u64,
            0,
        ]
    }

    fn kind(&self) -> i32 {
        match self.mode {
            Mode::Free => libc::F_UNLCK,
            Mode::Shared => libc::F_RDLCK,
            Mode::Exclusive => libc::F_WRLCK,
        }
    }

    /// Length in bytes; 0 extends to the end of the file.
    fn length(&self) -> i64 {
        match self.end {
            Some(end) if end < i64::MAX as u64 => (end - self.start + 1) as i64,
            _ => 0,
        }
    }

    /// Makes the change through a descriptor of the open file that has the lock. Returns false if another owner's lock
    /// conflicts.
    pub(crate) fn make(&self, fd: BorrowedFd<'_>, holder: LockHolder) -> io::Result<bool> {
        let outcome = match holder {
            LockHolder::Flock => self.flock(fd),
            _ => raw::lock_range(
                fd,
                holder == LockHolder::OpenFile,
                self.kind(),
                self.start as i64,
                self.length(),
            ),
        };
        unless_excluded(outcome)
    }

    fn flock(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let operation = match self.mode {
            Mode::Free => FlockOperation::Unlock,
            Mode::Shared => FlockOperation::NonBlockingLockShared,
            Mode::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        let outcome = flock(fd, operation);
        if outcome.is_err() && self.mode == Mode::Exclusive {
            // The failed conversion has released the shared lock. The conflicting owner still has a lock, so that no
            // owner can have an exclusive one.
            let _ = flock(fd, FlockOperation::NonBlockingLockShared);
        }
        Ok(outcome?)
    }
}

/// Returns true if a call that takes a lock succeeded, and false if another owner's lock conflicts. Other failures are
/// errors.
pub(crate) fn unless_excluded(outcome: io::Result<()>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns the byte range that a step changes.
fn part(step: LockStep, lock: &Lock) -> Option<(u64, Option<u64>)> {
    let first = has_two_parts(lock).then_some(lock.start);
    match (step, first) {
        (LockStep::Share | LockStep::Rest, Some(first)) => Some((first + 1, lock.end)),
        (LockStep::Share | LockStep::Rest, None) => Some((lock.start, lock.end)),
        (LockStep::First | LockStep::Last, first) => first.map(|first| (first, Some(first))),
    }
}

/// Returns true if a lock moves in two parts.
pub(super) fn has_two_parts(lock: &Lock) -> bool {
    lock.holder != LockHolder::Flock && lock.end.is_none_or(|end| end > lock.start)
}

/// Returns true if the donor can make the lock a shared one.
pub(super) fn is_shareable(lock: &Lock, readable: bool) -> bool {
    readable || lock.holder == LockHolder::Flock
}

/// Returns the type of a file's file system.
pub(crate) fn file_system(fd: BorrowedFd<'_>) -> io::Result<u32> {
    // Some kernels sign-extend types that have 32 bits.
    Ok(fstatfs(fd)?.f_type as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const STEPS: [LockStep; 4] = [
        LockStep::Share,
        LockStep::Rest,
        LockStep::First,
        LockStep::Last,
    ];

    fn lock(holder: LockHolder, start: u64, end: Option<u64>) -> Lock {
        Lock {
            holder,
            write: true,
            start,
            end,
        }
    }

    /// Lock mode of each byte at one node.
    type Bytes = BTreeMap<u64, Mode>;

    fn change(bytes: &mut Bytes, change: Option<LockChange>) {
        if let Some(change) = change {
            let range = change.start..=change.end.unwrap_or(9);
            bytes.extend(range.map(|byte| (byte, change.mode)));
        }
    }

    /// After each half of each step, no other owner can lock the range exclusively, nor, if the lock has two parts,
    /// shared.
    #[test]
    fn a_lock_is_never_free() {
        for (readable, end) in [
            (true, Some(7)),
            (false, None),
            (true, Some(3)),
            (false, Some(4)),
        ] {
            let lock = lock(LockHolder::OpenFile, 3, end);
            let last = end.unwrap_or(9);
            let fill = |mode| (3..=last).map(move |byte| (byte, mode)).collect::<Bytes>();
            let (mut donor, mut acceptor) = (fill(Mode::Exclusive), fill(Mode::Free));
            let is_safe = |donor: &Bytes, acceptor: &Bytes| {
                let has = |mode| {
                    donor
                        .values()
                        .chain(acceptor.values())
                        .any(|one| *one == mode)
                };
                let both = |byte: u64| (donor[&byte], acceptor[&byte]);
                let agree = (3..=last).all(|byte| {
                    !matches!(
                        both(byte),
                        (Mode::Exclusive, Mode::Shared | Mode::Exclusive)
                            | (Mode::Shared, Mode::Exclusive)
                    )
                });
                let held = (3..=last).all(|byte| both(byte) != (Mode::Free, Mode::Free));
                agree
                    && if has_two_parts(&lock) {
                        has(Mode::Exclusive)
                    } else {
                        held
                    }
                    && (held || !readable)
            };
            for step in STEPS {
                change(&mut donor, LockChange::of_donor(step, &lock, readable));
                assert!(
                    is_safe(&donor, &acceptor),
                    "{step:?} {donor:?} {acceptor:?}"
                );
                change(
                    &mut acceptor,
                    LockChange::of_acceptor(step, &lock, readable),
                );
                assert!(
                    is_safe(&donor, &acceptor),
                    "{step:?} {donor:?} {acceptor:?}"
                );
            }
            assert_eq!((donor, acceptor), (fill(Mode::Free), fill(Mode::Exclusive)));
        }
    }
}
