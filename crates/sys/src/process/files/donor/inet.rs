//! TCP and UDP sockets found while a tree is read.

use super::Address;
use super::saver::Saved;
use crate::process::files::error::Reason;
use crate::process::files::fdinfo::FdInfo;
use crate::process::files::image::{FileId, Kind, OpenFile};
use crate::process::sockets::{Reader, SocketError, SocketStatic};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// TCP and UDP sockets of a tree.
#[derive(Debug, Default)]
pub struct Found {
    /// Copies of the sockets, if the tree is stopped.
    pub held: BTreeMap<FileId, OwnedFd>,
    /// Fixed properties of the sockets; in the freeze, only of sockets for which the draft has no valid ones.
    pub fixed: BTreeMap<FileId, Arc<SocketStatic>>,
    /// Descriptors from which the sockets can be copied.
    pub places: BTreeMap<FileId, Address>,
    /// Sockets that the caller reads without a descriptor: no copies are made.
    pub seen: Arc<BTreeSet<FileId>>,
    reader: Option<Reader>,
}

impl Found {
    /// Continues from sockets found earlier.
    pub fn of(held: BTreeMap<FileId, OwnedFd>, fixed: BTreeMap<FileId, Arc<SocketStatic>>) -> Self {
        Self {
            held,
            fixed,
            ..Self::default()
        }
    }

    /// Keeps the copy of a socket, and reads its fixed properties unless the draft's (`known`) are still valid.
    pub fn hold(&mut self, id: FileId, copy: OwnedFd, known: Option<&SocketStatic>) -> Saved<()> {
        if !known.is_some_and(|known| known.is_still(copy.as_fd())) {
            self.look(id, copy.as_fd())?;
        }
        self.held.insert(id, copy);
        Ok(())
    }

    /// Reads the fixed properties of a socket.
    pub fn look(&mut self, id: FileId, fd: BorrowedFd<'_>) -> Saved<()> {
        let fixed = self.read(fd);
        let fixed = fixed.map_err(|error| Reason::Socket(error.to_string()))?;
        self.fixed.insert(id, Arc::new(fixed));
        Ok(())
    }

    fn read(&mut self, fd: BorrowedFd<'_>) -> Result<SocketStatic, SocketError> {
        match &mut self.reader {
            Some(reader) => reader.read(fd),
            none => none.insert(Reader::new()?).read(fd),
        }
    }
}

/// Returns the saved state of a TCP or UDP socket if only its flags may differ from `before`.
pub fn unchanged(info: &FdInfo, before: Option<&OpenFile>) -> Option<OpenFile> {
    let before = before.filter(|before| is_unchanged(info, before))?;
    Some(OpenFile {
        flags: info.flags,
        ..before.clone()
    })
}

/// Returns true if a file is the same TCP or UDP socket as before, its flags aside: the inode number of a socket is not
/// reused while the socket exists.
pub fn is_unchanged(info: &FdInfo, before: &OpenFile) -> bool {
    let Kind::Inet { inode, .. } = before.kind else {
        return false;
    };
    let quiet = before.owner.is_none() && !info.tells_somebody();
    inode == info.inode && quiet
}
