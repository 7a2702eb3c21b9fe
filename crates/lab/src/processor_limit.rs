//! The share of processors that each node of a lab has: a quota for every period of 10 ms.
//!
//! The quota is `cpu.max` of the host's control group where that has the controller `cpu`. Where the controller belongs
//! to version 1, the host has a second group there, `holdfast-lab.LAB.HOST`, and sees the hierarchy at
//! [`MOUNT_INSIDE`].

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::mount::{MsFlags, mount};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorContext, Result};

/// The hierarchy of version 1 with the controller `cpu`, inside a host.
const MOUNT_INSIDE: &str = "/run/cgroup/cpu";

/// Length of a period, in microseconds.
const PERIOD_US: u32 = 10_000;

/// Smallest and greatest number of processors. The kernel grants no less than 1 ms of a period.
const PROCESSORS_MIN: f64 = 0.1;
const PROCESSORS_MAX: f64 = 1024.0;

/// Part of all processors that real-time threads of all nodes together may use. The kernel keeps the rest for others, and
/// subtracts it from no quota.
const REALTIME_SHARE: f64 = 0.9;

/// Maximum time for the kernel to release a group whose processes were killed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// A group of version 1 for one host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ProcessorGroup {
    pub directory: PathBuf,
    /// Options of the mount of the hierarchy: names of controllers.
    options: String,
}

/// Refuses a share outside the range.
pub(crate) fn validate(processors: f64) -> Result<()> {
    if (PROCESSORS_MIN..=PROCESSORS_MAX).contains(&processors) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "processors must be {PROCESSORS_MIN} to {PROCESSORS_MAX}, not {processors}"
    )))
}

/// Limits a host whose group in the hierarchy of version 2 is `group`. Returns the group of version 1, if the host needs
/// one.
pub(crate) fn limit(
    group: &Path,
    (lab, host): (&str, &str),
    (processors, nodes): (f64, u16),
) -> Result<Option<ProcessorGroup>> {
    let quota_us = (processors * f64::from(PERIOD_US)).round() as u64;
    let ancestors: Vec<&Path> = group.ancestors().skip(1).take(3).collect();
    if let [lab_group, base, root] = ancestors[..]
        && has_cpu_controller(root)
    {
        for parent in [root, base, lab_group] {
            write(&parent.join("cgroup.subtree_control"), "+cpu")?;
        }
        write(&group.join("cpu.max"), &format!("{quota_us} {PERIOD_US}"))?;
        return Ok(None);
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let Some((hierarchy, options)) = find_hierarchy(&mounts) else {
        let hint = "no control group controller `cpu` is available, so that nodes cannot have a share of processors";
        return Err(Error::Machine(hint.into()));
    };
    let directory = hierarchy.join(format!("{}{host}", prefix(lab)));
    match fs::create_dir(&directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).context(|| format!("create {}", directory.display()));
        }
        _ => {}
    }
    write(&directory.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
    write(&directory.join("cpu.cfs_quota_us"), &quota_us.to_string())?;
    allow_realtime(&directory, processors, nodes);
    Ok(Some(ProcessorGroup { directory, options }))
}

fn has_cpu_controller(root: &Path) -> bool {
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    controllers
        .split_ascii_whitespace()
        .any(|name| name == "cpu")
}

/// Returns the mount point of the hierarchy of version 1 with the controller `cpu`, and its controllers.
fn find_hierarchy(mounts: &str) -> Option<(PathBuf, String)> {
    /// Controllers that share a hierarchy with `cpu`.
    const CONTROLLERS: [&str; 3] = ["cpu", "cpuacct", "cpuset"];
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let controllers = options
            .split(',')
            .filter(|option| CONTROLLERS.contains(option));
        let controllers: Vec<&str> = controllers.collect();
        let is_found = kind == "cgroup" && controllers.contains(&"cpu");
        is_found.then(|| (PathBuf::from(path), controllers.join(",")))
    })
}

/// Gives real-time threads of a host a part of the processors. A new group has none in kernels with real-time groups, so
/// that daemons could not become real-time; other kernels have no such limit.
fn allow_realtime(directory: &Path, processors: f64, nodes: u16) {
    let online = thread::available_parallelism().map_or(1, usize::from) as f64;
    let share = (processors / online).min(REALTIME_SHARE / f64::from(nodes.max(1)));
    let period_written = fs::write(directory.join("cpu.rt_period_us"), PERIOD_US.to_string());
    let mut runtime_us = (share * f64::from(PERIOD_US)) as u64;
    // The kernel refuses if all groups together would have more than the machine: other labs may have a part.
    while period_written.is_ok()
        && runtime_us > 0
        && fs::write(directory.join("cpu.rt_runtime_us"), runtime_us.to_string()).is_err()
    {
        runtime_us /= 2;
    }
}

/// Mounts the hierarchy of a host's group. Runs in the host's namespaces, after it has joined the group.
pub(crate) fn mount_inside(group: &ProcessorGroup) -> Result<()> {
    fs::create_dir_all(MOUNT_INSIDE).context(|| format!("create {MOUNT_INSIDE}"))?;
    let restrictive = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(
        Some("cgroup"),
        MOUNT_INSIDE,
        Some("cgroup"),
        restrictive,
        Some(&*group.options),
    )
    .context(|| format!("mount the controllers {} on {MOUNT_INSIDE}", group.options))
}

/// Removes the groups of version 1 of a lab, whose processes have been killed.
pub(crate) fn remove(lab: &str) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let Some((hierarchy, _)) = find_hierarchy(&mounts) else {
        return Ok(());
    };
    let deadline = Instant::now() + REMOVAL_TIMEOUT;
    let prefix = prefix(lab);
    for entry in fs::read_dir(hierarchy).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(&prefix) {
            continue;
        }
        let describe = || format!("remove control group {}", entry.path().display());
        loop {
            match fs::remove_dir(entry.path()) {
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                // A killed process is still ending.
                Err(error)
                    if error.kind() == ErrorKind::ResourceBusy && Instant::now() < deadline =>
                {
                    thread::sleep(Duration::from_millis(2));
                }
                done => {
                    done.context(describe)?;
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Prefix of the names of a lab's groups. No name of a lab has a dot.
fn prefix(lab: &str) -> String {
    format!("holdfast-lab.{lab}.")
}

fn write(file: &Path, value: &str) -> Result<()> {
    fs::write(file, value).context(|| format!("write {value} to {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchy_is_found_with_its_controllers() {
        let mounts = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n\
                      cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n";
        let expected = ("/sys/fs/cgroup/cpu,cpuacct".into(), "cpu,cpuacct".into());
        assert_eq!(find_hierarchy(mounts), Some(expected));
        assert_eq!(find_hierarchy("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn impossible_shares_are_refused() {
        for processors in [0.0, 0.09, -1.0, f64::NAN, f64::INFINITY, 1025.0] {
            assert!(validate(processors).is_err(), "{processors}");
        }
        for processors in [0.1, 0.5, 2.0, 1024.0] {
            assert!(validate(processors).is_ok(), "{processors}");
        }
    }
}
