//! Check for resources that threads do not share, though threads usually do, or that processes share, though processes
//! usually do not.

use super::{InspectionReport, Obstacle};
use crate::error::Result;
use crate::procfs::{self, ProcStat};

/// Type of `kcmp(2)`.
#[derive(Clone, Copy)]
enum KcmpType {
    Memory = 1,
    Directory = 3,
}

/// Reports a thread with a resource of its own. Descriptor tables are checked by the inspection of descriptors.
pub(super) fn check_thread(pid: i32, tid: i32, report: &mut InspectionReport) {
    if is_different(pid, tid, KcmpType::Directory) {
        report.block(pid, Obstacle::ThreadDirectory(tid));
    }
}

/// Reports resources that a process shares with its parent, or with another child of its parent.
pub(super) fn check_process(pid: i32, report: &mut InspectionReport) -> Result<()> {
    let parent = ProcStat::read(pid)?.parent;
    let siblings = procfs::children(parent).unwrap_or_default();
    // Each pair of siblings is compared once.
    let older = siblings.into_iter().filter(|other| *other < pid);
    for other in older.chain([parent]).filter(|other| *other > 0) {
        if is_same(pid, other, KcmpType::Memory) {
            report.block(pid, Obstacle::SharesMemory(other));
        } else if is_same(pid, other, KcmpType::Directory) {
            report.block(pid, Obstacle::SharesWorkingDirectory(other));
        }
    }
    let directory = procfs::link_target(pid, "cwd")?;
    if procfs::is_deleted(pid, "cwd", &directory) {
        let shown = directory.display().to_string();
        report.block(pid, Obstacle::DeletedDirectory(shown));
    }
    Ok(())
}

fn is_same(left: i32, right: i32, kind: KcmpType) -> bool {
    compare(left, right, kind) == 0
}

/// Returns true if two resources differ; false if they are the same, or unknown because one process has ended.
fn is_different(left: i32, right: i32, kind: KcmpType) -> bool {
    compare(left, right, kind) > 0
}

fn compare(left: i32, right: i32, kind: KcmpType) -> libc::c_long {
    // SAFETY: no pointers are passed.
    unsafe { libc::syscall(libc::SYS_kcmp, left, right, kind as i32, 0, 0) }
}
