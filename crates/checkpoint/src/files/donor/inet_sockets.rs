//! TCP and UDP sockets found while a tree is read.

use super::ProcessFd;
use super::open_file_saver::SaveResult;
use crate::files::error::BlockReason;
use crate::files::fdinfo::FdInfo;
use crate::files::image::{FileId, OpenFile, OpenFileKind};
use crate::sockets::{SocketError, SocketStaticReader, SocketStaticState};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// TCP and UDP sockets of a tree.
#[derive(Debug, Default)]
pub struct InetSockets {
    /// Copies of the sockets, if the tree is stopped.
    pub copies: BTreeMap<FileId, OwnedFd>,
    /// Fixed properties of the sockets; in the freeze, only of sockets for which the files snapshot has no valid ones.
    pub socket_statics: BTreeMap<FileId, Arc<SocketStaticState>>,
    /// Descriptors from which the sockets can be copied.
    pub socket_fds: BTreeMap<FileId, ProcessFd>,
    /// Sockets that the caller reads without a descriptor: no copies are made.
    pub skip_copy: Arc<BTreeSet<FileId>>,
    reader: Option<SocketStaticReader>,
}

impl InetSockets {
    /// Continues from sockets found earlier.
    pub fn from_copies(
        copies: BTreeMap<FileId, OwnedFd>,
        socket_statics: BTreeMap<FileId, Arc<SocketStaticState>>,
    ) -> Self {
        Self {
            copies,
            socket_statics,
            ..Self::default()
        }
    }

    /// Keeps the copy of a socket, and reads its fixed properties unless the files snapshot's (`known`) are still valid.
    pub fn add_copy(
        &mut self,
        id: FileId,
        copy: OwnedFd,
        previous: Option<&SocketStaticState>,
    ) -> SaveResult<()> {
        if !previous.is_some_and(|known| known.still_describes(copy.as_fd())) {
            self.read_static(id, copy.as_fd())?;
        }
        self.copies.insert(id, copy);
        Ok(())
    }

    /// Reads the fixed properties of a socket.
    pub fn read_static(&mut self, id: FileId, fd: BorrowedFd<'_>) -> SaveResult<()> {
        let fixed = self.read_with_reader(fd);
        let fixed = fixed.map_err(|error| BlockReason::Socket(error.to_string()))?;
        self.socket_statics.insert(id, Arc::new(fixed));
        Ok(())
    }

    fn read_with_reader(&mut self, fd: BorrowedFd<'_>) -> Result<SocketStaticState, SocketError> {
        match &mut self.reader {
            Some(reader) => reader.read(fd),
            none => none.insert(SocketStaticReader::new()?).read(fd),
        }
    }
}

/// Returns the saved state of a TCP or UDP socket if only its flags may differ from `before`.
pub fn saved_if_unchanged(info: &FdInfo, before: Option<&OpenFile>) -> Option<OpenFile> {
    let before = before.filter(|before| is_unchanged(info, before))?;
    Some(OpenFile {
        flags: info.flags,
        ..before.clone()
    })
}

/// Returns true if a file is the same TCP or UDP socket as before, its flags aside: the inode number of a socket is not
/// reused while the socket exists.
pub fn is_unchanged(info: &FdInfo, before: &OpenFile) -> bool {
    let OpenFileKind::Inet { inode, .. } = before.kind else {
        return false;
    };
    let quiet = before.owner.is_none() && !info.has_signal_receiver();
    inode == info.inode && quiet
}
