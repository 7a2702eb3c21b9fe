//! TCP and UDP sockets that are met while a tree is read.

use super::Address;
use super::saver::Saved;
use crate::process::files::error::Reason;
use crate::process::files::fdinfo::FdInfo;
use crate::process::files::image::{FileId, Kind, OpenFile};
use crate::process::sockets::{Reader, SocketError, SocketStatic};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What was found.
#[derive(Debug, Default)]
pub struct Found {
    /// Copies, of a tree that stands still.
    pub held: BTreeMap<FileId, OwnedFd>,
    /// What sockets were born with; in the freeze only of those for which the draft has nothing that still holds.
    pub fixed: BTreeMap<FileId, Arc<SocketStatic>>,
    /// Where they can be copied from.
    pub places: BTreeMap<FileId, Address>,
    /// Those that the caller sees from beside them: no copies are made.
    pub seen: Arc<BTreeSet<FileId>>,
    reader: Option<Reader>,
}

impl Found {
    /// What was found before.
    pub fn of(held: BTreeMap<FileId, OwnedFd>, fixed: BTreeMap<FileId, Arc<SocketStatic>>) -> Self {
        Self {
            held,
            fixed,
            ..Self::default()
        }
    }

    /// Keeps the copy of a socket. What the draft says of it may still hold.
    pub fn hold(&mut self, id: FileId, copy: OwnedFd, known: Option<&SocketStatic>) -> Saved<()> {
        if !known.is_some_and(|known| known.is_still(copy.as_fd())) {
            self.look(id, copy.as_fd())?;
        }
        self.held.insert(id, copy);
        Ok(())
    }

    /// Reads what a socket was born with.
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

/// A TCP or UDP socket with nothing new to say here.
pub fn unchanged(info: &FdInfo, before: Option<&OpenFile>) -> Option<OpenFile> {
    let before = before.filter(|before| is_unchanged(info, before))?;
    Some(OpenFile {
        flags: info.flags,
        ..before.clone()
    })
}

/// Whether a file is such a socket, its flags aside: its inode is never given to another socket while this one lives.
pub fn is_unchanged(info: &FdInfo, before: &OpenFile) -> bool {
    let Kind::Inet { inode, .. } = before.kind else {
        return false;
    };
    let quiet = before.owner.is_none() && !info.tells_somebody();
    inode == info.inode && quiet
}
