//! Check for descriptors that cannot move.

use super::{Blocker, Class, Obstacle, Report, classify, loopback, terminal};
use crate::process::donor::living_tree;
use crate::process::files::{Draft, FilesError, Limits};
use crate::process::image::POSIX_MEMORY;
use crate::process::procfs;
use std::collections::BTreeSet;

pub(super) fn check(report: &mut Report) {
    let strange = |blocker: &Blocker| matches!(blocker.obstacle, Obstacle::Namespace(_));
    if report.blockers.iter().any(strange) {
        // The descriptors of processes in other namespaces cannot be judged from this one.
        return;
    }
    let root = report.processes[0];
    // Processes may start and end during the check.
    let pids = || living_tree(root);
    let limits = Limits {
        elsewhere: mapped_memory(&pids()),
        // Files are not read: inotify would report reads to the program.
        digests: false,
        ..Limits::default()
    };
    match Draft::look(pids, &limits, None) {
        Ok(draft) => {
            loopback::check(report, &draft, || Draft::look(pids, &limits, None).ok());
            terminal::check(report, &draft.image);
            report.open_files = draft.image.files.len();
            report.sockets = draft.sockets.into_values().collect();
        }
        Err(FilesError::Blocked(blockers)) => {
            report
                .blockers
                .extend(blockers.into_iter().map(Blocker::from));
        }
        Err(error) => report.block(report.processes[0], Obstacle::Hidden(error.to_string())),
    }
}

/// Returns device and inode of mapped memory: its content moves with the mappings.
fn mapped_memory(pids: &[i32]) -> BTreeSet<(u64, u64)> {
    let maps = pids
        .iter()
        .flat_map(|pid| procfs::mappings(*pid).unwrap_or_default());
    let memory = maps.filter(|map| match classify(map) {
        Class::Memfd(_) | Class::RenamedFile => true,
        Class::SharedFile => map.name.starts_with(POSIX_MEMORY),
        _ => false,
    });
    let identity = memory.map(|map| {
        let (major, minor) = map.device;
        (libc::makedev(major, minor), map.inode)
    });
    identity.collect()
}
