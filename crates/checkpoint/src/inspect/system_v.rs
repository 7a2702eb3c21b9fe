//! Check of System V semaphores, messages and memory, which belong to a machine and not to processes: except for
//! attached memory, only the last user is known.

use super::{InspectionReport, Obstacle};
use crate::error::Result;
use crate::procfs::{self, MapLine};
use crate::system_v_memory::{self, ListedSegment, SystemVSegmentReader, attachments};

/// Last use of an object: process, kind of object, identifier.
type LastUse = (i32, &'static str, i32);

/// Reports objects that the tree uses and that cannot move.
pub(super) fn check(report: &mut InspectionReport) {
    let Some(root) = report.processes.first().copied() else {
        return;
    };
    for (pid, what, id) in
        system_v_memory::run_in_ipc_namespace(root, last_uses).unwrap_or_default()
    {
        block(report, pid, what, id);
    }
    let segments = SystemVSegmentReader::open(root).and_then(|table| table.read());
    let segments = segments.unwrap_or_default();
    if !segments.is_empty() {
        // An IPC namespace that a restorer made belongs to the tree alone.
        let is_only_tree = read_ipc_namespace(root)
            .is_ok_and(|ipc| read_ipc_namespace(std::process::id() as i32) != Ok(ipc));
        for segment in segments.iter().filter(|seen| seen.attached == 0) {
            let user = if is_only_tree { root } else { segment.creator };
            block(report, user, "memory", segment.segment.id);
        }
        check_attached(report, &segments);
    }
}

fn last_uses() -> Vec<LastUse> {
    let table = |name: &str| -> Vec<Vec<i64>> {
        let text = std::fs::read_to_string(format!("/proc/sysvipc/{name}")).unwrap_or_default();
        let row = |line: &str| {
            let words = line.split_whitespace();
            words.map(|word| word.parse().unwrap_or(0)).collect()
        };
        text.lines().skip(1).map(row).collect()
    };
    let field = |row: &[i64], at: usize| row.get(at).copied().unwrap_or(0) as i32;
    let mut uses = Vec::new();
    for row in table("msg") {
        // Fields lspid and lrpid.
        uses.extend([5, 6].map(|at| (field(&row, at), "messages", field(&row, 1))));
    }
    for row in table("sem") {
        let id = field(&row, 1);
        uses.extend((0..field(&row, 3)).map(|number| (last_user(id, number), "semaphores", id)));
    }
    uses
}

/// Reports attached segments that are attached in part, or by a process outside the tree too: neither can move.
fn check_attached(report: &mut InspectionReport, segments: &[ListedSegment]) {
    let mut attached = Vec::new();
    for pid in report.processes.clone() {
        for attachment in attachments(&procfs::mappings(pid).unwrap_or_default()) {
            let segment = segments
                .iter()
                .find(|seen| seen.segment.id == attachment.id);
            if segment.is_some_and(|seen| !attachment.covers(seen.segment.size)) {
                let obstacle = Obstacle::UnrestorableMapping(format!(
                    "a part of System V memory {}",
                    attachment.id
                ));
                report.block(pid, obstacle);
            }
            attached.push((attachment.id, attachment.mappings, pid));
        }
    }
    for segment in segments {
        let id = segment.segment.id;
        let tree_mappings = attached.iter().filter(|(segment_id, ..)| *segment_id == id);
        let count: u64 = tree_mappings.clone().map(|(_, mappings, _)| mappings).sum();
        if count > 0
            && segment.attached > count
            && let Some((_, _, pid)) = tree_mappings.clone().next()
            && let Some(outsider) = outside_user(report, *pid, id)
        {
            let name = format!("System V memory {id}");
            report.block(*pid, Obstacle::SharedOutside { name, outsider });
        }
    }
}

/// Returns a process outside the tree that has attached a segment of the IPC namespace of `pid`.
fn outside_user(report: &InspectionReport, pid: i32, id: i32) -> Option<i32> {
    let ipc_namespace = read_ipc_namespace(pid).ok()?;
    let maps_segment = |lines: &[MapLine]| attachments(lines).iter().any(|part| part.id == id);
    let pids = procfs::numeric_entries("/proc", 0).unwrap_or_default();
    let mut other_processes = pids.into_iter().filter(|other| {
        !report.processes.contains(other)
            && read_ipc_namespace(*other).is_ok_and(|there| there == ipc_namespace)
    });
    other_processes.find(|other| procfs::mappings(*other).is_ok_and(|lines| maps_segment(&lines)))
}

fn read_ipc_namespace(pid: i32) -> std::result::Result<String, ()> {
    let link: Result<String> = procfs::link_text(pid, "ns/ipc");
    link.map_err(drop)
}

fn block(report: &mut InspectionReport, pid: i32, what: &str, id: i32) {
    let obstacle = Obstacle::SystemV(format!("{what}, id {id}"));
    let is_reported = report
        .blockers
        .iter()
        .any(|blocker| blocker.obstacle == obstacle);
    if report.processes.contains(&pid) && !is_reported {
        report.block(pid, obstacle);
    }
}

fn last_user(semaphore_set: i32, number: i32) -> i32 {
    // SAFETY: no pointers are passed.
    unsafe { libc::semctl(semaphore_set, number, libc::GETPID) }
}
