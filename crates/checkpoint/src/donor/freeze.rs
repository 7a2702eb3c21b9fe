//! The freeze: a stopped tree.

use super::halt::HaltedProcess;
use super::lock_handover::LockHandover;
use super::precopy_round::PrecopyRound;
use super::process_state;
use super::tree_tracker::{TrackedProcess, TreeTracker};
use crate::error::{Context, Error, Result, check_long};
use crate::files::image::FileId;
use crate::files::{DescriptorCopier, SocketFds};
use crate::image::{PageRun, PagesMessage, ProcessTreeState, SharedMemory, TreeLayout};
use crate::inspect;
use crate::procfs::ProcStat;
use crate::sockets::FrozenSockets;
use crate::system_v_memory;
use holdfast_tcp_repair::abandon;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Longest time in which a tree may change at each attempt to stop it.
const HALT_TIMEOUT: Duration = Duration::from_secs(10);

/// A stopped tree, until it is thawed or ended. Dropping it thaws the tree.
#[derive(Debug)]
pub struct StoppedTree {
    // Dropped first: sockets resume before the processes that use them.
    pub(super) sockets: FrozenSockets,
    // Places of all sockets, and IDs of the copied ones. The others were snapshotted and not touched.
    pub(super) socket_places: SocketFds,
    pub(super) copied_sockets: BTreeSet<FileId>,
    // Dropped, and so resumed, before the tracker removes its stubs.
    pub(super) halted: Vec<Option<HaltedProcess>>,
    pub(super) round: PrecopyRound,
    // Runs of the round that were left to post-copy.
    pub(super) postcopy_runs: Vec<PageRun>,
    /// Exclusive locks that are being handed over to the acceptor.
    pub(super) lock_handovers: Vec<LockHandover>,
    pub(super) tracker: TreeTracker,
}

/// A tree that could not be stopped, and runs on.
#[derive(Debug)]
pub struct FreezeFailure {
    /// Tracker, which still watches the tree.
    pub tracker: TreeTracker,
    /// Reason of the failure.
    pub error: Error,
}

impl TreeTracker {
    /// Stops the tree and finds the changes still to be sent. On failure the tree runs on.
    ///
    /// # Errors
    /// [`Error::StopTimeout`]; [`Error::Blocked`] if something that cannot move has appeared; [`Error::ProcessEnded`].
    pub fn freeze(mut self) -> std::result::Result<StoppedTree, Box<FreezeFailure>> {
        let began = Instant::now();
        loop {
            let mut halted = Vec::new();
            let outcome = self.halt_tree(&mut halted);
            let error = match outcome.and_then(|()| self.collect_stopped(&halted)) {
                Ok(round) => return Ok(self.stopped_tree(halted, round)),
                Err(error) => error,
            };
            // A process may have called `exec` and have the same layout of memory as before.
            let is_late = began.elapsed() > HALT_TIMEOUT;
            let is_changed = !is_late && self.tree_changed(&error);
            drop(halted);
            if !is_changed {
                return Err(self.freeze_failure(error));
            }
            match self.update_processes() {
                Err(error) if !self.tree_changed(&error) => return Err(self.freeze_failure(error)),
                _ => {}
            }
        }
    }

    fn collect_stopped(&mut self, halted: &[Option<HaltedProcess>]) -> Result<PrecopyRound> {
        self.step_out_of_vdso(halted)?;
        self.collect_round(Some(halted))
    }

    fn stopped_tree(self, halted: Vec<Option<HaltedProcess>>, round: PrecopyRound) -> StoppedTree {
        StoppedTree {
            sockets: FrozenSockets::default(),
            socket_places: SocketFds::default(),
            copied_sockets: BTreeSet::new(),
            halted,
            round,
            postcopy_runs: Vec::new(),
            lock_handovers: Vec::new(),
            tracker: self,
        }
    }

    fn freeze_failure(self, error: Error) -> Box<FreezeFailure> {
        Box::new(FreezeFailure {
            tracker: self,
            error,
        })
    }

    /// Stops every process, including processes forked meanwhile. What has stopped stays stopped while the tracker attaches to
    /// new processes: a tree whose processes come and go all the time does not stay as it is for the duration of a stop.
    fn halt_tree(&mut self, halted: &mut Vec<Option<HaltedProcess>>) -> Result<()> {
        let began = Instant::now();
        loop {
            self.halt_running(halted)?;
            if self.is_whole_tree_halted(halted)? {
                return Ok(());
            }
            if began.elapsed() > HALT_TIMEOUT {
                return Err(Error::StopTimeout(self.root));
            }
            *halted = self.update_processes_around(std::mem::take(halted))?;
        }
    }

    /// Stops the processes that are not stopped yet.
    fn halt_running(&self, halted: &mut Vec<Option<HaltedProcess>>) -> Result<()> {
        halted.resize_with(self.processes.len(), || None);
        let is_running = |(tracked, halted): &(&TrackedProcess, &Option<HaltedProcess>)| {
            tracked.watched.is_some() && halted.is_none()
        };
        let running = self.processes.iter().zip(&*halted).filter(is_running);
        let running: Vec<i32> = running.map(|(tracked, _)| tracked.pid).collect();
        let mut stopped = HaltedProcess::stop_processes(&running).into_iter();
        // Collect all results before the first failure counts: the caller resumes the processes that have stopped.
        let mut failure = None;
        for (tracked, halted) in self.processes.iter().zip(halted) {
            if tracked.watched.is_none() || halted.is_some() {
                continue;
            }
            match stopped.next() {
                Some(Ok(one)) => *halted = Some(one),
                Some(Err(Error::ProcessEnded(_))) if tracked.pid != self.root => {}
                Some(Err(error)) => drop(failure.get_or_insert(error)),
                None => {}
            }
        }
        failure.map_or(Ok(()), Err)
    }

    fn is_whole_tree_halted(&self, halted: &[Option<HaltedProcess>]) -> Result<bool> {
        let mut pairs = self.processes.iter().zip(halted);
        if !pairs.all(|(tracked, halted)| tracked.watched.is_some() == halted.is_some()) {
            return Ok(false);
        }
        let known: Vec<i32> = self.processes.iter().map(|tracked| tracked.pid).collect();
        Ok(inspect::is_whole_tree(&known)? && self.is_tree_unchanged()?)
    }

    /// Returns true if no process has ended or called `exec` since the tracker attached to it.
    fn is_tree_unchanged(&self) -> Result<bool> {
        for tracked in &self.processes {
            let stat = match ProcStat::read(tracked.pid) {
                Err(Error::ProcessEnded(pid)) if pid != self.root => return Ok(false),
                other => other?,
            };
            let has_ended = matches!(stat.state, 'Z' | 'X');
            let is_unchanged = match &tracked.watched {
                Some(watched) => !has_ended && watched.has_same_memory(&stat),
                None => has_ended,
            };
            if !is_unchanged {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl StoppedTree {
    /// Returns the processes, threads and mappings to be recreated.
    #[must_use]
    pub fn tree(&self) -> &TreeLayout {
        &self.round.tree
    }

    /// Returns the number of bytes of memory still to be read and sent.
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.round.remaining_bytes()
    }

    /// Reads the next pages, about `limit` bytes; `None` when all were read.
    ///
    /// # Errors
    /// A page cannot be read: a stopped tree must be read completely.
    pub fn read_pages(&mut self, limit: u64) -> Result<Option<PagesMessage>> {
        let before = self.round.remaining_bytes();
        let pages = self.tracker.read_pages(&mut self.round, limit)?;
        let read = pages.as_ref().map_or(0, |pages| pages.bytes.len() as u64);
        if before - self.round.remaining_bytes() != read {
            return Err(Error::Image("memory of a stopped process cannot be read"));
        }
        Ok(pages)
    }

    /// Returns registers, signals, timers and other state.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_state(&self) -> Result<ProcessTreeState> {
        let mut stopped = Vec::with_capacity(self.halted.len());
        for (halted, tracked) in self.halted.iter().zip(&self.tracker.processes) {
            let attachment = tracked.watched.as_ref().map(|watched| &watched.attachment);
            stopped.push(halted.as_ref().zip(attachment));
        }
        let living: Vec<_> = stopped.iter().flatten().copied().collect();
        let mut states = process_state::read_processes(&living)?.into_iter();
        let processes = stopped.iter().map(|pair| pair.and_then(|_| states.next()));
        Ok(ProcessTreeState {
            processes: processes.collect(),
        })
    }

    /// Returns PID file descriptors of the processes. Each becomes readable when its process has ended and closed all
    /// of its descriptors.
    pub fn pidfds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let watched = self.tracker.processes.iter();
        let watched = watched.filter_map(|tracked| tracked.watched.as_ref());
        watched.map(|watched| watched.attachment.process.as_fd())
    }

    /// Thaws the tree, which runs on as if there had been no freeze and stays tracked.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn thaw(mut self) -> Result<TreeTracker> {
        let _priority_boost = self.tracker.raise_priority();
        self.postcopy_runs
            .drain(..)
            .for_each(|run| self.round.push(run));
        self.tracker.return_unread(&self.round);
        self.sockets.resume();
        for halted in self.halted.into_iter().flatten() {
            halted.thaw()?;
        }
        Ok(self.tracker)
    }

    /// Thaws the tree and removes the tracker's objects from it, in one stop.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn roll_back(mut self) -> Result<()> {
        let _priority_boost = self.tracker.raise_priority();
        self.sockets.resume();
        for (halted, tracked) in self.halted.drain(..).zip(self.tracker.processes.drain(..)) {
            if let (Some(mut halted), Some(watched)) = (halted, tracked.watched) {
                halted.cancel_pending_sigstop();
                watched.remove_stub(&halted)?;
                halted.thaw()?;
            }
        }
        Ok(())
    }

    /// Ends the original, which runs elsewhere.
    ///
    /// # Errors
    /// The kernel's error; some processes of the tree are then still stopped.
    pub fn release(mut self) -> Result<()> {
        self.sockets.abandon();
        let mut copier = DescriptorCopier::default();
        for place in self.uncopied_sockets() {
            // A socket that is closed already sends nothing either.
            let _ = copier
                .copy(place)
                .is_ok_and(|copy| abandon(copy.as_fd()).is_ok());
        }
        let segments = self
            .tree()
            .shared_memory
            .iter()
            .filter_map(SharedMemory::segment);
        let remaining_segments: Vec<i32> = segments
            .filter(|segment| !segment.is_marked_removed && !segment.is_gone)
            .map(|segment| segment.id)
            .collect();
        if !remaining_segments.is_empty() {
            // Segments would outlive the processes. A segment that cannot be removed does no harm.
            let _ = system_v_memory::remove(self.tracker.root, remaining_segments);
        }
        for tracked in self.tracker.processes.iter().rev() {
            let Some(watched) = &tracked.watched else {
                continue;
            };
            let process = watched.attachment.process.as_raw_fd();
            // SAFETY: no pointers but a null one are passed.
            let outcome = unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    process,
                    libc::SIGKILL,
                    std::ptr::null::<()>(),
                    0,
                )
            };
            match check_long(outcome) {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                other => drop(other.context(|| format!("ending process {}", tracked.pid))?),
            }
        }
        for halted in self.halted.drain(..).flatten() {
            halted.detach();
        }
        self.tracker.processes.clear();
        Ok(())
    }
}
