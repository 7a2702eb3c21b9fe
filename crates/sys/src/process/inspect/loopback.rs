//! Connections over the loopback device with one end in the tree.

use super::{Blocker, Obstacle, Report};
use crate::process::files::image::FileId;
use crate::process::files::{Draft, Outside};
use crate::process::procfs;
use crate::process::sockets::{Ends, Halved, halved};
use std::collections::{HashMap, HashSet};
use std::{fs, io};

/// Finds them among the sockets that were read.
pub(super) fn check(report: &mut Report, draft: &Draft) {
    let sockets = draft.sockets.iter();
    let ends = sockets.filter_map(|(id, socket)| Some((Ends::of(socket)?, *id)));
    let ids: HashMap<Ends, FileId> = ends.collect();
    let found = match lasting(&ids, &report.processes) {
        Ok(found) if found.is_empty() => return,
        Ok(found) => found,
        Err(error) => {
            let why = format!("connections over the loopback device: {error}");
            return report.block(report.processes[0], Obstacle::Hidden(why));
        }
    };
    let outside = Outside::look(&report.processes);
    for (ends, why) in found {
        let holder = match why {
            Halved::Outside(Some(inode)) => outside.holder(&link(inode)),
            _ => None,
        };
        let place = ids.get(&ends).and_then(|id| draft.places.get(id));
        let pid = place.map_or(report.processes[0], |(pid, _)| *pid);
        let path = place.and_then(|(pid, fd)| procfs::link(*pid, &format!("fd/{fd}")).ok());
        let obstacle = Obstacle::Descriptor {
            fd: place.map(|(_, fd)| *fd),
            path: path.unwrap_or_default(),
            reason: why.text(&ends, holder),
        };
        report.halved.push(Blocker { pid, obstacle });
    }
}

/// The tree runs: what is found must not have come meanwhile, nor be gone again.
fn lasting(ids: &HashMap<Ends, FileId>, pids: &[i32]) -> io::Result<Vec<(Ends, Halved)>> {
    let tree: Vec<Ends> = ids.keys().copied().collect();
    let mut found = halved(&tree)?;
    if found.is_empty() {
        return Ok(found);
    }
    let theirs = all_links(pids);
    found.retain(|(_, why)| match why {
        Halved::Outside(Some(inode)) => !theirs.contains(&link(*inode)),
        _ => true,
    });
    let again = halved(&tree)?;
    found.retain(|one| again.contains(one));
    Ok(found)
}

/// What `/proc/PID/fd` shows of a socket.
fn link(inode: u32) -> String {
    format!("socket:[{inode}]")
}

fn all_links(pids: &[i32]) -> HashSet<String> {
    let folders = pids
        .iter()
        .map(|pid| fs::read_dir(format!("/proc/{pid}/fd")));
    let entries = folders.flatten().flatten().flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links
        .filter_map(|link| link.into_os_string().into_string().ok())
        .collect()
}
