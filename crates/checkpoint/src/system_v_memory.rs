//! System V shared memory: the segments of a process's IPC namespace, and how the acceptor recreates them.
//!
//! Programs refer to segments by number, so a restored tree has its own IPC namespace.

use super::error::{Context, Error, Result, check_long};
use super::image::{PAGE, SystemVSegment};
use super::inspect::{MappingClass, classify};
use super::procfs::MapLine;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

/// Prefix of the names of mapped segments in procfs. The key follows.
pub(crate) const MAPPED_NAME_PREFIX: &[u8] = b"/SYSV";
/// `SHM_DEST`: the segment is destroyed when the last process detaches it.
const SHM_DEST: u32 = 0o1000;
/// `SHM_LOCKED`.
const SHM_LOCKED: u32 = 0o2000;
/// `IPC_CREAT | IPC_EXCL`.
const CREATE_EXCLUSIVE: i32 = libc::IPC_CREAT | libc::IPC_EXCL;
/// Permissions of a segment while its tree is being restored.
const RESTORE_MODE: i32 = 0o777;

/// A segment as listed in `/proc/sysvipc/shm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListedSegment {
    pub segment: SystemVSegment,
    /// PID of the creator.
    pub creator: i32,
    /// Number of mappings of the segment.
    pub attached: u64,
}

/// Reader of the segments of an IPC namespace.
#[derive(Debug)]
pub(crate) struct SystemVSegmentReader {
    /// Open `/proc/sysvipc/shm`, which shows the namespace in which it was opened.
    file: File,
}

impl SystemVSegmentReader {
    /// Opens the list of the IPC namespace of a process.
    pub fn open(pid: i32) -> Result<Self> {
        let path = "/proc/sysvipc/shm";
        let file = run_in_ipc_namespace(pid, move || File::open(path))?;
        file.map(|file| Self { file }).context(|| path.to_owned())
    }

    /// Reads all segments of the namespace.
    pub fn read(&self) -> Result<Vec<ListedSegment>> {
        let mut text = Vec::new();
        let mut piece = [0; 16 << 10];
        loop {
            let read = self.file.read_at(&mut piece, text.len() as u64);
            match read.context(|| "/proc/sysvipc/shm".to_owned())? {
                0 => break,
                read => text.extend_from_slice(&piece[..read]),
            }
        }
        let text = String::from_utf8_lossy(&text);
        Ok(text.lines().skip(1).filter_map(parse).collect())
    }
}

/// A segment attached by a process: the adjacent mappings of one `shmat(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentAttachment {
    pub id: i32,
    /// Offset in the segment at which the mappings begin.
    offset: u64,
    bytes: u64,
    /// Number of mappings as the kernel counts them.
    pub mappings: u64,
}

impl SegmentAttachment {
    /// Returns true if the attachment covers all of a segment of this size.
    pub fn covers(&self, size: u64) -> bool {
        self.offset == 0 && self.bytes == size.next_multiple_of(PAGE)
    }
}

/// Returns the segments that a process has attached.
pub(crate) fn attachments(lines: &[MapLine]) -> Vec<SegmentAttachment> {
    let id = |line: &MapLine| match classify(line) {
        MappingClass::SystemV(id) => Some(id),
        _ => None,
    };
    let lines: Vec<(i32, &MapLine)> = lines
        .iter()
        .filter_map(|line| Some((id(line)?, line)))
        .collect();
    let goes_on = |(one, a): &(i32, &MapLine), (other, b): &(i32, &MapLine)| {
        one == other && a.end == b.start && b.offset == a.offset + (a.end - a.start)
    };
    let parts = lines.chunk_by(goes_on);
    let attachment = |part: &[(i32, &MapLine)]| SegmentAttachment {
        id: part[0].0,
        offset: part[0].1.offset,
        bytes: part[part.len() - 1].1.end - part[0].1.start,
        mappings: part.len() as u64,
    };
    parts.map(attachment).collect()
}

/// Removes segments from the namespace of a process that has moved. A segment lives on until the last process
/// detaches it.
pub(crate) fn remove(pid: i32, ids: Vec<i32>) -> Result<()> {
    run_in_ipc_namespace(pid, move || {
        for id in ids {
            // A segment that does not exist any more needs no removal.
            // SAFETY: no pointers but a null one are passed.
            unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
        }
    })
}

/// Runs a closure in the IPC namespace of a process.
pub(crate) fn run_in_ipc_namespace<T: Send + 'static>(
    pid: i32,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let path = format!("/proc/{pid}/ns/ipc");
    let entering = || format!("entering {path}");
    let target = File::open(&path).context(entering)?;
    let current = std::fs::metadata("/proc/thread-self/ns/ipc").context(entering)?;
    if target.metadata().context(entering)?.ino() == current.ino() {
        return Ok(work());
    }
    let inside = std::thread::Builder::new().spawn(move || {
        // SAFETY: no pointers are passed; only this thread moves, and it ends after its work.
        let outcome = unsafe { libc::setns(target.as_raw_fd(), libc::CLONE_NEWIPC) };
        check_long(outcome.into()).map(|_| work())
    });
    let inside = inside.context(entering)?.join();
    inside
        .unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
        .context(entering)
}

/// `key shmid perms size cpid lpid nattch uid gid cuid cgid …`.
fn parse(line: &str) -> Option<ListedSegment> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let word = |at: usize| words.get(at).copied();
    let number = |at: usize| word(at)?.parse::<u32>().ok();
    let mode = u32::from_str_radix(word(2)?, 8).ok()?;
    Some(ListedSegment {
        segment: SystemVSegment {
            id: word(1)?.parse().ok()?,
            key: word(0)?.parse().ok()?,
            size: word(3)?.parse().ok()?,
            mode: mode & 0o777,
            is_marked_removed: mode & SHM_DEST != 0,
            is_locked: mode & SHM_LOCKED != 0,
            is_gone: false,
            owner: (number(7)?, number(8)?),
            creator: (number(9)?, number(10)?),
        },
        creator: word(4)?.parse().ok()?,
        attached: word(6)?.parse().ok()?,
    })
}

/// A recreated segment. The restorer attaches it too, so that it exists until the restored processes attach it.
#[derive(Debug)]
pub(crate) struct RecreatedSystemVSegment {
    pub segment: SystemVSegment,
    is_removed: bool,
    address: usize,
    length: usize,
}

impl RecreatedSystemVSegment {
    /// Creates a segment with its original number in the caller's IPC namespace.
    pub fn new(segment: SystemVSegment) -> Result<Self> {
        let making = || format!("recreating System V memory {}", segment.id);
        // The setting applies to the next segment created in this namespace.
        std::fs::write("/proc/sys/kernel/shm_next_id", segment.id.to_string()).context(making)?;
        let size = usize::try_from(segment.size)
            .map_err(|_| Error::Image("System V segment too large"))?;
        let outcome = as_creator(segment.creator, || {
            // SAFETY: no pointers are passed.
            let id = unsafe { libc::shmget(segment.key, size, CREATE_EXCLUSIVE | RESTORE_MODE) };
            check_long(id.into())
        });
        if outcome.context(making)? != i64::from(segment.id) {
            let reason = format!("System V memory cannot be recreated with ID {}", segment.id);
            return Err(Error::Refused(reason));
        }
        // SAFETY: the kernel chooses the address, nothing refers to it, and `detach` detaches it.
        let address = unsafe { libc::shmat(segment.id, std::ptr::null(), 0) }.addr();
        if address == usize::MAX {
            return Err(io::Error::last_os_error()).context(making);
        }
        let mut recreated = Self {
            segment,
            is_removed: false,
            address,
            length: size.next_multiple_of(PAGE as usize),
        };
        recreated.update(segment)?;
        Ok(recreated)
    }

    /// Opens the segment's content as a file.
    pub fn open(&self) -> Result<File> {
        let (start, end) = (self.address, self.address + self.length);
        let link = format!("/proc/self/map_files/{start:x}-{end:x}");
        File::options()
            .read(true)
            .write(true)
            .open(&link)
            .context(|| link)
    }

    /// Updates the segment to the original's present state.
    pub fn update(&mut self, wanted: SystemVSegment) -> Result<()> {
        self.segment = wanted;
        if wanted.is_marked_removed {
            return self.remove();
        }
        Ok(())
    }

    /// Sets the original's owner and permissions, which may deny further access to the process that restores the
    /// tree.
    pub fn finish(&mut self) -> Result<()> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut description: libc::shmid_ds = unsafe { std::mem::zeroed() };
        description.shm_perm.uid = self.segment.owner.0;
        description.shm_perm.gid = self.segment.owner.1;
        description.shm_perm.mode = self.segment.mode as u16;
        if self.segment.is_locked {
            self.control(libc::SHM_LOCK, std::ptr::null_mut())?;
        }
        self.control(libc::IPC_SET, &raw mut description)
    }

    /// Marks the segment for destruction when the last process detaches it.
    pub fn remove(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.is_removed, true) {
            return Ok(());
        }
        self.control(libc::IPC_RMID, std::ptr::null_mut())
    }

    fn control(&self, command: i32, description: *mut libc::shmid_ds) -> Result<()> {
        let id = self.segment.id;
        // SAFETY: the description is null or one that outlives the call, as the command needs it.
        let outcome = unsafe { libc::shmctl(id, command, description) };
        check_long(outcome.into())
            .map(drop)
            .context(|| format!("accessing System V memory {id}"))
    }

    /// Detaches the segment from this process, and so leaves it to the restored ones.
    pub fn detach(&mut self) {
        let address = std::mem::take(&mut self.address);
        if address != 0 {
            // SAFETY: attached by `new`, and nothing refers to its content.
            unsafe { libc::shmdt(std::ptr::without_provenance(address)) };
        }
    }
}

/// Makes a call with another effective user and group. The caller must be single-threaded.
fn as_creator<T>((user, group): (u32, u32), call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    const UNCHANGED: u32 = u32::MAX;
    let set_ids = |user: u32, group: u32| {
        // SAFETY: no pointers are passed.
        check_long(unsafe { libc::syscall(libc::SYS_setresgid, UNCHANGED, group, UNCHANGED) })?;
        // SAFETY: no pointers are passed.
        check_long(unsafe { libc::syscall(libc::SYS_setresuid, UNCHANGED, user, UNCHANGED) })
    };
    // SAFETY: no pointers are passed.
    let (own_user, own_group) = unsafe { (libc::geteuid(), libc::getegid()) };
    if (user, group) == (own_user, own_group) {
        return call();
    }
    set_ids(user, group)?;
    let outcome = call();
    // Restore the user first: another user may not be allowed to change the group.
    // SAFETY: no pointers are passed.
    check_long(unsafe { libc::syscall(libc::SYS_setresuid, UNCHANGED, own_user, UNCHANGED) })?;
    set_ids(own_user, own_group)?;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_lines_of_the_kernel_parse() {
        let line = "1704875530      98305  1640   5000   77    78      3  1000   100     0     5 \
            1763836671          0 1763836669                     0                     0";
        let segment = parse(line).expect("parsed");
        let expected = SystemVSegment {
            id: 98305,
            key: 1_704_875_530,
            size: 5000,
            mode: 0o640,
            is_marked_removed: true,
            is_locked: false,
            is_gone: false,
            owner: (1000, 100),
            creator: (0, 5),
        };
        assert_eq!(
            (segment.segment, segment.creator, segment.attached),
            (expected, 77, 3)
        );
        assert_eq!(parse("key shmid perms size"), None);
    }

    #[test]
    fn adjacent_mappings_are_grouped_by_attachment() {
        let line = |page: u64, pages: u64, offset: u64| MapLine {
            start: page * PAGE,
            end: (page + pages) * PAGE,
            protection: libc::PROT_READ,
            shared: true,
            offset: offset * PAGE,
            device: (0, 1),
            inode: 5,
            name: b"/SYSV00000000 (deleted)".to_vec(),
            vm_flags: None,
        };
        // Two adjacent whole attachments, the second in two protections, and a partial attachment.
        let lines = [line(1, 2, 0), line(3, 1, 0), line(4, 1, 1), line(9, 1, 1)];
        let found = attachments(&lines);
        let are_whole: Vec<bool> = found
            .iter()
            .map(|attachment| attachment.covers(PAGE + 1))
            .collect();
        let mappings: Vec<u64> = found.iter().map(|attachment| attachment.mappings).collect();
        assert_eq!(
            (are_whole, mappings),
            (vec![true, true, false], vec![1, 2, 1])
        );
    }
}
