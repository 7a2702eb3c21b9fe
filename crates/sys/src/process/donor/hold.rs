//! A stopped tree that stays stopped when its tracer dies.
//!
//! A tracer's death lets its tracees go. So before the state of a tree leaves this host each process gets a `SIGSTOP`, which
//! waits until then: it cannot be blocked, and a thread takes it before it comes back to its program.

use super::freeze::StoppedTree;
use super::halt::Halted;
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::procfs::Stat;
use crate::process::sockets::left;
use crate::process::trace::pidfd_open;
use serde::{Deserialize, Serialize};
use std::os::fd::AsRawFd;

/// A process as it can be written down: one that is stopped for good, for example, until somebody lets it go or ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Its PID, as the donor sees it.
    pub pid: i32,
    /// When it began, in ticks: tells a PID's users apart.
    pub started_ticks: u64,
}

impl StoppedTree {
    /// The processes that [`StoppedTree::hold`] will stop for good: to be written down before.
    ///
    /// # Errors
    /// [`Error::Gone`] if a process has been killed.
    pub fn to_hold(&self) -> Result<Vec<Held>> {
        let running = self.halted.iter().flatten();
        let running = running.filter(|halted| !stopped_by_others(halted));
        running.map(|halted| Held::of(halted.pid)).collect()
    }

    /// Sees to it that the tree stays stopped even if the calling thread dies. [`StoppedTree::thaw`] and the like undo it.
    /// To be called after [`StoppedTree::state`].
    ///
    /// # Errors
    /// What the kernel says; [`Error::Gone`] if a process has been killed.
    pub fn hold(&mut self) -> Result<()> {
        for halted in self.halted.iter_mut().flatten() {
            if !stopped_by_others(halted) {
                halted.held = true;
                signal(halted.pid, libc::SIGSTOP)?;
            }
        }
        Ok(())
    }
}

/// What job control has stopped stays so by itself, and is not ours to let go.
fn stopped_by_others(halted: &Halted) -> bool {
    let mut threads = halted.threads.iter();
    threads.any(|thread| thread.group_stop.is_some())
}

impl Held {
    /// The process that has this PID.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is none.
    pub fn of(pid: i32) -> Result<Self> {
        let started_ticks = Stat::read(pid)?.started_ticks;
        Ok(Self { pid, started_ticks })
    }

    /// Whether it is still there, or a zombie of it.
    #[must_use]
    pub fn exists(&self) -> bool {
        Self::of(self.pid).is_ok_and(|found| found == *self)
    }

    /// Lets the process run on, if it is still there, and its connections with it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn resume(&self) -> Result<()> {
        if self.exists() {
            left::wake_all(self.pid).context(|| format!("connections of process {}", self.pid))?;
        }
        self.signal(libc::SIGCONT)
    }

    /// Ends the process, which runs elsewhere: nothing of it goes on the wire.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn release(&self) -> Result<()> {
        if self.exists() {
            left::abandon_all(self.pid)
                .context(|| format!("connections of process {}", self.pid))?;
        }
        self.end()
    }

    /// Ends the process, if it is still there.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn end(&self) -> Result<()> {
        self.signal(libc::SIGKILL)
    }

    fn signal(&self, number: i32) -> Result<()> {
        let process = match pidfd_open(self.pid) {
            Err(Error::Kernel { source, .. }) if is_gone(&source) => return Ok(()),
            other => other?,
        };
        // Looked at with the descriptor in hand: it stands for the process that had the PID then.
        match Stat::read(self.pid) {
            Ok(stat) if stat.started_ticks == self.started_ticks => {}
            Ok(_) | Err(Error::Gone(_)) => return Ok(()),
            Err(error) => return Err(error),
        }
        let doing = || format!("signal {number} to process {}", self.pid);
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

/// To a process that is traced, so that its PID stays its own.
pub(super) fn signal(pid: i32, number: i32) -> Result<()> {
    // SAFETY: no pointers are passed.
    let outcome = unsafe { libc::kill(pid, number) };
    match check_long(outcome.into()) {
        Err(error) if is_gone(&error) => Err(Error::Gone(pid)),
        other => other
            .map(drop)
            .context(|| format!("signal {number} to process {pid}")),
    }
}
