//! Report on a tree before a move: its size, and obstacles to the move. The inspection reads `/proc` and changes
//! nothing.

mod blocker;
mod descriptors;
mod loopback;
mod mappings;
mod namespaces;
mod sessions;
mod shared_resources;
mod system_v;
mod terminal;

pub use blocker::{Blocker, Obstacle};
pub(crate) use mappings::{
    MappingClass, check_guards, classify, current_name, former_name, map_files_path,
};

use super::error::{Error, Result};
use super::procfs::{self, ProcStat, ProcStatus};
use super::sockets::SocketStaticState;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Result of inspecting a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InspectionReport {
    /// Obstacles to the move; empty if there is none.
    pub blockers: Vec<Blocker>,
    /// Connections over the loopback device with the other ends outside the tree. A tree with such connections cannot
    /// move, but can be cloned, because a clone has no connections.
    pub split_connections: Vec<Blocker>,
    /// Processes, the root first.
    pub processes: Vec<i32>,
    /// Number of threads of all processes.
    pub threads: usize,
    /// Number of mappings of all processes.
    pub mappings: usize,
    /// Number of open files of all processes, including files in flight between their sockets.
    pub open_files: usize,
    /// TCP and UDP sockets among the open files.
    pub sockets: Vec<Arc<SocketStaticState>>,
    /// Bytes of memory in use, shared memory and files included.
    pub resident_bytes: u64,
}

/// Longest wait for a process that is just starting another program.
const STARTING_MAX: Duration = Duration::from_millis(300);
/// Number of inspections in which an obstacle must be found to be reported, and the pause between inspections.
const INSPECTIONS_MIN: usize = 3;
const INSPECTION_PAUSE: Duration = Duration::from_millis(10);

/// Inspects the tree of processes under `root`. Processes start and end, and open and close files, meanwhile: only
/// obstacles found in each of several inspections are reported. A program that is being started is waited for.
///
/// # Errors
/// [`Error::ProcessEnded`] if there is no such process; obstacles are in the report.
pub fn inspect(root: i32) -> Result<InspectionReport> {
    let started_at = Instant::now();
    let mut lasting_blockers: Option<Vec<Blocker>> = None;
    for inspection in 1.. {
        let mut report = inspect_once(root)?;
        let blockers = std::mem::take(&mut report.blockers);
        match &mut lasting_blockers {
            Some(lasting) => lasting.retain(|one| blockers.contains(one)),
            none => *none = Some(blockers),
        }
        let lasting = lasting_blockers.as_deref().unwrap_or_default();
        let starts_program =
            |blocker: &Blocker| matches!(blocker.obstacle, Obstacle::SharesMemory(_));
        let may_pass = lasting.iter().all(starts_program) && started_at.elapsed() < STARTING_MAX;
        if lasting.is_empty() || (inspection >= INSPECTIONS_MIN && !may_pass) {
            report.blockers = lasting.to_vec();
            return Ok(report);
        }
        std::thread::sleep(INSPECTION_PAUSE);
    }
    unreachable!("the last inspection returns")
}

fn inspect_once(root: i32) -> Result<InspectionReport> {
    let mut report = InspectionReport {
        processes: tree_pids(root)?,
        ..InspectionReport::default()
    };
    if let Err(error) = super::supported() {
        report.block(root, Obstacle::UnsupportedMachine(error.to_string()));
    }
    namespaces::check(root, &mut report)?;
    for pid in report.processes.clone() {
        let looked = match inspect_process(pid, &mut report) {
            // The process has ended meanwhile, and is inspected again as a zombie.
            Err(Error::Kernel { .. }) if has_ended(pid) => inspect_process(pid, &mut report),
            looked => looked,
        };
        match looked {
            Err(Error::ProcessEnded(gone)) if gone == pid && pid != root => {}
            Err(Error::Kernel {
                operation: what,
                source,
            }) => {
                report.block(pid, Obstacle::NotInspectable(format!("{what}: {source}")));
            }
            other => other?,
        }
    }
    sessions::check(&mut report);
    mappings::check_outsiders(&mut report);
    system_v::check(&mut report);
    descriptors::check(&mut report);
    Ok(report)
}

impl InspectionReport {
    fn block(&mut self, pid: i32, obstacle: Obstacle) {
        let blocker = Blocker { pid, obstacle };
        // A library is mapped in several consecutive pieces.
        if self.blockers.last() != Some(&blocker) {
            self.blockers.push(blocker);
        }
    }
}

/// Lists the processes of a tree, parents before children.
///
/// # Errors
/// [`Error::ProcessEnded`] if the root does not exist.
pub fn tree_pids(root: i32) -> Result<Vec<i32>> {
    procfs::threads(root)?;
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        let children = match procfs::children(*pid) {
            Ok(children) => children,
            Err(Error::ProcessEnded(_)) => Vec::new(),
            Err(error) => return Err(error),
        };
        found.extend(children);
        at += 1;
    }
    Ok(found)
}

/// Returns true if `known` are the processes of a stopped tree, parents before children, as [`tree_pids`] lists them. The
/// parents are read in reverse order: a process whose parent ends at that instant moves to a parent that is read later.
///
/// # Errors
/// Errors of procfs.
pub(crate) fn is_whole_tree(known: &[i32]) -> Result<bool> {
    let mut children_of = HashMap::new();
    for pid in known.iter().rev() {
        let children = match procfs::children(*pid) {
            Err(Error::ProcessEnded(_)) => Vec::new(),
            other => other?,
        };
        children_of.insert(*pid, children);
    }
    let mut found: Vec<i32> = known.first().copied().into_iter().collect();
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        let Some(children) = children_of.remove(pid) else {
            return Ok(false);
        };
        found.extend(children);
        at += 1;
    }
    Ok(found == known)
}

/// Returns true if a process is gone or a zombie; a process that is ending is waited for.
fn has_ended(pid: i32) -> bool {
    let started_at = Instant::now();
    loop {
        match ProcStat::read(pid) {
            Err(Error::ProcessEnded(_)) => return true,
            Ok(stat) if matches!(stat.state, 'Z' | 'X') => return true,
            Ok(stat) if stat.is_ending() && started_at.elapsed() < ENDING_MAX => {
                std::thread::sleep(Duration::from_micros(200));
            }
            _ => return false,
        }
    }
}

/// Longest wait for a process to end.
const ENDING_MAX: Duration = Duration::from_secs(1);
/// Core dump flag in a wait status.
const CORE_DUMP_FLAG: u64 = 0x80;

/// Lines of `/proc/PID/timers` for a timer of `CLOCK_THREAD_CPUTIME_ID`: the clock as requested, or the clock of thread
/// 0, which means the calling thread. A clock that names its thread has another number.
const THREAD_CLOCK: [&str; 2] = ["ClockID: 3", "ClockID: -2"];

fn inspect_process(pid: i32, report: &mut InspectionReport) -> Result<()> {
    let stat = ProcStat::read(pid)?;
    if matches!(stat.state, 'Z' | 'X') {
        if procfs::threads(pid)?.len() > 1 {
            report.block(pid, Obstacle::FirstThreadEnded);
        } else if report.processes.first() == Some(&pid) {
            return Err(Error::ProcessEnded(pid));
        } else if stat.field(52) & CORE_DUMP_FLAG != 0 {
            report.block(pid, Obstacle::ZombieCoreDumped);
        }
        return Ok(());
    }
    if let Some(group) = holdfast_sys::cgroup::frozen_group_of(pid) {
        report.block(pid, Obstacle::FrozenGroup(group));
    }
    report.resident_bytes += stat.field(24).saturating_mul(super::image::PAGE);
    for tid in procfs::threads(pid)? {
        let Ok(status) = ProcStatus::read(pid, tid) else {
            continue;
        };
        report.threads += 1;
        inspect_thread(pid, &status, report);
        shared_resources::check_thread(pid, tid, report);
    }
    inspect_program(pid, report)?;
    shared_resources::check_process(pid, report)?;
    let timers = procfs::read(pid, "timers").unwrap_or_default();
    if timers.lines().any(|line| THREAD_CLOCK.contains(&line)) {
        report.block(pid, Obstacle::ThreadClock);
    }
    let count = timers
        .lines()
        .filter(|line| line.starts_with("ID: "))
        .count();
    if count > super::donor::TIMERS_MAX {
        report.block(pid, Obstacle::TooManyTimers(count));
    }
    mappings::check(pid, report)
}

fn inspect_thread(pid: i32, status: &ProcStatus, report: &mut InspectionReport) {
    if status.tracer != 0 && !is_own_thread(status.tracer) {
        report.block(pid, Obstacle::Traced(status.tracer));
    }
    if status.seccomp == 1 {
        report.block(pid, Obstacle::StrictSeccomp);
    }
    if status.control_flow {
        report.block(pid, Obstacle::ShadowStack);
    }
    if status.forbids_speculation {
        report.block(pid, Obstacle::Speculation);
    }
}

/// Returns true if a tracer is a thread of this very process.
fn is_own_thread(tracer: i32) -> bool {
    std::fs::metadata(format!("/proc/self/task/{tracer}")).is_ok()
}

/// Checks that the process is a 64-bit program with the ordinary root directory.
fn inspect_program(pid: i32, report: &mut InspectionReport) -> Result<()> {
    let mut header = [0u8; 5];
    let read = std::fs::File::open(format!("/proc/{pid}/exe"))
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut header));
    if read.is_err() {
        // The process may be ending: its executable disappears together with its memory.
        if ProcStat::read(pid)?.is_ending() {
            return Ok(());
        }
        let message = procfs::link_text(pid, "exe").unwrap_or_else(|_| "no executable".to_owned());
        report.block(pid, Obstacle::Executable(message));
    } else if header[4] != 2 {
        report.block(pid, Obstacle::NotA64BitProgram);
    }
    let root = procfs::link_text(pid, "root")?;
    if root != "/" {
        report.block(pid, Obstacle::RootDirectory(root));
    }
    Ok(())
}
