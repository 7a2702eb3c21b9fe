//! Load of process trees: a process with all its descendants.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::time::Duration;

use super::control_groups::value_of;

/// Maximum number of threads that are read in one call, but for the last tree.
const THREADS_PER_CALL: usize = 1024;
/// Maximum number of threads of one tree that are read. Processes beyond have no part in the tree's load.
const THREADS_PER_TREE: usize = 1024;
/// Clock ticks per second of `/proc` (USER_HZ): 100 on all architectures of Linux that Rust supports.
const TICKS_PER_SECOND: u64 = 100;

/// Load of a tree over the time since its reading before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeLoad {
    /// Name of the root's program, as the kernel has it: at most 15 bytes.
    pub name: String,
    /// Start of the root in ticks since boot, which tells processes with the same PID apart.
    pub started_ticks: u64,
    /// Processor time used, in thousandths of a processor.
    pub cpu_millis: u32,
    /// Mean number of threads that were ready and waited for a processor, in thousandths.
    pub waiting_millis: u32,
    /// Memory that belongs to the tree alone, and the shared memory of its root, in KiB.
    pub memory_kib: u64,
    /// Number of processes.
    pub processes: u32,
    /// Number of threads.
    pub threads: u32,
}

/// Measures trees. Each call reads a bounded number of threads, so that many trees take turns.
#[derive(Debug, Default)]
pub(super) struct TreeMeter {
    trees: BTreeMap<i32, Tree>,
    /// PID of the root that was read last.
    last_read: Option<i32>,
}

#[derive(Debug)]
struct Tree {
    load: TreeLoad,
    read_at: Duration,
    reading: TreeReading,
}

impl TreeMeter {
    /// Reads trees with these roots, those first that have waited longest. Returns the last load of each tree that
    /// exists and has been read.
    pub fn measure(&mut self, now: Duration, roots: &[i32]) -> BTreeMap<i32, TreeLoad> {
        let roots: BTreeSet<i32> = roots.iter().copied().collect();
        self.trees.retain(|root, _| roots.contains(root));
        let after = self
            .last_read
            .map_or(i32::MIN, |last| last.saturating_add(1));
        let turns = roots.range(after..).chain(roots.range(..after));
        let mut threads = 0;
        for root in turns {
            if threads >= THREADS_PER_CALL {
                break;
            }
            self.last_read = Some(*root);
            let Some(reading) = TreeReading::read(*root) else {
                self.trees.remove(root);
                continue;
            };
            threads += reading.waits_ns.len().max(1);
            let load = match self.trees.get(root) {
                Some(tree) if tree.reading.started_ticks() == reading.started_ticks() => {
                    reading.load_since(&tree.reading, now.saturating_sub(tree.read_at))
                }
                _ => reading.load_since_start(),
            };
            let tree = Tree {
                load,
                read_at: now,
                reading,
            };
            self.trees.insert(*root, tree);
        }
        (self.trees.iter())
            .map(|(root, tree)| (*root, tree.load.clone()))
            .collect()
    }
}

/// Processor time counters of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessTimes {
    /// Start in ticks since boot, which tells processes with the same PID apart.
    started_ticks: u64,
    used_ticks: u64,
    /// Ticks of ended children that the process has waited for.
    children_ticks: u64,
}

/// Processor time counters of a process tree.
#[derive(Debug, Default)]
struct TreeReading {
    root: i32,
    name: String,
    processes: HashMap<i32, ProcessTimes>,
    /// Time that each thread has waited for a processor, in nanoseconds.
    waits_ns: HashMap<i32, u64>,
    memory_kib: u64,
}

impl TreeReading {
    /// Reads the tree; `None` if its root has ended.
    fn read(root: i32) -> Option<TreeReading> {
        let mut reading = TreeReading {
            root,
            ..TreeReading::default()
        };
        let mut pending = vec![root];
        let mut seen = HashSet::from([root]);
        while let Some(pid) = pending.pop() {
            if reading.waits_ns.len() >= THREADS_PER_TREE {
                break;
            }
            // A process may end at any time.
            let Some(times) = read_text(pid, "stat").as_deref().and_then(parse_stat) else {
                continue;
            };
            reading.processes.insert(pid, times);
            let status = read_text(pid, "status").unwrap_or_default();
            if pid == root {
                let name = status.lines().find_map(|line| line.strip_prefix("Name:"));
                name.unwrap_or_default()
                    .trim()
                    .clone_into(&mut reading.name);
            }
            let memory_kib = memory_of_status(&status, pid == root);
            reading.memory_kib = reading.memory_kib.saturating_add(memory_kib);
            let threads = fs::read_dir(format!("/proc/{pid}/task"));
            let threads = threads.into_iter().flatten().flatten();
            let threads = threads.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
            let room = THREADS_PER_TREE.saturating_sub(reading.waits_ns.len());
            for thread in threads.take(room) {
                let wait = read_text(pid, &format!("task/{thread}/schedstat"));
                let wait = wait.as_deref().and_then(parse_schedstat).unwrap_or(0);
                reading.waits_ns.insert(thread, wait);
                let children = read_text(pid, &format!("task/{thread}/children"));
                let children = children.unwrap_or_default();
                let children = children.split_ascii_whitespace();
                let children = children.filter_map(|child| child.parse::<i32>().ok());
                pending.extend(children.filter(|child| seen.insert(*child)));
            }
        }
        reading.processes.contains_key(&root).then_some(reading)
    }

    fn started_ticks(&self) -> Option<u64> {
        let root = self.processes.get(&self.root);
        root.map(|times| times.started_ticks)
    }

    /// Returns the load over the time `elapsed` since an earlier reading.
    fn load_since(&self, before: &TreeReading, elapsed: Duration) -> TreeLoad {
        let used = self.ticks_since(before) as f64 / TICKS_PER_SECOND as f64;
        let waited_ns = (self.waits_ns.iter()).map(|(thread, wait)| {
            let earlier = before.waits_ns.get(thread).copied();
            wait.saturating_sub(earlier.unwrap_or(0))
        });
        let waited = waited_ns.fold(0, u64::saturating_add) as f64 / 1e9;
        self.load_of(used, waited, elapsed.as_secs_f64())
    }

    /// Returns the mean load since the start of the root.
    fn load_since_start(&self) -> TreeLoad {
        let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let uptime = uptime.split_ascii_whitespace().next();
        let uptime: f64 = uptime.and_then(|text| text.parse().ok()).unwrap_or(0.0);
        let started = self.started_ticks().unwrap_or(0) as f64;
        // A tree that has just begun has no mean yet.
        let age = (uptime - started / TICKS_PER_SECOND as f64).max(1.0);
        let ticks = self.processes.values().fold(0_u64, |sum, times| {
            sum.saturating_add(times.used_ticks)
                .saturating_add(times.children_ticks)
        });
        let waited = self.waits_ns.values().copied().fold(0, u64::saturating_add);
        self.load_of(
            ticks as f64 / TICKS_PER_SECOND as f64,
            waited as f64 / 1e9,
            age,
        )
    }

    fn load_of(&self, used_s: f64, waited_s: f64, elapsed_s: f64) -> TreeLoad {
        // A float-to-integer conversion saturates.
        let millis = |seconds: f64| (seconds / elapsed_s.max(1e-3) * 1000.0).round() as u32;
        TreeLoad {
            name: self.name.clone(),
            started_ticks: self.started_ticks().unwrap_or(0),
            cpu_millis: millis(used_s),
            waiting_millis: millis(waited_s),
            memory_kib: self.memory_kib,
            processes: u32::try_from(self.processes.len()).unwrap_or(u32::MAX),
            threads: u32::try_from(self.waits_ns.len()).unwrap_or(u32::MAX),
        }
    }

    /// Returns the ticks used since an earlier reading, also by processes that ended in between.
    fn ticks_since(&self, before: &TreeReading) -> u64 {
        let earlier = |pid: &i32, times: &ProcessTimes| {
            let known = before.processes.get(pid);
            known.filter(|known| known.started_ticks == times.started_ticks)
        };
        let (mut own, mut children) = (0_u64, 0_u64);
        for (pid, times) in &self.processes {
            let (used, ended) = earlier(pid, times)
                .map_or((0, 0), |known| (known.used_ticks, known.children_ticks));
            own = own.saturating_add(times.used_ticks.saturating_sub(used));
            children = children.saturating_add(times.children_ticks.saturating_sub(ended));
        }
        // The total of an ended process is in its parent's figure: subtract the part that the earlier reading counted.
        let has_ended = |pid: &i32, times: &ProcessTimes| {
            let now = self.processes.get(pid);
            now.is_none_or(|now| now.started_ticks != times.started_ticks)
        };
        let counted = (before.processes.iter())
            .filter(|(pid, times)| has_ended(pid, times))
            .fold(0_u64, |sum, (_, times)| {
                sum.saturating_add(times.used_ticks)
                    .saturating_add(times.children_ticks)
            });
        own.saturating_add(children.saturating_sub(counted))
    }
}

/// Returns the children of a process without threads.
pub(super) fn children_of(pid: i32) -> Vec<i32> {
    let text = read_text(pid, &format!("task/{pid}/children")).unwrap_or_default();
    let children = text.split_ascii_whitespace();
    children.filter_map(|child| child.parse().ok()).collect()
}

fn read_text(pid: i32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    // The name of a process may have any bytes.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses `stat` (proc_pid_stat(5)); none for a process that has ended and only waits for its parent.
fn parse_stat(text: &str) -> Option<ProcessTimes> {
    // The name, the second field, may contain any text; it ends with the last parenthesis.
    let (_, rest) = text.rsplit_once(')')?;
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    if matches!(*words.first()?, "Z" | "X") {
        return None;
    }
    let number = |index: usize| words.get(index)?.parse::<u64>().ok();
    // Fields 14 to 17 are the times, field 22 is the start; the first word here is field 3.
    Some(ProcessTimes {
        started_ticks: number(19)?,
        used_ticks: number(11)?.saturating_add(number(12)?),
        children_ticks: number(13)?.saturating_add(number(14)?),
    })
}

/// Returns memory in `status` (proc_pid_status(5)), in KiB: anonymous pages, and for the root of a tree also pages that
/// the processes of the tree may share.
fn memory_of_status(text: &str, is_root: bool) -> u64 {
    let kib = |name| value_of(text, name).unwrap_or(0);
    let shared = match is_root {
        true => kib("RssFile:").saturating_add(kib("RssShmem:")),
        false => 0,
    };
    kib("RssAnon:").saturating_add(shared)
}

/// Parses the time of waiting in `schedstat`, in nanoseconds (`Documentation/scheduler/sched-stats.rst`).
fn parse_schedstat(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn reading(processes: &[(i32, u64, u64)], waits_ns: &[(i32, u64)]) -> TreeReading {
        let times = |&(pid, used_ticks, children_ticks): &(i32, u64, u64)| {
            let times = ProcessTimes {
                started_ticks: 5,
                used_ticks,
                children_ticks,
            };
            (pid, times)
        };
        TreeReading {
            root: 1,
            processes: processes.iter().map(times).collect(),
            waits_ns: waits_ns.iter().copied().collect(),
            memory_kib: 64,
            name: "server".to_owned(),
        }
    }

    #[test]
    fn load_is_a_rate() {
        let before = reading(&[(1, 100, 0), (2, 500, 0)], &[(1, 1_000), (2, 0)]);
        // The child used 20 more ticks, and ended; a new one used 30.
        let after = reading(
            &[(1, 110, 520), (3, 30, 0)],
            &[(1, 500_001_000), (3, 250_000_000)],
        );
        let load = after.load_since(&before, Duration::from_secs(2));
        let expected = TreeLoad {
            name: "server".to_owned(),
            started_ticks: 5,
            cpu_millis: 300,
            waiting_millis: 375,
            memory_kib: 64,
            processes: 2,
            threads: 2,
        };
        assert_eq!(load, expected);
    }

    #[test]
    fn damaged_files_have_no_values() {
        let fields: Vec<String> = (4..53).map(|number: u32| number.to_string()).collect();
        let text = format!("7 (a) S (b)) R {}", fields.join(" "));
        let expected = ProcessTimes {
            started_ticks: 22,
            used_ticks: 14 + 15,
            children_ticks: 16 + 17,
        };
        assert_eq!(parse_stat(&text), Some(expected));
        assert_eq!(parse_stat(&text.replace(" R ", " Z ")), None);
        for text in ["", "7 (a) R 1 2", "7 a R"] {
            assert_eq!(parse_stat(text), None, "{text}");
        }
        let status = "Name:\tsh\nRssAnon:\t 5 kB\nRssFile:\t 20 kB\nRssShmem:\t 1 kB\n";
        assert_eq!(memory_of_status(status, true), 26);
        assert_eq!(memory_of_status(status, false), 5);
        assert_eq!(memory_of_status("RssAnon:\n", true), 0);
        assert_eq!(parse_schedstat("122348 2453622 2\n"), Some(2_453_622));
        assert_eq!(parse_schedstat("0\n"), None);
    }

    #[test]
    fn tree_of_a_busy_shell_is_measured() {
        // The shell's child is the busy one.
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sh -c 'while :; do :; done'; true"])
            .spawn()
            .expect("a shell");
        let root = i32::try_from(shell.id()).expect("a PID");
        let mut meter = TreeMeter::default();
        let started = Instant::now();
        let found = loop {
            let load = meter.measure(started.elapsed(), &[root]).remove(&root);
            let is_whole = load
                .as_ref()
                .is_some_and(|load| load.processes == 2 && load.cpu_millis >= 50);
            // Even on a slow machine the child gets some processor time.
            if is_whole || started.elapsed() > Duration::from_secs(60) {
                break load;
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        // The orphaned child ends with its parent's terminal session only: end both by number.
        for pid in children_of(root) {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid).expect("a PID"),
                rustix::process::Signal::KILL,
            );
        }
        let _ = shell.kill();
        let _ = shell.wait();
        let load = found.expect("exceeded time: the tree has a load");
        assert_eq!((load.processes, load.threads, &*load.name), (2, 2, "sh"));
        assert!(load.cpu_millis >= 50 && load.memory_kib > 0, "{load:?}");
        // A tree that has ended has no load.
        assert!(meter.measure(started.elapsed(), &[root]).is_empty());
    }

    #[test]
    fn trees_take_turns() {
        let own = i32::try_from(std::process::id()).expect("a PID");
        let mut meter = TreeMeter::default();
        // A root that has ended takes no turn of another.
        let loads = meter.measure(Duration::ZERO, &[i32::MAX, own]);
        assert_eq!(loads.keys().copied().collect::<Vec<_>>(), [own]);
        meter.last_read = Some(own);
        assert_eq!(meter.measure(Duration::from_secs(1), &[own]).len(), 1);
        assert!(meter.measure(Duration::from_secs(2), &[]).is_empty());
    }
}
