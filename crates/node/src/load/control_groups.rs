//! Files of this host's control group: the topmost group that the daemon sees.
//!
//! On a machine that is the root group, in a container or a host of a lab the container's or the host's group. Only the
//! top matters: the daemon's own group below has the daemon alone.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Inode of the machine's first control group namespace (`PROC_CGROUP_INIT_INO` of `include/linux/proc_ns.h`).
const INITIAL_NAMESPACE_INODE: u64 = 0xEFFF_FFFB;

/// Directories of this host's control group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HostControlGroup {
    /// Directory in the hierarchy of version 2.
    unified: Option<PathBuf>,
    /// Directory in the hierarchy of version 1 with the controller `cpu`.
    cpu: Option<PathBuf>,
    /// Directory in the hierarchy of version 1 with the controller `cpuacct`.
    cpuacct: Option<PathBuf>,
    /// Directory in the hierarchy of version 1 with the controller `memory`.
    memory: Option<PathBuf>,
    /// True if files about the whole machine, such as `/proc/stat`, are about this host.
    is_machine: bool,
}

/// The group's limit and counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct GroupCounters {
    /// Processor time used, in microseconds.
    pub cpu_us: Option<u64>,
    /// Processors that the group's quota grants, in thousandths; none without a quota.
    pub quota_millis: Option<u32>,
    /// Time in which some process waited for a processor (`Documentation/accounting/psi.rst`), in microseconds.
    pub waiting_us: Option<u64>,
    /// Memory in use without the files that the kernel can drop at once, in KiB.
    pub memory_used_kib: Option<u64>,
    /// Memory that the group can still get, in KiB.
    pub memory_free_kib: Option<u64>,
}

impl HostControlGroup {
    /// Finds the control group of the host in the mounts that this process sees.
    pub fn find() -> HostControlGroup {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        // A mount whose path shows another file system is hidden under a later mount.
        let is_visible = |mount: &GroupMount<'_>| {
            fs::metadata(&mount.path).is_ok_and(|found| device_text(found.dev()) == mount.device)
        };
        let namespace = fs::metadata("/proc/self/ns/cgroup");
        let is_machine = namespace.is_ok_and(|found| found.ino() == INITIAL_NAMESPACE_INODE);
        HostControlGroup::from_mounts(&mounts, is_visible, is_machine)
    }

    fn from_mounts(
        mounts: &str,
        is_visible: impl Fn(&GroupMount<'_>) -> bool,
        is_machine: bool,
    ) -> HostControlGroup {
        let mut found = HostControlGroup {
            is_machine,
            ..HostControlGroup::default()
        };
        for mount in mounts.lines().filter_map(GroupMount::parse) {
            if !is_visible(&mount) {
                continue;
            }
            if mount.is_unified {
                found.unified = Some(mount.path.clone());
            }
            for option in mount.options.split(',').filter(|_| !mount.is_unified) {
                match option {
                    "cpu" => found.cpu = Some(mount.path.clone()),
                    "cpuacct" => found.cpuacct = Some(mount.path.clone()),
                    "memory" => found.memory = Some(mount.path.clone()),
                    _ => {}
                }
            }
        }
        found
    }

    /// Reads limit and counters. A value that this kernel does not have is absent.
    pub fn read(&self) -> GroupCounters {
        let machine_memory = read(Some(Path::new("/proc")), "meminfo")
            .as_deref()
            .and_then(parse_meminfo);
        let (used, free) = self.memory_kib(machine_memory);
        GroupCounters {
            cpu_us: self.cpu_us(),
            quota_millis: self.quota_millis(),
            waiting_us: self.waiting_us(),
            memory_used_kib: used,
            memory_free_kib: free,
        }
    }

    fn cpu_us(&self) -> Option<u64> {
        let unified = read(self.unified.as_deref(), "cpu.stat");
        unified
            .and_then(|text| value_of(&text, "usage_usec"))
            .or_else(|| {
                let nanoseconds = read(self.cpuacct.as_deref(), "cpuacct.usage")?;
                Some(nanoseconds.trim().parse::<u64>().ok()? / 1000)
            })
            .or_else(|| {
                let text = fs::read_to_string("/proc/stat");
                parse_processor_times(&text.ok().filter(|_| self.is_machine)?)
            })
    }

    fn quota_millis(&self) -> Option<u32> {
        let unified = read(self.unified.as_deref(), "cpu.max");
        unified.and_then(|text| parse_cpu_max(&text)).or_else(|| {
            let quota = read(self.cpu.as_deref(), "cpu.cfs_quota_us")?;
            let period = read(self.cpu.as_deref(), "cpu.cfs_period_us")?;
            parse_cpu_max(&format!("{} {}", quota.trim(), period.trim()))
        })
    }

    fn waiting_us(&self) -> Option<u64> {
        let unified = read(self.unified.as_deref(), "cpu.pressure");
        unified
            .or_else(|| {
                fs::read_to_string("/proc/pressure/cpu")
                    .ok()
                    .filter(|_| self.is_machine)
            })
            .and_then(|text| parse_pressure(&text))
    }

    /// Returns the used and the free memory in KiB. A group cannot get more than the machine has.
    fn memory_kib(&self, machine: Option<MachineMemory>) -> (Option<u64>, Option<u64>) {
        let machine_free = machine.map(|machine| machine.available_kib);
        let number = |directory: &Option<PathBuf>, file: &str| {
            let text = read(directory.as_deref(), file)?;
            text.trim().parse::<u64>().ok()
        };
        let groups = [
            (
                &self.unified,
                "memory.current",
                "memory.max",
                "inactive_file",
            ),
            (
                &self.memory,
                "memory.usage_in_bytes",
                "memory.limit_in_bytes",
                "total_inactive_file",
            ),
        ];
        for (directory, usage, limit, droppable) in groups {
            let Some(used) = number(directory, usage) else {
                continue;
            };
            let statistics = read(directory.as_deref(), "memory.stat").unwrap_or_default();
            let used = used.saturating_sub(value_of(&statistics, droppable).unwrap_or(0)) / 1024;
            let free = number(directory, limit).map(|limit| (limit / 1024).saturating_sub(used));
            let free = match (free, machine_free) {
                (Some(free), Some(machine)) => Some(free.min(machine)),
                (free, machine) => free.or(machine),
            };
            return (Some(used), free);
        }
        let machine_used = machine.filter(|_| self.is_machine).map(|machine| {
            let MachineMemory {
                total_kib,
                available_kib,
            } = machine;
            total_kib.saturating_sub(available_kib)
        });
        (machine_used, machine_free)
    }
}

/// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)) about control groups.
struct GroupMount<'a> {
    is_unified: bool,
    path: PathBuf,
    /// Number of the file system: `MAJOR:MINOR`.
    device: &'a str,
    options: &'a str,
}

impl GroupMount<'_> {
    fn parse(line: &str) -> Option<GroupMount<'_>> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(2);
        let (device, root, path) = (mount.next()?, mount.next()?, mount.next()?);
        let mut file_system = file_system.split(' ');
        let (kind, options) = (file_system.next()?, file_system.nth(1)?);
        let is_unified = match kind {
            "cgroup2" => true,
            "cgroup" => false,
            _ => return None,
        };
        // A group outside of this control group namespace belongs to another host.
        let is_inside = !root.split('/').any(|part| part == "..");
        is_inside.then(|| GroupMount {
            is_unified,
            path: PathBuf::from(path),
            device,
            options,
        })
    }
}

fn device_text(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major}:{minor}")
}

fn read(directory: Option<&Path>, file: &str) -> Option<String> {
    fs::read_to_string(directory?.join(file)).ok()
}

/// Returns the number behind a word at the beginning of a line.
pub(super) fn value_of(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

/// Parses `QUOTA PERIOD`, in microseconds, as in `cpu.max`; none for `max` and -1.
fn parse_cpu_max(text: &str) -> Option<u32> {
    let mut words = text.split_ascii_whitespace();
    let quota: u64 = words.next()?.parse().ok()?;
    let period: u64 = words.next()?.parse().ok().filter(|period| *period > 0)?;
    Some(u32::try_from(quota.saturating_mul(1000) / period).unwrap_or(u32::MAX))
}

/// Parses the sum of `some` in a pressure file, in microseconds.
fn parse_pressure(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let mut words = line.split_ascii_whitespace();
    words.find_map(|word| word.strip_prefix("total=")?.parse().ok())
}

/// Parses the busy time of all processors in `/proc/stat` (proc_stat(5)), in microseconds.
fn parse_processor_times(text: &str) -> Option<u64> {
    /// Microseconds of a clock tick: USER_HZ is 100 on all architectures of Linux that Rust supports.
    const TICK_US: u64 = 10_000;
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let times = line.split_ascii_whitespace().map(str::parse::<u64>);
    let times = times.collect::<Result<Vec<u64>, _>>().ok()?;
    times.get(4)?;
    // Idle and iowait are the fourth and fifth. Guest times, after the eighth, are part of the user's.
    let busy = (times.iter().take(8).enumerate())
        .filter(|(index, _)| !matches!(index, 3 | 4))
        .fold(0, |sum: u64, (_, time)| sum.saturating_add(*time));
    Some(busy.saturating_mul(TICK_US))
}

/// Memory of the machine, from `/proc/meminfo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MachineMemory {
    total_kib: u64,
    available_kib: u64,
}

fn parse_meminfo(text: &str) -> Option<MachineMemory> {
    Some(MachineMemory {
        total_kib: value_of(text, "MemTotal:")?,
        available_kib: value_of(text, "MemAvailable:")?,
    })
}

/// Returns the number of processors that are online, in thousandths.
pub(super) fn online_millis() -> u32 {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = count_of_list(&text)
        .or_else(|| u32::try_from(std::thread::available_parallelism().ok()?.get()).ok());
    count.unwrap_or(1).saturating_mul(1000)
}

/// Counts the numbers of a list such as `0-3,6`; none for an empty or malformed list.
fn count_of_list(text: &str) -> Option<u32> {
    let mut count = 0_u32;
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:7 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 /../.. /outside rw - cgroup2 cgroup2 rw
42 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
43 31 0:29 / /hidden rw - cgroup cgroup rw,cpu
44 cut off";

    #[test]
    fn directories_are_found_by_the_mounts() {
        let is_visible = |mount: &GroupMount<'_>| mount.path != Path::new("/hidden");
        let found = HostControlGroup::from_mounts(MOUNTS, is_visible, true);
        let both = Some(PathBuf::from("/sys/fs/cgroup/cpu,cpuacct"));
        let expected = HostControlGroup {
            unified: Some("/sys/fs/cgroup/unified".into()),
            cpu: both.clone(),
            cpuacct: both,
            memory: Some("/sys/fs/cgroup/memory".into()),
            is_machine: true,
        };
        assert_eq!(found, expected);
    }

    /// Returns a group of plain files.
    fn group_of(files: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        for (file, text) in files {
            fs::write(folder.path().join(file), text).expect("written");
        }
        let path = folder.path().to_owned();
        (folder, path)
    }

    #[test]
    fn version_2_has_all_values() {
        let (_folder, unified) = group_of(&[
            ("cpu.stat", "usage_usec 934433879\nuser_usec 773379621\n"),
            ("cpu.max", "2000 10000\n"),
            (
                "cpu.pressure",
                "some avg10=13.23 avg60=13.53 avg300=10.07 total=58159710\nfull avg10=0.00 total=7\n",
            ),
            ("memory.current", "10485760\n"),
            ("memory.max", "20971520\n"),
            ("memory.stat", "anon 1\ninactive_file 1048576\n"),
        ]);
        let group = HostControlGroup {
            unified: Some(unified),
            ..HostControlGroup::default()
        };
        let counters = group.read();
        let expected = GroupCounters {
            cpu_us: Some(934_433_879),
            quota_millis: Some(200),
            waiting_us: Some(58_159_710),
            memory_used_kib: Some(9 * 1024),
            memory_free_kib: Some(11 * 1024),
        };
        assert_eq!(counters, expected);
    }

    #[test]
    fn version_1_has_what_version_2_lacks() {
        let (_folder, cpu) = group_of(&[
            ("cpu.cfs_quota_us", "5000\n"),
            ("cpu.cfs_period_us", "10000\n"),
            ("cpuacct.usage", "7000000\n"),
        ]);
        let mut group = HostControlGroup {
            cpu: Some(cpu.clone()),
            cpuacct: Some(cpu.clone()),
            ..HostControlGroup::default()
        };
        let counters = group.read();
        assert_eq!(
            (counters.cpu_us, counters.quota_millis),
            (Some(7000), Some(500))
        );
        // The machine's files are not about a host in a namespace.
        assert_eq!(
            (counters.waiting_us, counters.memory_used_kib),
            (None, None)
        );
        fs::write(cpu.join("cpu.cfs_quota_us"), "-1\n").expect("written");
        assert_eq!(group.read().quota_millis, None);
        group.cpuacct = None;
        assert_eq!(group.read().cpu_us, None);
        group.is_machine = true;
        assert!(group.read().cpu_us > Some(0));
    }

    #[test]
    fn damaged_files_have_no_values() {
        for text in ["", "max 100000", "-1 100000", "5 0", "5", "x 10", "5 x"] {
            assert_eq!(parse_cpu_max(text), None, "{text}");
        }
        for text in ["", "some avg10=1\n", "some total=x\n", "full total=5\n"] {
            assert_eq!(parse_pressure(text), None, "{text}");
        }
        for text in ["", "intr 5\n", "cpu  1 2 x 4 5\n", "cpu  1 2 3\n"] {
            assert_eq!(parse_processor_times(text), None, "{text}");
        }
        for text in ["", "x", "3-1", "0,", "0-4294967295"] {
            assert_eq!(count_of_list(text), None, "{text}");
        }
        assert_eq!(value_of("usage_usec\n", "usage_usec"), None);
        assert_eq!(parse_meminfo("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn busy_time_omits_idle_and_guests() {
        let text = "cpu  10 1 20 60 4 2 2 1 5 5\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(parse_processor_times(text), Some(36 * 10_000));
    }

    #[test]
    fn processors_are_counted() {
        assert_eq!(count_of_list("0\n"), Some(1));
        assert_eq!(count_of_list("0-3,6,8-9\n"), Some(7));
        assert!(online_millis() >= 1000);
    }
}
