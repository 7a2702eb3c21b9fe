//! Checksums of locks on files. A restored tree gets its locks when it resumes; until then, its planned locks are
//! compared.

use crate::files::image::{FileLock, LockHolder};
use crate::files::{FdInfo, FilesImage};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the checksum of locks, or `None` if there are none. A lock counts at the lowest descriptor of its file,
/// because the kernel shows a process's own locks at each of them.
pub(super) fn checksum(infos: &BTreeMap<u32, FdInfo>, locks: &[(u32, FileLock)]) -> Option<u32> {
    let file = |info: &FdInfo| (info.mount, info.inode);
    let mut first: BTreeMap<(u32, u64), u32> = BTreeMap::new();
    for (number, info) in infos {
        first.entry(file(info)).or_insert(*number);
    }
    let found: BTreeSet<String> = locks
        .iter()
        .map(|(number, lock)| {
            let lowest = infos.get(number).and_then(|info| first.get(&file(info)));
            let holder = match lock.holder {
                LockHolder::Table(_) => "process",
                LockHolder::OpenFile => "open file",
                LockHolder::Flock => "flock",
            };
            let (write, start, end) = (lock.write, lock.start, lock.end);
            format!("{lowest:?} {holder} {write} {start} {end:?}")
        })
        .collect();
    let text: Vec<String> = found.into_iter().collect();
    (!text.is_empty()).then(|| crc32c::crc32c(text.join("\n").as_bytes()))
}

/// Returns the locks that the kernel shows.
pub(super) fn current_locks(infos: &BTreeMap<u32, FdInfo>) -> Vec<(u32, FileLock)> {
    let of_one = |(number, info): (&u32, &FdInfo)| {
        let locks = info.locks(0).unwrap_or_default();
        let number = *number;
        locks.into_iter().map(move |lock| (number, lock))
    };
    infos.iter().flat_map(of_one).collect()
}

/// Returns the locks that a process will get, by the PID that the process itself sees.
pub(crate) fn planned_locks(image: &FilesImage, pid: i32) -> Vec<(u32, FileLock)> {
    let mut found = Vec::new();
    for (table, has) in image
        .tables
        .iter()
        .filter(|(_, has)| has.pids.contains(&pid))
    {
        for (number, slot) in &has.slots {
            let locks = image.files.get(&slot.file).map(|file| &file.locks);
            let is_of_process = |lock: &&FileLock| match lock.holder {
                LockHolder::Table(holder) => holder == *table,
                LockHolder::Flock | LockHolder::OpenFile => true,
            };
            let locks = locks.into_iter().flatten().filter(is_of_process);
            found.extend(locks.map(|lock| (*number, *lock)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_checksum_depends_on_file_and_range_only() {
        let info = |inode| FdInfo {
            inode,
            ..FdInfo::default()
        };
        let infos = BTreeMap::from([(3, info(7)), (4, info(7)), (5, info(8))]);
        let lock = |number, holder, start| {
            let lock = FileLock {
                holder,
                write: true,
                start,
                end: Some(20),
            };
            (number, lock)
        };
        let table = LockHolder::Table;
        let checksum_of = |locks: &[(u32, FileLock)]| checksum(&infos, locks);
        assert_eq!(checksum_of(&[]), None);
        let twice = [lock(3, table(0), 10), lock(4, table(0), 10)];
        assert_eq!(checksum_of(&twice), checksum_of(&[lock(4, table(9), 10)]));
        let others = [
            lock(5, table(0), 10),
            lock(3, table(0), 11),
            lock(3, LockHolder::OpenFile, 10),
        ];
        for other in others {
            assert_ne!(checksum_of(&twice), checksum_of(&[other]));
        }
    }
}
