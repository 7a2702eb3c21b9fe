//! Restore of a Unix socket at the acceptor.

use super::naming::{at_bound, at_socket, bind, raw_name};
use super::peer::{Who, acting_as};
use super::stage::Hidden;
use super::{address, queue};
use crate::process::files::acceptor::Stock;
use crate::process::files::error::{At, FilesError, Refusal};
use crate::process::files::image::{FileId, Kind, UnixLink, UnixMessage, UnixName, UnixSocket};
use crate::process::files::kinds::socket::{allowed_options, new_socket, set_options};
use crate::process::files::raw;
use crate::process::rights::is_refusal;
use crate::socket_filter::SocketFilter;
use crate::sockopt::{check, set_int};
use libc::SOL_SOCKET;
use rustix::net::{Shutdown, accept_with, listen, shutdown};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Send buffer of a sender while queues are filled, bytes: all that the queues hold may be in flight at once.
const ROOM: i32 = 64 << 20;

/// Makes a socket, together with its peer if it has one.
pub fn make(stock: &mut Stock, id: FileId) -> Result<(), FilesError> {
    if stock.has(id) {
        return Ok(());
    }
    let socket = socket_of(stock, id)?;
    match socket.link {
        UnixLink::To(peer) if is_mutual(stock, id, peer) => make_pair(stock, id, peer, &socket),
        UnixLink::Gone => {
            let (fd, ghost) = make_orphan(stock, id, &socket)?;
            // The ghost is closed after the queue is filled.
            let ghost = stock.lift(ghost)?;
            stock.ghosts.insert(id, ghost);
            keep(stock, id, fd)
        }
        _ => {
            let fd = alone(&socket)?;
            bind(stock, fd.as_fd(), &socket, &Hidden::Socket(id))?;
            if let UnixLink::Listening(backlog) = socket.link {
                acting_as(socket.peer, || Ok(listen(&fd, backlog as i32)?)).at("listen")?;
            }
            if let UnixLink::Service(path) = &socket.link {
                connect_outside(stock, fd.as_fd(), path)?;
            }
            keep(stock, id, fd)
        }
    }
}

/// Connects to a listener outside the tree, with the rights of the tree.
fn connect_outside(stock: &mut Stock, fd: BorrowedFd<'_>, path: &str) -> Result<(), FilesError> {
    let opener = &mut stock.opener;
    let outcome = match opener.is_bounded() {
        true => address::bytes(path.as_bytes()).and_then(|bytes| opener.connect(fd, &bytes)),
        false => address::connect(fd, path.as_bytes()),
    };
    match outcome {
        Err(error) if opener.is_bounded() && is_refusal(&error) => {
            Err(Refusal::NotAllowed(path.to_string()).into())
        }
        outcome => Ok(outcome.map_err(|_| Refusal::Missing(path.to_string()))?),
    }
}

fn socket_of(stock: &Stock, id: FileId) -> Result<UnixSocket, FilesError> {
    match stock.image.files.get(&id).map(|file| &file.kind) {
        Some(Kind::Unix(socket)) => Ok((**socket).clone()),
        _ => Err(Refusal::SocketAbsent(id).into()),
    }
}

fn is_mutual(stock: &Stock, id: FileId, peer: FileId) -> bool {
    let back = socket_of(stock, peer).map(|socket| socket.link);
    id != peer && back.is_ok_and(|link| link == UnixLink::To(id))
}

/// Sets the status flags, then puts the socket into the stock.
fn keep(stock: &mut Stock, id: FileId, fd: OwnedFd) -> Result<(), FilesError> {
    let flags = stock.image.files[&id].flags & !(libc::O_ASYNC as u32);
    raw::set_status(fd.as_fd(), flags).at("F_SETFL")?;
    stock.keep(id, fd)
}

fn pair(kind: i32, made_by: Option<Who>) -> Result<(OwnedFd, OwnedFd), FilesError> {
    let mut fds = [0; 2];
    let kind = kind | libc::SOCK_CLOEXEC;
    // SAFETY: `fds` is writable for two descriptors and outlives the call.
    let make = || check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) });
    acting_as(made_by, make).at("socketpair")?;
    // SAFETY: the call succeeded, so both are new descriptors that nothing else owns.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// Creates an unconnected socket that belongs to its owner.
fn alone(socket: &UnixSocket) -> Result<OwnedFd, FilesError> {
    let make = || new_socket(libc::AF_UNIX, socket.socket, 0);
    acting_as(Some(socket.owner), make).at("socket")
}

/// Makes two sockets that are connected to each other.
fn make_pair(
    stock: &mut Stock,
    id: FileId,
    peer: FileId,
    socket: &UnixSocket,
) -> Result<(), FilesError> {
    let other = socket_of(stock, peer)?;
    let (fd, peer_fd) = if has_inherited_name(stock, socket) {
        let (client, server) = connect_and_accept(stock, (peer, &other), socket)?;
        (server, client)
    } else if has_inherited_name(stock, &other) {
        connect_and_accept(stock, (id, socket), &other)?
    } else {
        let (fd, peer_fd) = pair(socket.socket, socket.peer)?;
        bind(stock, fd.as_fd(), socket, &Hidden::Socket(id))?;
        bind(stock, peer_fd.as_fd(), &other, &Hidden::Socket(peer))?;
        (fd, peer_fd)
    };
    let peer_fd = stock.lift(peer_fd)?;
    keep(stock, id, fd)?;
    keep(stock, peer, peer_fd)
}

/// Makes a socket with a peer that the caller closes later.
fn make_orphan(
    stock: &mut Stock,
    id: FileId,
    socket: &UnixSocket,
) -> Result<(OwnedFd, OwnedFd), FilesError> {
    if has_inherited_name(stock, socket) {
        let client = UnixSocket {
            name: UnixName::None,
            peer: None,
            ..socket.clone()
        };
        let (client, server) = connect_and_accept(stock, (id, &client), socket)?;
        return Ok((server, client));
    }
    let (fd, ghost) = pair(socket.socket, socket.peer)?;
    bind(stock, fd.as_fd(), socket, &Hidden::Socket(id))?;
    Ok((fd, ghost))
}

/// Returns true if a connected socket most likely has its name from the listener that accepted it. Such a name cannot
/// be bound again: the socket is made by connecting and accepting.
fn has_inherited_name(stock: &Stock, socket: &UnixSocket) -> bool {
    if socket.socket == libc::SOCK_DGRAM {
        return false;
    }
    match &socket.name {
        UnixName::None => false,
        UnixName::Abstract(_) | UnixName::Path { file: None, .. } => true,
        UnixName::Path { .. } => {
            let name = raw_name(&socket.name);
            let alike = stock.image.files.values().filter(|file| match &file.kind {
                Kind::Unix(other) => raw_name(&other.name) == name,
                _ => false,
            });
            alike.count() > 1
        }
    }
}

fn connect_and_accept(
    stock: &mut Stock,
    (client_id, client): (FileId, &UnixSocket),
    server: &UnixSocket,
) -> Result<(OwnedFd, OwnedFd), FilesError> {
    let listener = stock
        .image
        .files
        .iter()
        .find_map(|(id, file)| match &file.kind {
            Kind::Unix(socket)
                if matches!(socket.link, UnixLink::Listening(_))
                    && raw_name(&socket.name) == raw_name(&server.name) =>
            {
                Some(*id)
            }
            _ => None,
        });
    let (listener, name, hidden) = match listener {
        Some(id) => {
            make(stock, id)?;
            let listener = stock.get(id)?.try_clone_to_owned().at("dup")?;
            (listener, socket_of(stock, id)?.name, Hidden::Socket(id))
        }
        None => {
            let mut server = server.clone();
            // The name is free again at once: other sockets may have inherited the same name from the listener.
            if let UnixName::Path { file, .. } = &mut server.name {
                *file = None;
            }
            let listener = new_socket(libc::AF_UNIX, server.socket, 0).at("socket")?;
            bind(stock, listener.as_fd(), &server, &Hidden::ForTheMoment)?;
            acting_as(client.peer, || Ok(listen(&listener, 1)?)).at("listen")?;
            (listener, server.name, Hidden::ForTheMoment)
        }
    };
    let fd = alone(client)?;
    bind(stock, fd.as_fd(), client, &Hidden::Socket(client_id))?;
    at_bound(stock, &hidden, &name, |name| {
        acting_as(server.peer, || address::connect(fd.as_fd(), name))
    })?;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let accepted = accept_with(&listener, flags).at("accept")?;
    Ok((fd, accepted))
}

/// Fills the queues of all sockets from their senders, and connects the sockets that waited to be accepted.
pub fn fill(stock: &mut Stock) -> Result<(), FilesError> {
    let sockets = stock
        .image
        .files
        .iter()
        .filter_map(|(id, file)| match &file.kind {
            Kind::Unix(socket) => Some((*id, (**socket).clone())),
            _ => None,
        });
    let sockets: Vec<(FileId, UnixSocket)> = sockets.collect();
    let mut waiting = Vec::new();
    for (id, socket) in &sockets {
        for message in &socket.queue {
            deliver(stock, *id, socket, message)?;
        }
        stock.ghosts.remove(id);
        if let UnixLink::Waiting(listener, place) = socket.link {
            waiting.push((listener, place, *id, socket.owner));
        }
    }
    waiting.sort_unstable();
    // The accepting process will see the creator of the socket as its peer: usually the creator also connected it.
    for (listener, _, id, owner) in waiting {
        let name = socket_of(stock, listener)?.name;
        let fd = stock.get(id)?.try_clone_to_owned().at("dup")?;
        at_socket(stock, listener, &name, |name| {
            acting_as(Some(owner), || address::connect(fd.as_fd(), name))
        })?;
    }
    // Some datagram sockets are connected in one direction only.
    for (id, socket) in &sockets {
        if let UnixLink::To(peer) = socket.link
            && !is_mutual(stock, *id, peer)
        {
            let name = socket_of(stock, peer)?.name;
            let fd = stock.get(*id)?.try_clone_to_owned().at("dup")?;
            at_socket(stock, peer, &name, |name| {
                address::connect(fd.as_fd(), name)
            })?;
        }
    }
    Ok(())
}

fn deliver(
    stock: &mut Stock,
    id: FileId,
    socket: &UnixSocket,
    message: &UnixMessage,
) -> Result<(), FilesError> {
    let fds = message.files.iter().map(|file| stock.raw(*file));
    let fds = fds.collect::<Result<Vec<_>, _>>()?;
    let connected = match socket.link {
        UnixLink::To(peer) if is_mutual(stock, id, peer) => Some(stock.get(peer)?.as_raw_fd()),
        _ => stock.ghosts.get(&id).map(AsRawFd::as_raw_fd),
    };
    if let Some(sender) = connected {
        // SAFETY: the stock keeps the descriptor open until this function has returned.
        let sender = unsafe { BorrowedFd::borrow_raw(sender) };
        set_int(sender, SOL_SOCKET, libc::SO_SNDBUFFORCE, ROOM).at("SO_SNDBUFFORCE")?;
        return send(sender, message, &fds, None);
    }
    let sender = sender_named(stock, &message.from.0, socket.socket)?;
    set_int(sender.as_fd(), SOL_SOCKET, libc::SO_SNDBUFFORCE, ROOM).at("SO_SNDBUFFORCE")?;
    at_socket(stock, id, &socket.name, |to| {
        send(sender.as_fd(), message, &fds, Some(to)).map_err(io::Error::other)
    })
}

/// Returns a socket of the tree with this name, or a temporary one.
fn sender_named(stock: &mut Stock, from: &[u8], kind: i32) -> Result<OwnedFd, FilesError> {
    let of_tree = stock
        .image
        .files
        .iter()
        .find_map(|(id, file)| match &file.kind {
            Kind::Unix(socket) if !from.is_empty() && raw_name(&socket.name) == from => Some(*id),
            _ => None,
        });
    if let Some(id) = of_tree {
        return stock.get(id)?.try_clone_to_owned().at("dup");
    }
    let fd = new_socket(libc::AF_UNIX, kind, 0).at("socket")?;
    let name = match from.first() {
        None => return Ok(fd),
        Some(0) => UnixName::Abstract(crate::process::files::image::Bytes(from.to_vec())),
        Some(_) => UnixName::Path {
            name: String::from_utf8_lossy(from).into_owned(),
            file: None,
            access: (0, 0, 0),
        },
    };
    let socket = UnixSocket {
        socket: kind,
        name,
        link: UnixLink::Alone,
        owner: (0, 0),
        peer: None,
        shutdown: 0,
        options: Vec::new(),
        filter: SocketFilter::default(),
        queue: Vec::new(),
    };
    bind(stock, fd.as_fd(), &socket, &Hidden::ForTheMoment)?;
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
    let own = std::process::id() as i32;
    if let Some((pid @ 0, ..)) = &mut credentials {
        *pid = own;
    }
    let sent = match queue::send(sender, bytes, fds, credentials, to) {
        // The sender has ended, or is outside the tree.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
            let credentials = credentials.map(|(_, user, group)| (own, user, group));
            queue::send(sender, bytes, fds, credentials, to)
        }
        sent => sent,
    };
    let sent = sent.at("a message in a socket's queue")?;
    if sent == bytes.len() {
        return Ok(());
    }
    Err(io::Error::from(io::ErrorKind::WriteZero)).at("a message in a socket's queue")
}

/// Sets the options and shuts directions down, after the queues are filled.
pub fn settle(fd: BorrowedFd<'_>, socket: &UnixSocket) -> Result<(), FilesError> {
    set_options(fd, &allowed_options(), &socket.options)?;
    socket.filter.attach(fd).at("SO_ATTACH_FILTER")?;
    let halves = match socket.shutdown & 3 {
        1 => Shutdown::Read,
        2 => Shutdown::Write,
        3 => Shutdown::Both,
        _ => return Ok(()),
    };
    match shutdown(fd, halves) {
        Err(rustix::io::Errno::NOTCONN) => Ok(()),
        outcome => outcome.at("shutdown"),
    }
}
