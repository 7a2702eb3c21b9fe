//! Check of namespaces: a tree must live in the caller's namespaces, or in namespaces that a restorer made for the
//! tree.

use super::{InspectionReport, Obstacle};
use crate::error::Result;
use crate::procfs::{self, ProcStat, ProcStatus};

/// Namespace kinds that the tree must share with the caller.
const SHARED_WITH_CALLER: [&str; 4] = ["cgroup", "net", "user", "uts"];
/// Namespace kinds that a restorer makes for a tree.
const MADE_BY_RESTORER: [&str; 4] = ["ipc", "mnt", "pid", "time"];

pub(super) fn check(root: i32, report: &mut InspectionReport) -> Result<()> {
    let parent = ProcStat::read(root)?.parent;
    let status = ProcStatus::read(root, root)?;
    if status.innermost_id() == 1 || parent == 0 {
        report.block(root, Obstacle::Init);
    }
    let reaper = is_reaper(parent);
    for pid in report.processes.clone() {
        for kind in SHARED_WITH_CALLER {
            compare(pid, kind, "/proc/thread-self", report);
        }
        for kind in MADE_BY_RESTORER {
            let expected = if reaper {
                format!("/proc/{parent}")
            } else {
                "/proc/thread-self".to_owned()
            };
            compare(pid, kind, &expected, report);
        }
    }
    Ok(())
}

fn compare(pid: i32, kind: &str, expected: &str, report: &mut InspectionReport) {
    let expected_link = std::fs::read_link(format!("{expected}/ns/{kind}"));
    let actual_link = procfs::link_text(pid, &format!("ns/{kind}"));
    if let (Ok(here), Ok(there)) = (expected_link, actual_link)
        && here.to_string_lossy() != there
    {
        report.block(pid, Obstacle::Namespace(kind.to_owned()));
    }
}

/// Returns true if a process is the first one of a PID namespace that a restorer made.
fn is_reaper(pid: i32) -> bool {
    let first = ProcStatus::read(pid, pid)
        .is_ok_and(|status| status.innermost_id() == 1 && status.ids.len() > 1);
    first && procfs::read(pid, "comm").is_ok_and(|name| name.trim_end() == crate::REAPER_NAME)
}
