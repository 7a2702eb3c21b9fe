//! Watching a tree while it runs.

use super::attach::{Attachment, own_maps};
use super::catalogue::Catalogue;
use super::halt::Halted;
use super::hidden;
use super::machine::{boot_id, clocks, features, read_vdso};
use super::round::Round;
use super::shared::SharedContent;
use super::userfault;
use crate::process::error::{Context, Error, Result};
use crate::process::files::Draft;
use crate::process::image::{Content, Mapping, PAGE, Process, Run, Space, Tree};
use crate::process::inspect;
use crate::process::procfs::{MapLine, Stat, Status};
use crate::process::ranges::Ranges;
use crate::process::trace::Memory;
use std::collections::HashMap;
use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::AsFd;

/// A tree that is watched. It runs, but for a moment at the start and whenever a process joins it.
#[derive(Debug)]
pub struct Tracker {
    pub(super) root: i32,
    pub(super) processes: Vec<Tracked>,
    pub(super) catalogue: Catalogue,
    pub(super) shared: Vec<SharedContent>,
    /// Descriptors as they were when they were looked at last.
    pub(super) draft: Option<Draft>,
    vdso: Vec<u8>,
    register_features: u64,
    generations: u64,
    /// Tracing is bound to a thread.
    _thread: PhantomData<*const ()>,
}

/// A process of the tree.
#[derive(Debug)]
pub(super) struct Tracked {
    pub pid: i32,
    started_ticks: u64,
    generation: u64,
    /// Nothing for a zombie.
    pub watched: Option<Watched>,
}

/// A process that has memory.
#[derive(Debug)]
pub(super) struct Watched {
    pub attachment: Attachment,
    pub memory: Memory,
    pub(super) pagemap: File,
    lines: Vec<MapLine>,
    pub(super) mappings: Vec<Mapping>,
    /// What the acceptor has: mappings, and pages in one version or another.
    delivered: Vec<Mapping>,
    sent: Ranges,
    /// What it has after the round that is being made.
    next: Ranges,
    /// Pages that were found to be written by a round that was given up.
    owed: Ranges,
}

/// How often a round is begun anew because processes came, ended or called `exec` meanwhile.
const ATTEMPTS: usize = 50;

impl Tracker {
    /// Begins to watch the tree under `root`. Nothing is read yet.
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

    /// What the tree is now and which pages changed since the last round; the first time that is everything.
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
        self.collect(true)
    }

    /// Whether a look failed only because the tree is not any more what it was.
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

    /// Stops watching, and takes what is ours out of the tree.
    ///
    /// # Errors
    /// What the kernel says; a process that has ended is none.
    pub fn stop(mut self) -> Result<()> {
        self.remove_all();
        Ok(())
    }

    /// With `advice` what the process asked of its mappings is read anew, which takes long.
    pub(super) fn collect(&mut self, advice: bool) -> Result<Round> {
        let mut round = Round::default();
        let mut shapes = Vec::new();
        for index in 0..self.processes.len() {
            let shape = self.collect_process(index, advice, &mut round)?;
            shapes.push(shape);
        }
        self.find_shared_tables(&mut shapes);
        self.collect_shared(&mut round)?;
        round.tree = Tree {
            clocks: clocks(),
            boot_id: boot_id(),
            vdso: self.vdso.clone(),
            register_features: self.register_features,
            processes: shapes,
            files: self.catalogue.files.clone(),
            shared: self.catalogue.shared.clone(),
        };
        for watched in self
            .processes
            .iter_mut()
            .filter_map(|tracked| tracked.watched.as_mut())
        {
            watched.delivered.clone_from(&watched.mappings);
            watched.sent = std::mem::take(&mut watched.next);
            watched.owed = Ranges::default();
        }
        Ok(round)
    }

    /// What of a round was not read comes with the next one.
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
        advice: bool,
        round: &mut Round,
    ) -> Result<Process> {
        let pid = self.processes[index].pid;
        let mut shape = self.identity(index)?;
        let Some(watched) = &mut self.processes[index].watched else {
            return Ok(shape);
        };
        watched.read_mappings(pid, advice, &mut self.catalogue)?;
        watched.collect(index as u32, round)?;
        shape.mappings = watched.mappings.clone();
        shape.executable = self.catalogue.executable(pid)?;
        Ok(shape)
    }

    /// Who the process is, by its own PID namespace.
    fn identity(&self, index: usize) -> Result<Process> {
        let tracked = &self.processes[index];
        let status = Status::read(tracked.pid, tracked.pid)?;
        let stat = Stat::read(tracked.pid)?;
        let parent = self.processes[..index]
            .iter()
            .position(|other| other.pid == stat.parent);
        let mut threads = Vec::new();
        if tracked.watched.is_some() {
            for tid in crate::process::procfs::threads(tracked.pid)? {
                match Status::read(tracked.pid, tid) {
                    Ok(status) => threads.push(status.own_id()),
                    Err(Error::Gone(_) | Error::Kernel { .. }) if tid != tracked.pid => {}
                    Err(error) => return Err(error),
                }
            }
        }
        // A leader outside the PID namespace is seen as 0; at the acceptor its namespace's first process leads.
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
        })
    }

    /// Attaches to processes that joined the tree and forgets those that left it.
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
        if let Err(error) = hidden::ask(&halted, &attachment) {
            attachment.remove(&halted, &own_maps(pid, None, false)?)?;
            return Err(error);
        }
        if self.vdso.is_empty() {
            self.vdso = read_vdso(&halted, &lines)?;
            self.register_features = features(&halted.first().extended()?);
        }
        halted.thaw()?;
        let path = format!("/proc/{pid}/pagemap");
        Ok(Watched {
            attachment,
            memory: Memory::open(pid)?,
            pagemap: File::open(&path).context(|| path)?,
            lines: Vec::new(),
            mappings: Vec::new(),
            delivered: Vec::new(),
            sent: Ranges::default(),
            next: Ranges::default(),
            owed: Ranges::default(),
        })
    }

    fn remove_all(&mut self) {
        for tracked in self.processes.drain(..) {
            let Some(watched) = tracked.watched else {
                continue;
            };
            // Who has ended meanwhile has nothing of ours.
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

impl Watched {
    /// Whether the process has the memory that it had: not after `exec`.
    pub fn is_current(&self) -> bool {
        userfault::scan(&self.pagemap, (0, PAGE), false).is_ok()
    }

    /// Takes the stub out of a process that stands still.
    pub fn remove(&self, halted: &Halted) -> Result<()> {
        let lines = own_maps(halted.pid, None, false)?;
        if !self.attachment.is_in(&lines) {
            return Ok(());
        }
        self.attachment.remove(halted, &lines)
    }

    fn read_mappings(&mut self, pid: i32, advice: bool, catalogue: &mut Catalogue) -> Result<()> {
        let mut lines = own_maps(pid, Some(&self.attachment), advice)?;
        if !advice && !keep_advice(&self.lines, &mut lines) {
            lines = own_maps(pid, Some(&self.attachment), true)?;
        }
        catalogue.enter_written(pid, &lines)?;
        let mut mappings = Vec::with_capacity(lines.len());
        for line in &lines {
            mappings.extend(catalogue.mapping(pid, line)?);
        }
        self.lines = lines;
        self.mappings = mappings;
        Ok(())
    }

    /// Finds what the acceptor lacks and protects it against unseen writes.
    fn collect(&mut self, index: u32, round: &mut Round) -> Result<()> {
        let mut private = Ranges::default();
        let mut unwatched = Vec::new();
        for mapping in self.mappings.iter().filter(|mapping| mapping.is_private()) {
            private.push(mapping.start, mapping.end);
            let userfault = self.attachment.userfault.as_fd();
            if userfault::watch(userfault, mapping.start, mapping.end).is_err() {
                unwatched.push((mapping.start, mapping.end));
            }
        }
        let scanned = |e: std::io::Error| {
            Err::<Vec<_>, _>(e).context(|| "PAGEMAP_SCAN (Linux 6.7)".to_owned())
        };
        let mut regions = userfault::scan(&self.pagemap, (0, u64::MAX), true).or_else(scanned)?;
        for range in unwatched {
            // Nothing tells what was written here: all of it counts.
            let more = userfault::scan(&self.pagemap, range, false).or_else(scanned)?;
            regions.extend(more.into_iter().map(|region| userfault::Region {
                categories: region.categories | userfault::WRITTEN,
                ..region
            }));
        }
        regions.sort_unstable_by_key(|region| region.start);
        let own = |region: &&userfault::Region| {
            region.categories & (userfault::FILE | userfault::ZERO) == 0
        };
        let here: Ranges = regions
            .iter()
            .filter(own)
            .map(|region| (region.start, region.end))
            .collect();
        let written = |region: &&userfault::Region| region.categories & userfault::WRITTEN != 0;
        let written: Ranges = regions
            .iter()
            .filter(own)
            .filter(written)
            .map(|region| (region.start, region.end))
            .collect();
        let here = here.and(&private);
        let there = self
            .sent
            .and(&Mapping::stable(&self.delivered, &self.mappings));
        let written = written.or(&self.owed).and(&here);
        let send = written.or(&here.minus(&there));
        let gone = there.minus(&here);
        let space = Space::Process(index);
        round.add(space, &gone, Content::Fresh);
        round.add(space, &send, Content::Bytes);
        self.owed = send;
        self.next = here;
        Ok(())
    }

    fn give_up(&mut self, run: Run) {
        let part: Ranges = [(run.start, run.start + run.length)].into_iter().collect();
        self.sent = match run.content {
            Content::Bytes => self.sent.minus(&part),
            Content::Fresh => self.sent.or(&part),
        };
    }

    /// Reads a run; what is not there any more comes with the next round.
    pub(super) fn read(&mut self, run: Run, bytes: &mut [u8]) -> bool {
        if self.memory.read(run.start, bytes).is_ok() {
            return true;
        }
        self.give_up(run);
        false
    }
}

/// Gives mappings that are as they were the advice that they had; false if there are others.
fn keep_advice(before: &[MapLine], lines: &mut [MapLine]) -> bool {
    let known: HashMap<(u64, u64), &MapLine> = before
        .iter()
        .map(|line| ((line.start, line.end), line))
        .collect();
    lines.iter_mut().all(|line| {
        let old = known.get(&(line.start, line.end));
        let same = old.filter(|old| {
            line.advice = old.advice;
            **old == line
        });
        same.is_some()
    })
}
