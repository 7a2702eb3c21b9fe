//! Kinds of open files: how each is saved at the donor, and made at the acceptor.

pub mod anon_inode;
pub mod epoll;
pub mod fingerprint;
pub mod inotify;
pub mod locks;
pub mod named_file;
pub mod nameless_content;
pub mod pipe;
pub mod socket;
pub mod terminal;
pub mod unix;

use super::acceptor::FdStore;
use super::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use super::error::{BlockReason, FilesError, StepContext};
use super::image::{FileId, OpenFile, OpenFileKind};
use rustix::fs::{FileType, Stat, fstat};

/// Saves an open file of any kind.
pub fn save(saver: &mut OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<OpenFileKind> {
    let stat = fstat(&source.copy).with_step("fstat")?;
    if source.info.flags & libc::O_PATH as u32 != 0 {
        return named_file::save_o_path_file(source, &stat);
    }
    if source.link.starts_with("anon_inode:") {
        return anon_inode::save(saver, source);
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => save_regular(saver, source, &stat),
        FileType::Directory => named_file::save_directory(source, &stat),
        FileType::Fifo => pipe::save(saver, source, &stat),
        FileType::Socket => socket::save(saver, source, &stat),
        FileType::CharacterDevice => terminal::save_device(saver, source, &stat),
        FileType::BlockDevice => Err(terminal::device_reason(&stat).into()),
        _ => Err(BlockReason::Unknown.into()),
    }
}

fn save_regular(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    stat: &Stat,
) -> SaveResult<OpenFileKind> {
    let identity = (stat.st_dev, stat.st_ino);
    if stat.st_nlink == 0 || saver.limits.mapped_memory.contains(&identity) {
        return nameless_content::save(saver, source, stat);
    }
    if !source.link.starts_with('/') {
        return Err(BlockReason::Namespace.into());
    }
    named_file::save_regular(saver, source, stat)
}

/// Makes an open file as far as possible before the tree is stopped.
pub fn make(store: &mut FdStore, id: FileId, file: &OpenFile) -> Result<(), FilesError> {
    match &file.kind {
        OpenFileKind::Regular {
            path,
            fingerprint: stamp,
            ..
        } => {
            let fd = named_file::open_with_rights(&mut store.opener, path, file.flags)?;
            if stamp.is_none() {
                named_file::require_generated_content(&fd, path)?;
            }
            store.insert(id, fd)
        }
        OpenFileKind::Directory { path, .. } | OpenFileKind::Path { path } => {
            let fd = named_file::open_with_rights(&mut store.opener, path, file.flags)?;
            store.insert(id, fd)
        }
        OpenFileKind::Device { path, device } => {
            let fd = named_file::open_device(&mut store.opener, path, *device, file.flags)?;
            store.insert(id, fd)
        }
        OpenFileKind::Content { content, .. } => {
            nameless_content::make(store, id, *content, file.flags)
        }
        OpenFileKind::Pipe { pipe } => pipe::make(store, id, *pipe, file.flags),
        OpenFileKind::TerminalMaster { terminal } => {
            terminal::make_master(store, id, *terminal, file.flags)
        }
        OpenFileKind::TerminalSlave { terminal } => {
            terminal::make_slave(store, id, *terminal, file.flags)
        }
        OpenFileKind::Epoll { .. }
        | OpenFileKind::Event { .. }
        | OpenFileKind::Timer(_)
        | OpenFileKind::Signal { .. }
        | OpenFileKind::Inotify { .. } => {
            let fd = anon_inode::make(&mut store.opener, &file.kind, file.flags)?;
            store.insert(id, fd)
        }
        OpenFileKind::Unix(_) => unix::make_socket(store, id),
        OpenFileKind::Netlink(netlink) => {
            let fd = socket::make_netlink(netlink, file.flags)?;
            store.insert(id, fd)
        }
        // TCP and UDP sockets are given by the caller, and pidfds are opened once the processes exist.
        OpenFileKind::Inet { .. } | OpenFileKind::Pidfd { .. } => Ok(()),
    }
}
