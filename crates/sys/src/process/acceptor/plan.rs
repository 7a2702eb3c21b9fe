//! State of a restoration, and handlers of the daemon's messages.

use super::birth::{self, Maker};
use super::door::Door;
use super::foreign::Foreign;
use super::husk::Husk;
use super::locks::Contended;
use super::missing::Watched;
use super::objects::Objects;
use super::{credentials, emptied, layout, mapper, state, stopped, threads};
use crate::priority::Hurry;
use crate::process::donor::features;
use crate::process::error::{Error, Result};
use crate::process::files::Stock;
use crate::process::image::{Content, Frozen, PagesIn, Process, Run, Space, Tree, each};
use crate::process::rights::Rights;
use crate::process::trace::{Stop, wait_for};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

/// A tree under restoration.
#[derive(Debug, Default)]
pub(super) struct Restoration {
    pub(super) tree: Tree,
    pub(super) objects: Objects,
    /// Empty processes by index in the tree; `None` for a zombie.
    pub(super) husks: Vec<Option<Husk>>,
    stub: u64,
    /// Socket pair over which processes get open files.
    door: Option<Rc<Door>>,
    /// Both vDSOs, if the original's differs from this kernel's.
    foreign: Option<Foreign>,
    /// Placeholder processes for process groups without a leader in the tree.
    pub(super) bearers: Vec<i32>,
    pub(super) frozen: Option<Frozen>,
    /// Result of [`Restoration::prepare`], if that ran in time.
    pub(super) prepared: Option<Result<()>>,
    /// Raised priority while the original is stopped.
    pub(super) hurry: Option<Hurry>,
    /// Open files, once the daemon has sent them.
    pub(super) stock: Option<Stock>,
    /// True if the store has the descriptors of the stopped tree.
    pub(super) stock_is_final: bool,
    /// Locks that another process still holds.
    pub(super) contended: Contended,
    /// Memory that post-copy delivers.
    pub(super) watched: Watched,
}

impl Restoration {
    /// Returns the root's PID.
    pub fn root(&self) -> i32 {
        self.tree.processes.first().map_or(0, |root| root.pid)
    }

    /// Returns true if the tree has all of its state and can be resumed.
    pub fn is_complete(&self) -> bool {
        self.frozen.is_some()
    }

    /// Returns the state that the tree has received.
    pub(super) fn state(&self) -> Option<&Frozen> {
        self.frozen.as_ref()
    }

    /// Sets the rights with which the tree's files are opened.
    pub fn set_rights(&mut self, rights: Rights) -> Result<()> {
        if !self.husks.is_empty() {
            return Err(Error::Image("rights out of order"));
        }
        self.objects.set_rights(rights);
        if self.objects.is_bounded() {
            // Root may exceed its limits, but a process without root's rights may not. Each process gets its own
            // limits at the end.
            raise_limits();
        }
        Ok(())
    }

    /// Adjusts processes, threads and mappings to `tree`.
    pub fn tree(&mut self, tree: Tree) -> Result<()> {
        self.is_open()?;
        // If a freeze was undone, this round sends the pages that post-copy would have delivered.
        self.watched = Watched::default();
        if self.husks.is_empty() {
            self.foreign = Foreign::of(&tree)?;
        }
        let gone = self.objects.gone_segments(&tree);
        for husk in self.husks.iter_mut().flatten() {
            mapper::detach(husk, &gone)?;
        }
        self.objects.drop_segments(&gone)?;
        self.objects.follow(&tree)?;
        let mut directories = Vec::new();
        if self.husks.is_empty() {
            directories = self.objects.directories(&tree);
            self.door = Some(Rc::new(Door::new()?));
            self.stub = layout::stub_address(&tree)?;
            self.bearers = groups_without_leader(&tree);
        } else if !layout::stub_is_free(&tree, self.stub) {
            return Err(Error::Refused(
                "the original has taken the stub's addresses; try again".to_owned(),
            ));
        }
        self.follow_processes(&tree, &directories)?;
        for (process, husk) in tree.processes.iter().zip(&mut self.husks) {
            if let Some(husk) = husk {
                if let Some(foreign) = &husk.foreign {
                    foreign.check(process)?;
                }
                mapper::reconcile(husk, process, &self.objects)?;
                mapper::guard(husk, process)?;
                threads::reconcile(husk, process)?;
            }
        }
        self.tree = tree;
        Ok(())
    }

    /// Refuses further changes once processes have their state.
    pub(super) fn is_open(&self) -> Result<()> {
        match self.is_complete() {
            true => Err(Error::Image("a message behind the state")),
            false => Ok(()),
        }
    }

    /// Writes memory. All of it must lie in the process's own mappings, never in the stub, the vDSO or elsewhere.
    pub fn pages(&mut self, pages: &PagesIn<'_>) -> Result<()> {
        self.is_open()?;
        for run in &pages.runs {
            if let Space::Process(index) = run.space
                && !self.husk(index)?.may_hold(run)
            {
                return Err(Error::Image("pages outside the mappings of their process"));
            }
        }
        for (alike, bytes) in pages.alike() {
            match (alike[0].space, alike[0].content) {
                (Space::Process(index), Content::Bytes) => {
                    let place = |run: &Run| (run.start, run.length as usize);
                    let places: Vec<(u64, usize)> = alike.iter().map(place).collect();
                    self.husk(index)?.memory.write_places(&places, bytes)?;
                }
                (Space::Process(index), Content::Fresh) => self.freshen(index, alike)?,
                (Space::Shared(index), _) => {
                    for (run, bytes) in each(alike, bytes) {
                        self.objects.write(index, run, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Tests the parts of the state that can fail for reasons visible while the original runs. The state itself is
    /// set later.
    pub fn outlook(&self, outlook: &Frozen) -> Result<()> {
        self.is_open()?;
        if outlook.processes.len() != self.tree.processes.len() {
            return Err(Error::Image("state of other processes"));
        }
        for (husk, state) in self.husks.iter().zip(&outlook.processes) {
            if let (Some(husk), Some(state)) = (husk, state) {
                state::try_out(husk, state)?;
            }
        }
        Ok(())
    }

    /// Gives processes and threads their state, and takes their locks.
    pub fn frozen(&mut self, frozen: Frozen) -> Result<()> {
        self.is_open()?;
        if self.stock.is_some() != self.stock_is_final {
            return Err(Error::Image("state before the last descriptors"));
        }
        if frozen.processes.len() != self.tree.processes.len() {
            return Err(Error::Image("state of other processes"));
        }
        for (husk, state) in self.husks.iter_mut().zip(&frozen.processes) {
            if let (Some(husk), Some(state)) = (husk, state) {
                husk.avoid(state::signals_to_come(state));
            }
        }
        stopped::stop(&self.tree, &self.husks, &frozen)?;
        let processes = self.tree.processes.iter().zip(&self.husks);
        let mut becoming = Vec::with_capacity(self.husks.len());
        for (index, ((process, husk), state)) in (0..).zip(processes.zip(&frozen.processes)) {
            match (husk, state) {
                (Some(husk), Some(state)) if state.threads.len() == process.threads.len() => {
                    if let Some(foreign) = &husk.foreign {
                        foreign.check_threads(
                            husk,
                            state,
                            self.watched.missing.of_process(index),
                        )?;
                    }
                    becoming.push((husk, process, state));
                }
                (None, None) => {}
                _ => return Err(Error::Image("state of other threads")),
            }
        }
        state::restore_all(&becoming, &self.objects)?;
        self.objects.finish_segments()?;
        for husk in self.living() {
            husk.close_door()?;
        }
        self.take_locks()?;
        self.frozen = Some(frozen);
        Ok(())
    }

    pub(super) fn husk(&self, index: u32) -> Result<&Husk> {
        self.husks
            .get(index as usize)
            .and_then(Option::as_ref)
            .ok_or(Error::Image("pages of an unknown process"))
    }

    /// Resets pages to the content of a new mapping.
    fn freshen(&self, index: u32, runs: &[Run]) -> Result<()> {
        let husk = self.husk(index)?;
        for some in runs.chunks(500) {
            let mut script = husk.script();
            for run in some {
                script.call(
                    "madvise",
                    libc::SYS_madvise,
                    &[run.start, run.length, libc::MADV_DONTNEED as u64],
                );
            }
            husk.run(script)?;
        }
        Ok(())
    }

    /// Makes the processes that are new, and ends the processes that are gone.
    fn follow_processes(&mut self, tree: &Tree, directories: &[Option<OwnedFd>]) -> Result<()> {
        let is_first = self.husks.is_empty();
        self.end_gone(tree)?;
        let before = self.tree.processes.iter().map(|process| process.pid);
        let mut known: HashMap<i32, Option<Husk>> = before.zip(self.husks.drain(..)).collect();
        let mut fresh = false;
        for process in &tree.processes {
            let husk = match known.remove(&process.pid) {
                Some(husk) if husk.is_some() || process.exit_status.is_some() => husk,
                _ => {
                    fresh = true;
                    Some(self.make(tree, process)?)
                }
            };
            self.husks.push(husk);
            self.renew(process)?;
        }
        if fresh {
            self.group(tree)?;
        }
        if self.objects.is_bounded() {
            self.lower(tree, is_first.then_some(directories))?;
        }
        self.end_zombies(tree)
    }

    /// Makes empty processes give up the restorer's rights, before they receive anything of the image. Processes made
    /// later inherit their parents' credentials.
    fn lower(&mut self, tree: &Tree, first: Option<&[Option<OwnedFd>]>) -> Result<()> {
        let processes = tree.processes.iter().zip(&mut self.husks);
        for (at, (process, husk)) in processes.enumerate() {
            let Some(husk) = husk.as_mut().filter(|_| process.exit_status.is_none()) else {
                continue;
            };
            match (first, &husk.who) {
                (Some(directories), _) => {
                    let directory = directories.get(at).and_then(Option::as_ref);
                    credentials::lower(husk, process, directory.map(AsFd::as_fd))?;
                }
                (None, Some(who)) => {
                    let (credentials, limited) = (&process.credentials, process.no_new_privileges);
                    who.check(process.pid, credentials, limited)?;
                }
                (None, None) => return Err(Error::Image("a husk with the restorer's rights")),
            }
        }
        Ok(())
    }

    /// Ends processes that have ended at the donor or were replaced under the same PID, children before parents.
    fn end_gone(&mut self, tree: &Tree) -> Result<()> {
        let stays = |process: &Process, zombie: bool| {
            let same = |other: &&Process| {
                other.pid == process.pid && other.parent.is_none() == process.parent.is_none()
            };
            let new = tree.processes.iter().find(same);
            new.is_some_and(|new| !zombie || new.exit_status.is_some())
        };
        for at in (0..self.husks.len()).rev() {
            let process = &self.tree.processes[at];
            if stays(process, self.husks[at].is_none()) {
                continue;
            }
            let Some(parent) = process.parent.map(|parent| parent as usize) else {
                return Err(Error::Refused(
                    "the root of the tree was replaced".to_owned(),
                ));
            };
            if self.husks[at].is_some() {
                // SAFETY: no pointers are passed; an empty process belongs to the restorer alone.
                unsafe { libc::kill(process.pid, libc::SIGKILL) };
                let _ = wait_for(process.pid, Duration::from_secs(10));
            }
            if let Some(parent) = &self.husks[parent] {
                let mut script = parent.script();
                script.attempt(
                    libc::SYS_wait4,
                    &[process.pid as u64, 0, libc::__WALL as u64, 0],
                );
                parent.run(script)?;
            }
            self.husks.remove(at);
            self.tree.processes.remove(at);
        }
        Ok(())
    }

    fn make(&self, tree: &Tree, process: &Process) -> Result<Husk> {
        let mut husk = match process.parent {
            None => {
                let door = self
                    .door
                    .as_ref()
                    .ok_or(Error::Image("no way for descriptors"))?;
                birth::root(process, self.stub, &self.bearers, door)?
            }
            Some(parent) => {
                let parent_session = tree.processes[parent as usize].session;
                let parent = self.husk(parent)?;
                let inherits = process.session == process.pid || process.session == parent_session;
                match self.sharer(tree, process)? {
                    Some(husk) => birth::child(parent, process, Maker { husk, shares: true })?,
                    None if inherits => {
                        let maker = Maker {
                            husk: parent,
                            shares: false,
                        };
                        birth::child(parent, process, maker)?
                    }
                    None => self.make_in_session(tree, parent, process)?,
                }
            }
        };
        if process.parent.is_some() && process.session == process.pid {
            let mut script = husk.script();
            script.call("setsid", libc::SYS_setsid, &[]);
            husk.run(script)?;
        }
        check_features(tree, &husk)?;
        emptied::empty(&mut husk, process, self.foreign.as_ref())?;
        Ok(husk)
    }

    /// Makes a child in another session than its parent's. The donor's process that made it there has ended.
    fn make_in_session(&self, tree: &Tree, parent: &Husk, process: &Process) -> Result<Husk> {
        let made = tree.processes.iter().zip(&self.husks);
        let mut living = made.filter_map(|(other, husk)| Some((other, husk.as_ref()?)));
        let is_sibling =
            |other: &Process| (other.session, other.parent) == (process.session, process.parent);
        if let Some((_, husk)) = living.find(|(other, _)| is_sibling(other)) {
            let maker = Maker {
                husk,
                shares: false,
            };
            return birth::child(parent, process, maker);
        }
        birth::child_of_ended_session(parent, process).map_err(|error| {
            Error::Refused(format!(
                "session {} of process {} cannot be made again: {error}",
                process.session, process.pid
            ))
        })
    }

    /// Returns the process that has the descriptor table to share and can make the new process.
    fn sharer(&self, tree: &Tree, process: &Process) -> Result<Option<&Husk>> {
        let Some(other) = process.table_of else {
            return Ok(None);
        };
        let related = process.parent == Some(other)
            || process.parent == tree.processes[other as usize].parent;
        if !related {
            let message = format!(
                "process {} shares its descriptors with a distant relative",
                process.pid
            );
            return Err(Error::Refused(message));
        }
        self.husk(other).map(Some)
    }

    /// Resets a process that has called `exec`.
    fn renew(&mut self, process: &Process) -> Result<()> {
        match self.husks.last_mut() {
            Some(Some(husk)) if husk.generation != process.generation => {
                husk.generation = process.generation;
                emptied::empty(husk, process, self.foreign.as_ref())
            }
            _ => Ok(()),
        }
    }

    fn group(&self, tree: &Tree) -> Result<()> {
        let pairs = tree.processes.iter().zip(&self.husks);
        let living: Vec<(&Process, &Husk)> = pairs
            .filter_map(|(process, husk)| husk.as_ref().map(|husk| (process, husk)))
            .collect();
        birth::groups(&living)
    }

    /// Ends the processes of zombies, which have ended and have not been waited for.
    fn end_zombies(&mut self, tree: &Tree) -> Result<()> {
        for (process, slot) in tree.processes.iter().zip(&mut self.husks) {
            let Some(status) = process.exit_status else {
                continue;
            };
            let Some(husk) = slot.take() else {
                continue;
            };
            let signal = status & 0x7f;
            if signal == 0 {
                let mut script = husk.script();
                script.attempt(libc::SYS_exit_group, &[(status >> 8 & 0xff) as u64]);
                let _ = husk.run(script);
                continue;
            }
            husk.first().set_mask(0)?;
            // SAFETY: no pointers are passed; an empty process belongs to the restorer alone.
            unsafe { libc::kill(husk.pid, signal) };
            let mut give = 0;
            loop {
                match husk.first().resume(give) {
                    // The process is dead, and its status can be collected.
                    Err(Error::Gone(_)) => {}
                    other => other?,
                }
                match wait_for(husk.pid, Duration::from_secs(10))? {
                    Stop::Ended(_) => break,
                    Stop::Signal(received) => give = received,
                    _ => give = 0,
                }
            }
        }
        Ok(())
    }
}

/// Raises the limits for processes, signals and locked memory as far as this process may, for empty processes to
/// inherit.
fn raise_limits() {
    for resource in [Resource::Nproc, Resource::Sigpending, Resource::Memlock] {
        let limit = getrlimit(resource);
        let raised = Rlimit {
            current: limit.maximum,
            ..limit
        };
        // If this fails, the low limit is the reason that a later step reports.
        let _ = setrlimit(resource, raised);
    }
}

/// Returns the tree's process groups without a leader in it, except the group of a session leader outside of the
/// tree.
fn groups_without_leader(tree: &Tree) -> Vec<i32> {
    let session = tree.processes.first().map_or(0, |root| root.session);
    let is_there =
        |pid: i32| pid == session || tree.processes.iter().any(|process| process.pid == pid);
    let mut groups: Vec<i32> = tree.processes.iter().map(|process| process.group).collect();
    groups.retain(|group| !is_there(*group));
    groups.sort_unstable();
    groups.dedup();
    // Their number must fit into 7 bits of a byte.
    groups.truncate(100);
    groups
}

fn check_features(tree: &Tree, husk: &Husk) -> Result<()> {
    let here = features(&husk.first().extended()?);
    let missing = tree.register_features & !here;
    if missing != 0 {
        return Err(Error::Refused(format!(
            "its processor lacks registers of the donor's (XCR0 bits {missing:#x})"
        )));
    }
    Ok(())
}
