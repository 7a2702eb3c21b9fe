//! Saving a Unix socket at the donor.

use super::diag::{DiagEntry, list_sockets};
use super::receive_queue::{PeekedMessage, peek};
use super::{address, peer_credentials};
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, StepContext};
use crate::files::image::{
    ByteString, FileId, OpenFileKind, UnixConnectionState, UnixMessage, UnixName, UnixSocket,
};
use crate::files::kinds::socket::{read_filter, read_socket_options};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Stat;
use rustix::io::ioctl_fionread;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `SIOCOUTQ`.
const SIOCOUTQ: u64 = 0x5411;

/// Saves a Unix socket: its name, its connection, and its queue if the tree is stopped.
pub fn save(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    socket: i32,
) -> SaveResult<OpenFileKind> {
    if let Some(pid) = saver.outside_holders.holder_of_link(&source.link) {
        return Err(BlockReason::OtherEndOutside(Some(pid)).into());
    }
    if has_out_of_band_data(source)? {
        return Err(BlockReason::OutOfBand.into());
    }
    let entry = diag_entry(saver, source)?;
    let name = read_name(source)?;
    let link = read_connection_state(saver, source, socket, &entry)?;
    let queue = if saver.frozen && !entry.listening {
        read_queue(saver, source, socket)?
    } else {
        Vec::new()
    };
    let found = read_socket_options(source.fd())?;
    let stat = rustix::fs::fstat(&source.copy).with_step("fstat")?;
    Ok(OpenFileKind::Unix(Box::new(UnixSocket {
        socket,
        name,
        link,
        owner: (stat.st_uid, stat.st_gid),
        peer: peer_credentials::read_peer(source.fd()).with_step("SO_PEERCRED")?,
        shutdown: entry.shutdown,
        options: found,
        filter: read_filter(source.fd())?,
        queue,
    })))
}

/// Returns true if out-of-band data (`MSG_OOB`) was sent and not read.
fn has_out_of_band_data(source: &FileBeingSaved) -> SaveResult<bool> {
    let mut poll_fds = [PollFd::new(&source.copy, PollFlags::PRI)];
    poll(&mut poll_fds, Some(&Timespec::default())).with_step("poll")?;
    Ok(poll_fds[0].revents().contains(PollFlags::PRI))
}

/// Returns the socket's entry in the kernel's list, which is read anew if the socket is younger than the list.
fn diag_entry(saver: &mut OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<DiagEntry> {
    let inode = source.info.inode as u32;
    let find_entry = |saver: &OpenFileSaver<'_>| {
        let sockets = &saver.unix.as_ref()?.sockets;
        sockets.get(&inode).cloned()
    };
    if find_entry(saver).is_none() {
        saver.unix = Some(list_sockets(saver.pids[0]).with_step("sock_diag")?);
    }
    Ok(find_entry(saver).ok_or(BlockReason::OtherNamespace)?)
}

fn read_name(source: &FileBeingSaved) -> SaveResult<UnixName> {
    let raw = address::bound_name(source.fd()).with_step("getsockname")?;
    match raw.first() {
        None => return Ok(UnixName::None),
        Some(0) => return Ok(UnixName::Abstract(ByteString(raw))),
        Some(_) => {}
    }
    let name = String::from_utf8(raw).map_err(|_| BlockReason::NotUtf8)?;
    let (file, access) = match find_bound_file(source)? {
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
fn find_bound_file(source: &FileBeingSaved) -> SaveResult<Option<(String, Stat)>> {
    let file = match address::open_bound_file(source.fd()) {
        Ok(file) => file,
        // An accepted socket may have a name without a file.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        Err(error) => return Err(error).with_step("SIOCUNIXFILE")?,
    };
    let stat = rustix::fs::fstat(&file).with_step("fstat")?;
    if stat.st_nlink == 0 {
        return Ok(None);
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = fs::read_link(&link).with_step(&link)?;
    let is_current = fs::symlink_metadata(&path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (stat.st_dev, stat.st_ino));
    if !is_current {
        return Ok(None);
    }
    let path = path.into_os_string().into_string();
    Ok(Some((path.map_err(|_| BlockReason::NotUtf8)?, stat)))
}

fn read_connection_state(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
    socket: i32,
    entry: &DiagEntry,
) -> SaveResult<UnixConnectionState> {
    if entry.listening {
        return listening_link(saver, entry);
    }
    let listed = saver.unix.as_ref();
    let inode = source.info.inode as u32;
    if let Some((listener, place)) = listed.and_then(|listed| listed.pending_accept.get(&inode)) {
        let listener = find_in_tree(saver, *listener).ok_or(BlockReason::OtherEndOutside(None))?;
        let mut unread = [0u8; 4];
        super::super::super::syscalls::ioctl(source.fd(), SIOCOUTQ, &mut unread)
            .with_step("SIOCOUTQ")?;
        // Data for a socket that waits cannot be read before the socket is accepted.
        if saver.frozen && unread != [0; 4] {
            return Err(BlockReason::Unaccepted.into());
        }
        return Ok(UnixConnectionState::PendingAccept(listener, *place));
    }
    match entry.peer {
        None => Ok(UnixConnectionState::Unconnected),
        Some(0) => Ok(UnixConnectionState::PeerClosed),
        Some(peer) => match find_in_tree(saver, peer) {
            Some(file) => Ok(UnixConnectionState::Peer(file)),
            None if socket == libc::SOCK_DGRAM => service_link(saver, source, peer),
            None => Err(outside_peer_reason(saver, peer).into()),
        },
    }
}

fn outside_peer_reason(saver: &OpenFileSaver<'_>, peer: u32) -> BlockReason {
    let link = format!("socket:[{peer}]");
    BlockReason::OtherEndOutside(saver.outside_holders.holder_of_link(&link))
}

fn listening_link(saver: &OpenFileSaver<'_>, entry: &DiagEntry) -> SaveResult<UnixConnectionState> {
    let outside_client = |waiting: &u32| find_in_tree(saver, *waiting).is_none();
    if saver.frozen && entry.pending_accept.iter().any(outside_client) {
        return Err(BlockReason::Unaccepted.into());
    }
    Ok(UnixConnectionState::Listening(entry.backlog))
}

fn find_in_tree(saver: &OpenFileSaver<'_>, inode: u32) -> Option<FileId> {
    let same_inode = saver.open_files.with_inode(inode.into());
    // Files on other mounts may have the same inode number; only Unix sockets have the line `scm_fds`.
    let index = same_inode.iter().find(|index| {
        saver.open_files.list[**index]
            .info
            .value("scm_fds")
            .is_some()
    });
    index.map(|index| saver.file_id(*index))
}

/// Returns the link of a datagram socket that is connected to a file, such as the system log's: the path means the same
/// on every host.
fn service_link(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
    peer: u32,
) -> SaveResult<UnixConnectionState> {
    let (mut address, _) = address::to_sockaddr(&[]).with_step("getpeername")?;
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&source.copy);
    // SAFETY: `address` is writable for `length` bytes and both outlive the call.
    let outcome = unsafe { libc::getpeername(fd, (&raw mut address).cast(), &raw mut length) };
    holdfast_sys::sockopt::check(outcome).with_step("getpeername")?;
    let name =
        String::from_utf8(address::name(&address, length)).map_err(|_| BlockReason::NotUtf8)?;
    if name.starts_with('/') && Path::new(&name).exists() {
        return Ok(UnixConnectionState::Service(name));
    }
    Err(outside_peer_reason(saver, peer).into())
}

fn read_queue(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    socket: i32,
) -> SaveResult<Vec<UnixMessage>> {
    let stream = socket != libc::SOCK_DGRAM;
    if stream && ioctl_fionread(&source.copy).with_step("FIONREAD")? == 0 {
        return Ok(Vec::new());
    }
    let peeked = match peek(source.fd(), stream) {
        Ok(peeked) => peeked,
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => return Ok(Vec::new()),
        Err(error) => return Err(error).with_step("MSG_PEEK")?,
    };
    let mut queue = Vec::new();
    for message in peeked {
        queue.push(to_message(saver, message)?);
    }
    Ok(queue)
}

fn to_message(saver: &mut OpenFileSaver<'_>, message: PeekedMessage) -> SaveResult<UnixMessage> {
    let mut files = Vec::new();
    for fd in message.fds {
        files.push(saver.add_in_flight(fd)?);
    }
    let inside = |(pid, user, group)| (saver.inner_pid(pid).unwrap_or(0), user, group);
    Ok(UnixMessage {
        bytes: ByteString(message.bytes),
        files,
        credentials: message.credentials.map(inside),
        sender_name: ByteString(message.sender_name),
    })
}
