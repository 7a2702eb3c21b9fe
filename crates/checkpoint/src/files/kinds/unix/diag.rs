//! The kernel's list of Unix sockets (`sock_diag(7)`, `linux/unix_diag.h`).

use holdfast_sys::netlink::{Netlink, NetlinkRequest, attributes};
use rustix::fs::{Mode, OFlags, open};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::AsFd;

/// `SOCK_DIAG_BY_FAMILY`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `UDIAG_SHOW_PEER`, `_ICONS`, `_RQLEN`.
const SHOW_FLAGS: u32 = 0x4 | 0x8 | 0x10;
/// Bytes of `struct unix_diag_msg`.
const HEADER_BYTES: usize = 16;
/// Netlink attributes of a socket (`UNIX_DIAG_*`).
const UNIX_DIAG_PEER: u16 = 2;
const UNIX_DIAG_ICONS: u16 = 3;
const UNIX_DIAG_RQLEN: u16 = 4;
const UNIX_DIAG_SHUTDOWN: u16 = 6;
/// `TCP_LISTEN`.
const TCP_LISTEN: u8 = 10;

/// A socket in the kernel's list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiagEntry {
    /// True if the socket listens.
    pub listening: bool,
    /// Inode of the peer; 0 if no process has the peer open.
    pub peer: Option<u32>,
    /// Inodes of the sockets that wait to be accepted by this listener, oldest first.
    pub pending_accept: Vec<u32>,
    /// Backlog of this listener.
    pub backlog: u32,
    /// Directions that are shut down.
    pub shutdown: u8,
}

/// All sockets of a network namespace, by inode.
#[derive(Debug, Default)]
pub struct DiagSockets {
    /// Sockets by inode.
    pub sockets: HashMap<u32, DiagEntry>,
    /// Listener and position in its queue, for each socket that waits to be accepted.
    pub pending_accept: HashMap<u32, (u32, u32)>,
}

/// Reads the kernel's list, in the network namespace of a process.
pub fn list_sockets(pid: i32) -> io::Result<DiagSockets> {
    let namespace_path = format!("/proc/{pid}/ns/net");
    if fs::read_link(&namespace_path)? == fs::read_link("/proc/thread-self/ns/net")? {
        return query_kernel();
    }
    let namespace = open(
        namespace_path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let inside = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        query_kernel()
    };
    let thread = std::thread::scope(|scope| scope.spawn(inside).join());
    thread.unwrap_or_else(|_| Err(io::Error::other("the thread that lists sockets panicked")))
}

fn query_kernel() -> io::Result<DiagSockets> {
    let mut request = [0u8; 24];
    request[0] = libc::AF_UNIX as u8;
    request[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    request[12..16].copy_from_slice(&SHOW_FLAGS.to_ne_bytes());
    request[16..24].copy_from_slice(&[0xff; 8]);
    let mut listed = DiagSockets::default();
    let message = NetlinkRequest::new(SOCK_DIAG_BY_FAMILY, 0, &request);
    let mut netlink = Netlink::new(libc::NETLINK_SOCK_DIAG)?;
    netlink.request(message, libc::NLM_F_DUMP, |_, body| {
        if let Some((inode, entry)) = parse(body) {
            for (place, waiting) in entry.pending_accept.iter().enumerate() {
                listed
                    .pending_accept
                    .insert(*waiting, (inode, place as u32));
            }
            listed.sockets.insert(inode, entry);
        }
    })?;
    Ok(listed)
}

fn parse(body: &[u8]) -> Option<(u32, DiagEntry)> {
    let word = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_ne_bytes(bytes))
    };
    let inode = word(body, 4)?;
    let mut entry = DiagEntry {
        listening: *body.get(2)? == TCP_LISTEN,
        ..DiagEntry::default()
    };
    for (kind, value) in attributes(body.get(HEADER_BYTES..)?) {
        match kind {
            UNIX_DIAG_PEER => entry.peer = word(value, 0),
            UNIX_DIAG_ICONS => {
                entry.pending_accept = (0..value.len() / 4)
                    .filter_map(|at| word(value, at * 4))
                    .collect()
            }
            UNIX_DIAG_RQLEN => entry.backlog = word(value, 4)?,
            UNIX_DIAG_SHUTDOWN => entry.shutdown = *value.first()?,
            _ => {}
        }
    }
    Some((inode, entry))
}
