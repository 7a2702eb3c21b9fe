//! The daemon has exactly the capabilities that its documentation lists.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use holdfast_testbed::cluster::{Cluster, ClusterSpec};

const DOCUMENTATION: &str = include_str!("../../../../docs/configuration.md");

/// Names of the capabilities in `linux/capability.h`, in the order of their numbers.
const CAPABILITY_NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Compares a daemon with migration and one without it.
pub fn assert_capabilities_documented() -> Result<()> {
    let (needed, optional) = documented_capabilities(true)?;
    ensure!(
        needed.len() == 16,
        "the documented list was not read in full: {needed:?}"
    );
    for migration in [true, false] {
        let (needed, optional) = match migration {
            true => (needed.clone(), optional.clone()),
            false => documented_capabilities(false)?,
        };
        let mut spec = ClusterSpec::new(format!("m-caps-{}", std::process::id()));
        spec.migration = migration;
        let cluster = Cluster::up(spec)?;
        for node in cluster.nodes() {
            let pid = cluster.daemon_pid(&node)?.context("no daemon")?;
            for (thread, sets) in thread_capabilities(pid)? {
                let has = &sets["CapEff"];
                let extra: Vec<_> = has
                    .difference(&needed)
                    .filter(|one| !optional.contains(*one))
                    .collect();
                ensure!(
                    extra.is_empty(),
                    "{node} has undocumented capabilities {extra:?}"
                );
                // Threads for a single task may have fewer.
                let missing: Vec<_> = needed.difference(has).collect();
                ensure!(
                    missing.is_empty() || thread != pid,
                    "{node} lacks {missing:?}"
                );
                ensure!(
                    sets["CapPrm"] == *has,
                    "{node} can raise more capabilities: {sets:?}"
                );
                for inherited_set in ["CapInh", "CapAmb"] {
                    ensure!(sets[inherited_set].is_empty(), "{node}: {sets:?}");
                }
                let has_allowed_bounding_set = migration || sets["CapBnd"] == *has;
                ensure!(
                    has_allowed_bounding_set,
                    "programs started by {node} can raise more capabilities: {sets:?}"
                );
            }
        }
    }
    Ok(())
}

/// Returns the capability sets of each thread of a process, by thread id and by their names in procfs.
fn thread_capabilities(pid: i32) -> Result<BTreeMap<i32, BTreeMap<String, BTreeSet<String>>>> {
    let mut found = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        let thread = task.file_name().to_string_lossy().parse()?;
        // A thread may end meanwhile.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        let mut sets = BTreeMap::new();
        for line in status.lines().filter(|line| line.starts_with("Cap")) {
            let (name, bits) = line.split_once(":\t").context("a set")?;
            let bits = u64::from_str_radix(bits, 16)?;
            let names = (0..64).filter(|number| bits >> number & 1 == 1);
            let name_of = |number: usize| match CAPABILITY_NAMES.get(number) {
                Some(name) => format!("CAP_{name}"),
                None => format!("number {number}"),
            };
            sets.insert(name.to_owned(), names.map(name_of).collect());
        }
        ensure!(sets.len() == 5, "{sets:?}");
        found.insert(thread, sets);
    }
    ensure!(found.contains_key(&pid), "no main thread");
    Ok(found)
}

/// Returns the capabilities that the documentation says the daemon keeps, and the optional ones.
fn documented_capabilities(migration: bool) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let (_, section) = DOCUMENTATION
        .split_once("\n## Capabilities\n")
        .context("no section `Capabilities`")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let (always, with_migration) = section
        .split_once("With `migration.enabled`")
        .context("no list for `migration.enabled`")?;
    let (mut needed, mut optional) = (BTreeSet::new(), BTreeSet::new());
    let lines = always
        .lines()
        .chain(with_migration.lines().filter(|_| migration));
    for line in lines.filter(|line| line.starts_with("| `CAP_")) {
        let mut cells = line.split('|').skip(1);
        let (names, purpose) = (
            cells.next().unwrap_or_default(),
            cells.next().unwrap_or_default(),
        );
        if purpose.contains("dropped after the start") {
            continue;
        }
        let target_set = if purpose.contains("optional") {
            &mut optional
        } else {
            &mut needed
        };
        target_set.extend(
            names
                .split(',')
                .map(|name| name.trim().trim_matches('`').to_owned()),
        );
    }
    Ok((needed, optional))
}
