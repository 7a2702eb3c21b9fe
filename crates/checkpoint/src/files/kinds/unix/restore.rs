//! Restore of a Unix socket at the acceptor.

use super::naming::{bind, raw_name, with_bound_name, with_socket_name};
use super::peer_credentials::{UserGroup, run_as};
use super::staging_directory::HiddenSocketFile;
use super::{address, receive_queue};
use crate::file_rights::is_refusal;
use crate::files::acceptor::FdStore;
use crate::files::error::{FilesError, FilesRefusal, StepContext};
use crate::files::image::{
    FileId, OpenFileKind, UnixConnectionState, UnixMessage, UnixName, UnixSocket,
};
use crate::files::kinds::socket::{allowed_options, new_socket, set_options};
use crate::files::syscalls;
use holdfast_sys::socket_filter::SocketFilter;
use holdfast_sys::sockopt::{check, set_int};
use libc::SOL_SOCKET;
use rustix::net::{Shutdown, accept_with, listen, shutdown};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Send buffer of a sender while queues are filled, bytes: all that the queues hold may be in flight at once.
const SEND_BUFFER_BYTES: i32 = 64 << 20;

/// Makes a socket, together with its peer if it has one.
pub fn make_socket(store: &mut FdStore, id: FileId) -> Result<(), FilesError> {
    if store.contains(id) {
        return Ok(());
    }
    let socket = unix_socket(store, id)?;
    match socket.link {
        UnixConnectionState::Peer(peer) if is_mutual(store, id, peer) => {
            restore_connected_sockets(store, id, peer, &socket)
        }
        UnixConnectionState::PeerClosed => {
            let (fd, closed_peer) = make_with_closed_peer(store, id, &socket)?;
            // The ghost is closed after the queue is filled.
            let ghost = store.move_above_tree(closed_peer)?;
            store.closed_peers.insert(id, ghost);
            insert_with_flags(store, id, fd)
        }
        _ => {
            let fd = create_unconnected(&socket)?;
            bind(store, fd.as_fd(), &socket, &HiddenSocketFile::Socket(id))?;
            if let UnixConnectionState::Listening(backlog) = socket.link {
                run_as(socket.peer, || Ok(listen(&fd, backlog as i32)?)).with_step("listen")?;
            }
            if let UnixConnectionState::Service(path) = &socket.link {
                connect_outside(store, fd.as_fd(), path)?;
            }
            insert_with_flags(store, id, fd)
        }
    }
}

/// Connects to a listener outside the tree, with the rights of the tree.
fn connect_outside(store: &mut FdStore, fd: BorrowedFd<'_>, path: &str) -> Result<(), FilesError> {
    let opener = &mut store.opener;
    let outcome = match opener.is_limited() {
        true => {
            address::to_sockaddr_bytes(path.as_bytes()).and_then(|bytes| opener.connect(fd, &bytes))
        }
        false => address::connect(fd, path.as_bytes()),
    };
    match outcome {
        Err(error) if opener.is_limited() && is_refusal(&error) => {
            Err(FilesRefusal::NotAllowed(path.to_string()).into())
        }
        outcome => Ok(outcome.map_err(|_| FilesRefusal::Missing(path.to_string()))?),
    }
}

fn unix_socket(store: &FdStore, id: FileId) -> Result<UnixSocket, FilesError> {
    match store.image.files.get(&id).map(|file| &file.kind) {
        Some(OpenFileKind::Unix(socket)) => Ok((**socket).clone()),
        _ => Err(FilesRefusal::SocketMissing(id).into()),
    }
}

fn is_mutual(store: &FdStore, id: FileId, peer: FileId) -> bool {
    let peer_link = unix_socket(store, peer).map(|socket| socket.link);
    id != peer && peer_link.is_ok_and(|link| link == UnixConnectionState::Peer(id))
}

/// Sets the status flags, then puts the socket into the store.
fn insert_with_flags(store: &mut FdStore, id: FileId, fd: OwnedFd) -> Result<(), FilesError> {
    let flags = store.image.files[&id].flags & !(libc::O_ASYNC as u32);
    syscalls::set_status(fd.as_fd(), flags).with_step("F_SETFL")?;
    store.insert(id, fd)
}

fn create_pair(kind: i32, creator: Option<UserGroup>) -> Result<(OwnedFd, OwnedFd), FilesError> {
    let mut fds = [0; 2];
    let kind = kind | libc::SOCK_CLOEXEC;
    // SAFETY: `fds` is writable for two descriptors and outlives the call.
    let make = || check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) });
    run_as(creator, make).with_step("socketpair")?;
    // SAFETY: the call succeeded, so both are new descriptors that nothing else owns.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// Creates an unconnected socket that belongs to its owner.
fn create_unconnected(socket: &UnixSocket) -> Result<OwnedFd, FilesError> {
    let make = || new_socket(libc::AF_UNIX, socket.socket, 0);
    run_as(Some(socket.owner), make).with_step("socket")
}

/// Restores two sockets of the tree that were connected to each other.
fn restore_connected_sockets(
    store: &mut FdStore,
    id: FileId,
    peer: FileId,
    socket: &UnixSocket,
) -> Result<(), FilesError> {
    let peer_socket = unix_socket(store, peer)?;
    let (fd, peer_fd) = if has_inherited_name(store, socket) {
        let (client, server) = connect_and_accept(store, (peer, &peer_socket), socket)?;
        (server, client)
    } else if has_inherited_name(store, &peer_socket) {
        connect_and_accept(store, (id, socket), &peer_socket)?
    } else {
        let (fd, peer_fd) = create_pair(socket.socket, socket.peer)?;
        bind(store, fd.as_fd(), socket, &HiddenSocketFile::Socket(id))?;
        bind(
            store,
            peer_fd.as_fd(),
            &peer_socket,
            &HiddenSocketFile::Socket(peer),
        )?;
        (fd, peer_fd)
    };
    let peer_fd = store.move_above_tree(peer_fd)?;
    insert_with_flags(store, id, fd)?;
    insert_with_flags(store, peer, peer_fd)
}

/// Makes a socket with a peer that the caller closes later.
fn make_with_closed_peer(
    store: &mut FdStore,
    id: FileId,
    socket: &UnixSocket,
) -> Result<(OwnedFd, OwnedFd), FilesError> {
    if has_inherited_name(store, socket) {
        let client = UnixSocket {
            name: UnixName::None,
            peer: None,
            ..socket.clone()
        };
        let (client, server) = connect_and_accept(store, (id, &client), socket)?;
        return Ok((server, client));
    }
    let (fd, closed_peer) = create_pair(socket.socket, socket.peer)?;
    bind(store, fd.as_fd(), socket, &HiddenSocketFile::Socket(id))?;
    Ok((fd, closed_peer))
}

/// Returns true if a connected socket most likely has its name from the listener that accepted it. Such a name cannot
/// be bound again: the socket is made by connecting and accepting.
fn has_inherited_name(store: &FdStore, socket: &UnixSocket) -> bool {
    if socket.socket == libc::SOCK_DGRAM {
        return false;
    }
    match &socket.name {
        UnixName::None => false,
        UnixName::Abstract(_) | UnixName::Path { file: None, .. } => true,
        UnixName::Path { .. } => {
            let name = raw_name(&socket.name);
            let same_name = store.image.files.values().filter(|file| match &file.kind {
                OpenFileKind::Unix(other) => raw_name(&other.name) == name,
                _ => false,
            });
            same_name.count() > 1
        }
    }
}

fn connect_and_accept(
    store: &mut FdStore,
    (client_id, client): (FileId, &UnixSocket),
    server: &UnixSocket,
) -> Result<(OwnedFd, OwnedFd), FilesError> {
    let listener = store
        .image
        .files
        .iter()
        .find_map(|(id, file)| match &file.kind {
            OpenFileKind::Unix(socket)
                if matches!(socket.link, UnixConnectionState::Listening(_))
                    && raw_name(&socket.name) == raw_name(&server.name) =>
            {
                Some(*id)
            }
            _ => None,
        });
    let (listener, name, hidden) = match listener {
        Some(id) => {
            make_socket(store, id)?;
            let listener = store.get(id)?.try_clone_to_owned().with_step("dup")?;
            (
                listener,
                unix_socket(store, id)?.name,
                HiddenSocketFile::Socket(id),
            )
        }
        None => {
            let mut server = server.clone();
            // The name is free again at once: other sockets may have inherited the same name from the listener.
            if let UnixName::Path { file, .. } = &mut server.name {
                *file = None;
            }
            let listener = new_socket(libc::AF_UNIX, server.socket, 0).with_step("socket")?;
            bind(
                store,
                listener.as_fd(),
                &server,
                &HiddenSocketFile::Temporary,
            )?;
            run_as(client.peer, || Ok(listen(&listener, 1)?)).with_step("listen")?;
            (listener, server.name, HiddenSocketFile::Temporary)
        }
    };
    let fd = create_unconnected(client)?;
    bind(
        store,
        fd.as_fd(),
        client,
        &HiddenSocketFile::Socket(client_id),
    )?;
    with_bound_name(store, &hidden, &name, |name| {
        run_as(server.peer, || address::connect(fd.as_fd(), name))
    })?;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let accepted = accept_with(&listener, flags).with_step("accept")?;
    Ok((fd, accepted))
}

/// Fills the queues of all sockets from their senders, and connects the sockets that waited to be accepted.
pub fn fill_receive_queues(store: &mut FdStore) -> Result<(), FilesError> {
    let sockets = store
        .image
        .files
        .iter()
        .filter_map(|(id, file)| match &file.kind {
            OpenFileKind::Unix(socket) => Some((*id, (**socket).clone())),
            _ => None,
        });
    let sockets: Vec<(FileId, UnixSocket)> = sockets.collect();
    let mut waiting = Vec::new();
    for (id, socket) in &sockets {
        for message in &socket.queue {
            deliver(store, *id, socket, message)?;
        }
        store.closed_peers.remove(id);
        if let UnixConnectionState::PendingAccept(listener, place) = socket.link {
            waiting.push((listener, place, *id, socket.owner));
        }
    }
    waiting.sort_unstable();
    // The accepting process will see the creator of the socket as its peer: usually the creator also connected it.
    for (listener, _, id, owner) in waiting {
        let name = unix_socket(store, listener)?.name;
        let fd = store.get(id)?.try_clone_to_owned().with_step("dup")?;
        with_socket_name(store, listener, &name, |name| {
            run_as(Some(owner), || address::connect(fd.as_fd(), name))
        })?;
    }
    // Some datagram sockets are connected in one direction only.
    for (id, socket) in &sockets {
        if let UnixConnectionState::Peer(peer) = socket.link
            && !is_mutual(store, *id, peer)
        {
            let name = unix_socket(store, peer)?.name;
            let fd = store.get(*id)?.try_clone_to_owned().with_step("dup")?;
            with_socket_name(store, peer, &name, |name| {
                address::connect(fd.as_fd(), name)
            })?;
        }
    }
    Ok(())
}

fn deliver(
    store: &mut FdStore,
    id: FileId,
    socket: &UnixSocket,
    message: &UnixMessage,
) -> Result<(), FilesError> {
    let fds = message.files.iter().map(|file| store.raw_fd(*file));
    let fds = fds.collect::<Result<Vec<_>, _>>()?;
    let connected = match socket.link {
        UnixConnectionState::Peer(peer) if is_mutual(store, id, peer) => {
            Some(store.get(peer)?.as_raw_fd())
        }
        _ => store.closed_peers.get(&id).map(AsRawFd::as_raw_fd),
    };
    if let Some(sender) = connected {
        // SAFETY: the store keeps the descriptor open until this function has returned.
        let sender = unsafe { BorrowedFd::borrow_raw(sender) };
        set_int(sender, SOL_SOCKET, libc::SO_SNDBUFFORCE, SEND_BUFFER_BYTES)
            .with_step("SO_SNDBUFFORCE")?;
        return send(sender, message, &fds, None);
    }
    let sender = sender_named(store, &message.sender_name.0, socket.socket)?;
    set_int(
        sender.as_fd(),
        SOL_SOCKET,
        libc::SO_SNDBUFFORCE,
        SEND_BUFFER_BYTES,
    )
    .with_step("SO_SNDBUFFORCE")?;
    with_socket_name(store, id, &socket.name, |to| {
        send(sender.as_fd(), message, &fds, Some(to)).map_err(io::Error::other)
    })
}

/// Returns a socket of the tree with this name, or a temporary one.
fn sender_named(store: &mut FdStore, from: &[u8], kind: i32) -> Result<OwnedFd, FilesError> {
    let of_tree = store
        .image
        .files
        .iter()
        .find_map(|(id, file)| match &file.kind {
            OpenFileKind::Unix(socket) if !from.is_empty() && raw_name(&socket.name) == from => {
                Some(*id)
            }
            _ => None,
        });
    if let Some(id) = of_tree {
        return store.get(id)?.try_clone_to_owned().with_step("dup");
    }
    let fd = new_socket(libc::AF_UNIX, kind, 0).with_step("socket")?;
    let name = match from.first() {
        None => return Ok(fd),
        Some(0) => UnixName::Abstract(crate::files::image::ByteString(from.to_vec())),
        Some(_) => UnixName::Path {
            name: String::from_utf8_lossy(from).into_owned(),
            file: None,
            access: (0, 0, 0),
        },
    };
    let socket = UnixSocket {
        socket: kind,
        name,
        link: UnixConnectionState::Unconnected,
        owner: (0, 0),
        peer: None,
        shutdown: 0,
        options: Vec::new(),
        filter: SocketFilter::default(),
        queue: Vec::new(),
    };
    bind(store, fd.as_fd(), &socket, &HiddenSocketFile::Temporary)?;
    Ok(fd)
}

fn send(
    sender: BorrowedFd<'_>,
    message: &UnixMessage,
    fds: &[i32],
    to: Option<&[u8]>,
) -> Result<(), FilesError> {
    let bytes = &message.bytes.0;
    let mut credentials = message.credentials;
    let own_pid = std::process::id() as i32;
    if let Some((pid @ 0, ..)) = &mut credentials {
        *pid = own_pid;
    }
    let sent = match receive_queue::send(sender, bytes, fds, credentials, to) {
        // The sender has ended, or is outside the tree.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
            let credentials = credentials.map(|(_, user, group)| (own_pid, user, group));
            receive_queue::send(sender, bytes, fds, credentials, to)
        }
        sent => sent,
    };
    let sent = sent.with_step("restoring a message in a socket's queue")?;
    if sent == bytes.len() {
        return Ok(());
    }
    Err(io::Error::from(io::ErrorKind::WriteZero))
        .with_step("restoring a message in a socket's queue")
}

/// Sets the options and shuts directions down, after the queues are filled.
pub fn apply_options_and_shutdown(
    fd: BorrowedFd<'_>,
    socket: &UnixSocket,
) -> Result<(), FilesError> {
    set_options(fd, &allowed_options(), &socket.options)?;
    socket.filter.attach(fd).with_step("SO_ATTACH_FILTER")?;
    let halves = match socket.shutdown & 3 {
        1 => Shutdown::Read,
        2 => Shutdown::Write,
        3 => Shutdown::Both,
        _ => return Ok(()),
    };
    match shutdown(fd, halves) {
        Err(rustix::io::Errno::NOTCONN) => Ok(()),
        outcome => outcome.with_step("shutdown"),
    }
}
