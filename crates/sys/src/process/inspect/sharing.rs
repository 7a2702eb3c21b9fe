//! What threads and processes have in common, where others have not, or the other way round.

use super::{Obstacle, Report};
use crate::process::error::Result;
use crate::process::procfs::{self, Stat};

/// What `kcmp(2)` compares.
#[derive(Clone, Copy)]
enum Kind {
    Memory = 1,
    Descriptors = 2,
    Directory = 3,
}

/// Threads of a process that have something for themselves.
pub(super) fn check_thread(pid: i32, tid: i32, report: &mut Report) {
    for (kind, what) in [
        (Kind::Directory, "a working directory"),
        (Kind::Descriptors, "a table of descriptors"),
    ] {
        if differ(pid, tid, kind) {
            report.block(pid, Obstacle::ThreadApart(tid, what.to_owned()));
        }
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
    let directory = procfs::link(pid, "cwd")?;
    if directory.ends_with(" (deleted)") {
        report.block(pid, Obstacle::DeletedDirectory(directory));
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
