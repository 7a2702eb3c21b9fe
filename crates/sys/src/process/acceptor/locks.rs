//! Locks on files, taken when the donor has given them up.

use super::husk::Husk;
use super::plan::Restoration;
use crate::process::error::{Error, Result};
use crate::process::files::image::{Lock, LockHolder, Table};
use crate::process::files::{FilesError, Stock, take_lock};
use std::io;

impl Restoration {
    /// Takes all locks that the tree had; gives those that somebody else has.
    pub(super) fn take_locks(&self) -> Result<Vec<String>> {
        let mut missed = Vec::new();
        let Some(stock) = &self.stock else {
            return Ok(missed);
        };
        for (number, table) in &stock.image().tables {
            let Some(husk) = self.living().find(|husk| table.pids.contains(&husk.pid)) else {
                continue;
            };
            for (fd, lock) in stock.image().locks(*number) {
                if !take(husk, stock, table, fd, lock)? {
                    missed.push(format!("process {}, descriptor {fd}: {lock:?}", husk.pid));
                }
            }
        }
        Ok(missed)
    }
}

/// Whether a lock was to be had. Those of open files are the stock's too; others belong to the table.
fn take(husk: &Husk, stock: &Stock, table: &Table, fd: u32, lock: Lock) -> Result<bool> {
    let outcome = match lock.holder {
        LockHolder::Table(_) => take_in(husk, fd, lock)?,
        LockHolder::Flock | LockHolder::OpenFile => {
            let file = table.slots.get(&fd).and_then(|slot| stock.file(slot.file));
            match take_lock(file.ok_or(Error::Image("a lock on no file"))?, &lock) {
                Err(FilesError::Kernel { source, .. }) => Err(source),
                other => Ok(other?),
            }
        }
    };
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(source) => Err(Error::Kernel {
            what: format!("a lock of process {}", husk.pid),
            source,
        }),
    }
}

/// `F_SETLK`, by a process with the table that has the lock.
fn take_in(husk: &Husk, fd: u32, lock: Lock) -> Result<io::Result<()>> {
    let kind = if lock.write {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    };
    let length = match lock.end {
        Some(end) if end < i64::MAX as u64 => end - lock.start + 1,
        _ => 0,
    };
    let mut script = husk.script();
    // `struct flock`: type and whence of two bytes each, start, length, PID.
    let head = u64::from(kind as u16) | (libc::SEEK_SET as u64) << 16;
    let at = script.words(&[head, lock.start, length, 0])?;
    script.attempt(libc::SYS_fcntl, &[u64::from(fd), libc::F_SETLK as u64, at]);
    let result = husk.run(script)?.results[0];
    Ok(crate::process::donor::value(result).map(drop))
}
