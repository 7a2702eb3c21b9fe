//! Control groups (version 2): reads a group's limits, and makes a group of the same name and limits on another host.
//!
//! The files of a group are copied verbatim, because only the kernel interprets a limit. Limits of single devices
//! (`io.max` and the like) are left out: another host has other devices.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Files of a control group.
const PROCESSES: &str = "cgroup.procs";
const CONTROLLERS: &str = "cgroup.controllers";
const SUBTREE: &str = "cgroup.subtree_control";

/// Prefix of the names of the files that every group has.
const CORE_PREFIX: &str = "cgroup";

/// Files that hold limits, each with its value in a new group. The name up to the first dot is the controller.
const LIMIT_FILES: [(&str, &str); 20] = [
    ("cgroup.max.depth", "max"),
    ("cgroup.max.descendants", "max"),
    ("cpu.idle", "0"),
    ("cpu.max", "max 100000"),
    ("cpu.max.burst", "0"),
    ("cpu.uclamp.max", "max"),
    ("cpu.uclamp.min", "0.00"),
    ("cpu.weight", "100"),
    ("cpuset.cpus", ""),
    ("cpuset.cpus.partition", "member"),
    ("cpuset.mems", ""),
    ("io.weight", "default 100"),
    ("memory.high", "max"),
    ("memory.low", "0"),
    ("memory.max", "max"),
    ("memory.min", "0"),
    ("memory.oom.group", "0"),
    ("memory.swap.high", "max"),
    ("memory.swap.max", "max"),
    ("pids.max", "max"),
];

/// Marks of a frozen group, or of a group with a frozen ancestor: controller in `/proc/PID/cgroup`, file in the group's
/// directory, and the beginning of a line of that file.
const FREEZERS: [(&str, &str, &str); 2] = [
    ("", "cgroup.events", "frozen 1"),
    ("freezer", "freezer.state", "FR"),
];

/// Returns the path of the frozen control group that contains a process; `None` if the group is not frozen or the
/// caller cannot see it. No thread of a frozen process can be stopped by ptrace.
#[must_use]
pub fn frozen_group_of(pid: i32) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    groups.lines().find_map(|line| {
        let mut words = line.splitn(3, ':').skip(1);
        let (controllers, path) = (words.next()?, words.next()?);
        let (controller, file, frozen) = FREEZERS
            .iter()
            .find(|(controller, ..)| controllers.split(',').any(|one| one == *controller))?;
        let is_frozen = |directory: PathBuf| {
            let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
            text.lines().any(|line| line.starts_with(frozen))
        };
        let mut directories = mounts
            .lines()
            .filter_map(|mount| group_directory(mount, controller, path));
        directories.any(is_frozen).then(|| path.to_owned())
    })
}

/// Returns the directory of a group under one mount, a line of `/proc/PID/mountinfo`: a version 2 mount for an empty
/// controller, a version 1 mount otherwise.
fn group_directory(mount: &str, controller: &str, path: &str) -> Option<PathBuf> {
    let (mount_fields, kind) = mount.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let (fs_type, options) = (kind.next()?, kind.nth(1)?);
    let is_matching = match controller {
        "" => fs_type == "cgroup2",
        _ => fs_type == "cgroup" && options.split(',').any(|option| option == controller),
    };
    let mut words = mount_fields.split(' ').skip(3);
    let (root, mount_point) = (words.next()?, words.next()?);
    let relative = Path::new(path).strip_prefix(root).ok()?;
    is_matching.then(|| Path::new(mount_point).join(relative))
}

/// A control group in a form that can be made on another host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlGroup {
    /// Path below the root of all groups, without a leading slash.
    path: String,
    /// Contents of limit files that differ from a new group's, by file name.
    limits: BTreeMap<String, String>,
}

/// The control groups of this host, as far as the caller sees them.
#[derive(Clone, Debug)]
pub struct ControlGroups {
    root: PathBuf,
}

impl ControlGroups {
    /// Returns the groups below `root`, the mount point of a cgroup2 file system.
    #[must_use]
    pub fn new(root: PathBuf) -> ControlGroups {
        ControlGroups { root }
    }

    /// Returns the paths of all groups of this name, the shortest first.
    #[must_use]
    pub fn find_by_name(&self, name: &str) -> Vec<String> {
        let mut found = Vec::new();
        let mut pending = vec![PathBuf::new()];
        while let Some(path) = pending.pop() {
            let entries = fs::read_dir(self.root.join(&path)).into_iter().flatten();
            let below = entries.filter_map(Result::ok);
            let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            for entry in below {
                let path = path.join(entry.file_name());
                if entry.file_name() == name {
                    found.extend(path.to_str().map(str::to_owned));
                }
                pending.push(path);
            }
        }
        found.sort_by_key(|path| (path.len(), path.clone()));
        found
    }

    /// Returns the processes of a group and of its descendants.
    ///
    /// # Errors
    /// `NotFound` and other errors of reading the group's files.
    pub fn processes(&self, path: &str) -> io::Result<BTreeSet<i32>> {
        let directory = self.root.join(path);
        let text = fs::read_to_string(directory.join(PROCESSES))?;
        let mut found: BTreeSet<i32> = text.lines().filter_map(|line| line.parse().ok()).collect();
        for entry in fs::read_dir(directory)?.filter_map(Result::ok) {
            if entry.file_type().is_ok_and(|kind| kind.is_dir())
                && let Some(name) = entry.file_name().to_str()
            {
                // A group that was removed meanwhile has no processes.
                let below = self.processes(&format!("{path}/{name}"));
                found.extend(below.unwrap_or_default());
            }
        }
        Ok(found)
    }

    /// Returns the processes whose parents are not in `processes`.
    #[must_use]
    pub fn tree_roots(processes: &BTreeSet<i32>) -> Vec<i32> {
        let is_root =
            |pid: &&i32| parent_of(**pid).is_some_and(|parent| !processes.contains(&parent));
        processes.iter().filter(is_root).copied().collect()
    }

    /// Returns the path of the group that a process is in; `None` for the root group, or if the caller cannot see the
    /// group.
    ///
    /// # Errors
    /// There is no such process.
    pub fn group_of(&self, pid: i32) -> io::Result<Option<String>> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::/"));
        Ok(path.filter(|path| is_plain_path(path)).map(str::to_owned))
    }

    /// Reads a group with its limits.
    ///
    /// # Errors
    /// There is no such group, or one of its files cannot be read.
    pub fn read(&self, path: &str) -> io::Result<ControlGroup> {
        let mut limits = BTreeMap::new();
        for entry in fs::read_dir(self.root.join(path))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(default_value) = default_limit(&name) else {
                continue;
            };
            let value = fs::read_to_string(entry.path())?;
            if value.trim_end() != default_value {
                limits.insert(name, value.trim_end().to_owned());
            }
        }
        let path = path.to_owned();
        Ok(ControlGroup { path, limits })
    }

    /// Returns the reasons that prevent making the group on this host; empty if there are none.
    #[must_use]
    pub fn creation_obstacles(&self, group: &ControlGroup) -> Vec<String> {
        if !is_plain_path(&group.path) {
            return vec![format!("`{}` is not a valid cgroup path", group.path)];
        }
        let mut refusals = Vec::new();
        if self
            .processes(&group.path)
            .is_ok_and(|found| !found.is_empty())
        {
            let path = &group.path;
            let text = format!("control group {path} has processes already: stop that unit first");
            refusals.push(text);
        }
        let available = fs::read_to_string(self.root.join(CONTROLLERS)).unwrap_or_default();
        for (file, value) in &group.limits {
            let controller = controller_of(file);
            let is_known = default_limit(file).is_some();
            if !is_known
                || (controller != CORE_PREFIX
                    && !available.split_whitespace().any(|name| name == controller))
            {
                refusals.push(format!(
                    "control group {} has the limit {file} = {value}, but this host has no controller for it",
                    group.path
                ));
            }
        }
        refusals
    }

    /// Makes a group and moves a process without children into it.
    ///
    /// # Errors
    /// The first reason of [`ControlGroups::creation_obstacles`], or the kernel's error; after the latter, [`ControlGroups::remove`] undoes the
    /// change.
    pub fn create(&self, group: &ControlGroup, process: i32) -> Result<(), String> {
        if let Some(refusal) = self.creation_obstacles(group).into_iter().next() {
            return Err(refusal);
        }
        // An empty group that is left over may have other limits.
        self.remove(&group.path);
        let controllers: BTreeSet<&str> = group
            .limits
            .keys()
            .map(|file| controller_of(file))
            .collect();
        let mut directory = self.root.clone();
        for part in Path::new(&group.path) {
            for controller in controllers.iter().filter(|name| **name != CORE_PREFIX) {
                write_limit(&directory.join(SUBTREE), &format!("+{controller}"))?;
            }
            directory.push(part);
            match fs::create_dir(&directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(format!("{}: {error}", directory.display()));
                }
                _ => {}
            }
        }
        for (file, value) in &group.limits {
            write_limit(&directory.join(file), value)?;
        }
        write_limit(&directory.join(PROCESSES), &process.to_string())
    }

    /// Removes an empty group and its ancestors that become empty. Returns true if the group does not exist afterwards.
    pub fn remove(&self, path: &str) -> bool {
        let groups = Path::new(path).ancestors();
        for path in groups.take_while(|group| *group != Path::new("") && is_plain_path(path)) {
            // A group with processes or child groups stays.
            match fs::remove_dir(self.root.join(path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => break,
                _ => {}
            }
        }
        !self.root.join(path).exists()
    }
}

impl ControlGroup {
    /// Returns the path below the root of all groups, without a leading slash.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the names and contents of the limit files.
    pub fn limits(&self) -> impl Iterator<Item = (&str, &str)> {
        let Self { path: _, limits } = self;
        (limits.iter()).map(|(file, value)| (&**file, &**value))
    }
}

/// Returns a file's content in a new group; `None` if the file holds no limit.
fn default_limit(file: &str) -> Option<&'static str> {
    // There is one such file for each huge page size.
    if file.starts_with("hugetlb.") && file.ends_with(".max") {
        return Some("max");
    }
    let limit = LIMIT_FILES.iter().find(|(name, _)| *name == file);
    limit.map(|(_, fresh)| *fresh)
}

fn controller_of(file: &str) -> &str {
    file.split('.').next().unwrap_or_default()
}

/// Returns true if a path leads down from the root, without `..`.
fn is_plain_path(path: &str) -> bool {
    let path = Path::new(path);
    let mut parts = path.components();
    path.is_relative()
        && path != Path::new("")
        && parts.all(|part| matches!(part, Component::Normal(_)))
}

fn write_limit(file: &Path, value: &str) -> Result<(), String> {
    fs::write(file, value).map_err(|error| format!("{} = {value}: {error}", file.display()))
}

/// Returns the parent of a process; `None` if there is no such process.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name, the second field, may contain any bytes; it ends with the last parenthesis.
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let after_name = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with plain files stands in for a cgroup2 mount.
    fn groups(files: &[(&str, &str)]) -> (tempfile::TempDir, ControlGroups) {
        let folder = tempfile::tempdir().expect("a folder");
        for (file, text) in files {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().expect("a folder")).expect("made");
            fs::write(file, text).expect("written");
        }
        let groups = ControlGroups::new(folder.path().to_owned());
        (folder, groups)
    }

    #[test]
    fn units_are_found_by_their_groups() {
        let (_folder, groups) = groups(&[
            ("system.slice/game.service/cgroup.procs", "2\n3\n"),
            ("system.slice/game.service/below/cgroup.procs", "4\n"),
            ("user.slice/deeper/still/game.service/cgroup.procs", ""),
        ]);
        let named = groups.find_by_name("game.service");
        assert_eq!(named.len(), 2);
        assert_eq!(named[0], "system.slice/game.service");
        assert_eq!(
            groups.processes(&named[0]).expect("processes"),
            BTreeSet::from([2, 3, 4])
        );
        assert_eq!(groups.find_by_name("other.service"), Vec::<String>::new());
    }

    #[test]
    fn only_changed_limits_are_read() {
        let (_folder, groups) = groups(&[
            ("a/cgroup.procs", "7\n"),
            ("a/memory.max", "1048576\n"),
            ("a/memory.high", "max\n"),
            ("a/memory.current", "4096\n"),
            ("a/hugetlb.2MB.max", "4194304\n"),
        ]);
        let group = groups.read("a").expect("a group");
        let limits: Vec<(&str, &str)> = group
            .limits
            .iter()
            .map(|(file, value)| (&**file, &**value))
            .collect();
        assert_eq!(
            limits,
            [("hugetlb.2MB.max", "4194304"), ("memory.max", "1048576")]
        );
    }

    #[test]
    fn refusals_name_the_obstacle() {
        let (_folder, groups) = groups(&[
            ("cgroup.controllers", "memory pids\n"),
            ("busy/cgroup.procs", "7\n"),
        ]);
        let group = |path: &str, file: &str| ControlGroup {
            path: path.to_owned(),
            limits: BTreeMap::from([(file.to_owned(), "1".to_owned())]),
        };
        let no_refusals = Vec::<String>::new();
        assert_eq!(
            groups.creation_obstacles(&group("system.slice/a", "memory.max")),
            no_refusals
        );
        assert_eq!(
            groups.creation_obstacles(&group("system.slice/a", "cgroup.max.depth")),
            no_refusals
        );
        for (path, file, why) in [
            ("system.slice/a", "cpu.max", "cpu.max = 1"),
            ("system.slice/a", "memory.reclaim", "memory.reclaim"),
            ("system.slice/a", "cgroup.procs", "cgroup.procs"),
            ("../a", "memory.max", "`../a`"),
            ("/a", "memory.max", "`/a`"),
            ("", "memory.max", "``"),
            ("busy", "memory.max", "has processes"),
        ] {
            let refusals = groups.creation_obstacles(&group(path, file));
            assert_eq!(refusals.len(), 1, "{refusals:?}");
            assert!(refusals[0].contains(why), "{refusals:?}");
        }
    }

    #[test]
    fn mount_line_gives_group_directory() {
        let second = "35 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate";
        let first =
            "38 24 0:33 /docker /sys/fs/cgroup/freezer rw shared:9 - cgroup none rw,freezer";
        let directory = |mount, controller| group_directory(mount, controller, "/docker/a");
        let found = |path: &str| Some(PathBuf::from(path));
        assert_eq!(
            directory(second, ""),
            found("/sys/fs/cgroup/unified/docker/a")
        );
        assert_eq!(
            directory(first, "freezer"),
            found("/sys/fs/cgroup/freezer/a")
        );
        assert_eq!(directory(first, "cpu"), None);
        assert_eq!(directory(first, ""), None);
        assert_eq!(group_directory(first, "freezer", "/user"), None);
    }

    #[test]
    fn processes_without_listed_parent_are_roots() {
        let own_pid = std::process::id() as i32;
        let parent = parent_of(own_pid).expect("myself");
        assert_eq!(
            ControlGroups::tree_roots(&BTreeSet::from([own_pid])),
            [own_pid]
        );
        if parent > 0 {
            assert_eq!(
                ControlGroups::tree_roots(&BTreeSet::from([own_pid, parent])),
                [parent]
            );
        }
    }
}
