//! Check for resources that threads do not share, though threads usually do, or that processes share, though processes
//! usually do not.

use super::{Obstacle, Report};
use crate::process::error::Result;
use crate::process::procfs::{self, Stat};

/// Type of `kcmp(2)`.
#[derive(Clone, Copy)]
enum Kind {
    Memory = 1,
    Directory = 3,
}

/// Reports a thread with a resource of its own. Descriptor tables are checked by the inspection of descriptors.
pub(super) fn check_thread(pid: i32, tid: i32, report: &mut Report) {
    if differ(pid, tid, Kind::Directory) {
        report.block(pid, Obstacle::ThreadDirectory(tid));
    }
}

/// Reports resources that a process shares with its parent, or with another child of its parent.
pub(super) fn check_process(pid: i32, report: &mut Report) -> Result<()> {
    let parent = Stat::read(pid)?.parent;
    let siblings = procfs::children(parent).unwrap_or_default();
    // Each pair of siblings is compared once.
    let older = siblings.into_iter().filter(|other| *other < pid);
    for other in older.chain([parent]).filter(|other| *other > 0) {
        if same(pid, other, Kind::Memory) {
            report.block(pid, Obstacle::MemoryOf(other));
        } else if same(pid, other, Kind::Directory) {
            report.block(pid, Obstacle::DirectoryOf(other));
        }
    }
    let directory = procfs::link_target(pid, "cwd")?;
    if procfs::is_deleted(pid, "cwd", &directory) {
        let shown = directory.display().to_string();
        report.block(pid, Obstacle::DeletedDirectory(shown));
    }
    Ok(())
}

fn same(one: i32, other: i32, kind: Kind) -> bool {
    compare(one, other, kind) == 0
}

/// Returns true if two resources differ; false if they are the same, or unknown because one process has ended.
fn differ(one: i32, other: i32, kind: Kind) -> bool {
    compare(one, other, kind) > 0
}

fn compare(one: i32, other: i32, kind: Kind) -> libc::c_long {
    // SAFETY: no pointers are passed.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, kind as i32, 0, 0) }
}
