//! Asynchronous write protection by `userfaultfd`, and `PAGEMAP_SCAN` (Linux 6.7).

use crate::process::error::{Context, Result, check_long};
use crate::process::image::{ADDRESS_END, Backing, Mapping};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Only pages that were written since the last scan with [`PROTECT`].
pub(super) const WRITTEN: u64 = 1 << 1;
/// The page is the file's, not the process's own.
pub(super) const FILE: u64 = 1 << 2;
pub(super) const PRESENT: u64 = 1 << 3;
pub(super) const SWAPPED: u64 = 1 << 4;
/// The page of zeros that all share.
pub(super) const ZERO: u64 = 1 << 5;

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

/// Neighbouring pages of the same kind.
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
/// `PM_SCAN_WP_MATCHING`: what is found is protected again.
const PROTECT: u64 = 1;
/// `UFFDIO_REGISTER_MODE_WP`.
const WRITE_PROTECT: u64 = 2;

/// Makes a new `userfaultfd` usable.
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

/// Watches a range; watching it already is fine.
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

/// Where to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub start: u64,
    pub end: u64,
    /// Whether pages of files are told from the process's own. That takes the kernel ten times as long as the rest of the look, so
    /// not where there are none.
    pub files: bool,
}

/// All pages that are the process's: those written since the last scan have [`WRITTEN`], and are protected again. With
/// `protect`, ranges that nobody watches are left out.
pub(super) fn scan(pagemap: &File, looks: &[Look], protect: bool) -> io::Result<Vec<Region>> {
    let mut found = Vec::new();
    let mut buffer = vec![Region::default(); 8192];
    for look in looks {
        let files = if look.files { FILE } else { 0 };
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: if protect { PROTECT } else { 0 },
            start: look.start,
            end: look.end.min(ADDRESS_END),
            walk_end: 0,
            vec: buffer.as_mut_ptr().addr() as u64,
            vec_len: buffer.len() as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: WRITTEN | PRESENT | SWAPPED | ZERO | files,
        };
        while argument.start < argument.end {
            // SAFETY: `argument` has the kernel's layout, points to a buffer of `vec_len` regions, and both outlive the call.
            let count = unsafe {
                libc::ioctl(pagemap.as_fd().as_raw_fd(), PAGEMAP_SCAN, &raw mut argument)
            };
            let count = check_long(count.into())? as usize;
            found.extend_from_slice(&buffer[..count]);
            if argument.walk_end <= argument.start {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            argument.start = argument.walk_end;
        }
    }
    Ok(found)
}

/// Where in a private mapping the process has pages of its own.
pub(crate) fn scan_own(pagemap: &File, mapping: &Mapping) -> Result<Vec<(u64, u64)>> {
    let found = scan(pagemap, &looks(std::slice::from_ref(mapping)), false)
        .context(|| "PAGEMAP_SCAN (Linux 6.7)".to_owned())?;
    let own = found
        .iter()
        .filter(|region| region.categories & (FILE | ZERO) == 0);
    Ok(own.map(|region| (region.start, region.end)).collect())
}

/// Where a process has pages of its own, as few looks as that takes: neighbours of a kind, with what is between them, are one.
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
    use crate::process::image::PAGE;

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
