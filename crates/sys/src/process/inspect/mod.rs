//! Report on a tree before a move: its size, and obstacles to the move. The inspection reads `/proc` and changes
//! nothing.

mod blocker;
mod descriptors;
mod loopback;
mod mappings;
mod namespaces;
mod sessions;
mod sharing;
mod system_v;
mod terminal;

pub use blocker::{Blocker, Obstacle};
pub(crate) use mappings::{Class, check_guards, classify, former_name, map_file, present_name};

use super::error::{Error, Result};
use super::procfs::{self, Stat, Status};
use super::sockets::SocketStatic;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Result of inspecting a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Obstacles to the move; empty if there is none.
    pub blockers: Vec<Blocker>,
    /// Connections over the loopback device with the other ends outside the tree. A tree with such connections cannot
    /// move, but can be cloned, because a clone has no connections.
    pub halved: Vec<Blocker>,
    /// Processes, the root first.
    pub processes: Vec<i32>,
    /// Number of threads of all processes.
    pub threads: usize,
    /// Number of mappings of all processes.
    pub mappings: usize,
    /// Number of open files of all processes, including files in flight between their sockets.
    pub open_files: usize,
    /// TCP and UDP sockets among the open files.
    pub sockets: Vec<Arc<SocketStatic>>,
    /// Bytes of memory in use, shared memory and files included.
    pub resident_bytes: u64,
}

/// Longest wait for a process that is just starting another program.
const STARTING_MAX: Duration = Duration::from_millis(300);
/// Number of inspections in which an obstacle must be found to be reported, and the pause between inspections.
const LOOKS: usize = 3;
const PAUSE: Duration = Duration::from_millis(10);

/// Inspects the tree of processes under `root`. Processes start and end, and open and close files, meanwhile: only
/// obstacles found in each of several inspections are reported. A program that is being started is waited for.
///
/// # Errors
/// [`Error::Gone`] if there is no such process; obstacles are in the report.
pub fn inspect(root: i32) -> Result<Report> {
    let began = Instant::now();
    let mut lasting: Option<Vec<Blocker>> = None;
    for look in 1.. {
        let mut report = inspect_once(root)?;
        let blockers = std::mem::take(&mut report.blockers);
        match &mut lasting {
            Some(lasting) => lasting.retain(|one| blockers.contains(one)),
            none => *none = Some(blockers),
        }
        let lasting = lasting.as_deref().unwrap_or_default();
        let starts = |blocker: &Blocker| matches!(blocker.obstacle, Obstacle::MemoryOf(_));
        let may_pass = lasting.iter().all(starts) && began.elapsed() < STARTING_MAX;
        if lasting.is_empty() || (look >= LOOKS && !may_pass) {
            report.blockers = lasting.to_vec();
            return Ok(report);
        }
        std::thread::sleep(PAUSE);
    }
    unreachable!("a look is the last")
}

fn inspect_once(root: i32) -> Result<Report> {
    let mut report = Report {
        processes: tree(root)?,
        ..Report::default()
    };
    if let Err(error) = super::supported() {
        report.block(root, Obstacle::Machine(error.to_string()));
    }
    namespaces::check(root, &mut report)?;
    for pid in report.processes.clone() {
        let looked = match look(pid, &mut report) {
            // The process has ended meanwhile, and is inspected again as a zombie.
            Err(Error::Kernel { .. }) if has_ended(pid) => look(pid, &mut report),
            looked => looked,
        };
        match looked {
            Err(Error::Gone(gone)) if gone == pid && pid != root => {}
            Err(Error::Kernel { what, source }) => {
                report.block(pid, Obstacle::Hidden(format!("{what}: {source}")));
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

impl Report {
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
/// [`Error::Gone`] if the root does not exist.
pub fn tree(root: i32) -> Result<Vec<i32>> {
    procfs::threads(root)?;
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        let children = match procfs::children(*pid) {
            Ok(children) => children,
            Err(Error::Gone(_)) => Vec::new(),
            Err(error) => return Err(error),
        };
        found.extend(children);
        at += 1;
    }
    Ok(found)
}

/// Returns true if a process is gone or a zombie; a process that is ending is waited for.
fn has_ended(pid: i32) -> bool {
    let began = Instant::now();
    loop {
        match Stat::read(pid) {
            Err(Error::Gone(_)) => return true,
            Ok(stat) if matches!(stat.state, 'Z' | 'X') => return true,
            Ok(stat) if stat.is_ending() && began.elapsed() < ENDING_MAX => {
                std::thread::sleep(Duration::from_micros(200));
            }
            _ => return false,
        }
    }
}

/// Longest wait for a process to end.
const ENDING_MAX: Duration = Duration::from_secs(1);
/// Core dump flag in a wait status.
const DUMPED: u64 = 0x80;

/// Lines of `/proc/PID/timers` for a timer of `CLOCK_THREAD_CPUTIME_ID`: the clock as requested, or the clock of thread
/// 0, which means the calling thread. A clock that names its thread has another number.
const THREAD_CLOCK: [&str; 2] = ["ClockID: 3", "ClockID: -2"];

fn look(pid: i32, report: &mut Report) -> Result<()> {
    let stat = Stat::read(pid)?;
    if matches!(stat.state, 'Z' | 'X') {
        if procfs::threads(pid)?.len() > 1 {
            report.block(pid, Obstacle::FirstThreadEnded);
        } else if report.processes.first() == Some(&pid) {
            return Err(Error::Gone(pid));
        } else if stat.field(52) & DUMPED != 0 {
            report.block(pid, Obstacle::DumpedCore);
        }
        return Ok(());
    }
    if let Some(group) = crate::cgroup::frozen(pid) {
        report.block(pid, Obstacle::FrozenGroup(group));
    }
    report.resident_bytes += stat.field(24).saturating_mul(super::image::PAGE);
    for tid in procfs::threads(pid)? {
        let Ok(status) = Status::read(pid, tid) else {
            continue;
        };
        report.threads += 1;
        look_at_thread(pid, &status, report);
        sharing::check_thread(pid, tid, report);
    }
    look_at_program(pid, report)?;
    sharing::check_process(pid, report)?;
    let timers = procfs::read(pid, "timers").unwrap_or_default();
    if timers.lines().any(|line| THREAD_CLOCK.contains(&line)) {
        report.block(pid, Obstacle::ThreadClock);
    }
    let count = timers
        .lines()
        .filter(|line| line.starts_with("ID: "))
        .count();
    if count > super::donor::TIMERS_MAX {
        report.block(pid, Obstacle::ManyTimers(count));
    }
    mappings::check(pid, report)
}

fn look_at_thread(pid: i32, status: &Status, report: &mut Report) {
    if status.tracer != 0 && !is_ours(status.tracer) {
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
fn is_ours(tracer: i32) -> bool {
    std::fs::metadata(format!("/proc/self/task/{tracer}")).is_ok()
}

/// Checks that the process is a 64-bit program with the ordinary root directory.
fn look_at_program(pid: i32, report: &mut Report) -> Result<()> {
    let mut header = [0u8; 5];
    let read = std::fs::File::open(format!("/proc/{pid}/exe"))
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut header));
    if read.is_err() {
        // The process may be ending: its executable disappears together with its memory.
        if Stat::read(pid)?.is_ending() {
            return Ok(());
        }
        let message = procfs::link(pid, "exe").unwrap_or_else(|_| "no executable".to_owned());
        report.block(pid, Obstacle::Executable(message));
    } else if header[4] != 2 {
        report.block(pid, Obstacle::NotA64BitProgram);
    }
    let root = procfs::link(pid, "root")?;
    if root != "/" {
        report.block(pid, Obstacle::RootDirectory(root));
    }
    Ok(())
}
