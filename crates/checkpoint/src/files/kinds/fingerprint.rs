//! Stamps, by which a file is recognised on another host.

use crate::file_rights::FileOpener;
use crate::files::error::{FilesError, FilesRefusal, StepContext};
use crate::files::image::{FileFingerprint, FilePath};
use crate::files::kinds::named_file::open_with_rights;
use rustix::fs::{AtFlags, OFlags, StatxFlags, fstatvfs, statx};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Largest file that is compared as a whole, bytes.
const WHOLE_DIGEST_BYTES_MAX: u64 = 16 << 20;
/// Part of a larger file that is compared at each end, bytes.
const EDGE_BYTES: u64 = 1 << 20;

/// Returns the stamp of an open file. The digest in `before` is reused if the file has not changed, and no other digest
/// is computed if `before` is given, because the tree is stopped then. With `digests` false, no digest is computed at
/// all.
pub fn compute(
    fd: &OwnedFd,
    before: Option<&FileFingerprint>,
    digests: bool,
) -> io::Result<FileFingerprint> {
    let statx_mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = statx(fd, c"", AtFlags::EMPTY_PATH, statx_mask)?;
    let nanoseconds = |time: rustix::fs::StatxTimestamp| {
        time.tv_sec
            .wrapping_mul(1_000_000_000)
            .wrapping_add(i64::from(time.tv_nsec))
    };
    let mut stamp = FileFingerprint {
        size: stat.stx_size,
        mode: u32::from(stat.stx_mode),
        modified_ns: nanoseconds(stat.stx_mtime),
        identity: (
            fstatvfs(fd)?.f_fsid,
            stat.stx_ino,
            nanoseconds(stat.stx_btime),
        ),
        digest: None,
    };
    stamp.digest = match before {
        Some(before) if (before.size, before.modified_ns) == (stamp.size, stamp.modified_ns) => {
            before.digest
        }
        Some(_) => None,
        None if digests => Some(digest(fd, stamp.size)?),
        None => None,
    };
    Ok(stamp)
}

fn digest(fd: &OwnedFd, size: u64) -> io::Result<[u8; 32]> {
    // The file is reopened: the copy may be open for writing only.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
    let file = File::open(path)?;
    let mut digest = Sha256::new();
    let mut add = |from: u64, to: u64| {
        let mut buffer = vec![0; 256 * 1024];
        let mut at = from;
        while at < to {
            let count = buffer.len().min((to - at) as usize);
            match file.read_at(&mut buffer[..count], at)? {
                0 => break,
                length => {
                    digest.update(&buffer[..length]);
                    at += length as u64;
                }
            }
        }
        Ok::<_, io::Error>(())
    };
    if size <= WHOLE_DIGEST_BYTES_MAX {
        add(0, size)?;
    } else {
        add(0, EDGE_BYTES)?;
        add(size - EDGE_BYTES, size)?;
    }
    Ok(digest.finalize().into())
}

/// Checks that the file at `path` is the one that the stamp was taken of, or an equal one. In the freeze (`last`), the
/// very same file must have the size and time that the donor saw, or equal content.
pub fn verify(
    opener: &mut FileOpener,
    path: &FilePath,
    stamp: &FileFingerprint,
    last: bool,
) -> Result<(), FilesError> {
    let differs = |what| {
        let path = path.to_string();
        Err(FilesRefusal::Differs {
            path,
            property: what,
        }
        .into())
    };
    let fd = open_with_rights(opener, path, OFlags::PATH.bits())?;
    let local = compute(&fd, Some(stamp), false).with_step(path)?;
    if local.mode != stamp.mode {
        return differs("type or permissions");
    }
    let unchanged = (local.size, local.modified_ns) == (stamp.size, stamp.modified_ns);
    if local.identity == stamp.identity && (unchanged || !last) {
        return Ok(());
    }
    if local.size != stamp.size {
        return differs("size");
    }
    match stamp.digest {
        Some(expected) if digest(&fd, local.size).with_step(path)? == expected => Ok(()),
        _ => differs("content"),
    }
}
