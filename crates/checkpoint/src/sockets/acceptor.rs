//! Restore of a tree's sockets at the acceptor.

mod repair_exit;

use self::repair_exit::is_incomplete;
use super::timestamp_clock::TimestampClock;
use super::{SocketAddresses, SocketError, SocketState, SocketStaticState, loopback_inject};
use crate::files::close_all;
use crate::files::image::FileId;
use holdfast_tcp_repair::udp;
use holdfast_tcp_repair::{
    ClosedLoopbackEnd, ClosingSocket, PreparedSocket, RestoredSocket, SocketPreparer,
    TcpDynamicState, TcpStaticState, TimeoutUncapCondition, WindowProbe, activate_all,
    injected_peer_packet, map_on_threads, reset_socket, restore, set_deferred_options,
    set_deferred_options_of_early_restored, uncap_timeout,
};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// The sockets of a tree that is being restored, in the network namespace in which this value was created. If dropped
/// before [`RestoredSockets::activate`], the sockets vanish and nothing is sent.
#[derive(Debug)]
pub struct RestoredSockets {
    preparer: SocketPreparer,
    /// First port that every accepted process may have, see
    /// [`ImageJudge::first_port`](crate::image_judge::ImageJudge::first_port).
    first_port: u16,
    created: BTreeMap<FileId, CreatedSocket>,
    /// Sockets that are not yet handed to the restorer.
    not_handed_over: BTreeSet<FileId>,
    /// Sockets that have the state of the stopped tree.
    restored_ids: BTreeSet<FileId>,
    /// True if awake connections have all their options.
    active_options_set: bool,
    /// Packets for sockets at loopback addresses, delivered after all sockets have their state, because these sockets
    /// answer each other.
    loopback_packets: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct CreatedSocket {
    socket_static: SocketStaticState,
    phase: SocketRestorePhase,
}

#[derive(Debug)]
enum SocketRestorePhase {
    /// A TCP socket that is prepared for its connection.
    Prepared(PreparedSocket),
    /// A connection in repair mode.
    Restored(RestoredSocket, Box<RestoredConnectionState>),
    /// A connection out of repair mode, which would act if its packets could leave and others arrived.
    OutOfRepair(RestoredSocket, Box<RestoredConnectionState>),
    /// A socket with a connection that is to end.
    Closing(ClosingSocket),
    /// Any other socket, or an active connection.
    Ready(OwnedFd),
}

/// State of a connection, and the setting of its clock if the state was taken while the connection was in use.
#[derive(Debug)]
struct RestoredConnectionState {
    state: Box<TcpDynamicState>,
    clock: Option<TimestampClock>,
}

/// A connection's socket that is to receive a state.
enum SocketRestoreTarget {
    Prepared(PreparedSocket),
    Restored(RestoredSocket),
}

impl AsFd for CreatedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.phase {
            SocketRestorePhase::Prepared(socket) => socket.as_fd(),
            SocketRestorePhase::Restored(socket, _)
            | SocketRestorePhase::OutOfRepair(socket, _) => socket.as_fd(),
            SocketRestorePhase::Closing(socket) => socket.as_fd(),
            SocketRestorePhase::Ready(socket) => socket.as_fd(),
        }
    }
}

impl RestoredSockets {
    /// Creates an empty set, for a tree that may have the ports from `first_port` on.
    ///
    /// # Errors
    /// Errors of the kernel when a socket is created.
    pub fn new(first_port: u16) -> Result<Self, SocketError> {
        Ok(Self {
            preparer: SocketPreparer::new()?,
            first_port,
            created: BTreeMap::new(),
            not_handed_over: BTreeSet::new(),
            restored_ids: BTreeSet::new(),
            active_options_set: false,
            loopback_packets: Vec::new(),
        })
    }

    /// Creates sockets that are new or changed, and drops the sockets in `closed`. Nothing is sent, but UDP sockets
    /// receive the packets that are let through to them.
    ///
    /// # Errors
    /// A resource that this host lacks, or a refusal by the kernel.
    pub fn prepare(
        &mut self,
        sockets: &BTreeMap<FileId, SocketStaticState>,
        closed: &BTreeSet<FileId>,
    ) -> Result<(), SocketError> {
        for id in closed {
            self.remove(*id);
            self.not_handed_over.remove(id);
        }
        for (id, fixed) in sockets {
            // The number may stand for another socket with the same address.
            self.remove(*id);
            let phase = self.make(fixed).map_err(|error| error.with_id(*id))?;
            self.created.insert(
                *id,
                CreatedSocket {
                    socket_static: fixed.clone(),
                    phase,
                },
            );
            self.not_handed_over.insert(*id);
        }
        Ok(())
    }

    fn make(&self, fixed: &SocketStaticState) -> Result<SocketRestorePhase, SocketError> {
        Ok(match fixed {
            SocketStaticState::Connection(fixed) => {
                SocketRestorePhase::Prepared(self.preparer.prepare(fixed)?)
            }
            SocketStaticState::Unconnected(fixed) => SocketRestorePhase::Ready(fixed.prepare()?),
            SocketStaticState::Datagrams(fixed) => SocketRestorePhase::Ready(udp::prepare(fixed)?),
            SocketStaticState::Ended { v6_socket } => {
                SocketRestorePhase::Ready(reset_socket(*v6_socket)?)
            }
            SocketStaticState::Closed(fixed) => SocketRestorePhase::Closing(fixed.prepare()?),
        })
    }

    /// Returns the sockets that the restorer has not received yet.
    #[must_use]
    pub fn new_sockets(&self) -> BTreeMap<FileId, BorrowedFd<'_>> {
        let made = |id: &FileId| self.created.get(id).map(|made| (*id, made.as_fd()));
        self.not_handed_over.iter().filter_map(made).collect()
    }

    /// Marks all sockets as received by the restorer.
    pub fn mark_handed_over(&mut self) {
        self.not_handed_over.clear();
    }

    /// Returns all sockets, with their fixed properties.
    pub fn iter(&self) -> impl Iterator<Item = (FileId, BorrowedFd<'_>, &SocketStaticState)> {
        let all = self.created.iter();
        all.map(|(id, made)| (*id, made.as_fd(), &made.socket_static))
    }

    /// Restores connections to the states that the donor read at `at_us` (microseconds of a clock of the donor) while
    /// the connections were in use. A connection that has a state gets the new one in the same open file. Nothing is
    /// sent.
    ///
    /// # Errors
    /// A refusal by the kernel, or a state that does not fit.
    pub fn restore_early(
        &mut self,
        states: BTreeMap<FileId, SocketState>,
        at_us: u64,
        threads: usize,
    ) -> Result<(), SocketError> {
        let packets = self.apply_states(states, Some((at_us, Instant::now())), threads)?;
        if packets.is_empty() {
            Ok(())
        } else {
            // A state that needs packets cannot be read without stopping the process.
            Err(SocketError::Unknown)
        }
    }

    /// Restores the state of all sockets, with `threads` threads for the connections. Nothing is sent yet. The caller
    /// must next write the returned packets to a TUN device, in this order: the packets carry state that only a packet
    /// can bring (a FIN, datagrams).
    ///
    /// # Errors
    /// A refusal by the kernel, or a state that does not fit.
    pub fn restore(
        &mut self,
        states: BTreeMap<FileId, SocketState>,
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, SocketError> {
        if !states.keys().eq(self.created.keys()) {
            return Err(SocketError::Unknown);
        }
        let packets = self.restore_some(states, threads)?;
        self.deliver_loopback()?;
        Ok(packets)
    }

    /// Same as [`RestoredSockets::restore`] for some of the sockets; the others must follow.
    ///
    /// # Errors
    /// Same as [`RestoredSockets::restore`].
    pub fn restore_some(
        &mut self,
        states: BTreeMap<FileId, SocketState>,
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, SocketError> {
        self.restored_ids.extend(states.keys());
        let packets = self.apply_states(states, None, threads)?.into_iter();
        let (loopback_packets, packets) =
            packets.partition(|packet| loopback_inject::is_to_loopback(packet));
        self.loopback_packets.extend::<Vec<_>>(loopback_packets);
        Ok(packets)
    }

    /// Same as [`RestoredSockets::restore`], without the sockets that [`RestoredSockets::restore_some`] has restored, and without
    /// connections that have not changed since [`RestoredSockets::restore_early`]. `at_us` is the time by the same clock.
    ///
    /// # Errors
    /// Same as [`RestoredSockets::restore`].
    pub fn restore_changed(
        &mut self,
        states: BTreeMap<FileId, SocketState>,
        at_us: u64,
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, SocketError> {
        let has_state = |made: &CreatedSocket| match &made.phase {
            SocketRestorePhase::Restored(_, taken) | SocketRestorePhase::OutOfRepair(_, taken) => {
                taken.clock.is_some()
            }
            _ => matches!(made.socket_static, SocketStaticState::Ended { .. }),
        };
        for (id, made) in &self.created {
            if !states.contains_key(id) && !self.restored_ids.contains(id) && !has_state(made) {
                return Err(SocketError::Unknown.with_id(*id));
            }
        }
        let packets = self.restore_some(states, threads)?;
        self.correct_clocks(at_us)?;
        self.deliver_loopback()?;
        Ok(packets)
    }

    /// Delivers packets to connections over the loopback device. Closed ends of such connections are created anew to
    /// take the answers.
    fn deliver_loopback(&mut self) -> Result<(), SocketError> {
        let connections = || {
            let all = self.created.values();
            all.filter_map(|made| match (&made.socket_static, &made.phase) {
                (SocketStaticState::Connection(fixed), SocketRestorePhase::Restored(_, taken)) => {
                    Some((&**fixed, &taken.state))
                }
                _ => None,
            })
        };
        let is_over_loopback = |fixed: &TcpStaticState| {
            [fixed.local, fixed.remote]
                .iter()
                .all(|end| end.ip().is_loopback())
        };
        let ended = connections()
            .filter(|(fixed, state)| is_over_loopback(fixed) && state.state.has_received_fin());
        let ended: Vec<_> = ended.collect();
        let mut closed = Vec::new();
        if !ended.is_empty() {
            let ends = |fixed: &TcpStaticState| (fixed.local, fixed.remote);
            let open_ends: HashSet<_> = connections().map(|(fixed, _)| ends(fixed)).collect();
            let addresses = self
                .created
                .values()
                .filter_map(|made| SocketAddresses::of(&made.socket_static));
            let ports: HashSet<u16> = addresses.map(|ends| ends.local.port()).collect();
            // A privileged port is allowed if a socket of the tree has it, because that socket was judged.
            let may_have = |port: u16| port >= self.first_port || ports.contains(&port);
            for (fixed, state) in ended {
                let is_closed = !open_ends.contains(&(fixed.remote, fixed.local));
                if is_closed && may_have(fixed.remote.port()) {
                    closed.extend(ClosedLoopbackEnd::new(fixed, state, &self.preparer)?);
                }
            }
        }
        let acknowledgements: Vec<_> = closed
            .iter()
            .filter_map(ClosedLoopbackEnd::packet)
            .collect();
        loopback_inject::deliver(&acknowledgements)?;
        loopback_inject::deliver(&std::mem::take(&mut self.loopback_packets))?;
        closed
            .into_iter()
            .try_for_each(|end| Ok(end.leave_to_kernel()?))
    }

    fn apply_states(
        &mut self,
        states: BTreeMap<FileId, SocketState>,
        read_at: Option<(u64, Instant)>,
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, SocketError> {
        let mut packets = Vec::new();
        let mut connections = Vec::with_capacity(states.len());
        for (id, state) in states {
            let Some(made) = self.created.remove(&id) else {
                return Err(SocketError::Unknown.with_id(id));
            };
            let (fixed, phase) = (made.socket_static, made.phase);
            match (fixed, phase, state) {
                (SocketStaticState::Connection(fixed), phase, SocketState::Connection(state)) => {
                    let getter = match phase {
                        SocketRestorePhase::Prepared(socket) => {
                            SocketRestoreTarget::Prepared(socket)
                        }
                        SocketRestorePhase::Restored(socket, _)
                        | SocketRestorePhase::OutOfRepair(socket, _) => {
                            SocketRestoreTarget::Restored(socket)
                        }
                        _ => return Err(SocketError::Unknown.with_id(id)),
                    };
                    connections.push((id, getter, fixed, state));
                }
                (
                    SocketStaticState::Closed(fixed),
                    SocketRestorePhase::Closing(socket),
                    SocketState::Closed(rest),
                ) => {
                    let ended = socket.end(&fixed, &rest);
                    let ended = ended.map_err(|error| SocketError::from(error).with_id(id))?;
                    let fixed = SocketStaticState::Closed(fixed);
                    let phase = SocketRestorePhase::Ready(ended);
                    self.created.insert(
                        id,
                        CreatedSocket {
                            socket_static: fixed,
                            phase,
                        },
                    );
                }
                (fixed, SocketRestorePhase::Ready(socket), state) => {
                    let outcome = restore_unconnected(&fixed, socket.as_fd(), &state, &mut packets);
                    outcome.map_err(|error| error.with_id(id))?;
                    let phase = SocketRestorePhase::Ready(socket);
                    self.created.insert(
                        id,
                        CreatedSocket {
                            socket_static: fixed,
                            phase,
                        },
                    );
                }
                _ => return Err(SocketError::Unknown.with_id(id)),
            }
        }
        self.connect(connections, read_at, threads, &mut packets)?;
        Ok(packets)
    }

    fn connect(
        &mut self,
        connections: Vec<(
            FileId,
            SocketRestoreTarget,
            Box<TcpStaticState>,
            Box<TcpDynamicState>,
        )>,
        read_at: Option<(u64, Instant)>,
        threads: usize,
        packets: &mut Vec<Vec<u8>>,
    ) -> Result<(), SocketError> {
        let preparer = &self.preparer;
        let restored = map_on_threads(connections, threads, |(id, getter, fixed, mut state)| {
            let prepared = match getter {
                SocketRestoreTarget::Prepared(socket) => Ok(socket),
                SocketRestoreTarget::Restored(socket) => socket.reset_to_prepared(&fixed, preparer),
            };
            let mut clock =
                read_at.map(|(at_us, came)| TimestampClock::set_ahead(at_us, came, &mut state));
            let socket = prepared.and_then(|socket| restore(socket, &fixed, &state));
            clock.iter_mut().for_each(TimestampClock::restart);
            (id, socket, fixed, RestoredConnectionState { state, clock })
        });
        for (id, socket, fixed, taken) in restored {
            let socket = socket.map_err(|error| SocketError::from(error).with_id(id))?;
            packets.extend(injected_peer_packet(&fixed, &taken.state));
            let phase = SocketRestorePhase::Restored(socket, Box::new(taken));
            let fixed = SocketStaticState::Connection(fixed);
            self.created.insert(
                id,
                CreatedSocket {
                    socket_static: fixed,
                    phase,
                },
            );
        }
        Ok(())
    }

    /// Returns the connections that lack part of their state until [`RestoredSockets::activate`]. A later daemon needs them to
    /// finish the activation.
    #[must_use]
    pub fn unfinished(&self) -> Vec<(TcpStaticState, TcpDynamicState)> {
        let all = self.created.values();
        all.filter_map(|made| match (&made.socket_static, &made.phase) {
            (SocketStaticState::Connection(fixed), SocketRestorePhase::Restored(_, taken))
                if is_incomplete(&taken.state) =>
            {
                Some(((**fixed).clone(), (*taken.state).clone()))
            }
            _ => None,
        })
        .collect()
    }

    /// Sets the options of awake connections that could not be set before all sockets have their state. To be called
    /// while the commit is not certain yet, so that [`RestoredSockets::activate`] has less to do.
    pub fn finish_active_options(&mut self) {
        if std::mem::replace(&mut self.active_options_set, true) {
            return;
        }
        for made in self.created.values() {
            if let (
                SocketStaticState::Connection(fixed),
                SocketRestorePhase::OutOfRepair(socket, _),
            ) = (&made.socket_static, &made.phase)
            {
                // Failures are ignored, as in `activate`.
                let _ = set_deferred_options_of_early_restored(socket.as_fd(), fixed);
                if fixed.remote.ip().is_loopback() {
                    let _ = uncap_timeout(socket.as_fd(), fixed, TimeoutUncapCondition::Always);
                }
            }
        }
    }

    /// Returns the connections with a capped retransmission timeout, and the longest timeout that each gets later,
    /// milliseconds.
    pub fn capped_timeouts(&self) -> impl Iterator<Item = (BorrowedFd<'_>, i32)> {
        self.created
            .values()
            .filter_map(|made| match &made.socket_static {
                SocketStaticState::Connection(fixed) if !fixed.remote.ip().is_loopback() => {
                    Some((made.as_fd(), fixed.longest_timeout_ms()?))
                }
                _ => None,
            })
    }

    /// Sets the longest retransmission timeout of all connections at once, if it cannot be raised later.
    pub fn raise_timeouts(&self) {
        for made in self.created.values() {
            if let SocketStaticState::Connection(fixed) = &made.socket_static {
                let _ = uncap_timeout(made.as_fd(), fixed, TimeoutUncapCondition::Always);
            }
        }
    }

    /// Closes the copies of all active sockets, in few system calls. To be called before the program runs: a copy that
    /// is still open when the program closes its own descriptor would delay the FIN, and the removal of the socket from
    /// epoll sets.
    pub fn close(mut self) {
        let made = std::mem::take(&mut self.created).into_values();
        let ready = made.filter_map(|made| match made.phase {
            SocketRestorePhase::Ready(socket) => Some(socket),
            _ => None,
        });
        close_all(ready.collect());
    }

    /// Activates the connections, with all their options: the commit must be certain.
    ///
    /// # Errors
    /// The first refusal by the kernel; the other connections are activated nevertheless.
    pub fn activate(&mut self, probe: WindowProbe, threads: usize) -> Result<(), SocketError> {
        self.finish_active_options();
        let (mut work, mut kept) = (Vec::new(), Vec::new());
        for (id, made) in std::mem::take(&mut self.created) {
            match (made.socket_static, made.phase) {
                (
                    SocketStaticState::Connection(fixed),
                    SocketRestorePhase::Restored(socket, taken),
                ) => {
                    work.push(socket);
                    kept.push((id, fixed, taken.state));
                }
                (fixed, SocketRestorePhase::OutOfRepair(socket, _)) => {
                    let phase = SocketRestorePhase::Ready(socket.into());
                    self.created.insert(
                        id,
                        CreatedSocket {
                            socket_static: fixed,
                            phase,
                        },
                    );
                }
                (fixed, phase) => drop(self.created.insert(
                    id,
                    CreatedSocket {
                        socket_static: fixed,
                        phase,
                    },
                )),
            }
        }
        let items = work.into_iter().zip(&kept);
        let items = items.map(|(socket, (_, fixed, state))| (socket, &**fixed, &**state));
        let active = activate_all(items.collect(), probe, threads);
        let mut failed = None;
        for ((id, fixed, _), active) in kept.into_iter().zip(active) {
            match active {
                Ok(socket) => {
                    // An option that cannot be set is no reason to lose the connection. Over the loopback device, the
                    // timeout is set without waiting for a round trip.
                    let _ = set_deferred_options(socket.as_fd(), &fixed);
                    if fixed.remote.ip().is_loopback() {
                        let _ =
                            uncap_timeout(socket.as_fd(), &fixed, TimeoutUncapCondition::Always);
                    }
                    let fixed = SocketStaticState::Connection(fixed);
                    let phase = SocketRestorePhase::Ready(socket);
                    self.created.insert(
                        id,
                        CreatedSocket {
                            socket_static: fixed,
                            phase,
                        },
                    );
                }
                Err(error) => failed = failed.or(Some(SocketError::from(error).with_id(id))),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Sets the state of a socket that is no connection.
fn restore_unconnected(
    fixed: &SocketStaticState,
    socket: BorrowedFd<'_>,
    state: &SocketState,
    packets: &mut Vec<Vec<u8>>,
) -> Result<(), SocketError> {
    match (fixed, state) {
        (SocketStaticState::Unconnected(fixed), SocketState::Unconnected) => {
            Ok(fixed.restore(socket)?)
        }
        (SocketStaticState::Datagrams(fixed), SocketState::Datagrams(queue, groups)) => {
            // Groups are joined only here: otherwise the program would receive some datagrams at both nodes.
            for membership in groups {
                udp::join(socket, membership)?;
            }
            let replayed = queue
                .iter()
                .filter_map(|datagram| udp::replay_packet(datagram, fixed.local));
            packets.extend(replayed);
            Ok(())
        }
        _ => Err(SocketError::Unknown),
    }
}
