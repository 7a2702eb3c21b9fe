//! Hand-over of locks between two nodes, on a file system that both nodes see.
//!
//! A file system regards two nodes as two lock owners, and no call passes a lock to another owner. So an exclusive lock
//! is released and taken in steps. Between the steps, donor and acceptor together hold enough of the lock that no other
//! owner can take all of it. A lock on a range moves in two parts, one of which is exclusive at all times; a `flock(2)`
//! lock has no ranges, and is shared for a while.
//!
//! | step | donor | acceptor |
//! | --- | --- | --- |
//! | [`LockHandoverStep::ShareRemainder`] | all but the first byte: shared | the same: shared |
//! | commit | | |
//! | [`LockHandoverStep::MoveRemainder`] | all but the first byte: free | the same: exclusive |
//! | [`LockHandoverStep::ShareFirstByte`] | first byte: shared | first byte: shared |
//! | [`LockHandoverStep::MoveFirstByte`] | first byte: free | first byte: exclusive |
//!
//! A file that is open for writing only cannot have shared locks on ranges: the donor releases the part that it would
//! share, and the acceptor takes that part exclusively. A lock that cannot be divided (`flock(2)`, or a range of one
//! byte) moves as a whole where the table says "all but the first byte".

use super::image::{FileLock, LockHolder};
use super::syscalls;
use rustix::fs::{FlockOperation, flock, fstat, fstatfs, fstatvfs};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::BorrowedFd;

/// Most locks of a process tree that are handed over at once.
pub const LOCKS_MAX: usize = 4096;

/// A step of the hand-over of locks; the module documentation lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LockHandoverStep {
    /// Step before the commit.
    ShareRemainder,
    /// First step after the commit.
    MoveRemainder,
    /// Second step after the commit, for locks in two parts.
    ShareFirstByte,
    /// Last step, for locks in two parts.
    MoveFirstByte,
}

/// Identity of a file, which distinguishes the file from all others on every node that sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedFileIdentity {
    /// Type of the file system (`statfs(2)`).
    fs_type: u32,
    /// ID of the file system (`f_fsid`), 0 if it has none.
    fs_id: u64,
    inode: u64,
    /// Type and bytes of the file's handle, which distinguish successive files with one inode number.
    handle: Option<(i32, Vec<u8>)>,
}

impl LockedFileIdentity {
    /// Reads the identity of an open file.
    ///
    /// # Errors
    /// Errors of `fstatfs(2)`, `fstatvfs(2)` and `fstat(2)`.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            fs_type: file_system(fd)?,
            fs_id: fstatvfs(fd)?.f_fsid,
            inode: fstat(fd)?.st_ino,
            handle: syscalls::file_handle(fd),
        })
    }
}

/// An exclusive lock that the acceptor could not take, because another owner, most likely the donor, has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContendedLock {
    /// A process that has the descriptor, by its PID inside the tree.
    pub process: i32,
    /// Descriptor number.
    pub fd: u32,
    /// The wanted lock.
    pub lock: FileLock,
    /// True if the file is open for reading, so that a range of the file can have a shared lock.
    pub readable: bool,
    /// Identity of the acceptor's file.
    pub identity: LockedFileIdentity,
}

impl ContendedLock {
    /// Returns true if the lock moves in two parts.
    #[must_use]
    pub fn has_two_parts(&self) -> bool {
        has_two_parts(&self.lock)
    }
}

/// Lock mode of a range of a file, or of the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockMode {
    Free,
    Shared,
    Exclusive,
}

/// A change to a part of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockChange {
    pub mode: LockMode,
    pub start: u64,
    /// Last byte; `None` is the end of the file.
    pub end: Option<u64>,
}

impl LockChange {
    /// Returns the change that sets a lock's mode on all of its range again.
    pub(crate) fn for_whole_range(lock: &FileLock) -> Self {
        Self {
            mode: if lock.write {
                LockMode::Exclusive
            } else {
                LockMode::Shared
            },
            start: lock.start,
            end: lock.end,
        }
    }

    /// Returns the donor's change in a step.
    pub(crate) fn for_donor(
        step: LockHandoverStep,
        lock: &FileLock,
        readable: bool,
    ) -> Option<Self> {
        Self::in_step(step, lock, readable, LockMode::Free)
    }

    /// Returns the acceptor's change in a step, which follows the donor's.
    pub(crate) fn for_acceptor(
        step: LockHandoverStep,
        lock: &FileLock,
        readable: bool,
    ) -> Option<Self> {
        Self::in_step(step, lock, readable, LockMode::Exclusive)
    }

    /// Returns one node's change in a step: to a shared lock where the two nodes can share the range, else to
    /// `unshared_mode`.
    fn in_step(
        step: LockHandoverStep,
        lock: &FileLock,
        readable: bool,
        unshared_mode: LockMode,
    ) -> Option<Self> {
        let mode = match step {
            LockHandoverStep::ShareRemainder | LockHandoverStep::ShareFirstByte
                if is_shareable(lock, readable) =>
            {
                LockMode::Shared
            }
            _ => unshared_mode,
        };
        step_range(step, lock).map(|(start, end)| Self { mode, start, end })
    }

    /// Returns a `struct flock` as words: type and whence of two bytes each, start, length, PID.
    pub(crate) fn flock_words(&self) -> [u64; 4] {
        let kind = self.flock_type() as u16;
        [
            u64::from(kind) | (libc::SEEK_SET as u64) << 16,
            self.start,
            self.length() as u64,
            0,
        ]
    }

    fn flock_type(&self) -> i32 {
        match self.mode {
            LockMode::Free => libc::F_UNLCK,
            LockMode::Shared => libc::F_RDLCK,
            LockMode::Exclusive => libc::F_WRLCK,
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
    pub(crate) fn apply(&self, fd: BorrowedFd<'_>, holder: LockHolder) -> io::Result<bool> {
        let outcome = match holder {
            LockHolder::Flock => self.flock(fd),
            _ => syscalls::lock_range(
                fd,
                holder == LockHolder::OpenFile,
                self.flock_type(),
                self.start as i64,
                self.length(),
            ),
        };
        is_lock_taken(outcome)
    }

    fn flock(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let operation = match self.mode {
            LockMode::Free => FlockOperation::Unlock,
            LockMode::Shared => FlockOperation::NonBlockingLockShared,
            LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        let outcome = flock(fd, operation);
        if outcome.is_err() && self.mode == LockMode::Exclusive {
            // The failed conversion has released the shared lock. The conflicting owner still has a lock, so that no
            // owner can have an exclusive one.
            let _ = flock(fd, FlockOperation::NonBlockingLockShared);
        }
        Ok(outcome?)
    }
}

/// Returns true if a call that takes a lock succeeded, and false if another owner's lock conflicts. Other failures are
/// errors.
pub(crate) fn is_lock_taken(outcome: io::Result<()>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns the byte range that a step changes.
fn step_range(step: LockHandoverStep, lock: &FileLock) -> Option<(u64, Option<u64>)> {
    let first = has_two_parts(lock).then_some(lock.start);
    match (step, first) {
        (LockHandoverStep::ShareRemainder | LockHandoverStep::MoveRemainder, Some(first)) => {
            Some((first + 1, lock.end))
        }
        (LockHandoverStep::ShareRemainder | LockHandoverStep::MoveRemainder, None) => {
            Some((lock.start, lock.end))
        }
        (LockHandoverStep::ShareFirstByte | LockHandoverStep::MoveFirstByte, first) => {
            first.map(|first| (first, Some(first)))
        }
    }
}

/// Returns true if a lock moves in two parts.
pub(super) fn has_two_parts(lock: &FileLock) -> bool {
    lock.holder != LockHolder::Flock && lock.end.is_none_or(|end| end > lock.start)
}

/// Returns true if the donor can make the lock a shared one.
pub(super) fn is_shareable(lock: &FileLock, readable: bool) -> bool {
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

    const STEPS: [LockHandoverStep; 4] = [
        LockHandoverStep::ShareRemainder,
        LockHandoverStep::MoveRemainder,
        LockHandoverStep::ShareFirstByte,
        LockHandoverStep::MoveFirstByte,
    ];

    fn lock(holder: LockHolder, start: u64, end: Option<u64>) -> FileLock {
        FileLock {
            holder,
            write: true,
            start,
            end,
        }
    }

    /// Lock mode of each byte at one node.
    type Bytes = BTreeMap<u64, LockMode>;

    fn apply_change(bytes: &mut Bytes, change: Option<LockChange>) {
        if let Some(change) = change {
            let range = change.start..=change.end.unwrap_or(9);
            bytes.extend(range.map(|byte| (byte, change.mode)));
        }
    }

    /// After each half of each step, no other owner can lock the range exclusively, nor, if the lock has two parts,
    /// shared.
    #[test]
    fn lock_is_never_free_during_handover() {
        for (readable, end) in [
            (true, Some(7)),
            (false, None),
            (true, Some(3)),
            (false, Some(4)),
        ] {
            let lock = lock(LockHolder::OpenFile, 3, end);
            let last_byte = end.unwrap_or(9);
            let fill = |mode| {
                (3..=last_byte)
                    .map(move |byte| (byte, mode))
                    .collect::<Bytes>()
            };
            let (mut donor, mut acceptor) = (fill(LockMode::Exclusive), fill(LockMode::Free));
            let excludes_others = |donor: &Bytes, acceptor: &Bytes| {
                let donor_or_acceptor_has = |mode| {
                    donor
                        .values()
                        .chain(acceptor.values())
                        .any(|one| *one == mode)
                };
                let modes = |byte: u64| (donor[&byte], acceptor[&byte]);
                let are_compatible = (3..=last_byte).all(|byte| {
                    !matches!(
                        modes(byte),
                        (LockMode::Exclusive, LockMode::Shared | LockMode::Exclusive)
                            | (LockMode::Shared, LockMode::Exclusive)
                    )
                });
                let held_bytes =
                    (3..=last_byte).all(|byte| modes(byte) != (LockMode::Free, LockMode::Free));
                are_compatible
                    && if has_two_parts(&lock) {
                        donor_or_acceptor_has(LockMode::Exclusive)
                    } else {
                        held_bytes
                    }
                    && (held_bytes || !readable)
            };
            for step in STEPS {
                apply_change(&mut donor, LockChange::for_donor(step, &lock, readable));
                assert!(
                    excludes_others(&donor, &acceptor),
                    "{step:?} {donor:?} {acceptor:?}"
                );
                apply_change(
                    &mut acceptor,
                    LockChange::for_acceptor(step, &lock, readable),
                );
                assert!(
                    excludes_others(&donor, &acceptor),
                    "{step:?} {donor:?} {acceptor:?}"
                );
            }
            assert_eq!(
                (donor, acceptor),
                (fill(LockMode::Free), fill(LockMode::Exclusive))
            );
        }
    }
}
