//! Tracking of a tree while it runs (pre-copy).

use super::halt::HaltedProcess;
use super::host_info::{boot_id, read_clocks, read_vdso, xcr0};
use super::mapped_object_catalogue::MappedObjectCatalogue;
use super::precopy_round::PrecopyRound;
use super::ptrace_checks;
use super::shared_memory::{SentPageHashes, collect_shared};
use super::tracker_attachment::{TrackerAttachment, read_own_mappings};
use super::watched_memory::{MemoryScan, WatchedMemory};
use crate::error::{Error, Result};
use crate::files::FilesSnapshot;
use crate::image::{Credentials, MemorySpace, ProcessLayout, TreeLayout};
use crate::inspect;
use crate::procfs::{ProcStat, ProcStatus};
use holdfast_sys::priority::{RealtimeGuard, is_realtime, processors};
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A tracked tree. The tree runs, except for a moment at the start and whenever a process joins it.
#[derive(Debug)]
pub struct TreeTracker {
    pub(super) root: i32,
    /// True if this thread has real-time priority while it keeps a process stopped.
    is_realtime_at_stops: bool,
    pub(super) processes: Vec<TrackedProcess>,
    pub(super) catalogue: MappedObjectCatalogue,
    pub(super) shared: Vec<SentPageHashes>,
    /// Descriptors as of the last read.
    pub(super) descriptor_snapshot: Option<Arc<FilesSnapshot>>,
    vdso: Vec<u8>,
    xcr0: u64,
    generations: u64,
    /// Makes the tracker stay in its thread, since tracing is bound to a thread.
    _thread: PhantomData<*const ()>,
}

/// Findings about a stopped tree, made before the catalogue is updated.
#[derive(Default)]
struct ParallelScan {
    /// For each process of the tree its findings; `None` if its mappings have changed.
    processes: Vec<Option<MemoryScan>>,
    /// Changed pages of shared memory objects.
    shared: PrecopyRound,
    /// Number of shared memory objects scanned: the first ones of the catalogue.
    shared_count: usize,
}

/// Processes for each helper thread. For fewer processes, starting a thread takes longer than the scan.
const PROCESSES_PER_HELPER: usize = 4;

/// A process of the tree.
#[derive(Debug)]
pub(super) struct TrackedProcess {
    pub pid: i32,
    started_ticks: u64,
    generation: u64,
    /// `None` for a zombie.
    pub watched: Option<WatchedMemory>,
}

/// Stopped processes of the tree, by generation.
type StoppedProcesses = HashMap<u64, HaltedProcess>;

/// Most attempts of a round. An attempt fails if a process was forked, ended or called `exec` meanwhile.
const ATTEMPTS: usize = 50;

impl TreeTracker {
    /// Begins to track the tree under `root`. No memory is read yet.
    ///
    /// # Errors
    /// [`Error::Blocked`] with everything that cannot move; [`Error::ProcessEnded`].
    pub fn start(root: i32) -> Result<Self> {
        Self::start_with_priority(root, false)
    }

    /// Begins to track the tree under `root`. With `is_realtime_at_stops`, the calling thread has real-time priority, where the
    /// kernel allows that, while it keeps a process stopped: others of the program may wait for that one, and a thread of
    /// ordinary priority may be kept from the processors in the middle.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with_priority(root: i32, is_realtime_at_stops: bool) -> Result<Self> {
        let report = inspect::inspect(root)?;
        if !report.blockers.is_empty() {
            return Err(Error::Blocked(report.blockers));
        }
        let mut tracker = Self {
            root,
            is_realtime_at_stops,
            processes: Vec::new(),
            catalogue: MappedObjectCatalogue::default(),
            shared: Vec::new(),
            descriptor_snapshot: None,
            vdso: Vec::new(),
            xcr0: 0,
            generations: 0,
            _thread: PhantomData,
        };
        if let Err(error) = tracker.update_processes() {
            tracker.detach_all();
            return Err(error);
        }
        Ok(tracker)
    }

    /// Returns the shape of the tree and the pages changed since the last round; all pages in the first round.
    ///
    /// # Errors
    /// [`Error::Blocked`] if something that cannot move has appeared; [`Error::ProcessEnded`] if the root has ended.
    pub fn next_round(&mut self) -> Result<PrecopyRound> {
        for _ in 1..ATTEMPTS {
            match self.try_round() {
                Err(error) if self.tree_changed(&error) => {}
                other => return other,
            }
        }
        self.try_round()
    }

    fn try_round(&mut self) -> Result<PrecopyRound> {
        self.update_processes()?;
        self.collect_round(None)
    }

    /// Returns true if an attempt failed only because the tree has changed.
    pub(super) fn tree_changed(&self, error: &Error) -> bool {
        let known = self.processes.iter();
        let is_as_known = |tracked: &TrackedProcess| {
            let stat = ProcStat::read(tracked.pid);
            let zombie = stat.map_or(true, |stat| matches!(stat.state, 'Z' | 'X'));
            zombie == tracked.watched.is_none() && (zombie || tracked.has_stub().unwrap_or(false))
        };
        match error {
            Error::ProcessEnded(pid) if *pid == self.root => false,
            Error::ProcessEnded(_) => true,
            _ => inspect::tree_pids(self.root).is_ok() && !known.into_iter().all(is_as_known),
        }
    }

    /// Stops tracking, and removes the tracker's objects from the tree.
    ///
    /// # Errors
    /// The kernel's error; a process that has ended causes none.
    pub fn stop_tracking(mut self) -> Result<()> {
        self.detach_all();
        Ok(())
    }

    /// Collects a round. While the tree runs (`stopped` is `None`), pages are write-protected to detect later writes,
    /// and the mappings' advice is read again, which takes long.
    pub(super) fn collect_round(
        &mut self,
        stopped: Option<&[Option<HaltedProcess>]>,
    ) -> Result<PrecopyRound> {
        let is_running = stopped.is_none();
        let mut round = PrecopyRound::default();
        let mut shapes = Vec::new();
        let scan = if is_running {
            ParallelScan::default()
        } else {
            self.scan_in_parallel()?
        };
        let mut found = scan.processes.into_iter();
        for index in 0..self.processes.len() {
            let halted = stopped.and_then(|all| all.get(index)?.as_ref());
            let found = found.next().flatten();
            let shape = self.collect_process(index, (is_running, halted), found, &mut round)?;
            shapes.push(shape);
        }
        self.set_shared_tables(&mut shapes);
        self.update_segments(is_running)?;
        round.append(scan.shared);
        self.collect_shared(scan.shared_count, &mut round)?;
        round.tree = TreeLayout {
            clocks: read_clocks(),
            boot_id: boot_id(),
            vdso: self.vdso.clone(),
            xcr0: self.xcr0,
            processes: shapes,
            files: self.catalogue.files.clone(),
            shared_memory: self.catalogue.shared.clone(),
        };
        for tracked in &mut self.processes {
            if let Some(watched) = &mut tracked.watched {
                watched.mark_delivered();
            }
        }
        Ok(round)
    }

    /// Scans the memory of a stopped tree on all processors, as far as the catalogue need not change.
    fn scan_in_parallel(&mut self) -> Result<ParallelScan> {
        let (processes, catalogue, shared) = (&self.processes, &self.catalogue, &mut self.shared);
        let jobs = AtomicUsize::new(0);
        let scan_processes = || {
            let mut found = Vec::new();
            while let Some(tracked) = processes.get(jobs.fetch_add(1, Ordering::Relaxed)) {
                let watched = tracked.watched.as_ref();
                found.push((
                    tracked.pid,
                    watched.and_then(|watched| watched.scan_unchanged_mappings(tracked.pid)),
                ));
            }
            found
        };
        let mut scan = ParallelScan {
            shared_count: catalogue.shared.len(),
            ..ParallelScan::default()
        };
        let is_urgent = is_realtime();
        let helpers = (processors() - 1).min(processes.len() / PROCESSES_PER_HELPER);
        let mut found: HashMap<i32, Option<MemoryScan>> = HashMap::new();
        std::thread::scope(|scope| {
            let scan_as_helper = || {
                let _hurry = is_urgent.then(RealtimeGuard::begin);
                scan_processes()
            };
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(scan_as_helper)).collect();
            let outcome = collect_shared(catalogue, shared, 0, &mut scan.shared);
            found.extend(scan_processes());
            for helper in helpers {
                // `collect_process` scans processes without findings.
                found.extend(helper.join().unwrap_or_default());
            }
            outcome
        })?;
        let scans = processes
            .iter()
            .map(|tracked| found.remove(&tracked.pid).flatten());
        scan.processes = scans.collect();
        Ok(scan)
    }

    /// Leaves the unread runs of a round to the next round.
    pub(super) fn return_unread(&mut self, round: &PrecopyRound) {
        for run in round.unread_runs() {
            let MemorySpace::Process(index) = run.space else {
                continue;
            };
            let tracked = self.processes.get_mut(index as usize);
            if let Some(watched) = tracked.and_then(|tracked| tracked.watched.as_mut()) {
                watched.return_run(run);
            }
        }
    }

    fn collect_process(
        &mut self,
        index: usize,
        (is_running, halted): (bool, Option<&HaltedProcess>),
        found: Option<MemoryScan>,
        round: &mut PrecopyRound,
    ) -> Result<ProcessLayout> {
        let pid = self.processes[index].pid;
        let mut shape = self.process_identity(index, halted)?;
        let Some(watched) = &mut self.processes[index].watched else {
            return Ok(shape);
        };
        match &found {
            Some(_) => watched.check_segments(pid, &self.catalogue)?,
            None => watched.read_mappings(pid, is_running, &mut self.catalogue)?,
        }
        watched.collect_changes(index as u32, is_running, found, round)?;
        shape.mappings = watched.mappings.clone();
        shape.guards = watched.guards.iter().collect();
        inspect::check_guards(pid, &shape.guards)?;
        shape.executable = self.catalogue.executable_index(pid)?;
        Ok(shape)
    }

    /// Returns the process's identity in its own PID namespace.
    fn process_identity(
        &self,
        index: usize,
        halted: Option<&HaltedProcess>,
    ) -> Result<ProcessLayout> {
        let tracked = &self.processes[index];
        let status = match halted {
            Some(halted) => halted.statuses()?[0].clone(),
            None => ProcStatus::read(tracked.pid, tracked.pid)?,
        };
        let stat = ProcStat::read(tracked.pid)?;
        let parent = self.processes[..index]
            .iter()
            .position(|other| other.pid == stat.parent);
        let mut threads = Vec::new();
        if let Some(halted) = halted {
            threads = halted.namespace_tids()?;
        } else if tracked.watched.is_some() {
            for tid in crate::procfs::threads(tracked.pid)? {
                match ProcStatus::read(tracked.pid, tid) {
                    Ok(status) => threads.push(status.innermost_id()),
                    Err(Error::ProcessEnded(_) | Error::Kernel { .. }) if tid != tracked.pid => {}
                    Err(error) => return Err(error),
                }
            }
        }
        // A leader outside of the PID namespace has the ID 0. At the acceptor, the first process of the namespace
        // leads.
        let own_id = |ids: &[i32]| ids.last().copied().unwrap_or(0).max(1);
        Ok(ProcessLayout {
            pid: status.innermost_id(),
            parent: if index == 0 {
                None
            } else {
                Some(parent.unwrap_or(0) as u32)
            },
            generation: tracked.generation,
            group: own_id(&status.group_ids),
            session: own_id(&status.session_ids),
            exit_signal: (stat.field(38) as i32).clamp(0, 64),
            exit_status: tracked.watched.is_none().then(|| stat.field(52) as i32),
            threads,
            shares_table_with: None,
            executable: 0,
            mappings: Vec::new(),
            guards: Vec::new(),
            credentials: Credentials {
                uids: status.uids,
                gids: status.gids,
                groups: status.groups,
                capabilities: status.capabilities,
                secure_bits: 0,
            },
            no_new_privileges: status.no_new_privileges,
            // Empty for a deleted directory or an ended process: the restored process does not begin there.
            directory: std::fs::read_link(format!("/proc/{}/cwd", tracked.pid))
                .map(|path| path.into_os_string().into_vec())
                .unwrap_or_default(),
        })
    }

    /// Attaches to processes that joined the tree, and detaches from processes that left it.
    pub(super) fn update_processes(&mut self) -> Result<()> {
        self.update_running_processes(None)
    }

    /// Updates all processes but the stopped ones. With `stopped`, a process to which the tracker attaches is added there and
    /// stays stopped.
    fn update_running_processes(
        &mut self,
        mut stopped: Option<&mut StoppedProcesses>,
    ) -> Result<()> {
        for _ in 1..ATTEMPTS {
            if self.try_update_processes(stopped.as_deref_mut())? {
                break;
            }
        }
        Ok(())
    }

    /// Attaches to new processes of the tree while others stay stopped; the new ones stay stopped too. Returns all stopped
    /// ones in the new order of processes. A process that has called `exec`, ended or left the tree runs on first, so that the
    /// tracker can attach to it again or detach.
    pub(super) fn update_processes_around(
        &mut self,
        halted: Vec<Option<HaltedProcess>>,
    ) -> Result<Vec<Option<HaltedProcess>>> {
        let pids: HashSet<i32> = inspect::tree_pids(self.root)?.into_iter().collect();
        let mut stopped = StoppedProcesses::new();
        for (tracked, halted) in self.processes.iter().zip(halted) {
            if let Some(halted) = halted
                && pids.contains(&tracked.pid)
                && tracked.has_stub().unwrap_or(false)
            {
                stopped.insert(tracked.generation, halted);
            }
        }
        self.update_running_processes(Some(&mut stopped))?;
        let generations = self.processes.iter().map(|tracked| tracked.generation);
        Ok(generations
            .map(|generation| stopped.remove(&generation))
            .collect())
    }

    /// Returns false if a living process is missing in the list although its parent is there: the kernel can leave out a
    /// process while its siblings end.
    fn try_update_processes(&mut self, mut stopped: Option<&mut StoppedProcesses>) -> Result<bool> {
        let pids = inspect::tree_pids(self.root)?;
        let mut known: HashMap<i32, TrackedProcess> = self
            .processes
            .drain(..)
            .map(|tracked| (tracked.pid, tracked))
            .collect();
        for pid in &pids {
            let updated = match known.remove(pid) {
                Some(old) if is_among(stopped.as_deref(), &old) => Ok(old),
                old => self.update_process(*pid, old, stopped.as_deref_mut()),
            };
            match updated {
                Ok(tracked) => self.processes.push(tracked),
                Err(Error::ProcessEnded(_)) if *pid != self.root => {}
                Err(error) => {
                    self.processes.extend(known.into_values());
                    return Err(error);
                }
            }
        }
        let mut is_complete = true;
        for missing in known.into_values() {
            match missing.living_parent() {
                Some(parent) if pids.contains(&parent) => {
                    is_complete = false;
                    self.processes.push(missing);
                }
                // The tracker can detach once it runs.
                Some(_) if is_among(stopped.as_deref(), &missing) => self.processes.push(missing),
                Some(_) => {
                    let _priority_boost = self.raise_priority();
                    missing.detach();
                }
                None => {}
            }
        }
        Ok(is_complete)
    }

    fn update_process(
        &mut self,
        pid: i32,
        old: Option<TrackedProcess>,
        stopped: Option<&mut StoppedProcesses>,
    ) -> Result<TrackedProcess> {
        let stat = ProcStat::read(pid)?;
        let zombie = matches!(stat.state, 'Z' | 'X');
        if let Some(old) = old
            && old.started_ticks == stat.started_ticks
            && old.watched.is_some() != zombie
            && (zombie || old.has_stub()?)
        {
            return Ok(old);
        }
        self.generations += 1;
        let mut tracked = TrackedProcess {
            pid,
            started_ticks: stat.started_ticks,
            generation: self.generations,
            watched: None,
        };
        if !zombie {
            let _priority_boost = self.raise_priority();
            let (watched, halted) = self.attach(pid)?;
            tracked.watched = Some(watched);
            match stopped {
                Some(stopped) => drop(stopped.insert(tracked.generation, halted)),
                None => halted.thaw()?,
            }
        }
        Ok(tracked)
    }

    /// Raises this thread's priority while a process is stopped.
    pub(super) fn raise_priority(&self) -> Option<RealtimeGuard> {
        self.is_realtime_at_stops.then(RealtimeGuard::begin)?
    }

    /// Attaches to a process, and leaves it stopped.
    fn attach(&mut self, pid: i32) -> Result<(WatchedMemory, HaltedProcess)> {
        let halted = HaltedProcess::stop(pid)?;
        ptrace_checks::check(&halted)?;
        let lines = read_own_mappings(pid, None, false)?;
        let attachment = TrackerAttachment::attach(&halted, &lines)?;
        let secure_bits = match ptrace_checks::query_ldt_and_secure_bits(&halted, &attachment) {
            Ok(secure_bits) => secure_bits,
            Err(error) => {
                attachment.remove_stub(&halted, &read_own_mappings(pid, None, false)?)?;
                return Err(error);
            }
        };
        if self.vdso.is_empty() {
            self.vdso = read_vdso(&halted, &lines)?;
            self.xcr0 = xcr0(&halted.first_thread().extended_registers()?);
        }
        // Open the memory before the process runs: a later `exec` would replace it.
        let watched = WatchedMemory::new(pid, attachment, secure_bits)?;
        Ok((watched, halted))
    }

    fn detach_all(&mut self) {
        for tracked in std::mem::take(&mut self.processes) {
            let _priority_boost = self.raise_priority();
            tracked.detach();
        }
    }
}

fn is_among(stopped: Option<&StoppedProcesses>, tracked: &TrackedProcess) -> bool {
    stopped.is_some_and(|stopped| stopped.contains_key(&tracked.generation))
}

impl Drop for TreeTracker {
    fn drop(&mut self) {
        self.detach_all();
    }
}

impl TrackedProcess {
    /// Removes the tracker's objects from the process.
    fn detach(self) {
        // A process that has ended meanwhile has no stub.
        if let Some(watched) = self.watched
            && let Ok(halted) = HaltedProcess::stop(self.pid)
        {
            let _ = watched.remove_stub(&halted);
            let _ = halted.thaw();
        }
    }

    /// Returns the parent; `None` if the process has ended.
    fn living_parent(&self) -> Option<i32> {
        let stat = ProcStat::read(self.pid).ok()?;
        let is_alive = !matches!(stat.state, 'Z' | 'X');
        (is_alive && stat.started_ticks == self.started_ticks).then_some(stat.parent)
    }

    fn has_stub(&self) -> Result<bool> {
        let Some(watched) = &self.watched else {
            return Ok(false);
        };
        Ok(watched
            .attachment
            .has_stub(&read_own_mappings(self.pid, None, false)?))
    }
}
