//! Memory that several mappings share. Writes through a descriptor or another process's mapping leave no trace in a
//! process's page table, so pages are compared by hash.

use super::mapped_object_catalogue::MappedObjectCatalogue;
use super::precopy_round::PrecopyRound;
use super::tree_tracker::TreeTracker;
use crate::error::{Context, Result};
use crate::image::{MemorySpace, PAGE, PageContent, PageRun};
use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Number of bytes read at a time.
const CHUNK: u64 = 1 << 20;

/// The acceptor's version of a shared memory object.
#[derive(Debug, Default)]
pub(super) struct SentPageHashes {
    keys: HashKeys,
    sent: HashMap<u64, PageHash>,
    /// Size in bytes at the last scan.
    size: u64,
}

impl TreeTracker {
    /// Updates the System V segments. The processes that attach them can be determined only in a stopped tree.
    pub(super) fn update_segments(&mut self, runs: bool) -> Result<()> {
        let mut count = HashMap::new();
        for watched in self
            .processes
            .iter()
            .filter_map(|tracked| tracked.watched.as_ref())
        {
            watched.count_segments(&mut count);
        }
        let pids: Vec<i32> = self.processes.iter().map(|tracked| tracked.pid).collect();
        let stopped = (!runs).then_some((&count, pids.as_slice()));
        self.catalogue.update_segments(self.root, stopped)
    }

    /// Returns the number of bytes of shared memory that the acceptor has. Each round compares all of them.
    #[must_use]
    pub fn shared_bytes(&self) -> u64 {
        let pages: usize = self.shared.iter().map(|content| content.sent.len()).sum();
        pages as u64 * PAGE
    }

    /// Scans all shared memory objects but the first `already_scanned`, which were scanned already.
    pub(super) fn collect_shared(
        &mut self,
        already_scanned: usize,
        round: &mut PrecopyRound,
    ) -> Result<()> {
        let (catalogue, shared) = (&mut self.catalogue, &mut self.shared);
        collect_shared(catalogue, shared, already_scanned, round)?;
        for (object, content) in catalogue.shared.iter_mut().zip(shared) {
            object.size = content.size;
        }
        Ok(())
    }

    pub(super) fn read_shared(&mut self, index: usize, offset: u64, bytes: &mut [u8]) -> bool {
        let read = read_padded(self.catalogue.object_handle(index), offset, bytes).is_ok();
        let content = &mut self.shared[index];
        for (number, page) in bytes.chunks_exact(PAGE as usize).enumerate() {
            let at = offset + number as u64 * PAGE;
            if read {
                content.sent.insert(at, content.keys.hash(page));
            } else {
                content.sent.remove(&at);
            }
        }
        read
    }
}

/// Scans shared memory objects, from index `first` on.
pub(super) fn collect_shared(
    catalogue: &MappedObjectCatalogue,
    shared: &mut Vec<SentPageHashes>,
    first: usize,
    round: &mut PrecopyRound,
) -> Result<()> {
    shared.resize_with(catalogue.shared.len(), SentPageHashes::default);
    for (index, content) in shared.iter_mut().enumerate().skip(first) {
        let handle = catalogue.object_handle(index);
        let size = handle
            .metadata()
            .context(|| "reading the size of shared memory".to_owned())?
            .len();
        content
            .collect_changes(index as u32, handle, size, round)
            .context(|| "reading shared memory".to_owned())?;
        content.size = size;
    }
    Ok(())
}

/// Number of words of a page.
const PAGE_WORDS: usize = PAGE as usize / 8;

/// Keys of a universal hash (NH, RFC 4418 section 5.2, with words of 64 bits), random so that no program can predict
/// them.
struct HashKeys([u64; PAGE_WORDS + 2]);

type PageHash = (u128, u128);

impl Default for HashKeys {
    fn default() -> Self {
        let random = RandomState::new();
        let mut keys = [0; PAGE_WORDS + 2];
        (0u64..)
            .zip(&mut keys)
            .for_each(|(at, key)| *key = random.hash_one(at));
        Self(keys)
    }
}

impl std::fmt::Debug for HashKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

impl HashKeys {
    /// Returns the hash of a page. Two different pages have the same hash with a probability of 2^-128: each half
    /// collides with a probability of 2^-64, and the halves use different keys. The hash costs one multiplication per
    /// word, since a freeze hashes all shared memory.
    fn hash(&self, page: &[u8]) -> PageHash {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (mut first_half, mut second_half) = (0u128, 0u128);
        for (pair, keys) in page.chunks_exact(16).zip(self.0.windows(4).step_by(2)) {
            let (low, high) = (word(&pair[..8]), word(&pair[8..]));
            let product =
                |a: u64, b: u64| u128::from(low.wrapping_add(a)) * u128::from(high.wrapping_add(b));
            first_half = first_half.wrapping_add(product(keys[0], keys[1]));
            second_half = second_half.wrapping_add(product(keys[2], keys[3]));
        }
        (first_half, second_half)
    }
}

impl SentPageHashes {
    fn collect_changes(
        &mut self,
        index: u32,
        handle: &File,
        size: u64,
        round: &mut PrecopyRound,
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
                    let hash = self.keys.hash(page);
                    // A changed page's hash is stored when the page is read, as the page may change again before.
                    if before.remove(&offset) == Some(hash) {
                        self.sent.insert(offset, hash);
                    } else {
                        round.push(PageRun {
                            space: MemorySpace::Shared(index),
                            start: offset,
                            length: PAGE,
                            content: PageContent::Bytes,
                        });
                    }
                }
                at += length;
            }
        }
        let mut vanished: Vec<u64> = before.into_keys().collect();
        vanished.sort_unstable();
        for start in vanished {
            let (space, length, content) = (MemorySpace::Shared(index), PAGE, PageContent::Initial);
            round.push(PageRun {
                space,
                start,
                length,
                content,
            });
        }
        Ok(())
    }
}

/// Returns the ranges of a file that hold data, in whole pages.
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

/// Reads from a file, with zeros beyond its end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_depends_on_every_word_and_on_keys() {
        let keys = HashKeys::default();
        let mut page = [0_u8; PAGE as usize];
        let zeros = keys.hash(&page);
        assert_eq!(keys.hash(&page), zeros);
        assert_ne!(HashKeys::default().hash(&page), zeros);
        for at in (0..page.len()).step_by(7) {
            page[at] ^= 1;
            let found = keys.hash(&page);
            assert!(found.0 != zeros.0 && found.1 != zeros.1, "byte {at}");
            page[at] ^= 1;
        }
        let (early, late) = ([1; 8], [2; 8]);
        page[..8].copy_from_slice(&early);
        page[8..16].copy_from_slice(&late);
        let before = keys.hash(&page);
        page[..8].copy_from_slice(&late);
        page[8..16].copy_from_slice(&early);
        assert_ne!(keys.hash(&page), before);
    }
}
