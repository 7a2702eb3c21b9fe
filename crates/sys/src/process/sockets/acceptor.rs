//! Sockets of a tree at the acceptor.

use super::{SocketError, SocketState, SocketStatic};
use crate::process::files::image::FileId;
use crate::tcp_repair::{
    PreparedSocket, Preparer, RestoredSocket, Settled, TcpDynamic, TcpStatic, WindowProbe,
    activate_all, injection, restore_all, settle,
};
use crate::udp;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The sockets of a tree in the making, in the network namespace in which this was made. Dropped before
/// [`Sockets::activate`], they vanish and nothing goes on the wire.
#[derive(Debug)]
pub struct Sockets {
    preparer: Preparer,
    made: BTreeMap<FileId, Made>,
    /// Not yet handed to the restorer.
    fresh: BTreeSet<FileId>,
}

#[derive(Debug)]
struct Made {
    fixed: SocketStatic,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// A TCP connection to be.
    Prepared(PreparedSocket),
    /// With its connection, in repair mode.
    Restored(RestoredSocket, Box<TcpDynamic>),
    /// Anything else, or a connection that goes on.
    Ready(OwnedFd),
}

impl AsFd for Made {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.phase {
            Phase::Prepared(socket) => socket.as_fd(),
            Phase::Restored(socket, _) => socket.as_fd(),
            Phase::Ready(socket) => socket.as_fd(),
        }
    }
}

impl Sockets {
    /// None yet.
    ///
    /// # Errors
    /// What the kernel says to making a socket.
    pub fn new() -> Result<Self, SocketError> {
        Ok(Self {
            preparer: Preparer::new()?,
            made: BTreeMap::new(),
            fresh: BTreeSet::new(),
        })
    }

    /// Makes sockets that are new or became others, and drops those that are `gone`. Nothing goes on the wire, but UDP sockets
    /// receive what is let through to them.
    ///
    /// # Errors
    /// What this host lacks, or the kernel refuses.
    pub fn prepare(
        &mut self,
        sockets: &BTreeMap<FileId, SocketStatic>,
        gone: &BTreeSet<FileId>,
    ) -> Result<(), SocketError> {
        self.made.retain(|id, _| !gone.contains(id));
        self.fresh.retain(|id| !gone.contains(id));
        for (id, fixed) in sockets {
            // The number may stand for another socket with the same address.
            self.made.remove(id);
            let phase = self.make(fixed).map_err(|error| error.of(*id))?;
            let mut fixed = fixed.clone();
            if let SocketStatic::Connection(fixed) = &mut fixed {
                // Flags are the open file's, which is given them with the other files.
                fixed.options.nonblocking = true;
            }
            self.made.insert(*id, Made { fixed, phase });
            self.fresh.insert(*id);
        }
        Ok(())
    }

    fn make(&self, fixed: &SocketStatic) -> Result<Phase, SocketError> {
        Ok(match fixed {
            SocketStatic::Connection(fixed) => Phase::Prepared(self.preparer.prepare(fixed)?),
            SocketStatic::Unconnected(fixed) => Phase::Ready(fixed.prepare()?),
            SocketStatic::Datagrams(fixed) => Phase::Ready(udp::prepare(fixed)?),
        })
    }

    /// Those that the restorer has not got yet.
    #[must_use]
    pub fn fresh(&self) -> BTreeMap<FileId, BorrowedFd<'_>> {
        let made = |id: &FileId| self.made.get(id).map(|made| (*id, made.as_fd()));
        self.fresh.iter().filter_map(made).collect()
    }

    /// The restorer has got them all.
    pub fn handed_over(&mut self) {
        self.fresh.clear();
    }

    /// All of them, with what they were born with.
    pub fn iter(&self) -> impl Iterator<Item = (FileId, BorrowedFd<'_>, &SocketStatic)> {
        let all = self.made.iter();
        all.map(|(id, made)| (*id, made.as_fd(), &made.fixed))
    }

    /// Gives all sockets their state, connections by `threads` threads; they send nothing yet. What it returns are packets to
    /// be written to a TUN device next, in this order: what only a packet can bring (a FIN, datagrams).
    ///
    /// # Errors
    /// What the kernel refuses, or state that does not fit.
    pub fn restore(
        &mut self,
        states: BTreeMap<FileId, SocketState>,
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, SocketError> {
        if !states.keys().eq(self.made.keys()) {
            return Err(SocketError::Unknown);
        }
        let mut packets = Vec::new();
        let mut connections = Vec::new();
        for (id, state) in states {
            let Some(made) = self.made.remove(&id) else {
                return Err(SocketError::Unknown);
            };
            match (made.fixed, made.phase, state) {
                (
                    SocketStatic::Connection(fixed),
                    Phase::Prepared(socket),
                    SocketState::Connection(state),
                ) => connections.push((id, socket, fixed, state)),
                (fixed, Phase::Ready(socket), state) => {
                    let outcome = settle_in(&fixed, socket.as_fd(), &state, &mut packets);
                    outcome.map_err(|error| error.of(id))?;
                    let phase = Phase::Ready(socket);
                    self.made.insert(id, Made { fixed, phase });
                }
                _ => return Err(SocketError::Unknown.of(id)),
            }
        }
        self.connect(connections, threads, &mut packets)?;
        Ok(packets)
    }

    fn connect(
        &mut self,
        connections: Vec<(FileId, PreparedSocket, Box<TcpStatic>, Box<TcpDynamic>)>,
        threads: usize,
        packets: &mut Vec<Vec<u8>>,
    ) -> Result<(), SocketError> {
        let mut work = Vec::with_capacity(connections.len());
        let mut kept = Vec::with_capacity(connections.len());
        for (id, socket, fixed, state) in connections {
            work.push(socket);
            kept.push((id, fixed, state));
        }
        let items = work.into_iter().zip(&kept);
        let items = items.map(|(socket, (_, fixed, state))| (socket, &**fixed, &**state));
        let restored = restore_all(items.collect(), threads);
        for ((id, fixed, state), restored) in kept.into_iter().zip(restored) {
            let socket = restored.map_err(|error| SocketError::from(error).of(id))?;
            packets.extend(injection(&fixed, &state));
            let phase = Phase::Restored(socket, state);
            let fixed = SocketStatic::Connection(fixed);
            self.made.insert(id, Made { fixed, phase });
        }
        Ok(())
    }

    /// Lets the connections go on: the commit must be certain.
    ///
    /// # Errors
    /// The first that the kernel refused; the others go on all the same.
    pub fn activate(&mut self, probe: WindowProbe, threads: usize) -> Result<(), SocketError> {
        let (mut work, mut kept) = (Vec::new(), Vec::new());
        for (id, made) in std::mem::take(&mut self.made) {
            match (made.fixed, made.phase) {
                (SocketStatic::Connection(fixed), Phase::Restored(socket, state)) => {
                    work.push(socket);
                    kept.push((id, fixed, state));
                }
                (fixed, phase) => drop(self.made.insert(id, Made { fixed, phase })),
            }
        }
        let items = work.into_iter().zip(&kept);
        let items = items.map(|(socket, (_, fixed, state))| (socket, &**fixed, &**state));
        let active = activate_all(items.collect(), probe, threads);
        let mut failed = None;
        for ((id, fixed, _), active) in kept.into_iter().zip(active) {
            match active {
                Ok(socket) => {
                    let fixed = SocketStatic::Connection(fixed);
                    let phase = Phase::Ready(socket);
                    self.made.insert(id, Made { fixed, phase });
                }
                Err(error) => failed = failed.or(Some(SocketError::from(error).of(id))),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Gives connections the options that could not be set before, and closes the copies of those that have all. To be called
    /// again, after some round trips, until it says [`Settled::Done`]: a copy that stays open would keep back a FIN.
    pub fn settle(&mut self) -> Settled {
        self.made
            .retain(|_, made| match (&made.fixed, &made.phase) {
                (SocketStatic::Connection(fixed), Phase::Ready(socket)) => {
                    // One that cannot be settled is closed by now.
                    matches!(settle(socket.as_fd(), fixed), Ok(Settled::Later))
                }
                _ => false,
            });
        if self.made.is_empty() {
            Settled::Done
        } else {
            Settled::Later
        }
    }
}

/// Gives state to a socket that is no connection.
fn settle_in(
    fixed: &SocketStatic,
    socket: BorrowedFd<'_>,
    state: &SocketState,
    packets: &mut Vec<Vec<u8>>,
) -> Result<(), SocketError> {
    match (fixed, state) {
        (SocketStatic::Unconnected(fixed), SocketState::Unconnected) => Ok(fixed.restore(socket)?),
        (SocketStatic::Datagrams(fixed), SocketState::Datagrams(queue)) => {
            let replayed = queue
                .iter()
                .filter_map(|datagram| udp::replay(datagram, fixed.local));
            packets.extend(replayed);
            Ok(())
        }
        _ => Err(SocketError::Unknown),
    }
}
