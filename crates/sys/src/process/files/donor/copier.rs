//! Copies of other processes' descriptors.

use super::Address;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::OwnedFd;

/// Makes copies; keeps a handle on each process it has met.
#[derive(Debug, Default)]
pub struct Copier {
    processes: HashMap<i32, OwnedFd>,
}

impl Copier {
    /// A copy of a descriptor. While it lives, so does the open file, even if the process closes its own.
    ///
    /// # Errors
    /// The kernel's: `EBADF` for a descriptor that is not open, `ESRCH` for a process that is gone.
    pub fn copy(&mut self, (pid, fd): Address) -> io::Result<OwnedFd> {
        let process = match self.processes.entry(pid) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let number = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
                entry.insert(pidfd_open(number, PidfdFlags::empty())?)
            }
        };
        Ok(pidfd_getfd(process, fd as i32, PidfdGetfdFlags::empty())?)
    }
}
