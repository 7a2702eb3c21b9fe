//! Who has sockets of a tree of processes open.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// The sockets of the tree under `root` that are open in other processes of this host, each with a process that has it.
pub(super) fn held_elsewhere(root: i32) -> Vec<String> {
    let tree = tree(root);
    let own: BTreeSet<String> = tree.iter().flat_map(|pid| sockets(*pid)).collect();
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // Children may have been born meanwhile.
    let others = pids.filter(|pid| !tree.contains(pid));
    let held = others.flat_map(|pid| sockets(pid).into_iter().map(move |link| (link, pid)));
    let found: BTreeMap<String, i32> = held.filter(|(link, _)| own.contains(link)).collect();
    if found.is_empty() {
        return Vec::new();
    }
    let late: BTreeSet<String> = self::tree(root)
        .iter()
        .filter(|pid| !tree.contains(pid))
        .flat_map(|pid| sockets(*pid))
        .collect();
    let left = found.into_iter().filter(|(link, _)| !late.contains(link));
    let told = left.map(|(link, pid)| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("{link} in {} ({pid})", name.trim_end())
    });
    told.collect()
}

fn tree(root: i32) -> Vec<i32> {
    let (mut found, mut at) = (vec![root], 0);
    while let Some(pid) = found.get(at).copied() {
        at += 1;
        let tasks = fs::read_dir(format!("/proc/{pid}/task"));
        for task in tasks.into_iter().flatten().flatten() {
            let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(
                text.split_whitespace()
                    .filter_map(|pid| pid.parse::<i32>().ok()),
            );
        }
    }
    found
}

fn sockets(pid: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let links = entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    let names = links.filter_map(|link| link.into_os_string().into_string().ok());
    names.filter(|name| name.starts_with("socket:")).collect()
}
