//! A stopped tree that stays stopped when its tracer dies.
//!
//! When a tracer dies, the kernel resumes its tracees. So before the state of a tree leaves this host, each process
//! gets a `SIGSTOP`, which stays pending until then. A process cannot block the signal, and a thread handles it
//! before it returns to its program.

use super::freeze::StoppedTree;
use super::halt::HaltedProcess;
use crate::error::{Context, Error, Result, check_long};
use crate::procfs::ProcStat;
use crate::sockets::crash_recovery;
use crate::trace::pidfd_open;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd};

/// Reference to a process that can be stored, for example to a process that stays stopped until it is resumed or
/// ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRef {
    /// PID as the donor sees it.
    pub pid: i32,
    /// Start time in ticks since boot. Distinguishes processes that use the same PID one after the other.
    pub started_ticks: u64,
}

impl StoppedTree {
    /// Returns the processes that [`StoppedTree::keep_stopped_without_tracer`] will stop for good. The caller must
    /// store them before that call.
    ///
    /// # Errors
    /// [`Error::ProcessEnded`] if a process has been killed.
    pub fn processes_to_hold(&self) -> Result<Vec<ProcessRef>> {
        let running = self.halted.iter().flatten();
        let running = running.filter(|halted| !is_stopped_by_job_control(halted));
        running.map(|halted| ProcessRef::of(halted.pid)).collect()
    }

    /// Keeps the tree stopped even if the calling thread dies. [`StoppedTree::thaw`] and the other ways to resume the
    /// tree undo this. Call it after [`StoppedTree::read_state`].
    ///
    /// # Errors
    /// The kernel's error; [`Error::ProcessEnded`] if a process has been killed.
    pub fn keep_stopped_without_tracer(&mut self) -> Result<()> {
        for halted in self.halted.iter_mut().flatten() {
            if !is_stopped_by_job_control(halted) {
                halted.has_pending_stop = true;
                signal(halted.pid, libc::SIGSTOP)?;
            }
        }
        Ok(())
    }
}

/// Returns true if job control has stopped the process. Such a process stays stopped by itself, and the tracker must
/// not resume it.
fn is_stopped_by_job_control(halted: &HaltedProcess) -> bool {
    let mut threads = halted.threads.iter();
    threads.any(|thread| thread.group_stop.is_some())
}

impl ProcessRef {
    /// Returns a reference to the process with this PID.
    ///
    /// # Errors
    /// [`Error::ProcessEnded`] if the process does not exist.
    pub fn of(pid: i32) -> Result<Self> {
        let started_ticks = ProcStat::read(pid)?.started_ticks;
        Ok(Self { pid, started_ticks })
    }

    /// Returns true if the process or its zombie still exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        Self::of(self.pid).is_ok_and(|found| found == *self)
    }

    /// Resumes the process and its connections, if the process still exists.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn resume(&self) -> Result<()> {
        if self.exists() {
            crash_recovery::resume_all(self.pid)
                .context(|| format!("finding connections of process {}", self.pid))?;
        }
        self.signal(libc::SIGCONT)
    }

    /// Ends the process, which runs elsewhere. Its connections send nothing.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn release(&self) -> Result<()> {
        if self.exists() {
            crash_recovery::abandon_all(self.pid)
                .context(|| format!("finding connections of process {}", self.pid))?;
        }
        self.end()
    }

    /// Returns copies of the process's sockets that new clients reach: listening TCP sockets, and UDP sockets without a peer.
    /// None if the process has ended.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn sockets_for_new_clients(&self) -> Result<Vec<OwnedFd>> {
        if !self.exists() {
            return Ok(Vec::new());
        }
        crash_recovery::sockets_for_new_clients(self.pid)
            .context(|| format!("finding listeners of process {}", self.pid))
    }

    /// Returns a descriptor of the process (pidfd); none if the process has ended.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(&self) -> Result<Option<OwnedFd>> {
        let process = match pidfd_open(self.pid) {
            Err(Error::Kernel { source, .. }) if is_gone(&source) => return Ok(None),
            other => other?,
        };
        // Read the start time after opening the descriptor, which refers to the process that had the PID at that
        // time.
        match ProcStat::read(self.pid) {
            Ok(stat) => Ok((stat.started_ticks == self.started_ticks).then_some(process)),
            Err(Error::ProcessEnded(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ends the process, if it still exists.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn end(&self) -> Result<()> {
        self.signal(libc::SIGKILL)
    }

    fn signal(&self, number: i32) -> Result<()> {
        let Some(process) = self.open()? else {
            return Ok(());
        };
        let doing = || format!("sending signal {number} to process {}", self.pid);
        // SAFETY: no pointers but a null one are passed.
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                process.as_raw_fd(),
                number,
                std::ptr::null::<()>(),
                0,
            )
        };
        match check_long(outcome) {
            Err(error) if is_gone(&error) => Ok(()),
            other => other.map(drop).context(doing),
        }
    }
}

fn is_gone(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Sends a signal to a process that is traced, and so keeps its PID.
pub(super) fn signal(pid: i32, number: i32) -> Result<()> {
    // SAFETY: no pointers are passed.
    let outcome = unsafe { libc::kill(pid, number) };
    match check_long(outcome.into()) {
        Err(error) if is_gone(&error) => Err(Error::ProcessEnded(pid)),
        other => other
            .map(drop)
            .context(|| format!("sending signal {number} to process {pid}")),
    }
}
