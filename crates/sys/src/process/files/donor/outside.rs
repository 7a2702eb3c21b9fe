//! Pipes, sockets and terminals of processes outside the tree.

use crate::process::procfs::Stat;
use std::collections::HashMap;
use std::fs;

/// Who else holds what, by what `/proc/PID/fd` shows.
#[derive(Debug, Default)]
pub struct Outside {
    holders: HashMap<String, Vec<i32>>,
    tree: Vec<i32>,
}

/// No chain of parents is longer.
const PARENTS_MAX: usize = 1000;

impl Outside {
    /// Looks at all descriptors of all other processes. Those that end meanwhile are left out.
    pub fn look(tree: &[i32]) -> Self {
        let mut holders = HashMap::new();
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            if tree.contains(&pid) {
                continue;
            }
            let fds = fs::read_dir(process.path().join("fd"));
            for fd in fds.into_iter().flatten().flatten() {
                let Ok(target) = fs::read_link(fd.path()) else {
                    continue;
                };
                let Some(target) = target.to_str() else {
                    continue;
                };
                if target.starts_with("pipe:") || target.starts_with("socket:") {
                    let holders: &mut Vec<i32> = holders.entry(target.to_string()).or_default();
                    if holders.last() != Some(&pid) {
                        holders.push(pid);
                    }
                }
            }
        }
        Self {
            holders,
            tree: tree.to_vec(),
        }
    }

    /// A process outside the tree that holds this, as `/proc/PID/fd` shows it.
    pub fn holder(&self, link: &str) -> Option<i32> {
        let holders = self.holders.get(link)?;
        holders.iter().copied().find(|pid| !self.is_inside(*pid))
    }

    /// Whether a process belongs to the tree after all, as one does that was born since the tree was listed, or has ended.
    fn is_inside(&self, pid: i32) -> bool {
        let mut at = pid;
        for _ in 0..PARENTS_MAX {
            match Stat::read(at) {
                Err(_) => return at == pid,
                Ok(stat) if self.tree.contains(&stat.parent) => return true,
                Ok(stat) if stat.parent <= 1 => return false,
                Ok(stat) => at = stat.parent,
            }
        }
        false
    }
}
