//! Exclusive locks that would be free for a moment during the hand-over, found before anything is changed.

use super::fdinfo::FdInfo;
use super::image::{FileLock, FilePath, LockHolder};
use super::lock_handover::{LockedFileIdentity, file_system, has_two_parts, is_shareable};
use crate::procfs;
use rustix::fs::{Mode, OFlags, open};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};

/// File systems that leave `flock(2)` to the kernel, which converts such a lock in one step: ext4, XFS, Btrfs, tmpfs,
/// F2FS, overlayfs, ramfs, bcachefs, ZFS, FAT, exFAT, JFS (`linux/magic.h`). Network and cluster file systems implement
/// `flock(2)` in their own ways, most of which free the lock for a moment.
const LOCAL_FLOCK_MAGICS: [u32; 12] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0xf2f5_2010,
    0x794c_7630,
    0x8584_58f6,
    0xca45_1a4e,
    0x2fc1_2fc1,
    0x4d44,
    0x2011_bab0,
    0x3153_464a,
];
/// Network and cluster file systems that convert a lock on a range in one step, as POSIX requires: NFS, GFS2, OCFS2,
/// Ceph, Lustre.
const ATOMIC_CONVERSION_MAGICS: [u32; 5] =
    [0x6969, 0x0116_1970, 0x7461_636f, 0x00c3_6400, 0x0bd0_0bd0];
/// Other file systems that several nodes share: CIFS, SMB 2 and later, AFS.
const OTHER_NETWORK_MAGICS: [u32; 3] = [0xff53_4d42, 0xfe53_4d42, 0x5346_414f];

/// An exclusive lock that cannot be handed over if both nodes see its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RiskyLock {
    /// A donor process that has the lock.
    process: i32,
    fd: u32,
    path: FilePath,
    identity: LockedFileIdentity,
    /// Reason, and the remedy.
    reason: String,
}

impl RiskyLock {
    /// Finds such locks of processes that may be running; processes that end and files that are closed meanwhile are
    /// left out.
    #[must_use]
    pub fn find(pids: &[i32]) -> Vec<Self> {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        if !locks.contains(" WRITE ") {
            return Vec::new();
        }
        let of_one = |pid: &i32| {
            let (pid, locks) = (*pid, &locks);
            let entries = fs::read_dir(format!("/proc/{pid}/fd"));
            let names = entries.into_iter().flatten().flatten();
            let numbers = names.filter_map(|name| name.file_name().to_str()?.parse().ok());
            numbers.filter_map(move |fd| Self::find_at(pid, fd, (pids, locks)))
        };
        pids.iter().flat_map(of_one).collect()
    }

    fn find_at(pid: i32, fd: u32, (tree, locks): (&[i32], &str)) -> Option<Self> {
        let link = format!("/proc/{pid}/fd/{fd}");
        let path = fs::read_link(&link).ok().filter(|path| path.has_root())?;
        let info = FdInfo::parse(&procfs::read(pid, &format!("fdinfo/{fd}")).ok()?)?;
        let locks_held = info.locks(0).ok()?;
        let mut written = locks_held.iter().filter(|lock| lock.write).peekable();
        written.peek()?;
        let file = open(&link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let (kind, identity) = (
            file_system(file.as_fd()).ok()?,
            LockedFileIdentity::of(file.as_fd()).ok()?,
        );
        // Processes of the tree do not wait for locks while they are stopped. `/proc/locks` does not name the owners of
        // open file locks.
        let mut waits = waiting_requests(&info, locks);
        waits.retain(|waits| waits.pid > 0 && !tree.contains(&waits.pid));
        let readable = is_readable(&info);
        let reason = written.find_map(|lock| handover_risk(lock, readable, kind, &waits))?;
        Some(Self {
            process: pid,
            fd,
            path: path.into(),
            identity,
            reason: reason.to_owned(),
        })
    }

    /// Returns the reason why the process cannot be restored here, if this node sees the same file.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let file = open(&*self.path, flags, Mode::empty()).ok()?;
        let is_same = LockedFileIdentity::of(file.as_fd()).ok()? == self.identity;
        let Self {
            process,
            fd,
            path,
            reason,
            ..
        } = self;
        is_same.then(|| format!("process {process}, descriptor {fd} ({path}): {reason}"))
    }
}

/// Returns true if an open file can be read.
pub(crate) fn is_readable(info: &FdInfo) -> bool {
    info.flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
}

/// Returns the reason why one of these exclusive locks cannot be handed over, if the file is on a file system that
/// every node sees.
pub(super) fn shared_fs_risk(
    fd: BorrowedFd<'_>,
    info: &FdInfo,
    locks: &[FileLock],
) -> Option<&'static str> {
    let mut written = locks.iter().filter(|lock| lock.write).peekable();
    written.peek()?;
    let kind = file_system(fd).ok()?;
    if !ATOMIC_CONVERSION_MAGICS.contains(&kind) && !OTHER_NETWORK_MAGICS.contains(&kind) {
        return None;
    }
    written.find_map(|lock| handover_risk(lock, is_readable(info), kind, &[]))
}

/// Returns the reason why another owner could get an exclusive lock during the hand-over; `waiting` lists the other
/// requests for locks on the file.
pub(crate) fn handover_risk(
    lock: &FileLock,
    readable: bool,
    kind: u32,
    waiting: &[WaitingRequest],
) -> Option<&'static str> {
    let is_local = LOCAL_FLOCK_MAGICS.contains(&kind);
    if lock.holder == LockHolder::Flock && !is_local {
        return Some(
            "has an exclusive flock(2) lock on a network file system, where the lock would be free for a moment: use \
             fcntl(2)",
        );
    }
    if !is_local && !ATOMIC_CONVERSION_MAGICS.contains(&kind) {
        return Some(
            "has an exclusive lock on a file system that cannot downgrade it to shared without releasing it: put the \
             file on another file system",
        );
    }
    if !has_two_parts(lock) && !is_shareable(lock, readable) {
        return Some(
            "has an exclusive lock on one byte and is open for writing only, so the lock cannot be downgraded to \
             shared: open the file for reading too",
        );
    }
    let is_granted = |waits: &&WaitingRequest| {
        let is_same_range = (lock.holder == LockHolder::Flock) == waits.flock;
        // While a lock is in two parts, one part is always exclusive.
        let spans = has_two_parts(lock)
            && waits.start <= lock.start
            && waits.end.is_none_or(|end| end > lock.start);
        let overlaps = waits.end.is_none_or(|end| end >= lock.start)
            && lock.end.is_none_or(|end| end >= waits.start);
        is_same_range && !waits.write && overlaps && !spans
    };
    waiting.iter().find(is_granted).map(|_| {
        "has an exclusive lock for which a reader waits in another process, and the reader would get it during the \
         move: let that reader try later"
    })
}

/// A request for a lock that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitingRequest {
    /// PID; -1 if the kernel does not know it.
    pub pid: i32,
    pub flock: bool,
    pub write: bool,
    pub start: u64,
    pub end: Option<u64>,
}

/// Returns the requests that wait for locks on a descriptor's file, if the descriptor has locks (`/proc/locks`,
/// `proc_locks(5)`).
pub(crate) fn waiting_requests(info: &FdInfo, locks: &str) -> Vec<WaitingRequest> {
    let Some(place) = info.locked_file() else {
        return Vec::new();
    };
    let line = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "->" {
            return None;
        }
        let flock = words.next()? == "FLOCK";
        let write = words.nth(1)? == "WRITE";
        let pid = words.next()?.parse().ok()?;
        if words.next()? != place {
            return None;
        }
        Some(WaitingRequest {
            pid,
            flock,
            write,
            start: words.next()?.parse().ok()?,
            end: words.next()?.parse().ok(),
        })
    };
    locks.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(holder: LockHolder, start: u64, end: Option<u64>) -> FileLock {
        FileLock {
            holder,
            write: true,
            start,
            end,
        }
    }

    #[test]
    fn lock_that_others_could_take_is_reported() {
        let (tmpfs, nfs, cifs) = (0x0102_1994, 0x6969, 0xff53_4d42);
        let whole = lock(LockHolder::Flock, 0, None);
        let range = lock(LockHolder::OpenFile, 0, None);
        let byte = lock(LockHolder::Table(0), 5, Some(5));
        let named = |lock, readable, kind, waits: &[WaitingRequest]| {
            handover_risk(lock, readable, kind, waits).is_some()
        };
        assert!(!named(&whole, false, tmpfs, &[]) && named(&whole, true, nfs, &[]));
        assert!(!named(&range, false, nfs, &[]) && named(&range, true, cifs, &[]));
        assert!(!named(&byte, true, nfs, &[]) && named(&byte, false, nfs, &[]));
        let reader = WaitingRequest {
            pid: 7,
            flock: true,
            write: false,
            start: 0,
            end: None,
        };
        let writer = WaitingRequest {
            write: true,
            ..reader
        };
        assert!(named(&whole, true, tmpfs, &[reader]) && !named(&whole, true, tmpfs, &[writer]));
        let (spanning, within) = (
            WaitingRequest {
                flock: false,
                ..reader
            },
            WaitingRequest {
                flock: false,
                start: 4,
                ..reader
            },
        );
        assert!(!named(&range, true, tmpfs, &[spanning, reader]));
        assert!(named(&range, true, tmpfs, &[within]) && named(&byte, true, tmpfs, &[within]));
    }

    #[test]
    fn waiter_for_another_range_is_no_risk() {
        let reader = WaitingRequest {
            pid: 7,
            flock: false,
            write: false,
            start: 10,
            end: Some(19),
        };
        let named = |start, end| {
            let lock = lock(LockHolder::Table(0), start, end);
            handover_risk(&lock, true, 0xef53, &[reader]).is_some()
        };
        assert!(!named(0, Some(9)) && !named(20, None) && !named(10, Some(30)));
        assert!(named(5, Some(30)) && named(19, None) && named(0, Some(10)));
    }

    #[test]
    fn waiting_requests_of_the_kernel_parse() {
        let text = "pos:\t0\nflags:\t02\nmnt_id:\t9\nino:\t131\n\
            lock:\t1: FLOCK  ADVISORY  WRITE 21758 fe:00:131 0 EOF\n";
        let locks = "1: FLOCK  ADVISORY  WRITE 21758 fe:00:131 0 EOF\n\
            1: -> FLOCK  ADVISORY  READ 21760 fe:00:131 0 EOF\n\
            2: OFDLCK ADVISORY  WRITE -1 fe:00:131 0 EOF\n\
            2: -> OFDLCK ADVISORY  WRITE -1 fe:00:131 5 14\n\
            3: -> POSIX  ADVISORY  READ 8 fe:00:132 0 EOF\n";
        let info = FdInfo::parse(text).expect("parses");
        let flock = WaitingRequest {
            pid: 21760,
            flock: true,
            write: false,
            start: 0,
            end: None,
        };
        let range = WaitingRequest {
            pid: -1,
            flock: false,
            write: true,
            start: 5,
            end: Some(14),
        };
        assert_eq!(waiting_requests(&info, locks), [flock, range]);
    }
}
