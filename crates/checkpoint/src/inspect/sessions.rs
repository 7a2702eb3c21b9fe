//! Check for processes in another session than their parents.

use super::{InspectionReport, Obstacle};
use crate::procfs::ProcStat;

/// Reports sessions that cannot be rebuilt. The acceptor puts a process into the session of its parent, into the
/// session of an earlier child of its parent, or into a session after all its earlier members have ended.
pub(super) fn check(report: &mut InspectionReport) {
    let read = |pid: &i32| Some((*pid, ProcStat::read(*pid).ok()?));
    let processes: Vec<(i32, ProcStat)> = report.processes.iter().filter_map(read).collect();
    for (at, (pid, stat)) in processes.iter().enumerate().skip(1) {
        let (earlier, session) = (&processes[..at], stat.session);
        let parent = earlier.iter().find(|(other, _)| *other == stat.parent);
        let Some((_, parent)) = parent.filter(|_| session != *pid) else {
            continue;
        };
        if session == parent.session {
            continue;
        }
        let is_sibling =
            |(_, other): &(i32, ProcStat)| (other.session, other.parent) == (session, stat.parent);
        let is_leader = |(other, _): &(i32, ProcStat)| *other == session;
        let remains_after_leader = earlier.iter().any(|(_, other)| other.session == session);
        if !earlier.iter().any(is_sibling)
            && (remains_after_leader || processes.iter().any(is_leader))
        {
            report.block(*pid, Obstacle::UnrestorableSession(session));
        }
    }
}
