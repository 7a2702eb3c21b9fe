//! Check of sessions on terminals of the tree.

use super::{InspectionReport, Obstacle};
use crate::files::FilesImage;
use crate::procfs::{ProcStat, ProcStatus};

/// Reports jobs in sessions with a controlling terminal. The kernel assigns a controlling terminal to a session leader
/// and to processes forked later, so an existing job cannot get the terminal again.
pub(super) fn check(report: &mut InspectionReport, image: &FilesImage) {
    let pids = image.tables.values().flat_map(|table| &table.pids);
    let leaders = pids.filter(|pid| image.controlling_terminal(**pid).is_some());
    for inner in leaders.copied() {
        let is_leader = |pid: &i32| {
            ProcStatus::read(*pid, *pid).is_ok_and(|status| status.innermost_id() == inner)
        };
        let Some(leader) = report.processes.iter().copied().find(is_leader) else {
            continue;
        };
        let has_job = |pid: &i32| {
            let stat = ProcStat::read(*pid);
            *pid != leader && stat.is_ok_and(|job| job.session == leader && !job.is_ending())
        };
        if let Some(job) = report.processes.iter().copied().find(has_job) {
            report.block(job, Obstacle::SharesTerminal(leader));
        }
    }
}
