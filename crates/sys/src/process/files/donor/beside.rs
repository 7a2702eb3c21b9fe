//! What `/proc` and `fcntl` tell beside an open file itself.

use super::saver::Saved;
use super::subject::Subject;
use crate::process::files::error::{At, FilesError};
use crate::process::files::image::Owner;
use crate::process::files::raw;
use crate::process::files::survey::inner_pid;
use std::fs;
use std::os::fd::BorrowedFd;

/// Who is told by signal about an open file.
pub fn owner(subject: &Subject) -> Saved<Option<Owner>> {
    if subject.info.flags & libc::O_PATH as u32 != 0 {
        return Ok(None);
    }
    let (kind, pid) = raw::owner(subject.fd()).at("F_GETOWN_EX")?;
    let signal = raw::owner_signal(subject.fd()).at("F_GETSIG")?;
    if pid == 0 {
        return Ok(None);
    }
    // The owner may be gone by now, or stay behind: then nobody is told, as before.
    Ok(inner_pid(pid).map(|pid| Owner { kind, pid, signal }))
}

/// Whether somebody is named who is told by signal.
pub fn has_owner(fd: BorrowedFd<'_>) -> Result<bool, FilesError> {
    let (_, pid) = raw::owner(fd).at("F_GETOWN_EX")?;
    Ok(pid != 0)
}

/// `RLIMIT_NOFILE` of a process, soft and hard.
pub fn descriptors_max(pid: i32) -> Result<(u64, u64), FilesError> {
    let path = format!("/proc/{pid}/limits");
    let text = fs::read_to_string(&path).at(&path)?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let mut numbers = line.unwrap_or("").split_whitespace();
    let mut next = || {
        numbers
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(u64::MAX)
    };
    Ok((next(), next()))
}
