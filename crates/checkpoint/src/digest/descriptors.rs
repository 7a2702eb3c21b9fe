//! Checksums of descriptors, as procfs shows them on any machine.

use super::pipe_and_socket_data::QueuedDataReader;
use super::{DigestedPart, DigestedProcess, TreeDigest, locks};
use crate::error::{Result, unexpected_text};
use crate::files::FdInfo;
use crate::procfs;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Flags of an open file that determine its use.
const DIGESTED_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_DIRECT
    | libc::O_ASYNC
    | libc::O_PATH;

/// Adds the checksums of all descriptors of a process.
pub(super) fn add(
    digest: &mut TreeDigest,
    process: i32,
    stopped: &DigestedProcess<'_>,
) -> Result<()> {
    let pid = stopped.pid;
    let contents = QueuedDataReader::open(pid)?;
    let mut infos = BTreeMap::new();
    for number in procfs::numeric_entries(&format!("/proc/{pid}/fd"), pid)? {
        let link = procfs::link_text(pid, &format!("fd/{number}"))?;
        let text = procfs::read(pid, &format!("fdinfo/{number}"))?;
        let info = FdInfo::parse(&text).ok_or_else(|| unexpected_text("cannot parse fdinfo"))?;
        let number = number as u32;
        if let Some(name) = portable_name(&link) {
            let part = DigestedPart::Name { process, number };
            digest.insert(part, crc32c::crc32c(name.as_bytes()));
        }
        let part = DigestedPart::Descriptor { process, number };
        digest.insert(part, crc32c::crc32c(describe(&link, &info).as_bytes()));
        if let Some(checksum) = contents.checksum(number, &link, info.flags)? {
            digest.insert(DigestedPart::Queue { process, number }, checksum);
        }
        infos.insert(number, info);
    }
    let shown;
    let found = match &stopped.locks {
        Some(planned) => planned,
        None => {
            shown = locks::current_locks(&infos);
            &shown
        }
    };
    if let Some(checksum) = locks::checksum(&infos, found) {
        digest.insert(DigestedPart::Locks { process }, checksum);
    }
    Ok(())
}

/// Returns the part of a link that is the same on every machine: without inode numbers, and `None` for a name that
/// leads nowhere.
pub(super) fn portable_name(link: &str) -> Option<&str> {
    let deleted = link.ends_with(" (deleted)") && !link.starts_with("/memfd:");
    match link.split_once(":[") {
        Some((kind, number)) if number.starts_with(|c: char| c.is_ascii_digit()) => Some(kind),
        _ => (!deleted).then_some(link),
    }
}

fn describe(link: &str, info: &FdInfo) -> String {
    let flags = info.flags as i32 & DIGESTED_FLAGS;
    let mut text = format!("{flags:o} {}", info.close_on_exec);
    let has_offset = link.starts_with('/') && !link.starts_with("/dev/");
    if has_offset {
        let _ = write!(text, " at {}", info.offset);
    }
    for known in ["eventfd-count", "sigmask", "clockid", "it_interval"] {
        let _ = write!(text, " {:?}", info.value(known));
    }
    let mut watched = info.epoll();
    watched.sort_unstable_by_key(|line| (line.fd, line.data, line.events));
    for line in watched {
        let _ = write!(text, " {} {:x} {:x}", line.fd, line.events, line.data);
    }
    for line in info.inotify().unwrap_or_default() {
        let _ = write!(text, " {} {:x}", line.id, line.mask);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(offset: u64) -> FdInfo {
        FdInfo {
            offset,
            flags: libc::O_RDWR as u32,
            ..FdInfo::default()
        }
    }

    #[test]
    fn inode_numbers_do_not_change_the_digest_but_offsets_do() {
        assert_eq!(portable_name("pipe:[17]"), portable_name("pipe:[18]"));
        assert_ne!(portable_name("pipe:[17]"), portable_name("socket:[17]"));
        let kinds = ["anon_inode:[eventfd]", "anon_inode:[eventpoll]"];
        assert_ne!(portable_name(kinds[0]), portable_name(kinds[1]));
        assert_eq!(portable_name("/tmp/a (deleted)"), None);
        assert_ne!(describe("/tmp/a", &info(1)), describe("/tmp/a", &info(2)));
        assert_eq!(
            describe("/dev/null", &info(1)),
            describe("/dev/null", &info(2))
        );
    }
}
