//! Tracking of a tree while it runs (pre-copy).

use super::attach::{Attachment, own_maps};
use super::catalogue::Catalogue;
use super::halt::Halted;
use super::hidden;
use super::machine::{boot_id, clocks, features, read_vdso};
use super::round::Round;
use super::shared::{SharedContent, collect_shared};
use super::watched::{Found, Watched};
use crate::priority::{Hurry, is_realtime, processors};
use crate::process::error::{Error, Result};
use crate::process::files::Draft;
use crate::process::image::{Credentials, Process, Space, Tree};
use crate::process::inspect;
use crate::process::procfs::{Stat, Status};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A tracked tree. The tree runs, except for a moment at the start and whenever a process joins it.
#[derive(Debug)]
pub struct Tracker {
    pub(super) root: i32,
    pub(super) processes: Vec<Tracked>,
    pub(super) catalogue: Catalogue,
    pub(super) shared: Vec<SharedContent>,
    /// Descriptors as of the last read.
    pub(super) draft: Option<Arc<Draft>>,
    vdso: Vec<u8>,
    register_features: u64,
    generations: u64,
    /// Makes the tracker stay in its thread, since tracing is bound to a thread.
    _thread: PhantomData<*const ()>,
}

/// Findings about a stopped tree, made before the catalogue is updated.
#[derive(Default)]
struct Ahead {
    /// For each process of the tree its findings; `None` if its mappings have changed.
    processes: Vec<Option<Found>>,
    /// Changed pages of shared memory objects.
    shared: Round,
    /// Number of shared memory objects scanned: the first ones of the catalogue.
    shared_count: usize,
}

/// Processes for each helper thread. For fewer processes, starting a thread takes longer than the scan.
const PROCESSES_EACH: usize = 4;

/// A process of the tree.
#[derive(Debug)]
pub(super) struct Tracked {
    pub pid: i32,
    started_ticks: u64,
    generation: u64,
    /// `None` for a zombie.
    pub watched: Option<Watched>,
}

/// Most attempts of a round. An attempt fails if a process was forked, ended or called `exec` meanwhile.
const ATTEMPTS: usize = 50;

impl Tracker {
    /// Begins to track the tree under `root`. No memory is read yet.
    ///
    /// # Errors
    /// [`Error::Blocked`] with everything that cannot move; [`Error::Gone`].
    pub fn start(root: i32) -> Result<Self> {
        let report = inspect::inspect(root)?;
        if !report.blockers.is_empty() {
            return Err(Error::Blocked(report.blockers));
        }
        let mut tracker = Self {
            root,
            processes: Vec::new(),
            catalogue: Catalogue::default(),
            shared: Vec::new(),
            draft: None,
            vdso: Vec::new(),
            register_features: 0,
            generations: 0,
            _thread: PhantomData,
        };
        if let Err(error) = tracker.follow_tree() {
            tracker.remove_all();
            return Err(error);
        }
        Ok(tracker)
    }

    /// Returns the shape of the tree and the pages changed since the last round; all pages in the first round.
    ///
    /// # Errors
    /// [`Error::Blocked`] if something that cannot move has appeared; [`Error::Gone`] if the root has ended.
    pub fn round(&mut self) -> Result<Round> {
        for _ in 1..ATTEMPTS {
            match self.try_round() {
                Err(error) if self.moved_on(&error) => {}
                other => return other,
            }
        }
        self.try_round()
    }

    fn try_round(&mut self) -> Result<Round> {
        self.follow_tree()?;
        self.collect(None)
    }

    /// Returns true if an attempt failed only because the tree has changed.
    fn moved_on(&self, error: &Error) -> bool {
        let known = self.processes.iter();
        let same = |tracked: &Tracked| {
            let stat = Stat::read(tracked.pid);
            let zombie = stat.map_or(true, |stat| matches!(stat.state, 'Z' | 'X'));
            zombie == tracked.watched.is_none() && (zombie || tracked.has_stub().unwrap_or(false))
        };
        match error {
            Error::Gone(pid) if *pid == self.root => false,
            Error::Gone(_) => true,
            _ => inspect::tree(self.root).is_ok() && !known.into_iter().all(same),
        }
    }

    /// Stops tracking, and removes the tracker's objects from the tree.
    ///
    /// # Errors
    /// The kernel's error; a process that has ended causes none.
    pub fn stop(mut self) -> Result<()> {
        self.remove_all();
        Ok(())
    }

    /// Collects a round. While the tree runs (`stopped` is `None`), pages are write-protected to detect later writes,
    /// and the mappings' advice is read again, which takes long.
    pub(super) fn collect(&mut self, stopped: Option<&[Option<Halted>]>) -> Result<Round> {
        let runs = stopped.is_none();
        let mut round = Round::default();
        let mut shapes = Vec::new();
        let ahead = if runs {
            Ahead::default()
        } else {
            self.look_ahead()?
        };
        let mut found = ahead.processes.into_iter();
        for index in 0..self.processes.len() {
            let halted = stopped.and_then(|all| all.get(index)?.as_ref());
            let found = found.next().flatten();
            let shape = self.collect_process(index, (runs, halted), found, &mut round)?;
            shapes.push(shape);
        }
        self.find_shared_tables(&mut shapes);
        self.follow_segments(runs)?;
        round.append(ahead.shared);
        self.collect_shared(ahead.shared_count, &mut round)?;
        round.tree = Tree {
            clocks: clocks(),
            boot_id: boot_id(),
            vdso: self.vdso.clone(),
            register_features: self.register_features,
            processes: shapes,
            files: self.catalogue.files.clone(),
            shared: self.catalogue.shared.clone(),
        };
        for tracked in &mut self.processes {
            if let Some(watched) = &mut tracked.watched {
                watched.deliver();
            }
        }
        Ok(round)
    }

    /// Scans the memory of a stopped tree on all processors, as far as the catalogue need not change.
    fn look_ahead(&mut self) -> Result<Ahead> {
        let (processes, catalogue, shared) = (&self.processes, &self.catalogue, &mut self.shared);
        let jobs = AtomicUsize::new(0);
        let look = || {
            let mut found = Vec::new();
            while let Some(tracked) = processes.get(jobs.fetch_add(1, Ordering::Relaxed)) {
                let seen = tracked.watched.as_ref();
                found.push((tracked.pid, seen.and_then(|of| of.look_again(tracked.pid))));
            }
            found
        };
        let mut ahead = Ahead {
            shared_count: catalogue.shared.len(),
            ..Ahead::default()
        };
        let hurries = is_realtime();
        let helpers = (processors() - 1).min(processes.len() / PROCESSES_EACH);
        let mut found: HashMap<i32, Option<Found>> = HashMap::new();
        std::thread::scope(|scope| {
            let help = || {
                let _hurry = hurries.then(Hurry::begin);
                look()
            };
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(help)).collect();
            let outcome = collect_shared(catalogue, shared, 0, &mut ahead.shared);
            found.extend(look());
            for helper in helpers {
                // `collect_process` scans processes without findings.
                found.extend(helper.join().unwrap_or_default());
            }
            outcome
        })?;
        let of_each = processes.iter().map(|of| found.remove(&of.pid).flatten());
        ahead.processes = of_each.collect();
        Ok(ahead)
    }

    /// Leaves the unread runs of a round to the next round.
    pub(super) fn give_up(&mut self, round: &Round) {
        for run in round.rest() {
            let Space::Process(index) = run.space else {
                continue;
            };
            let tracked = self.processes.get_mut(index as usize);
            if let Some(watched) = tracked.and_then(|tracked| tracked.watched.as_mut()) {
                watched.give_up(run);
            }
        }
    }

    fn collect_process(
        &mut self,
        index: usize,
        (runs, halted): (bool, Option<&Halted>),
        found: Option<Found>,
        round: &mut Round,
    ) -> Result<Process> {
        let pid = self.processes[index].pid;
        let mut shape = self.identity(index, halted)?;
        let Some(watched) = &mut self.processes[index].watched else {
            return Ok(shape);
        };
        match &found {
            Some(_) => watched.check_segments(pid, &self.catalogue)?,
            None => watched.read_mappings(pid, runs, &mut self.catalogue)?,
        }
        watched.collect(index as u32, runs, found, round)?;
        shape.mappings = watched.mappings.clone();
        shape.guards = watched.guards.iter().collect();
        inspect::check_guards(pid, &shape.guards)?;
        shape.executable = self.catalogue.executable(pid)?;
        Ok(shape)
    }

    /// Returns the process's identity in its own PID namespace.
    fn identity(&self, index: usize, halted: Option<&Halted>) -> Result<Process> {
        let tracked = &self.processes[index];
        let status = match halted {
            Some(halted) => halted.statuses()?[0].clone(),
            None => Status::read(tracked.pid, tracked.pid)?,
        };
        let stat = Stat::read(tracked.pid)?;
        let parent = self.processes[..index]
            .iter()
            .position(|other| other.pid == stat.parent);
        let mut threads = Vec::new();
        if let Some(halted) = halted {
            threads = halted.own_ids()?;
        } else if tracked.watched.is_some() {
            for tid in crate::process::procfs::threads(tracked.pid)? {
                match Status::read(tracked.pid, tid) {
                    Ok(status) => threads.push(status.own_id()),
                    Err(Error::Gone(_) | Error::Kernel { .. }) if tid != tracked.pid => {}
                    Err(error) => return Err(error),
                }
            }
        }
        // A leader outside of the PID namespace has the ID 0. At the acceptor, the first process of the namespace
        // leads.
        let own = |ids: &[i32]| ids.last().copied().unwrap_or(0).max(1);
        Ok(Process {
            pid: status.own_id(),
            parent: if index == 0 {
                None
            } else {
                Some(parent.unwrap_or(0) as u32)
            },
            generation: tracked.generation,
            group: own(&status.group_ids),
            session: own(&status.session_ids),
            exit_signal: (stat.field(38) as i32).clamp(0, 64),
            exit_status: tracked.watched.is_none().then(|| stat.field(52) as i32),
            threads,
            table_of: None,
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

    /// Attaches to processes that joined the tree, and forgets processes that left it.
    pub(super) fn follow_tree(&mut self) -> Result<()> {
        let pids = inspect::tree(self.root)?;
        let mut known: HashMap<i32, Tracked> = self
            .processes
            .drain(..)
            .map(|tracked| (tracked.pid, tracked))
            .collect();
        for pid in pids {
            let old = known.remove(&pid);
            match self.follow_process(pid, old) {
                Ok(tracked) => self.processes.push(tracked),
                Err(Error::Gone(_)) if pid != self.root => {}
                Err(error) => {
                    self.processes.extend(known.into_values());
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn follow_process(&mut self, pid: i32, old: Option<Tracked>) -> Result<Tracked> {
        let stat = Stat::read(pid)?;
        let zombie = matches!(stat.state, 'Z' | 'X');
        if let Some(old) = old
            && old.started_ticks == stat.started_ticks
            && old.watched.is_some() != zombie
            && (zombie || old.has_stub()?)
        {
            return Ok(old);
        }
        self.generations += 1;
        Ok(Tracked {
            pid,
            started_ticks: stat.started_ticks,
            generation: self.generations,
            watched: if zombie {
                None
            } else {
                Some(self.attach(pid)?)
            },
        })
    }

    fn attach(&mut self, pid: i32) -> Result<Watched> {
        let halted = Halted::stop(pid)?;
        hidden::check(&halted)?;
        let lines = own_maps(pid, None, false)?;
        let attachment = Attachment::make(&halted, &lines)?;
        let secure_bits = match hidden::ask(&halted, &attachment) {
            Ok(secure_bits) => secure_bits,
            Err(error) => {
                attachment.remove(&halted, &own_maps(pid, None, false)?)?;
                return Err(error);
            }
        };
        if self.vdso.is_empty() {
            self.vdso = read_vdso(&halted, &lines)?;
            self.register_features = features(&halted.first().extended()?);
        }
        // Open the memory before the process runs: a later `exec` would replace it.
        let watched = Watched::new(pid, attachment, secure_bits)?;
        halted.thaw()?;
        Ok(watched)
    }

    fn remove_all(&mut self) {
        for tracked in self.processes.drain(..) {
            let Some(watched) = tracked.watched else {
                continue;
            };
            // A process that has ended meanwhile has no stub.
            if let Ok(halted) = Halted::stop(tracked.pid) {
                let _ = watched.remove(&halted);
                let _ = halted.thaw();
            }
        }
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.remove_all();
    }
}

impl Tracked {
    fn has_stub(&self) -> Result<bool> {
        let Some(watched) = &self.watched else {
            return Ok(false);
        };
        Ok(watched.attachment.is_in(&own_maps(self.pid, None, false)?))
    }
}
