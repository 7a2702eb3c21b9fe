//! Arriving connections: connections that are being handed off to this node, from their sockets' making to the time when
//! server programs or the kernel serve them.

mod accept_queue_insertion;
mod activation;
mod congestion;
mod deferred_socket_options;
mod journal;
mod offers;
mod restore;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, Results};
use holdfast_tcp_repair::{PreparedSocket, RestoredSocket, SocketPreparer, TcpStaticState};
use holdfast_wire::Flow;
use holdfast_wire::failure::{Failure, NodeFault, PeerFault, ProgramFault, ProtocolViolation};

use self::accept_queue_insertion::UnacceptedConnections;
use self::congestion::CongestionRestorer;
use self::deferred_socket_options::DeferredSocketOptions;
use self::journal::ArrivalJournal;
pub use self::restore::ReclaimedArrival;
use super::packet_hold::{HeldPackets, PacketHold};
use super::programs::ConnectedPrograms;
use super::setup::{SetupError, other_error, system_error};
use super::state_blobs::DynamicBlob;
use crate::app_server::SessionId;
use crate::dataplane::{Dataplane, HeldPacket, HoldDevice};
use crate::failure_conversion::IntoFailure;

/// Time limit for a program to take its arrivals. Shorter than the donor's limit, so that the donor learns the reason.
const PROGRAM_RECEIPT_TIMEOUT: Duration = Duration::from_millis(1500);

/// The connections that are being handed off to this node, with the means to make and restore their sockets.
pub struct ArrivingConnections {
    connections: HashMap<Flow, ArrivingConnection>,
    /// Flow of each arrival, and the program's number for the service, by the arrival's id.
    ids: HashMap<u64, (Flow, u32)>,
    /// Id of the next arrival.
    next_id: u64,
    preparer: SocketPreparer,
    pending_prepares: Vec<PendingPrepare>,
    congestion: CongestionRestorer,
    /// Options that arrived sockets get later.
    deferred_socket_options: DeferredSocketOptions,
    unaccepted: UnacceptedConnections,
    journal: ArrivalJournal,
}

/// A connection that is being handed off to this node.
struct ArrivingConnection {
    /// Session of the program that takes the connection.
    session: SessionId,
    /// Id of the arrival on this node.
    id: u64,
    /// True if the program has received descriptor and state.
    is_received: bool,
    /// Progress of the connection's socket at this node.
    socket: ArrivalSocket,
    /// Options of the socket, as read by the donor.
    static_state: Option<TcpStaticState>,
    /// State of the socket; default until the donor has sent it.
    dynamic_state: DynamicBlob,
    /// Packets held for the connection.
    held_packets: HeldPackets,
    /// True if the congestion map has an entry for the connection.
    has_congestion_entry: bool,
}

/// Progress of an arriving connection's socket.
enum ArrivalSocket {
    /// No socket of its own: a flow of the program's shared UDP socket.
    SharedUdp,
    /// No socket yet: the commit makes it in the listener's accept queue.
    Queued,
    /// The socket is bound, in repair mode.
    Prepared(PreparedSocket),
    /// The socket is connected, in repair mode.
    Restored(RestoredSocket),
    /// Restored by an earlier daemon, which may already have activated it.
    Reclaimed(OwnedFd),
    /// The socket is active, out of repair mode.
    Active(OwnedFd),
    /// The socket failed, and is closed.
    Closed,
}

/// A connection that is about to arrive, as the donor has announced it.
pub struct AnnouncedConnection {
    /// Flow of the connection.
    pub flow: Flow,
    /// Session of the program that takes the connection.
    pub session: SessionId,
    /// The program's number for the service.
    pub service: u32,
    /// Options of the socket; `None` for a flow of a shared UDP socket.
    pub static_state: Option<TcpStaticState>,
    /// True if no program has the connection: it waits to be accepted.
    pub is_unaccepted: bool,
}

/// A `PrepareSockets` command that waits for programs to take descriptors and state.
struct PendingPrepare {
    token: CommandToken,
    flows: Vec<Flow>,
    results: Vec<Result<(), Failure>>,
    /// Deadline; arrivals not taken by then are given up.
    deadline: Duration,
}

/// Result of [`ArrivingConnections::poll_prepares`].
#[derive(Default)]
pub struct PreparedArrivals {
    /// Completions of the commands for which no answer is missing.
    pub completions: Vec<Completion>,
    /// Sessions and ids of the arrivals that their programs did not take in time.
    pub overdue: Vec<(SessionId, u64)>,
}

impl ArrivingConnections {
    /// Opens the journal below `run_dir` and attaches the accept-queue program; `first_id` is the id of the first
    /// arrival.
    ///
    /// # Errors
    /// The journal cannot be used, or the kernel refuses a socket.
    pub fn open(
        run_dir: &Path,
        dataplane: &Dataplane,
        hold: &HoldDevice,
        first_id: u64,
    ) -> Result<Self, SetupError> {
        Ok(Self {
            connections: HashMap::new(),
            ids: HashMap::new(),
            next_id: first_id,
            journal: ArrivalJournal::open(run_dir)
                .map_err(system_error("the journal of arrivals"))?,
            preparer: SocketPreparer::new().map_err(other_error)?,
            pending_prepares: Vec::new(),
            congestion: CongestionRestorer::new(dataplane),
            deferred_socket_options: DeferredSocketOptions::default(),
            unaccepted: UnacceptedConnections::new(dataplane, hold),
        })
    }

    /// Returns the number of arriving connections.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns the journal, from which the next daemon recovers arrivals.
    pub fn journal(&mut self) -> &mut ArrivalJournal {
        &mut self.journal
    }

    /// Returns the session of the program that takes a flow.
    pub fn session_of(&self, flow: &Flow) -> Option<SessionId> {
        self.connections.get(flow).map(|arrival| arrival.session)
    }

    /// Returns the ids of the arrivals of these flows, by the session of their program.
    pub fn ids_by_session(
        &self,
        flows: impl Iterator<Item = Flow>,
    ) -> BTreeMap<SessionId, Vec<u64>> {
        let mut ids: BTreeMap<SessionId, Vec<u64>> = BTreeMap::new();
        for flow in flows {
            if let Some(arrival) = self.connections.get(&flow) {
                ids.entry(arrival.session).or_default().push(arrival.id);
            }
        }
        ids
    }

    /// Makes and binds the socket of an announced connection. Returns the connection's slot of the hold counters.
    ///
    /// # Errors
    /// The connection cannot arrive here.
    pub fn add(
        &mut self,
        dataplane: &Dataplane,
        hold: &mut PacketHold,
        announced: AnnouncedConnection,
    ) -> Result<u32, Failure> {
        let flow = announced.flow;
        let socket = match &announced.static_state {
            _ if announced.is_unaccepted => ArrivalSocket::Queued,
            Some(static_state)
                if static_state.local == flow.local && static_state.remote == flow.remote =>
            {
                ArrivalSocket::Prepared(
                    self.preparer
                        .prepare(static_state)
                        .map_err(IntoFailure::into_failure)?,
                )
            }
            Some(_) => return Err(ProtocolViolation::StateOfOtherFlow.into()),
            None => ArrivalSocket::SharedUdp,
        };
        let held_packets =
            HeldPackets::start(dataplane, hold).ok_or(NodeFault::TooManyConnectionsInTransit)?;
        let slot = held_packets.slot();
        let id = self.next_id;
        self.next_id += 1;
        let arrival = ArrivingConnection {
            session: announced.session,
            id,
            is_received: announced.is_unaccepted,
            socket,
            static_state: announced.static_state,
            dynamic_state: DynamicBlob::default(),
            held_packets,
            has_congestion_entry: false,
        };
        if let Some(previous) = self.connections.insert(flow, arrival) {
            previous.held_packets.free_slot(hold);
        }
        self.ids.insert(id, (flow, announced.service));
        Ok(slot)
    }

    /// Removes all state of an arrival that has failed.
    pub fn remove(&mut self, flow: &Flow, dataplane: &Dataplane, hold: &mut PacketHold) {
        if let Some(arrival) = self.connections.remove(flow) {
            self.ids.remove(&arrival.id);
            arrival.held_packets.free_slot(hold);
            if arrival.has_congestion_entry {
                self.congestion.forget(dataplane, flow);
            }
            arrival.socket.close_silently();
        }
        self.journal.remove(flow);
        // Only an entry in transit to this node is removed: the flow may have become owned or a tombstone in another
        // way.
        if matches!(dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = dataplane.remove_flow(flow)
        {
            tracing::warn!(%flow, %error, "cannot remove a flow that did not arrive from the flow table");
        }
    }

    /// Holds a packet of an arriving flow, or gives the packet to the stack once the flow is released. Returns the
    /// packet if the flow is not arriving here.
    pub fn hold_or_replay(
        &mut self,
        dataplane: &Dataplane,
        hold: &PacketHold,
        flow: &Flow,
        packet: HeldPacket,
    ) -> Option<HeldPacket> {
        let Some(arrival) = self.connections.get_mut(flow) else {
            return Some(packet);
        };
        arrival.held_packets.hold_or_replay(dataplane, hold, packet);
        None
    }
}

/// Answers of the programs to which connections are offered.
impl ArrivingConnections {
    /// Begins to wait until the programs have taken the flows of a `PrepareSockets` command, at the machine's time
    /// `now`.
    pub fn await_programs(
        &mut self,
        now: Duration,
        token: CommandToken,
        flows: Vec<Flow>,
        results: Vec<Result<(), Failure>>,
    ) {
        self.pending_prepares.push(PendingPrepare {
            token,
            flows,
            results,
            deadline: now + PROGRAM_RECEIPT_TIMEOUT,
        });
    }

    /// Returns the earliest deadline of the programs that are to take connections.
    pub fn prepare_deadline(&self) -> Option<Duration> {
        let preparing = self.pending_prepares.iter();
        preparing.map(|prepare| prepare.deadline).min()
    }

    /// Handles a program's `Received`: the program has descriptor and state of these arrivals.
    pub fn on_received(&mut self, ids: &[u64]) {
        for id in ids {
            if let Some((flow, _)) = self.ids.get(id)
                && let Some(arrival) = self.connections.get_mut(flow)
                && arrival.id == *id
            {
                arrival.is_received = true;
            }
        }
    }

    /// Handles a program's `Refused`: the program does not take these arrivals.
    pub fn on_refused(&mut self, ids: &[u64], reason: &str) {
        for id in ids {
            let Some((flow, _)) = self.ids.get(id) else {
                continue;
            };
            for prepare in &mut self.pending_prepares {
                for (prepared_flow, result) in prepare.flows.iter().zip(&mut prepare.results) {
                    if prepared_flow == flow && result.is_ok() {
                        let reason = reason.to_owned().into();
                        *result = Err(ProgramFault::AcceptingProgramRefused(reason).into());
                    }
                }
            }
        }
    }

    /// Ends the prepare commands for which every program has answered, has ended, or is late. Removes the arrivals that
    /// failed.
    pub fn poll_prepares(
        &mut self,
        now: Duration,
        programs: &ConnectedPrograms,
        dataplane: &Dataplane,
        hold: &mut PacketHold,
    ) -> PreparedArrivals {
        let mut prepared = PreparedArrivals::default();
        for mut prepare in std::mem::take(&mut self.pending_prepares) {
            let mut waiting = false;
            for (flow, result) in prepare.flows.iter().zip(&mut prepare.results) {
                if result.is_err() {
                    continue;
                }
                match self.connections.get(flow) {
                    Some(arrival) if programs.has_ended(arrival.session) => {
                        *result = Err(ProgramFault::AcceptingProgramEnded.into());
                    }
                    Some(arrival) if !arrival.is_received && prepare.deadline <= now => {
                        prepared.overdue.push((arrival.session, arrival.id));
                        let limit_ms = PROGRAM_RECEIPT_TIMEOUT.as_millis() as u32;
                        *result = Err(ProgramFault::AcceptingProgramLate { limit_ms }.into());
                    }
                    Some(arrival) if !arrival.is_received => waiting = true,
                    Some(_) => {}
                    None => *result = Err(PeerFault::HandoffGivenUp.into()),
                }
            }
            if waiting {
                self.pending_prepares.push(prepare);
                continue;
            }
            for (flow, result) in prepare.flows.iter().zip(&prepare.results) {
                if result.is_err() {
                    self.remove(flow, dataplane, hold);
                }
            }
            prepared.completions.push(Completion {
                token: prepare.token,
                results: Results::PreparedSockets(prepare.results),
            });
        }
        prepared
    }
}

impl ArrivalSocket {
    /// Closes the socket of a failed arrival silently, even if the program has a duplicate.
    fn close_silently(&self) {
        let descriptor: Option<BorrowedFd<'_>> = match self {
            ArrivalSocket::Prepared(socket) => Some(socket.as_fd()),
            ArrivalSocket::Restored(socket) => Some(socket.as_fd()),
            ArrivalSocket::Active(socket) | ArrivalSocket::Reclaimed(socket) => {
                Some(socket.as_fd())
            }
            ArrivalSocket::SharedUdp | ArrivalSocket::Queued | ArrivalSocket::Closed => None,
        };
        if let Some(Err(error)) = descriptor.map(holdfast_tcp_repair::abandon) {
            tracing::warn!(%error, "cannot close a discarded socket");
        }
    }
}
