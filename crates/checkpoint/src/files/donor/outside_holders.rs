//! Pipes, sockets, terminals and files without a name that processes outside the tree have open.

use crate::REAPER_NAME;
use crate::files::syscalls;
use crate::procfs::ProcStat;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Descriptors of processes outside the tree, by the text that `/proc/PID/fd` shows for the file.
#[derive(Debug, Default)]
pub struct OutsideHolders {
    holders: HashMap<String, Vec<i32>>,
    /// Files with a text that tells only their kind, by that text.
    ambiguous: HashMap<String, SameLinkFds>,
    tree: Vec<i32>,
}

/// Descriptors of other processes with the same text.
#[derive(Debug, Default)]
struct SameLinkFds {
    /// Descriptors: process and number.
    descriptors: Vec<(i32, u32)>,
    /// The same descriptors in the kernel's order of files, sorted at the first query.
    sorted: OnceCell<Vec<(i32, u32)>>,
}

/// Longest chain of parents that is followed.
const PARENTS_MAX: usize = 1000;

impl OutsideHolders {
    /// Reads all descriptors of all other processes. Processes that end meanwhile are left out.
    pub fn read(tree: &[i32]) -> Self {
        let mut holders = HashMap::new();
        let mut nameless: HashMap<String, SameLinkFds> = HashMap::new();
        let own_pid = std::process::id() as i32;
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            if tree.contains(&pid) {
                continue;
            }
            let fds = fs::read_dir(process.path().join("fd"));
            for fd in fds.into_iter().flatten().flatten() {
                let Ok(target) = fs::read_link(fd.path()) else {
                    continue;
                };
                let Some(target) = target.to_str() else {
                    continue;
                };
                if target.starts_with("pipe:") || target.starts_with("socket:") {
                    let holders: &mut Vec<i32> = holders.entry(target.to_string()).or_default();
                    if holders.last() != Some(&pid) {
                        holders.push(pid);
                    }
                } else if pid != own_pid && is_ambiguous(target) {
                    // Copies that this process makes are closed at once.
                    let number = fd.file_name().to_str().and_then(|name| name.parse().ok());
                    let found = nameless.entry(target.to_string()).or_default();
                    found.descriptors.extend(number.map(|number| (pid, number)));
                }
            }
        }
        Self {
            holders,
            ambiguous: nameless,
            tree: tree.to_vec(),
        }
    }

    /// Returns a process outside the tree that has the file with this text in `/proc/PID/fd`.
    pub fn holder_of_link(&self, link: &str) -> Option<i32> {
        let holders = self.holders.get(link)?;
        holders.iter().copied().find(|pid| !self.is_inside(*pid))
    }

    /// Returns true if a process belongs to the tree, because it was started after the tree was listed, or if it has
    /// ended.
    fn is_inside(&self, pid: i32) -> bool {
        let mut at = pid;
        for _ in 0..PARENTS_MAX {
            match ProcStat::read(at) {
                Err(_) => return at == pid,
                Ok(stat) if self.tree.contains(&stat.parent) => return true,
                Ok(stat) if stat.parent <= 1 => return false,
                Ok(stat) => at = stat.parent,
            }
        }
        false
    }

    /// Returns a process outside the tree that has a file of the tree open, for files that [`OutsideHolders::holder_of_link`] cannot
    /// distinguish: an eventfd, timerfd, epoll set or the like, or the content of a file without a name. New children
    /// of the tree do not count as outside.
    pub fn holder_of_file(&self, link: &str, file: (i32, u32)) -> Option<i32> {
        let group = self.ambiguous.get(link)?;
        let mut holders = match is_unnamed_content(link) {
            true => group.holders_of_content(file),
            false => group.holders_of_file(file),
        };
        holders.retain(|pid| !is_reaper(*pid) && !self.is_inside(*pid));
        holders.first().copied()
    }
}

impl SameLinkFds {
    /// Returns the processes that have the same open file. Once the descriptors are sorted, the cost is logarithmic in
    /// their number.
    fn holders_of_file(&self, file: (i32, u32)) -> Vec<i32> {
        let sorted = self.sorted.get_or_init(|| {
            let mut sorted = Vec::with_capacity(self.descriptors.len());
            for &one in &self.descriptors {
                let position = sorted.partition_point(|other| compare_files(*other, one).is_lt());
                sorted.insert(position, one);
            }
            sorted
        });
        let first = sorted.partition_point(|other| compare_files(*other, file).is_lt());
        let candidates = sorted[first..].iter();
        let equal = candidates.take_while(|other| compare_files(**other, file).is_eq());
        equal.map(|(pid, _)| *pid).collect()
    }

    fn holders_of_content(&self, file: (i32, u32)) -> Vec<i32> {
        let identity = |(pid, fd): (i32, u32)| {
            let found = fs::metadata(format!("/proc/{pid}/fd/{fd}")).ok()?;
            Some((found.dev(), found.ino()))
        };
        let Some(wanted) = identity(file) else {
            return Vec::new();
        };
        let same = self
            .descriptors
            .iter()
            .filter(|one| identity(**one) == Some(wanted));
        same.map(|(pid, _)| *pid).collect()
    }
}

/// Returns true for a reaper: the restorer of a tree closes the tree's files shortly after the restore.
fn is_reaper(pid: i32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.is_ok_and(|name| name.trim_end() == REAPER_NAME)
}

/// Compares two open files; comparison fails for a descriptor that was closed meanwhile.
fn compare_files(one: (i32, u32), other: (i32, u32)) -> syscalls::Ordering {
    syscalls::compare_files(one, other).unwrap_or(syscalls::Ordering::Less)
}

/// Returns true if the text is that of a file which was unlinked, or never had a name.
fn is_unnamed_content(link: &str) -> bool {
    link.starts_with('/') && link.ends_with(" (deleted)")
}

/// Returns true if the text does not distinguish the file from others of its kind.
fn is_ambiguous(link: &str) -> bool {
    let is_object = link.starts_with("anon_inode:") && link != "anon_inode:[pidfd]";
    is_object || is_unnamed_content(link)
}
