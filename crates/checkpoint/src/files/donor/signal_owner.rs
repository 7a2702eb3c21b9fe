//! State of an open file that `/proc` and `fcntl` report.

use super::file_being_saved::FileBeingSaved;
use super::open_file_saver::{OpenFileSaver, SaveResult};
use crate::files::descriptor_survey::live_inner_pid;
use crate::files::error::{BlockReason, FilesError, StepContext};
use crate::files::image::SignalOwner;
use crate::files::syscalls;
use crate::procfs::ProcStatus;
use std::fs;
use std::os::fd::BorrowedFd;

/// Returns the receiver of signals about an open file. An owner that has ended counts as none.
pub fn read_signal_owner(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
) -> SaveResult<Option<SignalOwner>> {
    if source.info.flags & libc::O_PATH as u32 != 0 {
        return Ok(None);
    }
    let (kind, pid) = syscalls::owner(source.fd()).with_step("F_GETOWN_EX")?;
    let signal = syscalls::owner_signal(source.fd()).with_step("F_GETSIG")?;
    if pid == 0 {
        return Ok(None);
    }
    let inner = match kind {
        syscalls::F_OWNER_PGRP => innermost_group(&saver.pids, pid),
        _ => live_inner_pid(pid).filter(|_| is_in_tree(&saver.pids, pid)),
    };
    if inner.is_none() && live_inner_pid(pid).is_some() {
        return Err(BlockReason::OwnerOutside(pid).into());
    }
    Ok(inner.map(|pid| SignalOwner { kind, pid, signal }))
}

/// True if a process, or the process of a thread, belongs to the tree.
fn is_in_tree(tree: &[i32], pid: i32) -> bool {
    let status = ProcStatus::read(pid, pid).ok();
    let process = status.and_then(|status| status.process_ids.first().copied());
    process.is_some_and(|process| tree.contains(&process))
}

/// Number of a process group in the PID namespace of its members, if a process of the tree is a member.
fn innermost_group(tree: &[i32], group: i32) -> Option<i32> {
    let mut members = tree
        .iter()
        .filter_map(|pid| ProcStatus::read(*pid, *pid).ok());
    let member = members.find(|status| status.group_ids.first() == Some(&group))?;
    member
        .group_ids
        .last()
        .copied()
        .filter(|number| *number > 0)
}

/// Returns true if the file has an owner for its signals.
pub fn has_owner(fd: BorrowedFd<'_>) -> Result<bool, FilesError> {
    let (_, pid) = syscalls::owner(fd).with_step("F_GETOWN_EX")?;
    Ok(pid != 0)
}

/// Returns `RLIMIT_NOFILE` of a process, soft and hard.
pub fn nofile_limits(pid: i32) -> Result<(u64, u64), FilesError> {
    let path = format!("/proc/{pid}/limits");
    let text = fs::read_to_string(&path).with_step(&path)?;
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
