//! Asynchronous write protection by `userfaultfd`, and `PAGEMAP_SCAN` (Linux 6.7).

use crate::process::error::{Context, Result, check_long};
use crate::process::image::{ADDRESS_END, Backing, GUARD_INSTALL, Mapping, PAGE};
use crate::process::ranges::Ranges;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;

/// The page was written since the last scan with [`PROTECT`].
pub(super) const WRITTEN: u64 = 1 << 1;
/// The page belongs to the file, not to the process.
pub(super) const FILE: u64 = 1 << 2;
pub(super) const PRESENT: u64 = 1 << 3;
pub(super) const SWAPPED: u64 = 1 << 4;
/// The shared zero page.
pub(super) const ZERO: u64 = 1 << 5;

/// Access to the page is a fault (`MADV_GUARD_INSTALL`); only with [`Guards::Shown`].
pub(super) const GUARD: u64 = 1 << 8;

/// Way to detect guard pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guards {
    /// The kernel reports guard pages (Linux 6.15).
    Shown,
    /// Guard pages look like swapped pages, and cannot be read.
    Unreadable,
    /// The kernel has no guard pages (before Linux 6.13).
    None,
}

impl Guards {
    /// Returns the way that works on this kernel.
    pub fn of_kernel() -> Self {
        static OF_KERNEL: OnceLock<Guards> = OnceLock::new();
        *OF_KERNEL.get_or_init(|| {
            let first = Look {
                start: 0,
                end: PAGE,
                files: false,
            };
            let shown = File::open("/proc/self/pagemap")
                .and_then(|pagemap| scan_for(&pagemap, &[first], guards_argument));
            // SAFETY: for zero bytes the call only reports if the kernel knows the advice.
            let known = unsafe { libc::madvise(std::ptr::null_mut(), 0, GUARD_INSTALL) } == 0;
            match (shown, known) {
                (Ok(_), _) => Self::Shown,
                (Err(_), true) => Self::Unreadable,
                (Err(_), false) => Self::None,
            }
        })
    }

    fn category(self) -> u64 {
        if self == Self::Shown { GUARD } else { 0 }
    }
}

fn guards_argument(_: &Look) -> ScanArgument {
    ScanArgument {
        category_mask: GUARD,
        return_mask: GUARD,
        ..ScanArgument::default()
    }
}

/// Returns the guard pages in these ranges, if the kernel reports them.
pub(crate) fn scan_guards(
    pagemap: &File,
    ranges: impl Iterator<Item = (u64, u64)>,
) -> io::Result<Ranges> {
    if Guards::of_kernel() != Guards::Shown {
        return Ok(Ranges::default());
    }
    let looks: Vec<Look> = ranges
        .map(|(start, end)| Look {
            start,
            end,
            files: false,
        })
        .collect();
    scan_for(pagemap, &looks, guards_argument).map(|found| of(&found))
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
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
pub(super) struct Region {
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
const FEATURES: u64 = 1 << 15 | 1 << 13 | 1 << 12;
/// `PM_SCAN_WP_MATCHING`: the scan protects matching pages again.
const PROTECT: u64 = 1;
/// `UFFDIO_REGISTER_MODE_WP`.
const WRITE_PROTECT: u64 = 2;

/// Enables a new `userfaultfd` for write protection.
pub(super) fn start(userfault: BorrowedFd<'_>) -> Result<()> {
    let mut api = Api {
        api: 0xaa,
        features: FEATURES,
        ioctls: 0,
    };
    // SAFETY: `api` has the kernel's layout and outlives the call.
    let outcome = unsafe { libc::ioctl(userfault.as_raw_fd(), UFFDIO_API, &raw mut api) };
    check_long(outcome.into())
        .map(drop)
        .context(|| "asynchronous write protection (Linux 6.7)".to_owned())
}

/// Starts watching a range, which may be watched already.
pub(super) fn watch(userfault: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
    let mut register = Register {
        start,
        length: end - start,
        mode: WRITE_PROTECT,
        ioctls: 0,
    };
    // SAFETY: `register` has the kernel's layout and outlives the call.
    let outcome = unsafe { libc::ioctl(userfault.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
    check_long(outcome.into()).map(drop)
}

/// A range to scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub start: u64,
    pub end: u64,
    /// True if the scan distinguishes file pages from the process's own. The kernel then takes ten times as long, so
    /// false for ranges without files.
    pub files: bool,
}

/// Returns all pages of the process. Pages written since the last scan have [`WRITTEN`]. With `protect`, the scan
/// protects these pages again, and leaves out ranges that are not watched.
pub(super) fn scan(pagemap: &File, looks: &[Look], protect: bool) -> io::Result<Vec<Region>> {
    let guards = Guards::of_kernel().category();
    scan_for(pagemap, looks, |look| ScanArgument {
        flags: if protect { PROTECT } else { 0 },
        category_anyof_mask: PRESENT | SWAPPED,
        return_mask: WRITTEN
            | PRESENT
            | SWAPPED
            | ZERO
            | guards
            | if look.files { FILE } else { 0 },
        ..ScanArgument::default()
    })
}

/// Scans ranges. The result is in order of addresses.
fn scan_for(
    pagemap: &File,
    looks: &[Look],
    what: impl Fn(&Look) -> ScanArgument,
) -> io::Result<Vec<Region>> {
    let mut found = Vec::new();
    let mut buffer = vec![Region::default(); 8192];
    for look in looks {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start: look.start,
            end: look.end.min(ADDRESS_END),
            vec: buffer.as_mut_ptr().addr() as u64,
            vec_len: buffer.len() as u64,
            ..what(look)
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
pub(super) fn scan_written(pagemap: &File, looks: &[Look]) -> io::Result<Ranges> {
    let found = scan_for(pagemap, looks, |_| ScanArgument {
        flags: PROTECT,
        // Match only present pages: the kernel would leave a mark for a protected absent page, which later looks like
        // a page.
        category_mask: PRESENT | WRITTEN,
        return_mask: WRITTEN,
        ..ScanArgument::default()
    })?;
    Ok(of(&found))
}

/// Returns the pages written since the last protecting scan, and the ranges without a present page. Protects nothing.
pub(super) fn scan_changed(pagemap: &File, looks: &[Look]) -> io::Result<(Ranges, Ranges)> {
    let found = scan_for(pagemap, looks, |_| ScanArgument {
        category_inverted: PRESENT,
        category_anyof_mask: PRESENT | WRITTEN,
        return_mask: PRESENT | SWAPPED | WRITTEN,
        ..ScanArgument::default()
    })?;
    // The kernel also reports an absent page as written.
    let is_there = |region: &Region| region.categories & (PRESENT | SWAPPED) != 0;
    let is_written = |region: &Region| region.categories & WRITTEN != 0 && is_there(region);
    let (written, absent): (Vec<Region>, Vec<Region>) = found.into_iter().partition(is_written);
    Ok((of(&written), of(&absent)))
}

fn of(found: &[Region]) -> Ranges {
    found
        .iter()
        .map(|region| (region.start, region.end))
        .collect()
}

/// Returns the ranges of a private mapping in which the process has its own pages.
pub(crate) fn scan_own(pagemap: &File, mapping: &Mapping) -> Result<Ranges> {
    let found = scan(pagemap, &looks(std::slice::from_ref(mapping)), false)
        .context(|| "PAGEMAP_SCAN (Linux 6.7)".to_owned())?;
    let own = found
        .iter()
        .filter(|region| region.categories & (FILE | ZERO | GUARD) == 0);
    Ok(own.map(|region| (region.start, region.end)).collect())
}

/// Returns the ranges to scan for a process's own pages, as few as possible. Neighbours of the same kind form one
/// range, including the gap between them.
pub(super) fn looks(mappings: &[Mapping]) -> Vec<Look> {
    let mut looks: Vec<Look> = Vec::new();
    for mapping in mappings.iter().filter(|mapping| mapping.is_private()) {
        let (start, end) = (mapping.start, mapping.end);
        let files = !matches!(mapping.backing, Backing::Anonymous(_));
        match looks.last_mut() {
            Some(last) if last.files == files => last.end = end,
            _ => looks.push(Look { start, end, files }),
        }
    }
    looks
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Watched memory of this process.
    struct Own {
        _userfault: OwnedFd,
        pagemap: File,
        look: Look,
    }

    impl Own {
        fn new(pages: u64) -> Self {
            /// `UFFD_USER_MODE_ONLY`.
            const USER_MODE_ONLY: i32 = 1;
            // SAFETY: a new descriptor, or an error.
            let userfault = unsafe {
                let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY);
                assert!(fd >= 0, "{}", io::Error::last_os_error());
                OwnedFd::from_raw_fd(fd as i32)
            };
            super::start(userfault.as_fd()).expect("Linux 6.7");
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
            watch(userfault.as_fd(), start, end).expect("watched");
            Self {
                _userfault: userfault,
                pagemap: File::open("/proc/self/pagemap").expect("there"),
                look: Look {
                    start,
                    end,
                    files: false,
                },
            }
        }

        /// The first word of each page.
        fn words(&self) -> Vec<&'static AtomicU64> {
            let pages = (self.look.start..self.look.end).step_by(PAGE as usize);
            // SAFETY: mapped, never unmapped, and only reached as atomic words.
            pages
                .map(|at| unsafe { &*(at as *const AtomicU64) })
                .collect()
        }

        fn written(&self) -> Vec<usize> {
            let found = scan_written(&self.pagemap, &[self.look]).expect("a scan");
            let pages = |(start, end)| (start..end).step_by(PAGE as usize);
            let number = |at| ((at - self.look.start) / PAGE) as usize;
            found.iter().flat_map(pages).map(number).collect()
        }
    }

    /// More ranges than the kernel's internal buffer holds, or the scan's.
    #[test]
    fn every_second_page_is_found_once() {
        let own = Own::new(40_000);
        let words = own.words();
        words
            .iter()
            .for_each(|word| word.store(1, Ordering::Relaxed));
        assert_eq!(own.written().len(), words.len());
        assert_eq!(own.written(), []);
        let even: Vec<usize> = (0..words.len()).step_by(2).collect();
        even.iter()
            .for_each(|number| words[*number].store(2, Ordering::Relaxed));
        let all = scan(&own.pagemap, &[own.look], false).expect("a scan");
        assert!(all.is_sorted_by(|a, b| a.end <= b.start));
        assert_eq!(own.written(), even);
    }

    #[test]
    fn pages_that_are_not_there_are_absent_and_not_written() {
        let own = Own::new(6);
        let words = own.words();
        (0..4).for_each(|page| words[page].store(1, Ordering::Relaxed));
        scan(&own.pagemap, &[own.look], true).expect("a scan");
        words[1].store(2, Ordering::Relaxed);
        // SAFETY: the page is this test's, and zeros are words.
        unsafe {
            let page = (own.look.start + 2 * PAGE) as *mut libc::c_void;
            assert_eq!(libc::madvise(page, PAGE as usize, libc::MADV_DONTNEED), 0);
        }
        let (written, absent) = scan_changed(&own.pagemap, &[own.look]).expect("a scan");
        let page = |from, to| (own.look.start + from * PAGE, own.look.start + to * PAGE);
        assert_eq!(written, [page(1, 2)].into_iter().collect());
        assert_eq!(absent, [page(2, 3), page(4, 6)].into_iter().collect());
    }

    #[test]
    fn nothing_is_missed_that_is_written_meanwhile() {
        const LOOKS: u64 = 300;
        let own = Own::new(4_096);
        let (words, ends) = (own.words(), AtomicBool::new(false));
        let mut copy = vec![0; words.len()];
        let follow = |copy: &mut Vec<u64>| {
            for number in own.written() {
                copy[number] = words[number].load(Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut state = 1_u64;
                while !ends.load(Ordering::Relaxed) {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let word = words[(state >> 33) as usize % words.len()];
                    word.fetch_add(1, Ordering::SeqCst);
                }
            });
            (0..LOOKS).for_each(|_| follow(&mut copy));
            ends.store(true, Ordering::Relaxed);
        });
        follow(&mut copy);
        let there: Vec<u64> = words
            .iter()
            .map(|word| word.load(Ordering::SeqCst))
            .collect();
        assert!(there == copy);
    }

    #[test]
    fn neighbours_of_a_kind_are_looked_at_together() {
        let anonymous = || Backing::Anonymous(Vec::new());
        let file = |shared| Backing::File {
            file: 0,
            offset: 0,
            shared,
        };
        let mapping = |start: u64, backing| Mapping {
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
        let look = |start, end, files| Look {
            start: start * PAGE,
            end: end * PAGE,
            files,
        };
        let expected = [look(1, 5, false), look(5, 7, true), look(8, 9, false)];
        assert_eq!(looks(&mappings), expected);
    }
}
