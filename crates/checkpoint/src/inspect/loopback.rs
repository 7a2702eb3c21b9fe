//! Connections over the loopback device with only one end in the tree.

use super::{Blocker, InspectionReport, Obstacle};
use crate::files::image::FileId;
use crate::files::{FilesSnapshot, OutsideHolders};
use crate::procfs;
use crate::sockets::{LoopbackSplitReason, SocketAddresses, split_connections};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use std::{fs, io};

/// Number of inspections: a running tree opens and closes connections, so only obstacles found in each inspection
/// count.
const INSPECTIONS_MIN: u32 = 3;
const INSPECTION_PAUSE: Duration = Duration::from_millis(10);
/// Longest wait for an obstacle that passes by itself.
const TRANSIENT_WAIT_MAX: Duration = Duration::from_secs(2);

/// Finds such connections among the sockets of `snapshot`; `read_again` reads the sockets anew.
pub(super) fn check(
    report: &mut InspectionReport,
    snapshot: &FilesSnapshot,
    read_again: impl Fn() -> Option<FilesSnapshot>,
) {
    let found = match lasting_splits(snapshot, read_again, &report.processes) {
        Ok(found) if found.is_empty() => return,
        Ok(found) => found,
        Err(error) => {
            let reason = format!("reading connections over the loopback device: {error}");
            return report.block(report.processes[0], Obstacle::NotInspectable(reason));
        }
    };
    let outside = OutsideHolders::read(&report.processes);
    let ids = ids_by_addresses(snapshot);
    for (ends, why) in found {
        let holder = match why {
            LoopbackSplitReason::Outside(Some(inode)) => {
                outside.holder_of_link(&socket_link(inode))
            }
            _ => None,
        };
        let process_fd = ids.get(&ends).and_then(|id| snapshot.socket_fds.get(id));
        let pid = process_fd.map_or(report.processes[0], |(pid, _)| *pid);
        let path =
            process_fd.and_then(|(pid, fd)| procfs::link_text(*pid, &format!("fd/{fd}")).ok());
        let obstacle = Obstacle::Descriptor {
            fd: process_fd.map(|(_, fd)| *fd),
            path: path.unwrap_or_default(),
            reason: why.text(&ends, holder),
        };
        report.split_connections.push(Blocker { pid, obstacle });
    }
}

fn ids_by_addresses(snapshot: &FilesSnapshot) -> HashMap<SocketAddresses, FileId> {
    let sockets = snapshot.sockets.iter();
    let ends = sockets.filter_map(|(id, socket)| Some((SocketAddresses::of(socket)?, *id)));
    ends.collect()
}

fn lasting_splits(
    snapshot: &FilesSnapshot,
    read_again: impl Fn() -> Option<FilesSnapshot>,
    pids: &[i32],
) -> io::Result<Vec<(SocketAddresses, LoopbackSplitReason)>> {
    let own_pid = [std::process::id() as i32];
    let started_at = Instant::now();
    let (mut found, mut inspections) = (current_splits(snapshot, pids)?, 1);
    // A restorer keeps copies of the sockets that it has just restored for some round trips.
    let is_transient = |(_, why): &(SocketAddresses, LoopbackSplitReason)| match why {
        LoopbackSplitReason::Outside(Some(inode)) => {
            all_links(&own_pid).contains(&socket_link(*inode))
        }
        LoopbackSplitReason::Outside(None) => false,
        LoopbackSplitReason::DataInTransit => true,
    };
    while !found.is_empty()
        && (inspections < INSPECTIONS_MIN
            || (found.iter().any(is_transient) && started_at.elapsed() < TRANSIENT_WAIT_MAX))
    {
        std::thread::sleep(INSPECTION_PAUSE);
        let Some(files_snapshot) = read_again() else {
            break;
        };
        let current = current_splits(&files_snapshot, pids)?;
        found.retain(|one| current.contains(one));
        inspections += 1;
    }
    Ok(found)
}

fn current_splits(
    snapshot: &FilesSnapshot,
    pids: &[i32],
) -> io::Result<Vec<(SocketAddresses, LoopbackSplitReason)>> {
    let tree: Vec<SocketAddresses> = ids_by_addresses(snapshot).into_keys().collect();
    let mut found = split_connections(&tree)?;
    if !found.is_empty() {
        // The tree may have received the socket meanwhile.
        let outside_links = all_links(pids);
        found.retain(|(_, why)| match why {
            LoopbackSplitReason::Outside(Some(inode)) => {
                !outside_links.contains(&socket_link(*inode))
            }
            _ => true,
        });
    }
    Ok(found)
}

/// Returns the text that `/proc/PID/fd` shows for a socket.
fn socket_link(inode: u32) -> String {
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
