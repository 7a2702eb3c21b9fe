//! Saving a Unix socket at the donor.

use super::list::{Entry, list};
use super::queue::{Peeked, peek};
use super::{address, peer};
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, Reason};
use crate::process::files::image::{
    Bytes, FileId, Kind, UnixLink, UnixMessage, UnixName, UnixSocket,
};
use crate::process::files::kinds::socket::{filter, socket_options};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Stat;
use rustix::io::ioctl_fionread;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `SIOCOUTQ`.
const SIOCOUTQ: u64 = 0x5411;

/// Saves a socket.
pub fn save(saver: &mut Saver<'_>, subject: &Subject, socket: i32) -> Saved<Kind> {
    if let Some(pid) = saver.outside.holder(&subject.link) {
        return Err(Reason::OtherEndOutside(Some(pid)).into());
    }
    if is_marked(subject)? {
        return Err(Reason::OutOfBand.into());
    }
    let entry = entry(saver, subject)?;
    let name = name(subject)?;
    let link = link(saver, subject, socket, &entry)?;
    let queue = if saver.frozen && !entry.listening {
        queue(saver, subject, socket)?
    } else {
        Vec::new()
    };
    let found = socket_options(subject.fd())?;
    let stat = rustix::fs::fstat(&subject.copy).at("fstat")?;
    Ok(Kind::Unix(Box::new(UnixSocket {
        socket,
        name,
        link,
        owner: (stat.st_uid, stat.st_gid),
        peer: peer::of(subject.fd()).at("SO_PEERCRED")?,
        shutdown: entry.shutdown,
        options: found,
        filter: filter(subject.fd())?,
        queue,
    })))
}

/// Returns true if out-of-band data (`MSG_OOB`) was sent and not read.
fn is_marked(subject: &Subject) -> Saved<bool> {
    let mut one = [PollFd::new(&subject.copy, PollFlags::PRI)];
    poll(&mut one, Some(&Timespec::default())).at("poll")?;
    Ok(one[0].revents().contains(PollFlags::PRI))
}

/// Returns the socket's entry in the kernel's list, which is read anew if the socket is younger than the list.
fn entry(saver: &mut Saver<'_>, subject: &Subject) -> Saved<Entry> {
    let inode = subject.info.inode as u32;
    let known = |saver: &Saver<'_>| {
        let sockets = &saver.unix.as_ref()?.sockets;
        sockets.get(&inode).cloned()
    };
    if known(saver).is_none() {
        saver.unix = Some(list(saver.pids[0]).at("sock_diag")?);
    }
    Ok(known(saver).ok_or(Reason::OtherNamespace)?)
}

fn name(subject: &Subject) -> Saved<UnixName> {
    let raw = address::own_name(subject.fd()).at("getsockname")?;
    match raw.first() {
        None => return Ok(UnixName::None),
        Some(0) => return Ok(UnixName::Abstract(Bytes(raw))),
        Some(_) => {}
    }
    let name = String::from_utf8(raw).map_err(|_| Reason::NotUtf8)?;
    let (file, access) = match file(subject)? {
        Some((path, stat)) => {
            let access = (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777);
            (Some(path), access)
        }
        None => (None, (0, 0, 0)),
    };
    Ok(UnixName::Path { name, file, access })
}

/// Returns the present path of a socket's file, which the socket itself holds under any name. `None` if the file was
/// removed.
fn file(subject: &Subject) -> Saved<Option<(String, Stat)>> {
    let file = match address::file(subject.fd()) {
        Ok(file) => file,
        // An accepted socket may have a name without a file.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        Err(error) => return Err(error).at("SIOCUNIXFILE")?,
    };
    let stat = rustix::fs::fstat(&file).at("fstat")?;
    if stat.st_nlink == 0 {
        return Ok(None);
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = fs::read_link(&link).at(&link)?;
    let is_there = fs::symlink_metadata(&path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (stat.st_dev, stat.st_ino));
    if !is_there {
        return Ok(None);
    }
    let path = path.into_os_string().into_string();
    Ok(Some((path.map_err(|_| Reason::NotUtf8)?, stat)))
}

fn link(saver: &Saver<'_>, subject: &Subject, socket: i32, entry: &Entry) -> Saved<UnixLink> {
    if entry.listening {
        return listening(saver, entry);
    }
    let listed = saver.unix.as_ref();
    let inode = subject.info.inode as u32;
    if let Some((listener, place)) = listed.and_then(|listed| listed.waiting.get(&inode)) {
        let listener = of_tree(saver, *listener).ok_or(Reason::OtherEndOutside(None))?;
        let mut unread = [0u8; 4];
        super::super::super::raw::ioctl(subject.fd(), SIOCOUTQ, &mut unread).at("SIOCOUTQ")?;
        // Data for a socket that waits cannot be read before the socket is accepted.
        if saver.frozen && unread != [0; 4] {
            return Err(Reason::Unaccepted.into());
        }
        return Ok(UnixLink::Waiting(listener, *place));
    }
    match entry.peer {
        None => Ok(UnixLink::Alone),
        Some(0) => Ok(UnixLink::Gone),
        Some(peer) => match of_tree(saver, peer) {
            Some(file) => Ok(UnixLink::To(file)),
            None if socket == libc::SOCK_DGRAM => service(saver, subject, peer),
            None => Err(outside(saver, peer).into()),
        },
    }
}

fn outside(saver: &Saver<'_>, peer: u32) -> Reason {
    let link = format!("socket:[{peer}]");
    Reason::OtherEndOutside(saver.outside.holder(&link))
}

fn listening(saver: &Saver<'_>, entry: &Entry) -> Saved<UnixLink> {
    let strange = |waiting: &u32| of_tree(saver, *waiting).is_none();
    if saver.frozen && entry.waiting.iter().any(strange) {
        return Err(Reason::Unaccepted.into());
    }
    Ok(UnixLink::Listening(entry.backlog))
}

fn of_tree(saver: &Saver<'_>, inode: u32) -> Option<FileId> {
    let alike = saver.pool.with_inode(inode.into());
    // Files on other mounts may have the same inode number; only Unix sockets have the line `scm_fds`.
    let class = alike
        .iter()
        .find(|class| saver.pool.classes[**class].info.value("scm_fds").is_some());
    class.map(|class| saver.id(*class))
}

/// Returns the link of a datagram socket that is connected to a file, such as the system log's: the path means the same
/// on every host.
fn service(saver: &Saver<'_>, subject: &Subject, peer: u32) -> Saved<UnixLink> {
    let (mut address, _) = address::address(&[]).at("getpeername")?;
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&subject.copy);
    // SAFETY: `address` is writable for `length` bytes and both outlive the call.
    let outcome = unsafe { libc::getpeername(fd, (&raw mut address).cast(), &raw mut length) };
    crate::sockopt::check(outcome).at("getpeername")?;
    let name = String::from_utf8(address::name(&address, length)).map_err(|_| Reason::NotUtf8)?;
    if name.starts_with('/') && Path::new(&name).exists() {
        return Ok(UnixLink::Service(name));
    }
    Err(outside(saver, peer).into())
}

fn queue(saver: &mut Saver<'_>, subject: &Subject, socket: i32) -> Saved<Vec<UnixMessage>> {
    let stream = socket != libc::SOCK_DGRAM;
    if stream && ioctl_fionread(&subject.copy).at("FIONREAD")? == 0 {
        return Ok(Vec::new());
    }
    let peeked = match peek(subject.fd(), stream) {
        Ok(peeked) => peeked,
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => return Ok(Vec::new()),
        Err(error) => return Err(error).at("MSG_PEEK")?,
    };
    let mut queue = Vec::new();
    for message in peeked {
        queue.push(to_message(saver, message)?);
    }
    Ok(queue)
}

fn to_message(saver: &mut Saver<'_>, message: Peeked) -> Saved<UnixMessage> {
    let mut files = Vec::new();
    for fd in message.fds {
        files.push(saver.id_in_flight(fd)?);
    }
    let inside = |(pid, user, group)| (saver.inner(pid).unwrap_or(0), user, group);
    Ok(UnixMessage {
        bytes: Bytes(message.bytes),
        files,
        credentials: message.credentials.map(inside),
        from: Bytes(message.from),
    })
}
