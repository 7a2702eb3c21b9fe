//! Kinds of open files: how each is saved at the donor, and made at the acceptor.

pub mod anonymous;
pub mod content;
pub mod epoll;
pub mod inotify;
pub mod locks;
pub mod named;
pub mod pipe;
pub mod socket;
pub mod stamp;
pub mod terminal;
pub mod unix;

use super::acceptor::Stock;
use super::donor::{Saved, Saver, Subject};
use super::error::{At, FilesError, Reason};
use super::image::{FileId, Kind, OpenFile};
use rustix::fs::{FileType, Stat, fstat};

/// Saves an open file of any kind.
pub fn save(saver: &mut Saver<'_>, subject: &Subject) -> Saved<Kind> {
    let stat = fstat(&subject.copy).at("fstat")?;
    if subject.info.flags & libc::O_PATH as u32 != 0 {
        return named::save_path(subject, &stat);
    }
    if subject.link.starts_with("anon_inode:") {
        return anonymous::save(saver, subject);
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => save_regular(saver, subject, &stat),
        FileType::Directory => named::save_directory(subject, &stat),
        FileType::Fifo => pipe::save(saver, subject, &stat),
        FileType::Socket => socket::save(saver, subject, &stat),
        FileType::CharacterDevice => terminal::save_device(saver, subject, &stat),
        FileType::BlockDevice => Err(terminal::device_reason(&stat).into()),
        _ => Err(Reason::Unknown.into()),
    }
}

fn save_regular(saver: &mut Saver<'_>, subject: &Subject, stat: &Stat) -> Saved<Kind> {
    let identity = (stat.st_dev, stat.st_ino);
    if stat.st_nlink == 0 || saver.limits.elsewhere.contains(&identity) {
        return content::save(saver, subject, stat);
    }
    if !subject.link.starts_with('/') {
        return Err(Reason::Namespace.into());
    }
    named::save_regular(saver, subject, stat)
}

/// Makes an open file as far as possible before the tree is stopped.
pub fn make(stock: &mut Stock, id: FileId, file: &OpenFile) -> Result<(), FilesError> {
    match &file.kind {
        Kind::Regular { path, stamp, .. } => {
            let fd = named::open_for(&mut stock.opener, path, file.flags)?;
            if stamp.is_none() {
                named::require_kernels_own(&fd, path)?;
            }
            stock.keep(id, fd)
        }
        Kind::Directory { path, .. } | Kind::Path { path } => {
            let fd = named::open_for(&mut stock.opener, path, file.flags)?;
            stock.keep(id, fd)
        }
        Kind::Device { path, device } => {
            let fd = named::open_device(&mut stock.opener, path, *device, file.flags)?;
            stock.keep(id, fd)
        }
        Kind::Content { content, .. } => content::make(stock, id, *content, file.flags),
        Kind::Pipe { pipe } => pipe::make(stock, id, *pipe, file.flags),
        Kind::TerminalMaster { terminal } => {
            terminal::make_master(stock, id, *terminal, file.flags)
        }
        Kind::TerminalSlave { terminal } => terminal::make_slave(stock, id, *terminal, file.flags),
        Kind::Epoll { .. }
        | Kind::Event { .. }
        | Kind::Timer(_)
        | Kind::Signal { .. }
        | Kind::Inotify { .. } => {
            let fd = anonymous::make(&mut stock.opener, &file.kind, file.flags)?;
            stock.keep(id, fd)
        }
        Kind::Unix(_) => unix::make(stock, id),
        Kind::Netlink(netlink) => {
            let fd = socket::make_netlink(netlink, file.flags)?;
            stock.keep(id, fd)
        }
        // TCP and UDP sockets are given by the caller, and pidfds are opened once the processes exist.
        Kind::Inet { .. } | Kind::Pidfd { .. } => Ok(()),
    }
}
