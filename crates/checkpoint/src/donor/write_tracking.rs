//! Asynchronous write protection by `userfaultfd`, and `PAGEMAP_SCAN` (Linux 6.7).

use crate::address_ranges::AddressRanges;
use crate::error::{Context, Result, check_long};
use crate::image::{ADDRESS_END, GUARD_INSTALL, MappingBacking, MemoryMapping, PAGE};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;

/// The page was written since the last scan with [`PM_SCAN_WP_MATCHING`].
pub(super) const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// The page belongs to the file, not to the process.
pub(super) const PAGE_IS_FILE: u64 = 1 << 2;
pub(super) const PAGE_IS_PRESENT: u64 = 1 << 3;
pub(super) const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The shared zero page.
pub(super) const PAGE_IS_PFNZERO: u64 = 1 << 5;

/// Access to the page is a fault (`MADV_GUARD_INSTALL`); only with [`GuardDetection::Reported`].
pub(super) const PAGE_IS_GUARD: u64 = 1 << 8;

/// Way to detect guard pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GuardDetection {
    /// The kernel reports guard pages (Linux 6.15).
    Reported,
    /// Guard pages range like swapped pages, and cannot be read.
    ReadFailure,
    /// The kernel has no guard pages (before Linux 6.13).
    Unsupported,
}

impl GuardDetection {
    /// Returns the way that works on this kernel.
    pub fn detect() -> Self {
        static DETECTED: OnceLock<GuardDetection> = OnceLock::new();
        *DETECTED.get_or_init(|| {
            let first = ScanRange {
                start: 0,
                end: PAGE,
                has_files: false,
            };
            let guard_scan = File::open("/proc/self/pagemap")
                .and_then(|pagemap| scan_for(&pagemap, &[first], guard_scan_argument));
            // SAFETY: for zero bytes the call only reports if the kernel knows the advice.
            let has_guards = unsafe { libc::madvise(std::ptr::null_mut(), 0, GUARD_INSTALL) } == 0;
            match (guard_scan, has_guards) {
                (Ok(_), _) => Self::Reported,
                (Err(_), true) => Self::ReadFailure,
                (Err(_), false) => Self::Unsupported,
            }
        })
    }

    fn category(self) -> u64 {
        if self == Self::Reported {
            PAGE_IS_GUARD
        } else {
            0
        }
    }
}

fn guard_scan_argument(_: &ScanRange) -> ScanArgument {
    ScanArgument {
        category_mask: PAGE_IS_GUARD,
        return_mask: PAGE_IS_GUARD,
        ..ScanArgument::default()
    }
}

/// Returns the guard pages in these ranges, if the kernel reports them.
pub(crate) fn scan_guards(
    pagemap: &File,
    ranges: impl Iterator<Item = (u64, u64)>,
) -> io::Result<AddressRanges> {
    if GuardDetection::detect() != GuardDetection::Reported {
        return Ok(AddressRanges::default());
    }
    let scanned: Vec<ScanRange> = ranges
        .map(|(start, end)| ScanRange {
            start,
            end,
            has_files: false,
        })
        .collect();
    scan_for(pagemap, &scanned, guard_scan_argument).map(|found| region_ranges(&found))
}

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArgument {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Adjacent pages of the same categories.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageRegion {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xaa, 0, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// `UFFD_FEATURE_WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM`.
const UFFD_FEATURES: u64 = 1 << 15 | 1 << 13 | 1 << 12;
/// `PM_SCAN_WP_MATCHING`: the scan protects matching pages again.
const PM_SCAN_WP_MATCHING: u64 = 1;
/// `UFFDIO_REGISTER_MODE_WP`.
const UFFDIO_REGISTER_MODE_WP: u64 = 2;

/// Enables a new `userfaultfd` for write protection.
pub(super) fn enable_write_protection(userfault: BorrowedFd<'_>) -> Result<()> {
    let mut api = ApiArgument {
        api: 0xaa,
        features: UFFD_FEATURES,
        ioctls: 0,
    };
    // SAFETY: `api` has the kernel's layout and outlives the call.
    let outcome = unsafe { libc::ioctl(userfault.as_raw_fd(), UFFDIO_API, &raw mut api) };
    check_long(outcome.into())
        .map(drop)
        .context(|| "asynchronous write protection (requires Linux 6.7)".to_owned())
}

/// Starts watching a range, which may be watched already.
pub(super) fn watch_range(userfault: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
    let mut register = RegisterArgument {
        start,
        length: end - start,
        mode: UFFDIO_REGISTER_MODE_WP,
        ioctls: 0,
    };
    // SAFETY: `register` has the kernel's layout and outlives the call.
    let outcome = unsafe { libc::ioctl(userfault.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
    check_long(outcome.into()).map(drop)
}

/// A range to scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScanRange {
    pub start: u64,
    pub end: u64,
    /// True if the scan distinguishes file pages from the process's own. The kernel then takes ten times as long, so
    /// false for ranges without files.
    pub has_files: bool,
}

/// Returns all pages of the process. Pages written since the last scan have [`PAGE_IS_WRITTEN`]. With `protect`, the scan
/// protects these pages again, and leaves out ranges that are not watched.
pub(super) fn scan(
    pagemap: &File,
    ranges: &[ScanRange],
    protect: bool,
) -> io::Result<Vec<PageRegion>> {
    let guards = GuardDetection::detect().category();
    scan_for(pagemap, ranges, |range| ScanArgument {
        flags: if protect { PM_SCAN_WP_MATCHING } else { 0 },
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_WRITTEN
            | PAGE_IS_PRESENT
            | PAGE_IS_SWAPPED
            | PAGE_IS_PFNZERO
            | guards
            | if range.has_files { PAGE_IS_FILE } else { 0 },
        ..ScanArgument::default()
    })
}

/// Scans ranges. The result is in order of addresses.
fn scan_for(
    pagemap: &File,
    ranges: &[ScanRange],
    argument_for: impl Fn(&ScanRange) -> ScanArgument,
) -> io::Result<Vec<PageRegion>> {
    let mut found = Vec::new();
    let mut buffer = vec![PageRegion::default(); 8192];
    for range in ranges {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start: range.start,
            end: range.end.min(ADDRESS_END),
            vec: buffer.as_mut_ptr().addr() as u64,
            vec_len: buffer.len() as u64,
            ..argument_for(range)
        };
        while argument.start < argument.end {
            // SAFETY: `argument` has the kernel's layout, points to a buffer of `vec_len` regions, and both outlive
            // the call.
            let count = unsafe {
                libc::ioctl(pagemap.as_fd().as_raw_fd(), PAGEMAP_SCAN, &raw mut argument)
            };
            let count = check_long(count.into())? as usize;
            found.extend_from_slice(&buffer[..count]);
            // The end of the walk is valid only if the buffer is full. Otherwise the scan is complete, and the kernel
            // gives the address at which its internal buffer was full last.
            if count < buffer.len() {
                break;
            }
            if argument.walk_end <= argument.start {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            argument.start = argument.walk_end;
        }
    }
    // Both buffers may be full at the end; the scan then covers that address twice.
    found.sort_unstable_by_key(|region| region.start);
    Ok(found)
}

/// Returns the present pages written since the last protecting scan, and protects them again. Ranges that are not
/// watched are left out.
pub(super) fn scan_written(pagemap: &File, ranges: &[ScanRange]) -> io::Result<AddressRanges> {
    let found = scan_for(pagemap, ranges, |_| ScanArgument {
        flags: PM_SCAN_WP_MATCHING,
        // Match only present pages: the kernel would leave a mark for a protected absent page, which later looks like
        // a page.
        category_mask: PAGE_IS_PRESENT | PAGE_IS_WRITTEN,
        return_mask: PAGE_IS_WRITTEN,
        ..ScanArgument::default()
    })?;
    Ok(region_ranges(&found))
}

/// Returns the pages written since the last protecting scan, and the ranges without a present page. Protects nothing.
pub(super) fn scan_changed(
    pagemap: &File,
    ranges: &[ScanRange],
) -> io::Result<(AddressRanges, AddressRanges)> {
    let found = scan_for(pagemap, ranges, |_| ScanArgument {
        category_inverted: PAGE_IS_PRESENT,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_WRITTEN,
        return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_WRITTEN,
        ..ScanArgument::default()
    })?;
    // The kernel also reports an absent page as written.
    let is_there =
        |region: &PageRegion| region.categories & (PAGE_IS_PRESENT | PAGE_IS_SWAPPED) != 0;
    let is_written =
        |region: &PageRegion| region.categories & PAGE_IS_WRITTEN != 0 && is_there(region);
    let (written, absent): (Vec<PageRegion>, Vec<PageRegion>) =
        found.into_iter().partition(is_written);
    Ok((region_ranges(&written), region_ranges(&absent)))
}

fn region_ranges(found: &[PageRegion]) -> AddressRanges {
    found
        .iter()
        .map(|region| (region.start, region.end))
        .collect()
}

/// Returns the ranges of a private mapping in which the process has its own pages.
pub(crate) fn scan_private_pages(pagemap: &File, mapping: &MemoryMapping) -> Result<AddressRanges> {
    let found = scan(pagemap, &scan_ranges(std::slice::from_ref(mapping)), false)
        .context(|| "PAGEMAP_SCAN (requires Linux 6.7)".to_owned())?;
    let own = found
        .iter()
        .filter(|region| region.categories & (PAGE_IS_FILE | PAGE_IS_PFNZERO | PAGE_IS_GUARD) == 0);
    Ok(own.map(|region| (region.start, region.end)).collect())
}

/// Returns the ranges to scan for a process's own pages, as few as possible. Neighbours of the same kind form one
/// range, including the gap between them.
pub(super) fn scan_ranges(mappings: &[MemoryMapping]) -> Vec<ScanRange> {
    let mut ranges: Vec<ScanRange> = Vec::new();
    for mapping in mappings.iter().filter(|mapping| mapping.is_private()) {
        let (start, end) = (mapping.start, mapping.end);
        let files = !matches!(mapping.backing, MappingBacking::Anonymous(_));
        match ranges.last_mut() {
            Some(last) if last.has_files == files => last.end = end,
            _ => ranges.push(ScanRange {
                start,
                end,
                has_files: files,
            }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Watched memory of this process.
    struct WatchedPages {
        _userfault: OwnedFd,
        pagemap: File,
        range: ScanRange,
    }

    impl WatchedPages {
        fn new(pages: u64) -> Self {
            /// `UFFD_USER_MODE_ONLY`.
            const USER_MODE_ONLY: i32 = 1;
            // SAFETY: a new descriptor, or an error.
            let userfault = unsafe {
                let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY);
                assert!(fd >= 0, "{}", io::Error::last_os_error());
                OwnedFd::from_raw_fd(fd as i32)
            };
            super::enable_write_protection(userfault.as_fd()).expect("Linux 6.7");
            let length = (pages * PAGE) as usize;
            // SAFETY: a new mapping, which stays as long as the process: nothing else is there.
            let start = unsafe {
                let both = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let start = libc::mmap(std::ptr::null_mut(), length, both, flags, -1, 0);
                assert_ne!(start, libc::MAP_FAILED);
                libc::madvise(start, length, libc::MADV_NOHUGEPAGE);
                start.addr() as u64
            };
            let end = start + pages * PAGE;
            watch_range(userfault.as_fd(), start, end).expect("watched");
            Self {
                _userfault: userfault,
                pagemap: File::open("/proc/self/pagemap").expect("there"),
                range: ScanRange {
                    start,
                    end,
                    has_files: false,
                },
            }
        }

        /// The first word of each page.
        fn words(&self) -> Vec<&'static AtomicU64> {
            let pages = (self.range.start..self.range.end).step_by(PAGE as usize);
            // SAFETY: mapped, never unmapped, and only reached as atomic words.
            pages
                .map(|at| unsafe { &*(at as *const AtomicU64) })
                .collect()
        }

        fn written_pages(&self) -> Vec<usize> {
            let found = scan_written(&self.pagemap, &[self.range]).expect("a scan");
            let pages = |(start, end)| (start..end).step_by(PAGE as usize);
            let number = |at| ((at - self.range.start) / PAGE) as usize;
            found.iter().flat_map(pages).map(number).collect()
        }
    }

    /// More ranges than the kernel's internal buffer holds, or the scan's.
    #[test]
    fn every_written_page_is_found_once() {
        let own = WatchedPages::new(40_000);
        let words = own.words();
        words
            .iter()
            .for_each(|word| word.store(1, Ordering::Relaxed));
        assert_eq!(own.written_pages().len(), words.len());
        assert_eq!(own.written_pages(), []);
        let even: Vec<usize> = (0..words.len()).step_by(2).collect();
        even.iter()
            .for_each(|number| words[*number].store(2, Ordering::Relaxed));
        let all = scan(&own.pagemap, &[own.range], false).expect("a scan");
        assert!(all.is_sorted_by(|a, b| a.end <= b.start));
        assert_eq!(own.written_pages(), even);
    }

    #[test]
    fn dropped_pages_are_absent_and_not_written() {
        let own = WatchedPages::new(6);
        let words = own.words();
        (0..4).for_each(|page| words[page].store(1, Ordering::Relaxed));
        scan(&own.pagemap, &[own.range], true).expect("a scan");
        words[1].store(2, Ordering::Relaxed);
        // SAFETY: the page is this test's, and zeros are words.
        unsafe {
            let page = (own.range.start + 2 * PAGE) as *mut libc::c_void;
            assert_eq!(libc::madvise(page, PAGE as usize, libc::MADV_DONTNEED), 0);
        }
        let (written, absent) = scan_changed(&own.pagemap, &[own.range]).expect("a scan");
        let page = |from, to| (own.range.start + from * PAGE, own.range.start + to * PAGE);
        assert_eq!(written, [page(1, 2)].into_iter().collect());
        assert_eq!(absent, [page(2, 3), page(4, 6)].into_iter().collect());
    }

    #[test]
    fn concurrent_writes_are_all_found() {
        const SCANS: u64 = 300;
        let own = WatchedPages::new(4_096);
        let (words, stop) = (own.words(), AtomicBool::new(false));
        let mut copy = vec![0; words.len()];
        let copy_written = |copy: &mut Vec<u64>| {
            for number in own.written_pages() {
                copy[number] = words[number].load(Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut state = 1_u64;
                while !stop.load(Ordering::Relaxed) {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let word = words[(state >> 33) as usize % words.len()];
                    word.fetch_add(1, Ordering::SeqCst);
                }
            });
            (0..SCANS).for_each(|_| copy_written(&mut copy));
            stop.store(true, Ordering::Relaxed);
        });
        copy_written(&mut copy);
        let content: Vec<u64> = words
            .iter()
            .map(|word| word.load(Ordering::SeqCst))
            .collect();
        assert!(content == copy);
    }

    #[test]
    fn neighbours_with_same_backing_share_one_range() {
        let anonymous = || MappingBacking::Anonymous(Vec::new());
        let file = |shared| MappingBacking::File {
            file: 0,
            offset: 0,
            shared,
        };
        let mapping = |start: u64, backing| MemoryMapping {
            start: start * PAGE,
            end: (start + 1) * PAGE,
            protection: libc::PROT_READ,
            advice: 0,
            backing,
        };
        let mappings = [
            mapping(1, anonymous()),
            mapping(2, file(true)),
            mapping(4, anonymous()),
            mapping(5, file(false)),
            mapping(6, file(false)),
            mapping(8, anonymous()),
        ];
        let scan_range = |start, end, files| ScanRange {
            start: start * PAGE,
            end: end * PAGE,
            has_files: files,
        };
        let expected = [
            scan_range(1, 5, false),
            scan_range(5, 7, true),
            scan_range(8, 9, false),
        ];
        assert_eq!(scan_ranges(&mappings), expected);
    }
}
