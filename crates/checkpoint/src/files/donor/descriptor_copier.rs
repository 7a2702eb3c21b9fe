//! Copies of other processes' descriptors.

use super::ProcessFd;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::OwnedFd;

/// Copier of descriptors, which keeps a pidfd of each process it has copied from.
#[derive(Debug, Default)]
pub struct DescriptorCopier {
    processes: HashMap<i32, OwnedFd>,
}

impl DescriptorCopier {
    /// Copies a descriptor. While the copy exists, the open file exists too, even if the process closes its own
    /// descriptor.
    ///
    /// # Errors
    /// Errors of the kernel: `EBADF` for a descriptor that is not open, `ESRCH` for a process that does not exist.
    pub fn copy(&mut self, (pid, fd): ProcessFd) -> io::Result<OwnedFd> {
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
