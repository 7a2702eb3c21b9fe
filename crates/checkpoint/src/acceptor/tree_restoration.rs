//! State of a restoration, and handlers of the daemon's messages.

use super::fd_channel::FdChannel;
use super::foreign_vdso::VdsoImages;
use super::locks::ContendedLocks;
use super::mapped_object_store::MappedObjectStore;
use super::missing_page_watch::MissingPageWatch;
use super::spawn::{self, Spawner};
use super::stub_process::StubProcess;
use super::{credentials, group_stop, mappings, process_state, stub_placement, threads, unmap};
use crate::donor::xcr0;
use crate::error::{Error, Result};
use crate::file_rights::FileRights;
use crate::files::FdStore;
use crate::image::{
    BorrowedPages, MemorySpace, PageContent, PageRun, ProcessLayout, ProcessTreeState, TreeLayout,
    runs_with_content,
};
use crate::trace::{StopReason, wait_for_stop};
use holdfast_sys::priority::RealtimeGuard;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

/// A tree under restoration.
#[derive(Debug, Default)]
pub(super) struct TreeRestoration {
    pub(super) tree: TreeLayout,
    pub(super) objects: MappedObjectStore,
    /// Stub processes by index in the tree; `None` for a zombie.
    pub(super) stub_processes: Vec<Option<StubProcess>>,
    stub_address: u64,
    /// Socket pair over which processes get open files.
    fd_channel: Option<Rc<FdChannel>>,
    /// Both vDSOs, if the original's differs from this kernel's.
    foreign_vdso: Option<VdsoImages>,
    /// Placeholder processes for process groups without a leader in the tree.
    pub(super) group_holders: Vec<i32>,
    pub(super) frozen: Option<ProcessTreeState>,
    /// Result of [`TreeRestoration::prepare_resume`], if that ran in time.
    pub(super) resume_preparation: Option<Result<()>>,
    /// Raised priority while the original is stopped.
    pub(super) realtime_guard: Option<RealtimeGuard>,
    /// Open files, once the daemon has sent them.
    pub(super) fd_store: Option<FdStore>,
    /// True if the store has the descriptors of the stopped tree.
    pub(super) fd_store_is_final: bool,
    /// Locks that another process still holds.
    pub(super) contended_locks: ContendedLocks,
    /// Memory that post-copy delivers.
    pub(super) missing_pages: MissingPageWatch,
}

impl TreeRestoration {
    /// Returns the root's PID.
    pub fn root(&self) -> i32 {
        self.tree.processes.first().map_or(0, |root| root.pid)
    }

    /// Returns true if the tree has all of its state and can be resumed.
    pub fn is_complete(&self) -> bool {
        self.frozen.is_some()
    }

    /// Returns the state that the tree has received.
    pub(super) fn received_state(&self) -> Option<&ProcessTreeState> {
        self.frozen.as_ref()
    }

    /// Sets the rights with which the tree's files are opened.
    pub fn set_rights(&mut self, rights: FileRights) -> Result<()> {
        if !self.stub_processes.is_empty() {
            return Err(Error::Image("rights came after the first tree"));
        }
        self.objects.set_rights(rights);
        if self.objects.has_limited_rights() {
            // Root may exceed its limits, but a process without root's rights may not. Each process gets its own
            // limits at the end.
            raise_limits();
        }
        Ok(())
    }

    /// Adjusts processes, threads and mappings to `tree`.
    pub fn update_tree(&mut self, tree: TreeLayout) -> Result<()> {
        self.check_not_complete()?;
        // Pages that an undone freeze had left to post-copy arrive in this round of the copy.
        self.missing_pages = MissingPageWatch::default();
        if self.stub_processes.is_empty() {
            self.foreign_vdso = VdsoImages::compare_vdsos(&tree)?;
        }
        let removed_segments = self.objects.removed_segments(&tree);
        for stub_process in self.stub_processes.iter_mut().flatten() {
            mappings::unmap_shared(stub_process, &removed_segments)?;
        }
        self.objects.remove_segments(&removed_segments)?;
        self.objects.update(&tree)?;
        let mut directories = Vec::new();
        if self.stub_processes.is_empty() {
            directories = self.objects.open_exempt_directories(&tree);
            self.fd_channel = Some(Rc::new(FdChannel::new()?));
            self.stub_address = stub_placement::stub_address(&tree)?;
            self.group_holders = leaderless_groups(&tree);
        } else if !stub_placement::stub_is_free(&tree, self.stub_address) {
            return Err(Error::Refused(
                "the original has mapped memory at the stub's addresses; try again".to_owned(),
            ));
        }
        self.update_processes(&tree, &directories)?;
        for (process, stub_process) in tree.processes.iter().zip(&mut self.stub_processes) {
            if let Some(stub_process) = stub_process {
                if let Some(foreign) = &stub_process.foreign_vdso {
                    foreign.check_addresses(process)?;
                }
                mappings::reconcile_mappings(stub_process, process, &self.objects)?;
                mappings::reconcile_guards(stub_process, process)?;
                threads::reconcile_threads(stub_process, process)?;
            }
        }
        self.tree = tree;
        Ok(())
    }

    /// Refuses further changes once processes have their state.
    pub(super) fn check_not_complete(&self) -> Result<()> {
        match self.is_complete() {
            true => Err(Error::Image("a message came after the state")),
            false => Ok(()),
        }
    }

    /// Writes memory. All of it must lie in the process's own mappings, never in the stub, the vDSO or elsewhere.
    pub fn write_pages(&mut self, pages: &BorrowedPages<'_>) -> Result<()> {
        self.check_not_complete()?;
        for run in &pages.runs {
            if let MemorySpace::Process(index) = run.space
                && !self.stub_process(index)?.contains_run(run)
            {
                return Err(Error::Image("pages outside the mappings of their process"));
            }
        }
        for (runs, bytes) in pages.groups() {
            match (runs[0].space, runs[0].content) {
                (MemorySpace::Process(index), PageContent::Bytes) => {
                    let range_of = |run: &PageRun| (run.start, run.length as usize);
                    let ranges: Vec<(u64, usize)> = runs.iter().map(range_of).collect();
                    self.stub_process(index)?
                        .memory
                        .write_ranges(&ranges, bytes)?;
                }
                (MemorySpace::Process(index), PageContent::Initial) => {
                    self.reset_pages(index, runs)?
                }
                (MemorySpace::Shared(index), _) => {
                    for (run, bytes) in runs_with_content(runs, bytes) {
                        self.objects.write_shared(index, run, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Tests the parts of the state that can fail for reasons visible while the original runs. The state itself is
    /// set later.
    pub fn check_state_preview(&self, outlook: &ProcessTreeState) -> Result<()> {
        self.check_not_complete()?;
        if outlook.processes.len() != self.tree.processes.len() {
            return Err(Error::Image(
                "the state does not match the tree's processes",
            ));
        }
        for (stub_process, state) in self.stub_processes.iter().zip(&outlook.processes) {
            if let (Some(stub_process), Some(state)) = (stub_process, state) {
                process_state::check_restorable(stub_process, state)?;
            }
        }
        Ok(())
    }

    /// Gives processes and threads their state, and takes their locks.
    pub fn restore_state(&mut self, frozen: ProcessTreeState) -> Result<()> {
        self.check_not_complete()?;
        if self.fd_store.is_some() != self.fd_store_is_final {
            return Err(Error::Image("the state came before the last descriptors"));
        }
        if frozen.processes.len() != self.tree.processes.len() {
            return Err(Error::Image(
                "the state does not match the tree's processes",
            ));
        }
        for (stub_process, state) in self.stub_processes.iter_mut().zip(&frozen.processes) {
            if let (Some(stub_process), Some(state)) = (stub_process, state) {
                stub_process.choose_stub_exit_signal(process_state::expected_signals(state));
            }
        }
        group_stop::stop_like_originals(&self.tree, &self.stub_processes, &frozen)?;
        let processes = self.tree.processes.iter().zip(&self.stub_processes);
        let mut targets = Vec::with_capacity(self.stub_processes.len());
        for (index, ((process, stub_process), state)) in (0..).zip(processes.zip(&frozen.processes))
        {
            match (stub_process, state) {
                (Some(stub_process), Some(state))
                    if state.threads.len() == process.threads.len() =>
                {
                    if let Some(foreign) = &stub_process.foreign_vdso {
                        foreign.check_threads(
                            stub_process,
                            state,
                            self.missing_pages.missing.ranges_of_process(index),
                        )?;
                    }
                    targets.push((stub_process, process, state));
                }
                (None, None) => {}
                _ => return Err(Error::Image("the state does not match the tree's threads")),
            }
        }
        process_state::restore_processes(&targets, &self.objects)?;
        self.objects.set_segment_permissions()?;
        for stub_process in self.living_processes() {
            stub_process.close_channel()?;
        }
        self.take_locks()?;
        self.frozen = Some(frozen);
        Ok(())
    }

    pub(super) fn stub_process(&self, index: u32) -> Result<&StubProcess> {
        self.stub_processes
            .get(index as usize)
            .and_then(Option::as_ref)
            .ok_or(Error::Image("pages of an unknown process"))
    }

    /// Resets pages to the content of a new mapping.
    fn reset_pages(&self, index: u32, runs: &[PageRun]) -> Result<()> {
        let stub_process = self.stub_process(index)?;
        for chunk in runs.chunks(500) {
            let mut script = stub_process.script();
            for run in chunk {
                script.add_call(
                    "madvise",
                    libc::SYS_madvise,
                    &[run.start, run.length, libc::MADV_DONTNEED as u64],
                );
            }
            stub_process.run_script(script)?;
        }
        Ok(())
    }

    /// Makes the processes that are new, and ends the processes that are gone.
    fn update_processes(
        &mut self,
        tree: &TreeLayout,
        directories: &[Option<OwnedFd>],
    ) -> Result<()> {
        let is_first = self.stub_processes.is_empty();
        self.end_removed(tree)?;
        let before = self.tree.processes.iter().map(|process| process.pid);
        let mut known: HashMap<i32, Option<StubProcess>> =
            before.zip(self.stub_processes.drain(..)).collect();
        let mut has_new = false;
        for process in &tree.processes {
            let stub_process = match known.remove(&process.pid) {
                Some(stub_process) if stub_process.is_some() || process.exit_status.is_some() => {
                    stub_process
                }
                _ => {
                    has_new = true;
                    Some(self.make_process(tree, process)?)
                }
            };
            self.stub_processes.push(stub_process);
            self.reset_after_exec(process)?;
        }
        if has_new {
            self.restore_process_groups(tree)?;
        }
        if self.objects.has_limited_rights() {
            self.lower_credentials(tree, is_first.then_some(directories))?;
        }
        self.end_zombies(tree)
    }

    /// Makes stub processes give up the restorer's rights, before they receive anything of the image. Processes made
    /// later inherit their parents' credentials.
    fn lower_credentials(
        &mut self,
        tree: &TreeLayout,
        first_directories: Option<&[Option<OwnedFd>]>,
    ) -> Result<()> {
        let processes = tree.processes.iter().zip(&mut self.stub_processes);
        for (at, (process, stub_process)) in processes.enumerate() {
            let Some(stub_process) = stub_process
                .as_mut()
                .filter(|_| process.exit_status.is_none())
            else {
                continue;
            };
            match (first_directories, &stub_process.lowered_credentials) {
                (Some(directories), _) => {
                    let directory = directories.get(at).and_then(Option::as_ref);
                    credentials::lower_credentials(
                        stub_process,
                        process,
                        directory.map(AsFd::as_fd),
                    )?;
                }
                (None, Some(who)) => {
                    let (credentials, limited) = (&process.credentials, process.no_new_privileges);
                    who.check(process.pid, credentials, limited)?;
                }
                (None, None) => {
                    return Err(Error::Image(
                        "a stub process still has the restorer's rights",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Ends processes that have ended at the donor or were replaced under the same PID, children before parents.
    fn end_removed(&mut self, tree: &TreeLayout) -> Result<()> {
        let is_kept = |process: &ProcessLayout, zombie: bool| {
            let is_same_process = |other: &&ProcessLayout| {
                other.pid == process.pid && other.parent.is_none() == process.parent.is_none()
            };
            let new = tree.processes.iter().find(is_same_process);
            new.is_some_and(|new| !zombie || new.exit_status.is_some())
        };
        for at in (0..self.stub_processes.len()).rev() {
            let process = &self.tree.processes[at];
            if is_kept(process, self.stub_processes[at].is_none()) {
                continue;
            }
            let Some(parent) = process.parent.map(|parent| parent as usize) else {
                return Err(Error::Refused(
                    "the tree's root process was replaced".to_owned(),
                ));
            };
            if self.stub_processes[at].is_some() {
                // SAFETY: no pointers are passed; a stub process belongs to the restorer alone.
                unsafe { libc::kill(process.pid, libc::SIGKILL) };
                let _ = wait_for_stop(process.pid, Duration::from_secs(10));
            }
            if let Some(parent) = &self.stub_processes[parent] {
                let mut script = parent.script();
                script.add_optional_call(
                    libc::SYS_wait4,
                    &[process.pid as u64, 0, libc::__WALL as u64, 0],
                );
                parent.run_script(script)?;
            }
            self.stub_processes.remove(at);
            self.tree.processes.remove(at);
        }
        Ok(())
    }

    fn make_process(&self, tree: &TreeLayout, process: &ProcessLayout) -> Result<StubProcess> {
        let mut stub_process = match process.parent {
            None => {
                let fd_channel = self
                    .fd_channel
                    .as_ref()
                    .ok_or(Error::Image("no channel for descriptors"))?;
                spawn::spawn_root(process, self.stub_address, &self.group_holders, fd_channel)?
            }
            Some(parent) => {
                let parent_session = tree.processes[parent as usize].session;
                let parent = self.stub_process(parent)?;
                let inherits = process.session == process.pid || process.session == parent_session;
                match self.table_sharer(tree, process)? {
                    Some(stub_process) => spawn::spawn_child(
                        parent,
                        process,
                        Spawner {
                            stub_process,
                            shares_fd_table: true,
                        },
                    )?,
                    None if inherits => {
                        let maker = Spawner {
                            stub_process: parent,
                            shares_fd_table: false,
                        };
                        spawn::spawn_child(parent, process, maker)?
                    }
                    None => self.make_in_other_session(tree, parent, process)?,
                }
            }
        };
        if process.parent.is_some() && process.session == process.pid {
            let mut script = stub_process.script();
            script.add_call("setsid", libc::SYS_setsid, &[]);
            stub_process.run_script(script)?;
        }
        check_register_features(tree, &stub_process)?;
        unmap::unmap_all(&mut stub_process, process, self.foreign_vdso.as_ref())?;
        Ok(stub_process)
    }

    /// Makes a child in another session than its parent's. The donor's process that made it there has ended.
    fn make_in_other_session(
        &self,
        tree: &TreeLayout,
        parent: &StubProcess,
        process: &ProcessLayout,
    ) -> Result<StubProcess> {
        let made = tree.processes.iter().zip(&self.stub_processes);
        let mut living =
            made.filter_map(|(other, stub_process)| Some((other, stub_process.as_ref()?)));
        let is_sibling = |other: &ProcessLayout| {
            (other.session, other.parent) == (process.session, process.parent)
        };
        if let Some((_, stub_process)) = living.find(|(other, _)| is_sibling(other)) {
            let maker = Spawner {
                stub_process,
                shares_fd_table: false,
            };
            return spawn::spawn_child(parent, process, maker);
        }
        spawn::spawn_in_ended_session(parent, process).map_err(|error| {
            Error::Refused(format!(
                "session {} of process {} cannot be recreated: {error}",
                process.session, process.pid
            ))
        })
    }

    /// Returns the process that has the descriptor table to share and can make the new process.
    fn table_sharer(
        &self,
        tree: &TreeLayout,
        process: &ProcessLayout,
    ) -> Result<Option<&StubProcess>> {
        let Some(other) = process.shares_table_with else {
            return Ok(None);
        };
        let related = process.parent == Some(other)
            || process.parent == tree.processes[other as usize].parent;
        if !related {
            let message = format!(
                "process {} shares its descriptor table with a process that is neither parent nor sibling",
                process.pid
            );
            return Err(Error::Refused(message));
        }
        self.stub_process(other).map(Some)
    }

    /// Resets a process that has called `exec`.
    fn reset_after_exec(&mut self, process: &ProcessLayout) -> Result<()> {
        match self.stub_processes.last_mut() {
            Some(Some(stub_process)) if stub_process.generation != process.generation => {
                stub_process.generation = process.generation;
                unmap::unmap_all(stub_process, process, self.foreign_vdso.as_ref())
            }
            _ => Ok(()),
        }
    }

    fn restore_process_groups(&self, tree: &TreeLayout) -> Result<()> {
        let pairs = tree.processes.iter().zip(&self.stub_processes);
        let living: Vec<(&ProcessLayout, &StubProcess)> = pairs
            .filter_map(|(process, stub_process)| {
                stub_process
                    .as_ref()
                    .map(|stub_process| (process, stub_process))
            })
            .collect();
        spawn::restore_process_groups(&living)
    }

    /// Ends the processes of zombies, which have ended and have not been waited for.
    fn end_zombies(&mut self, tree: &TreeLayout) -> Result<()> {
        for (process, slot) in tree.processes.iter().zip(&mut self.stub_processes) {
            let Some(status) = process.exit_status else {
                continue;
            };
            let Some(stub_process) = slot.take() else {
                continue;
            };
            let signal = status & 0x7f;
            if signal == 0 {
                let mut script = stub_process.script();
                script.add_optional_call(libc::SYS_exit_group, &[(status >> 8 & 0xff) as u64]);
                let _ = stub_process.run_script(script);
                continue;
            }
            stub_process.first_thread().set_signal_mask(0)?;
            // SAFETY: no pointers are passed; a stub process belongs to the restorer alone.
            unsafe { libc::kill(stub_process.pid, signal) };
            let mut signal_to_deliver = 0;
            loop {
                match stub_process.first_thread().resume(signal_to_deliver) {
                    // The process is dead, and its status can be collected.
                    Err(Error::ProcessEnded(_)) => {}
                    other => other?,
                }
                match wait_for_stop(stub_process.pid, Duration::from_secs(10))? {
                    StopReason::Ended(_) => break,
                    StopReason::Signal(received) => signal_to_deliver = received,
                    _ => signal_to_deliver = 0,
                }
            }
        }
        Ok(())
    }
}

/// Raises the limits for processes, signals and locked memory as far as this process may, for stub processes to
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
fn leaderless_groups(tree: &TreeLayout) -> Vec<i32> {
    let session = tree.processes.first().map_or(0, |root| root.session);
    let is_there =
        |pid: i32| pid == session || tree.processes.iter().any(|process| process.pid == pid);
    let mut groups: Vec<i32> = tree.processes.iter().map(|process| process.group).collect();
    groups.retain(|group| !is_there(*group));
    groups.sort_unstable();
    groups.dedup();
    // The temporary leader reports the number of groups in 7 bits of a byte.
    groups.truncate(100);
    groups
}

fn check_register_features(tree: &TreeLayout, stub_process: &StubProcess) -> Result<()> {
    let xcr0 = xcr0(&stub_process.first_thread().extended_registers()?);
    let missing = tree.xcr0 & !xcr0;
    if missing != 0 {
        return Err(Error::Refused(format!(
            "its CPU lacks register sets that the donor's CPU has (XCR0 bits {missing:#x})"
        )));
    }
    Ok(())
}
