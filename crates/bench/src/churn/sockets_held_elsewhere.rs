//! Processes that hold sockets of a process tree open.

use anyhow::{Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Returns the sockets of the tree under `root` that are open in other processes of the host, each with one such
/// process. `proc` is the host's /proc.
///
/// # Errors
/// The tree has no sockets: the process does not exist.
pub(super) fn sockets_held_elsewhere(proc: &Path, root: i32) -> Result<Vec<String>> {
    let tree = process_tree(proc, root);
    let own: BTreeSet<String> = tree
        .iter()
        .flat_map(|pid| open_sockets(proc, *pid))
        .collect();
    ensure!(
        !own.is_empty(),
        "process {root} has no sockets in {}",
        proc.display()
    );
    let all = fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // Processes forked since the first scan belong to the tree, too.
    let others = pids.filter(|pid| !tree.contains(pid));
    let held = others.flat_map(|pid| {
        open_sockets(proc, pid)
            .into_iter()
            .map(move |link| (link, pid))
    });
    let found: BTreeMap<String, i32> = held.filter(|(link, _)| own.contains(link)).collect();
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let forked_later: BTreeSet<String> = self::process_tree(proc, root)
        .iter()
        .filter(|pid| !tree.contains(pid))
        .flat_map(|pid| open_sockets(proc, *pid))
        .collect();
    let left = found
        .into_iter()
        .filter(|(link, _)| !forked_later.contains(link));
    let descriptions = left.map(|(link, pid)| {
        let name = fs::read_to_string(proc.join(format!("{pid}/comm"))).unwrap_or_default();
        format!("{link} in {} ({pid})", name.trim_end())
    });
    Ok(descriptions.collect())
}

fn process_tree(proc: &Path, root: i32) -> Vec<i32> {
    let (mut found, mut next_index) = (vec![root], 0);
    while let Some(pid) = found.get(next_index).copied() {
        next_index += 1;
        let tasks = fs::read_dir(proc.join(format!("{pid}/task")));
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

fn open_sockets(proc: &Path, pid: i32) -> Vec<String> {
    let entries = fs::read_dir(proc.join(format!("{pid}/fd")))
        .into_iter()
        .flatten();
    let links = entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    let names = links.filter_map(|link| link.into_os_string().into_string().ok());
    names.filter(|name| name.starts_with("socket:")).collect()
}
