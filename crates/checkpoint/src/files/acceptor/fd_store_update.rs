//! Update of the store to later files snapshots, and in the freeze to the final state of the tree.

use super::fd_store::FdStore;
use super::{ProvidedFiles, named_file_check};
use crate::files::error::{FilesError, FilesRefusal, StepContext};
use crate::files::image::changes::{FilesImageChanges, PreviousValues};
use crate::files::image::{FileId, OpenFile, OpenFileKind, UnixConnectionState};
use crate::files::kinds::{
    anon_inode, epoll, inotify, named_file, nameless_content, pipe, terminal, unix,
};
use crate::files::syscalls;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

impl FdStore {
    /// Brings the store to its final state. The processes of the tree must exist, because pidfds and owners of signals
    /// refer to them.
    ///
    /// # Errors
    /// Same as [`Self::prepare`]; [`FilesError::Malformed`] for changes that do not fit. The donor can still resume.
    pub fn apply_final(
        &mut self,
        changes: FilesImageChanges,
        provided: ProvidedFiles,
    ) -> Result<(), FilesError> {
        let former = self.apply_changes(changes, provided, true)?;
        self.fill_shared_objects(&former)?;
        // Both maps have the same order, so that no lookup is needed.
        let mut made = self.files.iter();
        for (id, file) in &self.image.files {
            let (_, fd) = made
                .find(|(made, _)| *made == id)
                .ok_or(FilesRefusal::SocketMissing(*id))?;
            self.set_state(fd, file, former.file(*id, file))?;
        }
        self.object_fds.clear();
        self.unclaimed_ends.clear();
        self.closed_peers.clear();
        self.opener.end_deputies();
        Ok(())
    }

    /// Updates the store to a later files snapshot of the running tree.
    ///
    /// # Errors
    /// Same as [`Self::prepare`]; [`FilesError::Malformed`] for changes that do not fit. The store is unusable then.
    pub fn apply_snapshot(
        &mut self,
        changes: FilesImageChanges,
        provided: ProvidedFiles,
    ) -> Result<(), FilesError> {
        let former = self.apply_changes(changes, provided, false)?;
        // The image records the work done so far: in the freeze, only differences from the image are left to do.
        for (id, old) in &former.files {
            if let (Some(fd), Some(file), Some(old)) =
                (self.files.get(id), self.image.files.get(id), old)
                && old.flags != file.flags
            {
                set_status(fd.as_fd(), file, libc::O_ASYNC as u32)?;
            }
        }
        for (id, before) in &former.contents {
            let current = self.image.contents.get(id);
            if let (Some(keeper), Some(before), Some(now)) =
                (self.object_fds.get(id), before, current)
            {
                nameless_content::update(keeper, before, now)?;
            }
        }
        Ok(())
    }

    /// Makes files that are new or have become other files, and returns their former states; `is_final` is true if the tree
    /// is stopped.
    fn apply_changes(
        &mut self,
        changes: FilesImageChanges,
        provided: ProvidedFiles,
        is_final: bool,
    ) -> Result<PreviousValues, FilesError> {
        self.slots_changed |= changes.affect_tables();
        let former = self.image.apply(changes)?;
        let mut remade: BTreeSet<FileId> = provided.sockets.keys().copied().collect();
        for (id, old) in &former.files {
            let Some(file) = self.image.files.get(id) else {
                self.files.remove(id);
                continue;
            };
            if old.as_ref() != Some(file) {
                named_file_check::verify_file(&mut self.opener, file, is_final)?;
            }
            if !old.as_ref().is_some_and(|old| can_reuse(old, file)) {
                remade.insert(*id);
            }
        }
        self.find_moved_contents(&former, &mut remade);
        for id in &remade {
            self.files.remove(id);
        }
        self.make_files(&remade, provided)?;
        if is_final {
            self.open_pidfds()?;
        }
        epoll::update_sets(self, &former, &remade)?;
        self.opener.end_deputies();
        Ok(former)
    }

    /// Finds contents that have begun, or ceased, to move with mappings: the files that refer to them are made anew.
    fn find_moved_contents(&mut self, former: &PreviousValues, remade: &mut BTreeSet<FileId>) {
        for (id, old) in &former.contents {
            let (Some(old), Some(value)) = (old, self.image.contents.get(id)) else {
                continue;
            };
            if old.mapped_memory != value.mapped_memory {
                self.object_fds.remove(id);
                let of_it = |kind: &OpenFileKind| matches!(kind, OpenFileKind::Content { content, .. } if content == id);
                let files = self.image.files.iter();
                remade.extend(
                    files
                        .filter(|(_, file)| of_it(&file.kind))
                        .map(|(id, _)| *id),
                );
            }
        }
    }

    /// Makes the names of Unix sockets lead to the new sockets; to be called when the move is committed.
    ///
    /// # Errors
    /// [`FilesError::Kernel`].
    pub fn publish(&mut self) -> Result<(), FilesError> {
        self.staging_directories
            .iter_mut()
            .try_for_each(unix::StagingDirectory::publish)
    }

    fn open_pidfds(&mut self) -> Result<(), FilesError> {
        let wanted = self
            .image
            .files
            .iter()
            .filter_map(|(id, file)| match file.kind {
                OpenFileKind::Pidfd { pid } if !self.contains(*id) => Some((*id, pid, file.flags)),
                _ => None,
            });
        for (id, pid, flags) in wanted.collect::<Vec<_>>() {
            let number = Pid::from_raw(pid).ok_or(FilesRefusal::SocketMissing(id))?;
            let fd = pidfd_open(number, PidfdFlags::empty()).with_step(format!("process {pid}"))?;
            syscalls::set_status(fd.as_fd(), flags).with_step("F_SETFL")?;
            self.insert(id, fd)?;
        }
        Ok(())
    }

    /// Fills the objects that several open files share.
    fn fill_shared_objects(&mut self, former: &PreviousValues) -> Result<(), FilesError> {
        for (id, value) in &self.image.contents {
            if let Some(keeper) = self.object_fds.get(id) {
                nameless_content::write_final_state(keeper, former.content(*id, value), value)?;
            }
        }
        for (id, value) in &self.image.pipes {
            if let Some(keeper) = self.object_fds.get(id) {
                pipe::fill(keeper, value)?;
            }
        }
        unix::fill_receive_queues(self)
    }

    /// Sets the state of an open file that was prepared for the state `before`.
    fn set_state(
        &self,
        fd: &OwnedFd,
        file: &OpenFile,
        before: Option<&OpenFile>,
    ) -> Result<(), FilesError> {
        match &file.kind {
            OpenFileKind::Regular { offset, .. } | OpenFileKind::Content { offset, .. }
                if *offset > 0 =>
            {
                named_file::seek(fd, *offset)?;
            }
            OpenFileKind::Directory { offset, .. } if *offset > 0 => {
                named_file::seek_in_directory(fd, *offset)?;
            }
            OpenFileKind::Event { count, .. } => anon_inode::set_count(fd, *count)?,
            OpenFileKind::Timer(timer) => anon_inode::arm_timerfd(fd, timer)?,
            OpenFileKind::TerminalMaster { terminal } => {
                terminal::set_terminal_state(fd, &self.image.terminals[terminal])?;
            }
            OpenFileKind::Unix(socket) => unix::apply_options_and_shutdown(fd.as_fd(), socket)?,
            OpenFileKind::Inotify { .. } => inotify::discard_events(fd)?,
            _ => {}
        }
        set_flags(fd, file, before)
    }
}

fn set_flags(fd: &OwnedFd, file: &OpenFile, before: Option<&OpenFile>) -> Result<(), FilesError> {
    let fd: BorrowedFd<'_> = fd.as_fd();
    if let Some(owner) = file.owner {
        syscalls::set_owner(fd, owner.kind, owner.pid).with_step("F_SETOWN_EX")?;
        syscalls::set_owner_signal(fd, owner.signal).with_step("F_SETSIG")?;
    }
    let is_async = file.flags & libc::O_ASYNC as u32 != 0;
    let changed = before.is_none_or(|before| before.flags != file.flags);
    if is_async || changed {
        set_status(fd, file, 0)?;
    }
    Ok(())
}

/// Sets the status flags, except the flags in `without`.
fn set_status(fd: BorrowedFd<'_>, file: &OpenFile, without: u32) -> Result<(), FilesError> {
    if file.flags & libc::O_PATH as u32 != 0 {
        return Ok(());
    }
    syscalls::set_status(fd, file.flags & !without).with_step("F_SETFL")
}

/// Returns true if a file prepared for one state can get the other state.
fn can_reuse(old: &OpenFile, new: &OpenFile) -> bool {
    let opening = (libc::O_ACCMODE | libc::O_PATH) as u32;
    if old.flags & opening != new.flags & opening {
        return false;
    }
    match (&old.kind, &new.kind) {
        (OpenFileKind::Regular { path: old, .. }, OpenFileKind::Regular { path: new, .. })
        | (OpenFileKind::Directory { path: old, .. }, OpenFileKind::Directory { path: new, .. }) => {
            old == new
        }
        (
            OpenFileKind::Content { content: old, .. },
            OpenFileKind::Content { content: new, .. },
        ) => old == new,
        (OpenFileKind::Epoll { .. }, OpenFileKind::Epoll { .. }) => true,
        (
            OpenFileKind::Event { semaphore: old, .. },
            OpenFileKind::Event { semaphore: new, .. },
        ) => old == new,
        (OpenFileKind::Timer(old), OpenFileKind::Timer(new)) => old.clock == new.clock,
        (OpenFileKind::Unix(old), OpenFileKind::Unix(new)) => {
            let ended = matches!(
                (&old.link, &new.link),
                (
                    UnixConnectionState::Peer(_),
                    UnixConnectionState::PeerClosed
                )
            );
            (old.socket, &old.name) == (new.socket, &new.name) && (ended || old.link == new.link)
        }
        (old, new) => old == new,
    }
}
