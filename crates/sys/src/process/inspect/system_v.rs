//! System V semaphores, messages and memory, which belong to a machine and not to processes: who used them last is all that is
//! known.

use super::{Obstacle, Report};

/// Adds what the tree has used last.
pub(super) fn check(report: &mut Report) {
    let table = |name: &str| -> Vec<Vec<i64>> {
        let text = std::fs::read_to_string(format!("/proc/sysvipc/{name}")).unwrap_or_default();
        let row = |line: &str| {
            let words = line.split_whitespace();
            words.map(|word| word.parse().unwrap_or(0)).collect()
        };
        text.lines().skip(1).map(row).collect()
    };
    let field = |row: &[i64], at: usize| row.get(at).copied().unwrap_or(0) as i32;
    for row in table("msg") {
        // lspid, lrpid.
        for at in [5, 6] {
            block(report, field(&row, at), "messages", field(&row, 1));
        }
    }
    for row in table("sem") {
        for number in 0..field(&row, 3) {
            block(
                report,
                last_user(field(&row, 1), number),
                "semaphores",
                field(&row, 1),
            );
        }
    }
    for row in table("shm") {
        // cpid; a segment that is mapped is found by its mapping.
        if field(&row, 6) == 0 {
            block(report, field(&row, 4), "memory", field(&row, 1));
        }
    }
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
