//! Connections over the loopback device with only one end in the tree.

use super::{Blocker, Obstacle, Report};
use crate::process::files::image::FileId;
use crate::process::files::{Draft, Outside};
use crate::process::procfs;
use crate::process::sockets::{Ends, Halved, halved};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use std::{fs, io};

/// Number of inspections: a running tree opens and closes connections, so only obstacles found in each inspection
/// count.
const LOOKS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(10);
/// Longest wait for an obstacle that passes by itself.
const PATIENCE: Duration = Duration::from_secs(2);

/// Finds such connections among the sockets of `draft`; `again` reads the sockets anew.
pub(super) fn check(report: &mut Report, draft: &Draft, again: impl Fn() -> Option<Draft>) {
    let found = match lasting(draft, again, &report.processes) {
        Ok(found) if found.is_empty() => return,
        Ok(found) => found,
        Err(error) => {
            let why = format!("connections over the loopback device: {error}");
            return report.block(report.processes[0], Obstacle::Hidden(why));
        }
    };
    let outside = Outside::look(&report.processes);
    let ids = ids(draft);
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

fn ids(draft: &Draft) -> HashMap<Ends, FileId> {
    let sockets = draft.sockets.iter();
    let ends = sockets.filter_map(|(id, socket)| Some((Ends::of(socket)?, *id)));
    ends.collect()
}

fn lasting(
    draft: &Draft,
    again: impl Fn() -> Option<Draft>,
    pids: &[i32],
) -> io::Result<Vec<(Ends, Halved)>> {
    let own = [std::process::id() as i32];
    let began = Instant::now();
    let (mut found, mut looks) = (seen(draft, pids)?, 1);
    // A restorer keeps copies of the sockets that it has just restored for some round trips.
    let passes = |(_, why): &(Ends, Halved)| match why {
        Halved::Outside(Some(inode)) => all_links(&own).contains(&link(*inode)),
        Halved::Outside(None) => false,
        Halved::Arriving => true,
    };
    while !found.is_empty()
        && (looks < LOOKS || (found.iter().any(passes) && began.elapsed() < PATIENCE))
    {
        std::thread::sleep(PAUSE);
        let Some(draft) = again() else { break };
        let now = seen(&draft, pids)?;
        found.retain(|one| now.contains(one));
        looks += 1;
    }
    Ok(found)
}

fn seen(draft: &Draft, pids: &[i32]) -> io::Result<Vec<(Ends, Halved)>> {
    let tree: Vec<Ends> = ids(draft).into_keys().collect();
    let mut found = halved(&tree)?;
    if !found.is_empty() {
        // The tree may have received the socket meanwhile.
        let theirs = all_links(pids);
        found.retain(|(_, why)| match why {
            Halved::Outside(Some(inode)) => !theirs.contains(&link(*inode)),
            _ => true,
        });
    }
    Ok(found)
}

/// Returns the text that `/proc/PID/fd` shows for a socket.
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
