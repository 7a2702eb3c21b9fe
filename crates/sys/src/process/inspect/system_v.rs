//! Check of System V semaphores, messages and memory, which belong to a machine and not to processes: except for
//! attached memory, only the last user is known.

use super::{Obstacle, Report};
use crate::process::error::Result;
use crate::process::procfs::{self, MapLine};
use crate::process::system_v::{self, Seen, Table, attachments};

/// Last use of an object: process, kind of object, identifier.
type Use = (i32, &'static str, i32);

/// Reports objects that the tree uses and that cannot move.
pub(super) fn check(report: &mut Report) {
    let Some(root) = report.processes.first().copied() else {
        return;
    };
    for (pid, what, id) in system_v::within(root, uses).unwrap_or_default() {
        block(report, pid, what, id);
    }
    let segments = Table::of(root).and_then(|table| table.read());
    let segments = segments.unwrap_or_default();
    if !segments.is_empty() {
        // An IPC namespace that a restorer made belongs to the tree alone.
        let alone = namespace(root).is_ok_and(|of| namespace(std::process::id() as i32) != Ok(of));
        for seen in segments.iter().filter(|seen| seen.attached == 0) {
            let user = if alone { root } else { seen.creator };
            block(report, user, "memory", seen.segment.id);
        }
        check_attached(report, &segments);
    }
}

fn uses() -> Vec<Use> {
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
fn check_attached(report: &mut Report, segments: &[Seen]) {
    let mut attached = Vec::new();
    for pid in report.processes.clone() {
        for part in attachments(&procfs::mappings(pid).unwrap_or_default()) {
            let seen = segments.iter().find(|seen| seen.segment.id == part.id);
            if seen.is_some_and(|seen| !part.is_whole(seen.segment.size)) {
                let obstacle =
                    Obstacle::OddMapping(format!("a part of System V memory {}", part.id));
                report.block(pid, obstacle);
            }
            attached.push((part.id, part.mappings, pid));
        }
    }
    for seen in segments {
        let id = seen.segment.id;
        let ours = attached.iter().filter(|(of, ..)| *of == id);
        let count: u64 = ours.clone().map(|(_, mappings, _)| mappings).sum();
        if count > 0
            && seen.attached > count
            && let Some((_, _, pid)) = ours.clone().next()
            && let Some(outsider) = outsider(report, *pid, id)
        {
            let name = format!("System V memory {id}");
            report.block(*pid, Obstacle::SharedOutside { name, outsider });
        }
    }
}

/// Returns a process outside the tree that has attached a segment of the IPC namespace of `pid`.
fn outsider(report: &Report, pid: i32, id: i32) -> Option<i32> {
    let here = namespace(pid).ok()?;
    let has = |lines: &[MapLine]| attachments(lines).iter().any(|part| part.id == id);
    let others = procfs::numbers("/proc", 0).unwrap_or_default();
    let mut others = others.into_iter().filter(|other| {
        !report.processes.contains(other) && namespace(*other).is_ok_and(|there| there == here)
    });
    others.find(|other| procfs::mappings(*other).is_ok_and(|lines| has(&lines)))
}

fn namespace(pid: i32) -> std::result::Result<String, ()> {
    let link: Result<String> = procfs::link(pid, "ns/ipc");
    link.map_err(drop)
}

fn block(report: &mut Report, pid: i32, what: &str, id: i32) {
    let obstacle = Obstacle::SystemV(format!("{what}, id {id}"));
    let known = report
        .blockers
        .iter()
        .any(|blocker| blocker.obstacle == obstacle);
    if report.processes.contains(&pid) && !known {
        report.block(pid, obstacle);
    }
}

fn last_user(set: i32, number: i32) -> i32 {
    // SAFETY: no pointers are passed.
    unsafe { libc::semctl(set, number, libc::GETPID) }
}
