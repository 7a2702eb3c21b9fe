//! Hand-over of a stopped tree's exclusive file locks to the acceptor, on a file system that both nodes see.
//! [`LockHandoverStep`] describes the steps.
//!
//! Locks of open files are changed through copies of their descriptors, and locks of processes by calls in the
//! processes' first threads.

use super::freeze::StoppedTree;
use super::halt::HaltedProcess;
use super::stop_without_tracer::ProcessRef;
use super::tracker_attachment::{TrackerAttachment, read_own_mappings, stub_exit_signal};
use crate::error::{Context, Error, Result, unexpected_text};
use crate::files::image::{FileLock, LockHolder};
use crate::files::{
    ContendedLock, DescriptorCopier, FdInfo, LOCKS_MAX, LockChange, LockHandoverStep,
    LockedFileIdentity, file_system, handover_risk, is_lock_taken, is_readable, waiting_requests,
};
use crate::inspect::{Blocker, Obstacle};
use crate::procfs;
use crate::trace::{CallBatch, SCRATCH_OFFSET, Stub, SystemCall, call_result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// Bytes of `struct flock`.
const FLOCK_BYTES: u64 = 32;
/// Most record locks that a process changes in one batch.
const BATCH_MAX: usize = 256;

/// A lock that is being handed over to the acceptor. The caller stores the record, so that a later daemon can take
/// the lock back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHandover {
    process: ProcessRef,
    fd: u32,
    lock: FileLock,
    readable: bool,
}

impl StoppedTree {
    /// Finds the tree's locks that the acceptor could not take. Nothing is changed.
    ///
    /// # Errors
    /// [`Error::Blocked`] if a lock would be free for a moment; [`Error::Refused`] if the tree does not hold a lock,
    /// so that another process excludes the acceptor.
    pub fn find_locks(&self, wanted: &[ContendedLock]) -> Result<Vec<LockHandover>> {
        if wanted.len() > LOCKS_MAX {
            return Err(Error::Refused(format!(
                "it has more than {LOCKS_MAX} exclusive locks on files that both nodes see"
            )));
        }
        let proc_locks =
            std::fs::read_to_string("/proc/locks").context(|| "/proc/locks".to_owned())?;
        let mut copier = DescriptorCopier::default();
        wanted
            .iter()
            .map(|wanted| self.find_lock(wanted, &mut copier, &proc_locks))
            .collect()
    }

    fn find_lock(
        &self,
        wanted: &ContendedLock,
        copier: &mut DescriptorCopier,
        waits: &str,
    ) -> Result<LockHandover> {
        let fd = wanted.fd;
        let mut shapes = self.round.tree.processes.iter();
        let index = shapes.position(|process| process.pid == wanted.process);
        let tracked = index.and_then(|index| self.tracker.processes.get(index));
        let pid = tracked
            .ok_or(Error::Image("a lock of an unknown process"))?
            .pid;
        let path = std::fs::read_link(format!("/proc/{pid}/fd/{fd}"))
            .context(|| format!("descriptor {fd} of process {pid}"))?;
        let path = path.to_string_lossy().into_owned();
        let copy = copier.copy((pid, fd)).context(|| path.clone())?;
        let text = procfs::read(pid, &format!("fdinfo/{fd}"))?;
        let info = FdInfo::parse(&text).ok_or_else(|| unexpected_text("cannot parse fdinfo"))?;
        let readable = is_readable(&info);
        let is_wanted = |lock: &FileLock| {
            let holder = match (lock.holder, wanted.lock.holder) {
                (LockHolder::Table(_), LockHolder::Table(_)) => true,
                (ours, other) => ours == other,
            };
            let range = (lock.start, lock.end) == (wanted.lock.start, wanted.lock.end);
            holder && range && lock.write && wanted.lock.write
        };
        let locks = info.locks(0).unwrap_or_default();
        let is_same =
            LockedFileIdentity::of(copy.as_fd()).context(|| path.clone())? == wanted.identity;
        let Some(lock) = locks.into_iter().find(is_wanted).filter(|_| is_same) else {
            return Err(Error::Refused(format!(
                "another process there holds the lock that process {pid} has here on {path}: end that process"
            )));
        };
        if readable != wanted.readable {
            return Err(Error::Image("a lock does not match its open file"));
        }
        let kind = file_system(copy.as_fd()).context(|| path.clone())?;
        if let Some(reason) = handover_risk(&lock, readable, kind, &waiting_requests(&info, waits))
        {
            let reason = reason.to_owned();
            let obstacle = Obstacle::Descriptor {
                fd: Some(fd),
                path,
                reason,
            };
            return Err(Error::Blocked(vec![Blocker { pid, obstacle }]));
        }
        Ok(LockHandover {
            process: ProcessRef::of(pid)?,
            fd,
            lock,
            readable,
        })
    }

    /// Takes the first step with locks that were found, and records them.
    ///
    /// # Errors
    /// The kernel's error; [`StoppedTree::regain_locks`] then undoes the changes.
    pub fn begin_handover(&mut self, given: Vec<LockHandover>) -> Result<()> {
        self.lock_handovers = given;
        self.change_locks(LockHandoverStep::ShareRemainder)
    }

    /// Takes a later step, when the tree runs at the acceptor or certainly will. If this thread dies meanwhile, the
    /// tree is killed: a process that makes calls would not stay stopped.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn advance_handover(&mut self, step: LockHandoverStep) -> Result<()> {
        if step == LockHandoverStep::ShareRemainder {
            return Err(Error::Image(
                "a lock step after the commit was requested before it",
            ));
        }
        let callers = self.lock_handovers.iter().filter(|given| given.is_record());
        let callers: Vec<i32> = callers.map(|given| given.process.pid).collect();
        let callers = self
            .halted
            .iter()
            .flatten()
            .filter(|halted| callers.contains(&halted.pid));
        for halted in callers.clone() {
            halted.set_kill_on_tracer_exit(true)?;
        }
        let outcome = self.change_locks(step);
        for halted in callers {
            halted.set_kill_on_tracer_exit(false)?;
        }
        outcome
    }

    fn change_locks(&self, step: LockHandoverStep) -> Result<()> {
        let change_of = |handover: &LockHandover| {
            LockChange::for_donor(step, &handover.lock, handover.readable)
        };
        let run = |pid, changes: &[_]| self.change_records(pid, changes);
        // No other lock can exclude a reduced lock.
        change_locks(&self.lock_handovers, change_of, run).map(drop)
    }

    /// Takes back the locks that were given. Returns true if all are exclusive again, and false as long as the
    /// acceptor or a process that came meanwhile has a part of one.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn regain_locks(&self) -> Result<bool> {
        let run = |pid, changes: &[_]| self.change_records(pid, changes);
        change_locks(
            &self.lock_handovers,
            |handover| Some(LockChange::for_whole_range(&handover.lock)),
            run,
        )
    }

    fn change_records(&self, pid: i32, changes: &[(u32, LockChange)]) -> Result<bool> {
        let processes = self.halted.iter().zip(&self.tracker.processes);
        let found = processes.filter(|(_, tracked)| tracked.pid == pid);
        let found =
            found.filter_map(|(halted, tracked)| halted.as_ref().zip(tracked.watched.as_ref()));
        let (halted, watched) = found.last().ok_or(Error::ProcessEnded(pid))?;
        change_records(halted, &watched.attachment, changes)
    }
}

impl LockHandover {
    /// Returns true if the lock belongs to a process and not to an open file.
    fn is_record(&self) -> bool {
        matches!(self.lock.holder, LockHolder::Table(_))
    }

    /// Takes back locks of processes that an earlier daemon left stopped. Returns true if all are exclusive again.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn regain(given: &[LockHandover]) -> Result<bool> {
        let living = given.iter().filter(|handover| handover.process.exists());
        let living: Vec<LockHandover> = living.cloned().collect();
        change_locks(
            &living,
            |handover| Some(LockChange::for_whole_range(&handover.lock)),
            |pid, changes| {
                let halted = HaltedProcess::stop(pid)?;
                let attachment =
                    TrackerAttachment::attach(&halted, &read_own_mappings(pid, None, false)?)?;
                let outcome = change_records(&halted, &attachment, changes);
                attachment.remove_stub(&halted, &read_own_mappings(pid, None, false)?)?;
                halted.thaw()?;
                outcome
            },
        )
    }
}

/// Changes locks; `run` changes the locks of processes. Returns true if all changes were made.
fn change_locks(
    given: &[LockHandover],
    change_of: impl Fn(&LockHandover) -> Option<LockChange>,
    mut run: impl FnMut(i32, &[(u32, LockChange)]) -> Result<bool>,
) -> Result<bool> {
    let mut copier = DescriptorCopier::default();
    let mut records: BTreeMap<i32, Vec<(u32, LockChange)>> = BTreeMap::new();
    let mut all_made = true;
    for handover in given {
        let (pid, fd) = (handover.process.pid, handover.fd);
        let Some(change) = change_of(handover) else {
            continue;
        };
        if handover.is_record() {
            records.entry(pid).or_default().push((fd, change));
            continue;
        }
        let fd_copy = copier.copy((pid, fd));
        let made = fd_copy.and_then(|copy| change.apply(copy.as_fd(), handover.lock.holder));
        all_made &=
            made.context(|| format!("changing the lock of process {pid}, descriptor {fd}"))?;
    }
    for (pid, changes) in records {
        all_made &= run(pid, &changes)?;
    }
    Ok(all_made)
}

/// Changes the record locks of a process by calls in its first thread.
fn change_records(
    halted: &HaltedProcess,
    attachment: &TrackerAttachment,
    changes: &[(u32, LockChange)],
) -> Result<bool> {
    let stub = Stub {
        address: attachment.stub.address,
        exit: stub_exit_signal(halted.pid, &halted.statuses()?[0]),
    };
    let mut all_made = true;
    for chunk in changes.chunks(BATCH_MAX) {
        let words = chunk.iter().flat_map(|(_, change)| change.flock_words());
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        let scratch = stub.address + SCRATCH_OFFSET;
        halted.memory.write(scratch, &bytes)?;
        let mut batch = CallBatch::default();
        for (at, (fd, _)) in (0..).zip(chunk) {
            let arguments = [
                u64::from(*fd),
                libc::F_SETLK as u64,
                scratch + at * FLOCK_BYTES,
            ];
            batch.push(SystemCall::new(libc::SYS_fcntl, &arguments));
        }
        let outcome = stub.run(halted.first_thread(), &halted.memory, batch)?;
        for result in outcome.results {
            let made = is_lock_taken(call_result(result).map(drop));
            all_made &=
                made.context(|| format!("changing a record lock of process {}", halted.pid))?;
        }
    }
    Ok(all_made)
}
