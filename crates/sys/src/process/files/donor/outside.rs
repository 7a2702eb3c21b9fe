//! Pipes, sockets and terminals of processes outside the tree.

use std::collections::HashMap;
use std::fs;

/// Who else holds what, by what `/proc/PID/fd` shows.
#[derive(Debug, Default)]
pub struct Outside {
    holders: HashMap<String, i32>,
}

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
                    holders.entry(target.to_string()).or_insert(pid);
                }
            }
        }
        Self { holders }
    }

    /// A process outside the tree that holds this, as `/proc/PID/fd` shows it.
    pub fn holder(&self, link: &str) -> Option<i32> {
        self.holders.get(link).copied()
    }
}
