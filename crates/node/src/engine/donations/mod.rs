//! Donated connections: connections of this node's server programs that are being handed off to other nodes.

mod cpu_pressure;
mod read_static;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{DatagramPiece, join_pieces};
use holdfast_proto::handoff::{
    CommandToken, Completion, FlowEpoch, FrozenFlow, Results, SendQueueInfo,
};
use holdfast_tcp_repair::{RepairError, TcpStaticReader, TcpStaticState};
use holdfast_wire::failure::{Failure, NodeFault, ProgramFault};
use holdfast_wire::{Flow, Protocol};
use serde_bytes::ByteBuf;

use self::cpu_pressure::CpuPressure;
use self::read_static::send_queue;
use super::fault_injection::test_clock_shift;
use super::state_blobs::{DynamicBlob, encode};
use crate::app_server::SessionId;
use crate::dataplane::HeldPacket;
use crate::failure_conversion::IntoFailure;

/// Polling interval of a send queue that drains.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_micros(500);

/// Time limit for a program to return the unread datagrams of a diverted UDP flow, during which no node serves the
/// flow.
const COLLECT_TIMEOUT: Duration = Duration::from_millis(500);

/// All donated connections, and the donor's commands that wait for sockets or programs.
pub struct Donations {
    connections: HashMap<Flow, DonatedConnection>,
    static_reader: TcpStaticReader,
    pending_drains: Vec<PendingDrain>,
    /// Machine's time of the next look at the send queues; `None` if none drains.
    drain_poll_at: Option<Duration>,
    pending_collects: Vec<PendingCollect>,
    /// Processor contention on this host.
    cpu_pressure: CpuPressure,
    /// Test setting: number of ticks by which this node's TCP clock is moved ahead (all namespaces share one clock).
    clock_shift: Option<u32>,
}

/// A connection that a program gives away.
pub struct DonatedConnection {
    /// Session of the program.
    pub session: SessionId,
    /// Duplicate of the program's descriptor; none for a flow of a shared UDP socket.
    pub socket: Option<OwnedFd>,
    /// Application state for the program at the acceptor.
    application_state: Vec<u8>,
    /// Options of the socket, read in *prepare*.
    static_state: Option<TcpStaticState>,
    /// Copies of the packets received out of order since *prepare*.
    out_of_order: Vec<HeldPacket>,
    /// UDP: pieces of unread datagrams that the program has returned so far.
    unread_pieces: Vec<DatagramPiece>,
    /// UDP: datagrams that the program had not read; `None` until the program has answered.
    unread_datagrams: Option<Vec<ByteBuf>>,
    /// Monotonic time of the freeze.
    pub frozen_at_ns: Option<u64>,
    /// Bytes in the send queue at the freeze.
    pub send_queue_bytes: usize,
    /// True while the holder's answer to the diversion is outstanding.
    in_doubt: bool,
    /// True if the program was notified that it keeps the connection.
    is_notified: bool,
}

impl DonatedConnection {
    /// Returns a donation at its beginning.
    pub fn new(session: SessionId, socket: Option<OwnedFd>, application: Vec<u8>) -> Self {
        Self {
            session,
            socket,
            application_state: application,
            static_state: None,
            out_of_order: Vec::new(),
            unread_pieces: Vec::new(),
            unread_datagrams: None,
            frozen_at_ns: None,
            send_queue_bytes: 0,
            in_doubt: false,
            is_notified: false,
        }
    }

    /// Returns the donation of a flow that a program gave away to an earlier daemon.
    pub fn reclaimed(session: SessionId, socket: Option<OwnedFd>) -> Self {
        let static_state = socket
            .as_ref()
            .and_then(|socket| holdfast_tcp_repair::read_static(socket.as_fd()).ok());
        Self {
            static_state,
            unread_datagrams: Some(Vec::new()),
            // The socket may be in repair mode; resuming is harmless if it is not.
            frozen_at_ns: Some(0),
            ..Self::new(session, socket, Vec::new())
        }
    }
}

/// A `Drain` command in progress.
struct PendingDrain {
    token: CommandToken,
    flows: Vec<Flow>,
    deadline: Duration,
}

/// A UDP `Freeze` command that waits for the program to empty its socket.
pub struct PendingCollect {
    /// Token of the command.
    pub token: CommandToken,
    /// Flows of the command, with their epochs.
    pub flows: Vec<FlowEpoch>,
    /// Deadline; the freeze continues then without the missing answers.
    deadline: Duration,
}

impl Donations {
    /// Returns the state without donations.
    ///
    /// # Errors
    /// The kernel refuses a socket.
    pub fn new() -> Result<Self, RepairError> {
        Ok(Self {
            connections: HashMap::new(),
            static_reader: TcpStaticReader::new()?,
            pending_drains: Vec::new(),
            drain_poll_at: None,
            pending_collects: Vec::new(),
            cpu_pressure: CpuPressure::new(),
            clock_shift: test_clock_shift(),
        })
    }

    /// Returns the number of donated connections.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns true if a flow is donated.
    pub fn contains(&self, flow: &Flow) -> bool {
        self.connections.contains_key(flow)
    }

    /// Adds the donation of a flow, at the start of its handoff.
    pub fn insert(&mut self, flow: Flow, donation: DonatedConnection) {
        self.connections.insert(flow, donation);
    }

    /// Removes and returns a donation that has ended.
    pub fn remove(&mut self, flow: &Flow) -> Option<DonatedConnection> {
        self.connections.remove(flow)
    }

    /// Returns the session of the program that gives a flow away.
    pub fn session_of(&self, flow: &Flow) -> Option<SessionId> {
        self.connections.get(flow).map(|donation| donation.session)
    }

    /// Gives a donation to its program's new session. Returns false if there is no such donation.
    pub fn set_session(&mut self, flow: &Flow, session: SessionId) -> bool {
        let Some(donation) = self.connections.get_mut(flow) else {
            return false;
        };
        donation.session = session;
        true
    }

    /// Handles the end of a program. Unread datagrams of its shared sockets are lost with the program.
    pub fn on_program_end(&mut self, session: SessionId) {
        let donations = self.connections.values_mut();
        for donation in donations.filter(|donation| donation.session == session) {
            donation.unread_datagrams.get_or_insert_default();
        }
    }

    /// Records that a flow stays here. Returns the session of its program, which must be notified.
    pub fn on_kept(&mut self, flow: &Flow) -> Option<SessionId> {
        let donation = self.connections.get_mut(flow)?;
        let session = donation.session;
        // The duplicate of the descriptor is needed until the holder has answered.
        donation.is_notified = true;
        if !donation.in_doubt {
            self.connections.remove(flow);
        }
        Some(session)
    }

    /// Returns true if some thread of this host waited too long for a processor since the last call, so that a donor
    /// rests between batches.
    pub fn should_rest(&mut self) -> bool {
        self.cpu_pressure.is_high()
    }

    /// Keeps the copy of a packet that a donated connection received out of order. Returns the packet if the flow is
    /// not donated.
    pub fn keep_out_of_order(&mut self, flow: &Flow, packet: HeldPacket) -> Option<HeldPacket> {
        let Some(donation) = self.connections.get_mut(flow) else {
            return Some(packet);
        };
        donation.out_of_order.push(packet);
        None
    }
}

/// Drain of send queues, and freeze.
impl Donations {
    /// Begins to wait for these flows' send queues to empty, until `deadline`.
    pub fn add_drain(&mut self, token: CommandToken, flows: Vec<Flow>, deadline: Duration) {
        self.pending_drains.push(PendingDrain {
            token,
            flows,
            deadline,
        });
    }

    /// Returns the time of the next [`Donations::poll_drains`].
    pub fn drain_poll_at(&self) -> Option<Duration> {
        self.drain_poll_at
    }

    /// Returns the completions of the drain commands whose queues are empty or whose deadline has passed.
    pub fn poll_drains(&mut self, now: Duration) -> Vec<Completion> {
        let mut completions = Vec::new();
        for drain in std::mem::take(&mut self.pending_drains) {
            let queues: Vec<SendQueueInfo> = drain
                .flows
                .iter()
                .map(|flow| self.flow_send_queue(flow))
                .collect();
            let empty = queues
                .iter()
                .all(|queue| queue.unsent == 0 && queue.unacked == 0);
            if empty || now >= drain.deadline {
                completions.push(Completion {
                    token: drain.token,
                    results: Results::Drained(queues),
                });
            } else {
                self.pending_drains.push(drain);
            }
        }
        self.drain_poll_at = (!self.pending_drains.is_empty()).then_some(now + DRAIN_POLL_INTERVAL);
        completions
    }

    fn flow_send_queue(&self, flow: &Flow) -> SendQueueInfo {
        let socket = self
            .connections
            .get(flow)
            .and_then(|donation| donation.socket.as_ref());
        socket.map(send_queue).unwrap_or_default()
    }

    /// Records the monotonic time of the flows' freeze, in nanoseconds.
    pub fn set_frozen(&mut self, flows: &[FlowEpoch], frozen_at_ns: u64) {
        for flow_epoch in flows {
            if let Some(donation) = self.connections.get_mut(&flow_epoch.flow) {
                donation.frozen_at_ns = Some(frozen_at_ns);
            }
        }
    }

    /// Begins to wait for the unread datagrams of these flows; at most [`COLLECT_TIMEOUT`].
    pub fn add_collect(&mut self, now: Duration, token: CommandToken, flows: Vec<FlowEpoch>) {
        self.pending_collects.push(PendingCollect {
            token,
            flows,
            deadline: now + COLLECT_TIMEOUT,
        });
    }

    /// Returns the earliest deadline of the programs that empty their sockets.
    pub fn collect_deadline(&self) -> Option<Duration> {
        let collecting = self.pending_collects.iter();
        collecting.map(|collect| collect.deadline).min()
    }

    /// Adds unread datagrams that a program has returned; `last` ends the program's answer.
    pub fn on_collected(&mut self, flow: &Flow, unread: Vec<DatagramPiece>, last: bool) {
        if let Some(donation) = self.connections.get_mut(flow) {
            donation.unread_pieces.extend(unread);
            if last {
                let datagrams =
                    join_pieces(std::mem::take(&mut donation.unread_pieces)).unwrap_or_default();
                donation.unread_datagrams =
                    Some(datagrams.into_iter().map(ByteBuf::from).collect());
            }
        }
    }

    /// Takes the freeze commands whose programs have emptied their sockets or whose deadline has passed.
    pub fn take_ready_collects(&mut self, now: Duration) -> Vec<PendingCollect> {
        let pending = std::mem::take(&mut self.pending_collects);
        let (ready, waiting) = pending.into_iter().partition(|collect| {
            collect.deadline <= now || collect.flows.iter().all(|flow| self.is_collected(flow))
        });
        self.pending_collects = waiting;
        ready
    }

    /// Returns true if a flow has no datagrams that its program has yet to return.
    fn is_collected(&self, flow_epoch: &FlowEpoch) -> bool {
        flow_epoch.flow.protocol == Protocol::Tcp
            || self
                .connections
                .get(&flow_epoch.flow)
                .is_none_or(|donation| donation.unread_datagrams.is_some())
    }

    /// Extracts the state of a frozen flow.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn extract(&mut self, flow: &Flow) -> Result<FrozenFlow, Failure> {
        let donation = self
            .connections
            .get_mut(flow)
            .ok_or(ProgramFault::ProgramEnded)?;
        let mut blob = DynamicBlob::default();
        if let (Some(socket), Some(static_state)) = (&donation.socket, &donation.static_state) {
            let state = holdfast_tcp_repair::extract(socket.as_fd(), static_state)
                .map_err(IntoFailure::into_own_failure)?;
            let is_missing = |packet: &HeldPacket| {
                packet.segment.is_some_and(|segment| {
                    segment
                        .sequence
                        .wrapping_add(segment.length)
                        .wrapping_sub(state.rcv_nxt)
                        .cast_signed()
                        > 0
                })
            };
            let copies = std::mem::take(&mut donation.out_of_order);
            blob.packets = copies
                .into_iter()
                .filter(is_missing)
                .map(|packet| ByteBuf::from(packet.bytes))
                .collect();
            donation.send_queue_bytes = state.outgoing.len();
            blob.tcp = Some(state);
        }
        if flow.protocol == Protocol::Udp {
            let unread = donation.unread_datagrams.take();
            blob.packets = unread.ok_or(ProgramFault::DatagramsNotReturned)?;
        }
        Ok(FrozenFlow {
            dynamic: encode(&blob)?,
            application: bytes::Bytes::new(),
        })
    }

    /// Resumes a donated connection, which stays at this node unless the holder's answer is `in_doubt`.
    ///
    /// # Errors
    /// The socket cannot be resumed.
    pub fn resume(&mut self, flow: &Flow, in_doubt: bool) -> Result<(), Failure> {
        let Some(donation) = self.connections.get_mut(flow) else {
            return Ok(());
        };
        donation.in_doubt = in_doubt;
        if let (Some(socket), Some(_)) = (&donation.socket, donation.frozen_at_ns.take()) {
            let static_state = donation
                .static_state
                .as_ref()
                .ok_or(NodeFault::FlowStateNeverRead)?;
            holdfast_tcp_repair::resume(socket.as_fd(), static_state)
                .map_err(IntoFailure::into_own_failure)?;
        }
        if donation.is_notified && !in_doubt {
            self.connections.remove(flow);
        }
        Ok(())
    }
}
