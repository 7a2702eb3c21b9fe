//! The tree stands still.

use super::halt::Halted;
use super::locks::GivenLock;
use super::process_state;
use super::round::Round;
use super::tracker::Tracker;
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::files::image::FileId;
use crate::process::files::{Copier, Places};
use crate::process::image::{Frozen, Pages, Run, Shared, Tree};
use crate::process::inspect;
use crate::process::sockets::Held;
use crate::process::system_v;
use crate::tcp_repair::abandon;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// A tree that stands still, until it is let go or ended. Dropping it lets it go.
#[derive(Debug)]
pub struct StoppedTree {
    // They go on before anybody who uses them.
    pub(super) sockets: Held,
    // Where they are, and those of which there are copies: the others were not touched, since they were seen from beside.
    pub(super) places: Places,
    pub(super) copied: BTreeSet<FileId>,
    // Let go before the tracker takes its stubs out.
    pub(super) halted: Vec<Option<Halted>>,
    pub(super) round: Round,
    // Of the round, what was left behind.
    pub(super) behind: Vec<Run>,
    /// Exclusive locks that are on their way to the acceptor.
    pub(super) given: Vec<GivenLock>,
    pub(super) tracker: Tracker,
}

/// A tree that could not be stopped, and runs on.
#[derive(Debug)]
pub struct Unfrozen {
    /// Watches it still.
    pub tracker: Tracker,
    /// Why.
    pub error: Error,
}

impl Tracker {
    /// Stops the tree and finds what is still to be sent. On failure the tree runs on.
    ///
    /// # Errors
    /// [`Error::WouldNotStop`]; [`Error::Blocked`] if something that cannot move has appeared; [`Error::Gone`].
    pub fn freeze(mut self) -> std::result::Result<StoppedTree, Box<Unfrozen>> {
        let mut halted = Vec::new();
        let outcome = self.halt_all(&mut halted).and_then(|()| {
            self.lead_out(&halted)?;
            self.collect(Some(&halted))
        });
        match outcome {
            Ok(round) => Ok(StoppedTree {
                sockets: Held::default(),
                places: Places::default(),
                copied: BTreeSet::new(),
                halted,
                round,
                behind: Vec::new(),
                given: Vec::new(),
                tracker: self,
            }),
            Err(error) => {
                drop(halted);
                Err(Box::new(Unfrozen {
                    tracker: self,
                    error,
                }))
            }
        }
    }

    /// Stops every process, also those that are born meanwhile.
    fn halt_all(&mut self, halted: &mut Vec<Option<Halted>>) -> Result<()> {
        loop {
            let living = self.processes.iter().filter(|of| of.watched.is_some());
            let living: Vec<i32> = living.map(|tracked| tracked.pid).collect();
            let mut stopped = Halted::stop_all(&living).into_iter();
            // All are taken before the first failure counts: those that have stopped are let go by the caller.
            let mut failure = None;
            for tracked in &self.processes {
                let outcome = tracked.watched.as_ref().and_then(|_| stopped.next());
                halted.push(match outcome {
                    Some(Err(Error::Gone(_))) if tracked.pid != self.root => None,
                    Some(Err(error)) => {
                        failure.get_or_insert(error);
                        None
                    }
                    other => other.and_then(Result::ok),
                });
            }
            if let Some(error) = failure {
                return Err(error);
            }
            let known: Vec<i32> = self.processes.iter().map(|tracked| tracked.pid).collect();
            if inspect::tree(self.root)? == known && self.are_as_known()? {
                return Ok(());
            }
            // Somebody was born or died since the last round: look again while the others run.
            halted.clear();
            self.follow_tree()?;
        }
    }

    /// No process has ended or called `exec` since it was attached to.
    fn are_as_known(&self) -> Result<bool> {
        for tracked in &self.processes {
            let state = match crate::process::procfs::Stat::read(tracked.pid) {
                Err(Error::Gone(pid)) if pid != self.root => return Ok(false),
                other => other?.state,
            };
            let ended = matches!(state, 'Z' | 'X');
            if !tracked
                .watched
                .as_ref()
                .map_or(ended, |watched| !ended && watched.is_current())
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl StoppedTree {
    /// Processes, threads and mappings as they are to be recreated.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.round.tree
    }

    /// Bytes of memory that are still to be read and sent.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.round.bytes()
    }

    /// The next pages, about `limit` bytes; nothing when all were read.
    ///
    /// # Errors
    /// A page that cannot be read: nothing may be left out any more.
    pub fn read(&mut self, limit: u64) -> Result<Option<Pages>> {
        let before = self.round.bytes();
        let pages = self.tracker.read(&mut self.round, limit)?;
        let read = pages.as_ref().map_or(0, |pages| pages.bytes.len() as u64);
        if before - self.round.bytes() != read {
            return Err(Error::Image(
                "memory of a stopped process could not be read",
            ));
        }
        Ok(pages)
    }

    /// Registers, signals, timers and the rest.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn state(&self) -> Result<Frozen> {
        let mut stopped = Vec::with_capacity(self.halted.len());
        for (halted, tracked) in self.halted.iter().zip(&self.tracker.processes) {
            let attachment = tracked.watched.as_ref().map(|watched| &watched.attachment);
            stopped.push(halted.as_ref().zip(attachment));
        }
        let living: Vec<_> = stopped.iter().flatten().copied().collect();
        let mut states = process_state::read_all(&living)?.into_iter();
        let processes = stopped.iter().map(|of| of.and_then(|_| states.next()));
        Ok(Frozen {
            processes: processes.collect(),
        })
    }

    /// PID file descriptors of the processes: each can be read when its process has ended, and has nothing open any more.
    pub fn process_descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let watched = self.tracker.processes.iter();
        let watched = watched.filter_map(|tracked| tracked.watched.as_ref());
        watched.map(|watched| watched.attachment.process.as_fd())
    }

    /// Lets the tree run on as if nothing had been, and goes on watching it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn thaw(mut self) -> Result<Tracker> {
        self.behind.drain(..).for_each(|run| self.round.push(run));
        self.tracker.give_up(&self.round);
        self.sockets.resume();
        for halted in self.halted.into_iter().flatten() {
            halted.thaw()?;
        }
        Ok(self.tracker)
    }

    /// Lets the tree run on, and takes what is ours out of it, in one stop.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn roll_back(mut self) -> Result<()> {
        self.sockets.resume();
        for (halted, tracked) in self.halted.drain(..).zip(self.tracker.processes.drain(..)) {
            if let (Some(mut halted), Some(watched)) = (halted, tracked.watched) {
                halted.release_hold();
                watched.remove(&halted)?;
                halted.thaw()?;
            }
        }
        Ok(())
    }

    /// Ends the original: it runs elsewhere now.
    ///
    /// # Errors
    /// What the kernel says; then processes of the tree are still stopped.
    pub fn release(mut self) -> Result<()> {
        self.sockets.give_up();
        let mut copier = Copier::default();
        for place in self.uncopied() {
            // One that is closed already is silent as well.
            let _ = copier
                .copy(place)
                .is_ok_and(|copy| abandon(copy.as_fd()).is_ok());
        }
        let segments = self.tree().shared.iter().filter_map(Shared::segment);
        let left: Vec<i32> = segments
            .filter(|segment| !segment.removed && !segment.gone)
            .map(|segment| segment.id)
            .collect();
        if !left.is_empty() {
            // They would outlive who has them. What cannot be removed hinders nobody.
            let _ = system_v::remove(self.tracker.root, left);
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
            halted.forget();
        }
        self.tracker.processes.clear();
        Ok(())
    }
}
