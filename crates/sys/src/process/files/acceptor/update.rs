//! Update of the stock to later drafts, and in the freeze to the final state of the tree.

use super::stock::Stock;
use super::{Given, verify};
use crate::process::files::error::{At, FilesError, Refusal};
use crate::process::files::image::changes::{Changes, Former};
use crate::process::files::image::{FileId, Kind, OpenFile, UnixLink};
use crate::process::files::kinds::{
    anonymous, content, epoll, inotify, named, pipe, terminal, unix,
};
use crate::process::files::raw;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

impl Stock {
    /// Brings the stock to its final state. The processes of the tree must exist, because pidfds and owners of signals
    /// refer to them.
    ///
    /// # Errors
    /// Same as [`Self::prepare`]; [`FilesError::Malformed`] for changes that do not fit. The donor can still resume.
    pub fn finish(&mut self, changes: Changes, given: Given) -> Result<(), FilesError> {
        let former = self.change(changes, given, true)?;
        self.fill(&former)?;
        // Both maps have the same order, so that no lookup is needed.
        let mut made = self.files.iter();
        for (id, file) in &self.image.files {
            let (_, fd) = made
                .find(|(made, _)| *made == id)
                .ok_or(Refusal::SocketAbsent(*id))?;
            self.set_state(fd, file, former.file(*id, file))?;
        }
        self.keepers.clear();
        self.first_files.clear();
        self.ghosts.clear();
        self.opener.rest();
        Ok(())
    }

    /// Updates the stock to a later draft of the running tree.
    ///
    /// # Errors
    /// Same as [`Self::prepare`]; [`FilesError::Malformed`] for changes that do not fit. The stock is unusable then.
    pub fn follow(&mut self, changes: Changes, given: Given) -> Result<(), FilesError> {
        let former = self.change(changes, given, false)?;
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
            let now = self.image.contents.get(id);
            if let (Some(keeper), Some(before), Some(now)) = (self.keepers.get(id), before, now) {
                content::update(keeper, before, now)?;
            }
        }
        Ok(())
    }

    /// Makes files that are new or have become other files, and returns their former states; `last` is true if the tree
    /// is stopped.
    fn change(&mut self, changes: Changes, given: Given, last: bool) -> Result<Former, FilesError> {
        self.stale |= changes.concern_tables();
        let former = self.image.apply(changes)?;
        let mut remade: BTreeSet<FileId> = given.sockets.keys().copied().collect();
        for (id, old) in &former.files {
            let Some(file) = self.image.files.get(id) else {
                self.files.remove(id);
                continue;
            };
            if old.as_ref() != Some(file) {
                verify::verify_file(&mut self.opener, file, last)?;
            }
            if !old.as_ref().is_some_and(|old| is_same_thing(old, file)) {
                remade.insert(*id);
            }
        }
        self.find_moved_contents(&former, &mut remade);
        for id in &remade {
            self.files.remove(id);
        }
        self.make(&remade, given)?;
        if last {
            self.open_pidfds()?;
        }
        epoll::finish(self, &former, &remade)?;
        self.opener.rest();
        Ok(former)
    }

    /// Finds contents that have begun, or ceased, to move with mappings: the files that refer to them are made anew.
    fn find_moved_contents(&mut self, former: &Former, remade: &mut BTreeSet<FileId>) {
        for (id, old) in &former.contents {
            let (Some(old), Some(value)) = (old, self.image.contents.get(id)) else {
                continue;
            };
            if old.elsewhere != value.elsewhere {
                self.keepers.remove(id);
                let of_it =
                    |kind: &Kind| matches!(kind, Kind::Content { content, .. } if content == id);
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
        self.stages.iter_mut().try_for_each(unix::Stage::publish)
    }

    fn open_pidfds(&mut self) -> Result<(), FilesError> {
        let wanted = self
            .image
            .files
            .iter()
            .filter_map(|(id, file)| match file.kind {
                Kind::Pidfd { pid } if !self.has(*id) => Some((*id, pid, file.flags)),
                _ => None,
            });
        for (id, pid, flags) in wanted.collect::<Vec<_>>() {
            let number = Pid::from_raw(pid).ok_or(Refusal::SocketAbsent(id))?;
            let fd = pidfd_open(number, PidfdFlags::empty()).at(format!("process {pid}"))?;
            raw::set_status(fd.as_fd(), flags).at("F_SETFL")?;
            self.keep(id, fd)?;
        }
        Ok(())
    }

    /// Fills the objects that several open files share.
    fn fill(&mut self, former: &Former) -> Result<(), FilesError> {
        for (id, value) in &self.image.contents {
            if let Some(keeper) = self.keepers.get(id) {
                content::finish(keeper, former.content(*id, value), value)?;
            }
        }
        for (id, value) in &self.image.pipes {
            if let Some(keeper) = self.keepers.get(id) {
                pipe::fill(keeper, value)?;
            }
        }
        unix::fill(self)
    }

    /// Sets the state of an open file that was prepared for the state `before`.
    fn set_state(
        &self,
        fd: &OwnedFd,
        file: &OpenFile,
        before: Option<&OpenFile>,
    ) -> Result<(), FilesError> {
        match &file.kind {
            Kind::Regular { offset, .. } | Kind::Content { offset, .. } if *offset > 0 => {
                named::seek(fd, *offset)?;
            }
            Kind::Directory { offset, .. } if *offset > 0 => {
                named::seek_in_directory(fd, *offset)?;
            }
            Kind::Event { count, .. } => anonymous::set_count(fd, *count)?,
            Kind::Timer(timer) => anonymous::arm(fd, timer)?,
            Kind::TerminalMaster { terminal } => {
                terminal::finish(fd, &self.image.terminals[terminal])?;
            }
            Kind::Unix(socket) => unix::settle(fd.as_fd(), socket)?,
            Kind::Inotify { .. } => inotify::empty(fd)?,
            _ => {}
        }
        set_flags(fd, file, before)
    }
}

fn set_flags(fd: &OwnedFd, file: &OpenFile, before: Option<&OpenFile>) -> Result<(), FilesError> {
    let fd: BorrowedFd<'_> = fd.as_fd();
    if let Some(owner) = file.owner {
        raw::set_owner(fd, owner.kind, owner.pid).at("F_SETOWN_EX")?;
        raw::set_owner_signal(fd, owner.signal).at("F_SETSIG")?;
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
    raw::set_status(fd, file.flags & !without).at("F_SETFL")
}

/// Returns true if a file prepared for one state can get the other state.
fn is_same_thing(old: &OpenFile, new: &OpenFile) -> bool {
    let opening = (libc::O_ACCMODE | libc::O_PATH) as u32;
    if old.flags & opening != new.flags & opening {
        return false;
    }
    match (&old.kind, &new.kind) {
        (Kind::Regular { path: old, .. }, Kind::Regular { path: new, .. })
        | (Kind::Directory { path: old, .. }, Kind::Directory { path: new, .. }) => old == new,
        (Kind::Content { content: old, .. }, Kind::Content { content: new, .. }) => old == new,
        (Kind::Epoll { .. }, Kind::Epoll { .. }) => true,
        (Kind::Event { semaphore: old, .. }, Kind::Event { semaphore: new, .. }) => old == new,
        (Kind::Timer(old), Kind::Timer(new)) => old.clock == new.clock,
        (Kind::Unix(old), Kind::Unix(new)) => {
            let ended = matches!((&old.link, &new.link), (UnixLink::To(_), UnixLink::Gone));
            (old.socket, &old.name) == (new.socket, &new.name) && (ended || old.link == new.link)
        }
        (old, new) => old == new,
    }
}
