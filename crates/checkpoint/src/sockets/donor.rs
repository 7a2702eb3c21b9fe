//! Reading a tree's sockets at the donor.

use super::{SocketError, SocketState, SocketStaticState};
use crate::files::image::FileId;
use holdfast_sys::netlink::Netlink;
use holdfast_sys::sock_diag::udp_shutdowns;
use holdfast_sys::sockopt::{get_bytes, get_int};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use holdfast_tcp_repair::udp::{self, HostMulticastGroups};
use holdfast_tcp_repair::{
    EndedTcpSocket, PendingInput, RepairError, TcpDynamicState, TcpStaticReader, TcpStaticState,
    UnconnectedTcpSocket, UnmovableReason, abandon, extract_all, has_closed, peek_unread, resume,
};
use rustix::net::{AddressFamily, SocketType, socket};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Reader of the fixed properties of sockets that are in use.
#[derive(Debug)]
pub struct SocketStaticReader {
    tcp: TcpStaticReader,
    /// Cookie of the network namespace; `None` if the kernel does not report it.
    cookie: Option<[u8; 8]>,
    /// Directions of UDP sockets that are shut down, once they were queried.
    shutdowns: Option<HashMap<[u8; 8], u8>>,
}

impl SocketStaticReader {
    /// Creates a reader for sockets of the calling thread's network namespace.
    ///
    /// # Errors
    /// Errors of creating a netlink socket.
    pub fn new() -> Result<Self, SocketError> {
        let own_cookie = socket(AddressFamily::INET, SocketType::DGRAM, None);
        let own_cookie = own_cookie.map_err(|error| RepairError::Kernel {
            step: "socket",
            source: error.into(),
        })?;
        Ok(Self {
            tcp: TcpStaticReader::new()?,
            cookie: cookie(own_cookie.as_fd()),
            shutdowns: None,
        })
    }

    /// Reads a socket without changing it.
    ///
    /// # Errors
    /// Names the property that cannot move.
    pub fn read(&mut self, fd: BorrowedFd<'_>) -> Result<SocketStaticState, SocketError> {
        let kernel = |source| RepairError::Kernel {
            step: "SO_TYPE",
            source,
        };
        if get_int(fd, libc::SOL_SOCKET, libc::SO_TYPE).map_err(kernel)? == libc::SOCK_DGRAM {
            self.check_namespace(fd)?;
            let mut fixed = udp::read_static_unbound_too(fd, Vec::new())?;
            fixed.shutdown |= self.shutdown(fd)?;
            return Ok(SocketStaticState::Datagrams(Box::new(fixed)));
        }
        match self.read_connection(fd) {
            Ok(fixed) => Ok(SocketStaticState::Connection(Box::new(fixed))),
            Err(RepairError::Unmovable(UnmovableReason::Closed)) if has_closed(fd)? => {
                self.check_namespace(fd)?;
                Ok(SocketStaticState::Closed(Box::new(EndedTcpSocket::read(
                    fd,
                )?)))
            }
            Err(RepairError::Unmovable(UnmovableReason::Listening | UnmovableReason::Closed)) => {
                self.check_namespace(fd)?;
                let fixed = UnconnectedTcpSocket::read(fd)?;
                Ok(SocketStaticState::Unconnected(Box::new(fixed)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the directions of a UDP socket that are shut down: the socket itself does not report `SHUT_WR`.
    fn shutdown(&mut self, fd: BorrowedFd<'_>) -> Result<u8, SocketError> {
        let kernel = |step| move |source| RepairError::Kernel { step, source };
        let shutdowns = match &mut self.shutdowns {
            Some(known) => known,
            none => {
                let netlink = Netlink::new(libc::NETLINK_SOCK_DIAG);
                let listed = netlink.and_then(|mut netlink| udp_shutdowns(&mut netlink));
                none.insert(listed.map_err(kernel("sock_diag"))?)
            }
        };
        if shutdowns.is_empty() {
            return Ok(0);
        }
        let mut cookie = [0; 8];
        get_bytes(fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)
            .map_err(kernel("SO_COOKIE"))?;
        Ok(shutdowns.get(&cookie).copied().unwrap_or(0))
    }

    /// Reads a connection. A connection that ends during the read is no longer listed, like a connection of another
    /// namespace: a second read recognises its end.
    fn read_connection(&mut self, fd: BorrowedFd<'_>) -> Result<TcpStaticState, RepairError> {
        match self.tcp.read(fd) {
            Err(RepairError::Unmovable(UnmovableReason::OtherNamespace))
                if cookie(fd) == self.cookie =>
            {
                self.tcp.read(fd)
            }
            read => read,
        }
    }

    /// Checks the namespace of a socket without a connection; of a connection, the read itself tells.
    fn check_namespace(&self, fd: BorrowedFd<'_>) -> Result<(), SocketError> {
        match cookie(fd) == self.cookie {
            true => Ok(()),
            false => Err(RepairError::from(UnmovableReason::OtherNamespace).into()),
        }
    }
}

/// Returns the cookie of a socket's network namespace.
fn cookie(fd: BorrowedFd<'_>) -> Option<[u8; 8]> {
    let mut cookie = [0; 8];
    let read = get_bytes(fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, &mut cookie);
    read.is_ok().then_some(cookie)
}

/// The sockets of a stopped tree. Dropping the value resumes the sockets.
#[derive(Debug, Default)]
pub struct FrozenSockets {
    sockets: BTreeMap<FileId, (OwnedFd, Arc<SocketStaticState>)>,
    /// Sockets in repair mode.
    extracted: BTreeSet<FileId>,
}

impl FrozenSockets {
    /// Takes over copies of the tree's sockets, with their fixed properties.
    #[must_use]
    pub fn new(sockets: BTreeMap<FileId, (OwnedFd, Arc<SocketStaticState>)>) -> Self {
        Self {
            sockets,
            extracted: BTreeSet::new(),
        }
    }

    /// Returns all TCP and UDP sockets of the tree, with their fixed properties.
    pub fn iter(&self) -> impl Iterator<Item = (FileId, BorrowedFd<'_>, &SocketStaticState)> {
        let all = self.sockets.iter();
        all.map(|(id, (fd, fixed))| (*id, fd.as_fd(), &**fixed))
    }

    /// Returns the addresses of listeners with connections that wait to be accepted.
    ///
    /// # Errors
    /// A refusal by the kernel.
    pub fn unaccepted(&self) -> Result<Vec<SocketAddr>, SocketError> {
        let mut found = Vec::new();
        for (id, (fd, fixed)) in &self.sockets {
            let SocketStaticState::Unconnected(fixed) = &**fixed else {
                continue;
            };
            let waiting = UnconnectedTcpSocket::unaccepted_count(fd.as_fd());
            if waiting.map_err(|error| SocketError::from(error).with_id(*id))? > 0 {
                found.extend(fixed.local);
            }
        }
        Ok(found)
    }

    /// Reads the state of all sockets except known ones (`is_known`), with `threads` threads for the connections.
    /// Packets of the connections must be held, with ingress and egress shut. The data that was read stays in the
    /// sockets too.
    ///
    /// # Errors
    /// An error of any socket; all sockets are resumed then.
    pub fn extract(
        &mut self,
        threads: usize,
        is_known: impl Fn(FileId) -> bool,
    ) -> Result<BTreeMap<FileId, SocketState>, SocketError> {
        let unknown_ids = self.sockets.keys().copied().filter(|id| !is_known(*id));
        self.extract_some(&unknown_ids.collect::<Vec<_>>(), threads)
    }

    /// Returns a connection's unread data, if it has exactly `length` bytes. The connection is not changed.
    #[must_use]
    pub fn unread(&self, id: FileId, length: u32) -> Option<Vec<u8>> {
        let (fd, _) = self.sockets.get(&id)?;
        peek_unread(fd.as_fd(), length)
    }

    /// Same as [`FrozenSockets::extract`] for one socket.
    ///
    /// # Errors
    /// Same as [`FrozenSockets::extract`].
    pub fn extract_one(
        &mut self,
        id: FileId,
    ) -> Result<BTreeMap<FileId, SocketState>, SocketError> {
        self.extract_some(&[id], 1)
    }

    fn extract_some(
        &mut self,
        wanted: &[FileId],
        threads: usize,
    ) -> Result<BTreeMap<FileId, SocketState>, SocketError> {
        let outcome = self.extract_wanted(wanted, threads);
        if outcome.is_err() {
            self.resume();
        }
        outcome
    }

    fn extract_wanted(
        &mut self,
        wanted: &[FileId],
        threads: usize,
    ) -> Result<BTreeMap<FileId, SocketState>, SocketError> {
        let mut found = BTreeMap::new();
        let (mut ids, mut connections) = (Vec::new(), Vec::new());
        let (mut groups, none) = (None, HostMulticastGroups::default());
        let wanted = wanted
            .iter()
            .filter_map(|id| self.sockets.get_key_value(id));
        for (id, (fd, fixed)) in wanted {
            match &**fixed {
                SocketStaticState::Connection(fixed) => {
                    ids.push(*id);
                    connections.push((fd.as_fd(), &**fixed));
                }
                other => {
                    if groups.is_none() && matches!(other, SocketStaticState::Datagrams(_)) {
                        groups = Some(HostMulticastGroups::read());
                    }
                    let known_groups = groups.as_ref().unwrap_or(&none);
                    let state = other.read_state(fd.as_fd(), known_groups);
                    found.insert(*id, state.map_err(|error| error.with_id(*id))?);
                }
            }
        }
        let mut states: Vec<TcpDynamicState> = Vec::new();
        let outcomes = extract_all(&connections, &mut states, threads);
        let mut failed = None;
        for ((id, outcome), state) in ids.into_iter().zip(outcomes).zip(states) {
            match outcome {
                Ok(()) => {
                    self.extracted.insert(id);
                    found.insert(id, SocketState::Connection(Box::new(state)));
                }
                Err(error) => failed = failed.or(Some(SocketError::from(error).with_id(id))),
            }
        }
        failed.map_or(Ok(found), Err)
    }

    /// Resumes the sockets, and closes the copies.
    pub fn resume(&mut self) {
        for id in std::mem::take(&mut self.extracted) {
            if let Some((fd, fixed)) = self.sockets.get(&id)
                && let SocketStaticState::Connection(fixed) = &**fixed
            {
                // A failure is ignored, because nothing else could be done for the connection.
                let _ = resume(fd.as_fd(), fixed);
            }
        }
        self.sockets.clear();
    }

    /// Ends the connections here without sending anything, because the sockets belong to another host.
    pub fn abandon(&mut self) {
        for (fd, fixed) in std::mem::take(&mut self.sockets).into_values() {
            if matches!(*fixed, SocketStaticState::Connection(_)) {
                // A connection that is closed already is silent too.
                let _ = abandon(fd.as_fd());
            }
        }
        self.extracted.clear();
    }
}

impl Drop for FrozenSockets {
    fn drop(&mut self) {
        self.resume();
    }
}

impl SocketStaticState {
    /// Returns the state of a socket that has no connection, without changing it.
    fn read_state(
        &self,
        fd: BorrowedFd<'_>,
        groups: &HostMulticastGroups,
    ) -> Result<SocketState, SocketError> {
        match self {
            Self::Datagrams(fixed) => {
                let queue = udp::peek_with_destinations(fd, fixed.v6_socket)?;
                let joined = udp::memberships(fd, fixed.v6_socket, groups)?;
                Ok(SocketState::Datagrams(queue, joined))
            }
            Self::Closed(_) => Ok(SocketState::Closed(PendingInput::read(fd)?)),
            _ => Ok(SocketState::Unconnected),
        }
    }

    /// Returns true if a socket made for one will do for the other: sizes that the kernel tunes may differ.
    pub(crate) fn is_compatible_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Connection(one), Self::Connection(other)) => one.equals_except_tuned(other),
            _ => self == other,
        }
    }

    /// Returns true if the properties still describe the socket: an unconnected one may have been connected since, or
    /// the reverse.
    pub(crate) fn still_describes(&self, fd: BorrowedFd<'_>) -> bool {
        let state = |fd| TcpInfo::read(fd).map(|info| info.state);
        match (self, state(fd)) {
            (Self::Datagrams(_), Err(_)) => true,
            (Self::Connection(_), Ok(state)) => !matches!(
                state,
                TcpState::Listen | TcpState::Close | TcpState::TimeWait
            ),
            (Self::Unconnected(fixed), Ok(state)) => match &fixed.listen {
                Some(_) => state == TcpState::Listen,
                None => state == TcpState::Close && matches!(has_closed(fd), Ok(false)),
            },
            (Self::Closed(_), Ok(_)) => matches!(has_closed(fd), Ok(true)),
            _ => false,
        }
    }
}
