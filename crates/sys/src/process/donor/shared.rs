//! Memory that several mappings share. Writes through a descriptor or a mapping elsewhere leave no trace in a process's
//! page table, so its pages are compared by hash.

use super::round::Round;
use super::tracker::Tracker;
use crate::process::error::{Context, Result};
use crate::process::image::{Content, PAGE, Run, Space};
use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bytes looked at together.
const CHUNK: u64 = 1 << 20;

/// What the acceptor has of a shared memory.
#[derive(Debug, Default)]
pub(super) struct SharedContent {
    /// Two keyed hashes of each page, which nobody can foresee.
    keys: (RandomState, RandomState),
    sent: HashMap<u64, (u64, u64)>,
}

impl Tracker {
    /// Looks again at segments of System V; only where the tree stands still can it be said who has them.
    pub(super) fn follow_segments(&mut self, runs: bool) -> Result<()> {
        let mut count = HashMap::new();
        for watched in self.processes.iter().filter_map(|of| of.watched.as_ref()) {
            watched.count_segments(&mut count);
        }
        let pids: Vec<i32> = self.processes.iter().map(|of| of.pid).collect();
        let stopped = (!runs).then_some((&count, pids.as_slice()));
        self.catalogue.follow_segments(self.root, stopped)
    }

    pub(super) fn collect_shared(&mut self, round: &mut Round) -> Result<()> {
        let count = self.catalogue.shared.len();
        self.shared.resize_with(count, SharedContent::default);
        for (index, content) in self.shared.iter_mut().enumerate() {
            let handle = self.catalogue.handle(index);
            let size = handle
                .metadata()
                .context(|| "size of shared memory".to_owned())?
                .len();
            content
                .collect(index as u32, handle, size, round)
                .context(|| "reading shared memory".to_owned())?;
            self.catalogue.shared[index].size = size;
        }
        Ok(())
    }

    pub(super) fn read_shared(&mut self, index: usize, offset: u64, bytes: &mut [u8]) -> bool {
        let read = read_padded(self.catalogue.handle(index), offset, bytes).is_ok();
        let content = &mut self.shared[index];
        for (number, page) in bytes.chunks_exact(PAGE as usize).enumerate() {
            let at = offset + number as u64 * PAGE;
            if read {
                content.sent.insert(at, content.hash(page));
            } else {
                content.sent.remove(&at);
            }
        }
        read
    }
}

impl SharedContent {
    fn hash(&self, page: &[u8]) -> (u64, u64) {
        (self.keys.0.hash_one(page), self.keys.1.hash_one(page))
    }

    fn collect(
        &mut self,
        index: u32,
        handle: &File,
        size: u64,
        round: &mut Round,
    ) -> io::Result<()> {
        let mut before = std::mem::take(&mut self.sent);
        let mut buffer = vec![0; CHUNK as usize];
        for (start, end) in data_ranges(handle, size)? {
            let mut at = start;
            while at < end {
                let length = (end - at).min(CHUNK);
                read_padded(handle, at, &mut buffer[..length as usize])?;
                for (number, page) in buffer[..length as usize]
                    .chunks_exact(PAGE as usize)
                    .enumerate()
                {
                    let offset = at + number as u64 * PAGE;
                    let hash = self.hash(page);
                    // What differs is entered when it is read, as it may change until then.
                    if before.remove(&offset) == Some(hash) {
                        self.sent.insert(offset, hash);
                    } else {
                        round.push(Run {
                            space: Space::Shared(index),
                            start: offset,
                            length: PAGE,
                            content: Content::Bytes,
                        });
                    }
                }
                at += length;
            }
        }
        let mut gone: Vec<u64> = before.into_keys().collect();
        gone.sort_unstable();
        for start in gone {
            let (space, length, content) = (Space::Shared(index), PAGE, Content::Fresh);
            round.push(Run {
                space,
                start,
                length,
                content,
            });
        }
        Ok(())
    }
}

/// Where a file has data, in whole pages.
pub(crate) fn data_ranges(handle: &File, size: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < size {
        let seek = |from: u64, whence| {
            // SAFETY: no pointers are passed.
            let outcome = unsafe { libc::lseek(handle.as_raw_fd(), from as libc::off_t, whence) };
            if outcome < 0 {
                Err(io::Error::last_os_error())
            } else {
                Ok(outcome as u64)
            }
        };
        let start = match seek(at, libc::SEEK_DATA) {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => break,
            other => other?,
        };
        let end = seek(start, libc::SEEK_HOLE)?;
        found.push((start / PAGE * PAGE, end.next_multiple_of(PAGE)));
        at = end.max(start + 1);
    }
    Ok(found)
}

/// Beyond the end there are zeros.
pub(crate) fn read_padded(handle: &File, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match handle.read_at(&mut bytes[at..], offset + at as u64) {
            Ok(0) => {
                bytes[at..].fill(0);
                break;
            }
            Ok(count) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
