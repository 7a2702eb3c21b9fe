//! Check for descriptors that cannot move.

use super::{Blocker, InspectionReport, MappingClass, Obstacle, classify, loopback, terminal};
use crate::donor::living_pids_of_tree;
use crate::files::{FilesError, FilesSnapshot, SaveLimits};
use crate::image::POSIX_MEMORY_DIRECTORY;
use crate::procfs;
use std::collections::BTreeSet;

pub(super) fn check(report: &mut InspectionReport) {
    let is_namespace_blocker =
        |blocker: &Blocker| matches!(blocker.obstacle, Obstacle::Namespace(_));
    if report.blockers.iter().any(is_namespace_blocker) {
        // The descriptors of processes in other namespaces cannot be judged from this one.
        return;
    }
    let root = report.processes[0];
    // Processes may start and end during the check.
    let pids = || living_pids_of_tree(root);
    let limits = SaveLimits {
        mapped_memory: mapped_memory(&pids()),
        // Files are not read: inotify would report reads to the program.
        hash_files: false,
        ..SaveLimits::default()
    };
    match FilesSnapshot::take(pids, &limits, None) {
        Ok(snapshot) => {
            loopback::check(report, &snapshot, || {
                FilesSnapshot::take(pids, &limits, None).ok()
            });
            terminal::check(report, &snapshot.image);
            report.open_files = snapshot.image.files.len();
            report.sockets = snapshot.sockets.into_values().collect();
        }
        Err(FilesError::Blocked(blockers)) => {
            report
                .blockers
                .extend(blockers.into_iter().map(Blocker::from));
        }
        Err(error) => report.block(
            report.processes[0],
            Obstacle::NotInspectable(error.to_string()),
        ),
    }
}

/// Returns device and inode of mapped memory: its content moves with the mappings.
fn mapped_memory(pids: &[i32]) -> BTreeSet<(u64, u64)> {
    let maps = pids
        .iter()
        .flat_map(|pid| procfs::mappings(*pid).unwrap_or_default());
    let memory = maps.filter(|map| match classify(map) {
        MappingClass::Memfd(_) | MappingClass::RenamedFile => true,
        MappingClass::SharedFile => map.name.starts_with(POSIX_MEMORY_DIRECTORY),
        _ => false,
    });
    let identity = memory.map(|map| {
        let (major, minor) = map.device;
        (libc::makedev(major, minor), map.inode)
    });
    identity.collect()
}
