//! What threads and processes have in common, where others have not, or the other way round.

use super::{Obstacle, Report};
use crate::process::error::Result;
use crate::process::procfs::{self, Stat};

/// What `kcmp(2)` compares.
#[derive(Clone, Copy)]
enum Kind {
    Memory = 1,
    Directory = 3,
}

/// A thread of a process that has something for itself. Of tables of descriptors the look at those tells.
pub(super) fn check_thread(pid: i32, tid: i32, report: &mut Report) {
    if differ(pid, tid, Kind::Directory) {
        report.block(pid, Obstacle::ThreadDirectory(tid));
    }
}

/// What a process shares with its parent, or with another child of it.
pub(super) fn check_process(pid: i32, report: &mut Report) -> Result<()> {
    let parent = Stat::read(pid)?.parent;
    let siblings = procfs::children(parent).unwrap_or_default();
    // Each pair of siblings once.
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

/// Neither the same nor unknown, as where one has ended.
fn differ(one: i32, other: i32, kind: Kind) -> bool {
    compare(one, other, kind) > 0
}

fn compare(one: i32, other: i32, kind: Kind) -> libc::c_long {
    // SAFETY: no pointers are passed.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, kind as i32, 0, 0) }
}
