//! Unaccepted connections: created in the listener's accept queue at the acceptor, at the commit.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use holdfast_bpf::AcceptQueue;
use holdfast_bpf::shared_with_c::{FlowState, Handshake};
use holdfast_proto::handoff::FlowEpoch;
use holdfast_sys::sock_diag;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::failure::{Failure, KernelFault, NodeFault, OperatorFault, ProgramFault, Text};
use holdfast_wire::{Flow, NodeId, Protocol};

use super::super::packet_hold::PacketHold;
use super::super::state_blobs::{DynamicBlob, StaticBlob, decode};
use super::journal::JournaledFlow;
use super::{ArrivalSocket, ArrivingConnections};
use crate::config::{Config, ServiceConfig};
use crate::dataplane::{Dataplane, FilterEntry, HoldDevice, flow_key};
use crate::failure_conversion::{IntoFailure, system_call};
use crate::migration::SocketEndpoint;

/// Pause after the first failed attempt to put a connection into a queue; each following one is twice as long, up to
/// [`RETRY_PAUSE_MAX`]. A full queue is one reason; another is a busy kernel that takes the packets later.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(10);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Time for which a connection waits for a place in a full queue.
const QUEUE_WAIT_MAX: Duration = Duration::from_secs(30);

/// Access to the accept queues of this node's listeners.
pub(super) struct UnacceptedConnections {
    /// The program that puts connections into queues, if the kernel supports it.
    accept_queues: Option<AcceptQueue>,
    /// Connections moved here that wait for a free place in a queue.
    waiting: Vec<UnacceptedConnection>,
}

/// A connection to put into its listener's queue. While the connection waits for a free place, its packets wait at the
/// client, which retransmits them.
pub struct UnacceptedConnection {
    flow_epoch: FlowEpoch,
    static_state: TcpStaticState,
    state: TcpDynamicState,
    /// The wait for the next attempt; none before the first attempt has failed.
    wait: Option<QueueWait>,
}

/// Wait of a connection for a place in a queue.
#[derive(Clone, Copy)]
struct QueueWait {
    since: Instant,
    pause: Duration,
    next_attempt: Instant,
}

impl QueueWait {
    /// Returns the wait after a failed attempt, or `None` if the connection has waited for too long.
    fn after_attempt(earlier: Option<QueueWait>, now: Instant) -> Option<QueueWait> {
        let since = earlier.map_or(now, |wait| wait.since);
        let pause = earlier.map_or(FIRST_RETRY_PAUSE, |wait| wait.pause * 2);
        let pause = pause.min(RETRY_PAUSE_MAX);
        let wait = QueueWait {
            since,
            pause,
            next_attempt: now + pause,
        };
        (now.saturating_duration_since(since) < QUEUE_WAIT_MAX).then_some(wait)
    }
}

/// Result of [`ArrivingConnections::create_queued`].
pub struct QueueAttempt {
    connection: UnacceptedConnection,
    created: Result<(), Failure>,
}

impl UnacceptedConnection {
    fn new(flow_epoch: FlowEpoch, static_state: TcpStaticState, state: TcpDynamicState) -> Self {
        Self {
            flow_epoch,
            static_state,
            state,
            wait: None,
        }
    }

    /// Creates the connection's socket in its listener's queue.
    fn create(&self, queue: Option<&AcceptQueue>, hold: &HoldDevice) -> Result<(), Failure> {
        let states = (&self.static_state, &self.state);
        create_in_queue(queue, hold, &self.flow_epoch.flow, states)
    }
}

impl UnacceptedConnections {
    /// Attaches the queue program; starts without connections.
    pub(super) fn new(dataplane: &Dataplane, hold: &HoldDevice) -> Self {
        let queue = dataplane.programs.attach_accept_queue(hold.ifindex());
        let queue = queue.inspect_err(|error| {
            tracing::warn!(%error, "cannot attach the accept queue program: this node takes no unaccepted connections");
        });
        Self {
            accept_queues: queue.ok(),
            waiting: Vec::new(),
        }
    }
}

impl ArrivingConnections {
    /// Checks that a program listens here at this service address, and that this kernel lets connections be put into
    /// accept queues.
    ///
    /// # Errors
    /// An unaccepted connection cannot arrive here.
    pub fn check_listener(&self, config: &Config, local: SocketAddr) -> Result<(), Failure> {
        let is_tcp_service =
            |service: &ServiceConfig| (service.protocol, service.address) == (Protocol::Tcp, local);
        if !config.services.iter().any(is_tcp_service) {
            return Err(OperatorFault::NotAService(local).into());
        }
        if self.unaccepted.accept_queues.is_none() {
            return Err(KernelFault::AcceptQueuesUnsupported.into());
        }
        match sock_diag::tcp_service_connections(local) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(OperatorFault::NoProgramListens {
                address: local,
                node: Text::of(&config.node.name),
            }
            .into()),
            Err(error) => Err(system_call("cannot list the acceptor's sockets", &error)),
        }
    }

    /// Returns true if the connection has no socket before the commit; `None` if the flow is not arriving here.
    pub fn is_unaccepted(&self, flow: &Flow) -> Option<bool> {
        let arrival = self.connections.get(flow)?;
        Some(matches!(arrival.socket, ArrivalSocket::Queued))
    }

    /// Creates the connection of a flow that this node has just become the owner of. Its packets are held until
    /// [`ArrivingConnections::end_queued`].
    ///
    /// # Errors
    /// The state of the connection is missing. A full queue is no error.
    pub fn create_queued(
        &mut self,
        dataplane: &Dataplane,
        hold: &HoldDevice,
        flow_epoch: &FlowEpoch,
    ) -> Result<QueueAttempt, Failure> {
        let arrival = self
            .connections
            .get_mut(&flow_epoch.flow)
            .ok_or(NodeFault::FlowNotArriving)?;
        let static_state = arrival
            .static_state
            .take()
            .ok_or(NodeFault::SocketOptionsMissing)?;
        let state = arrival
            .dynamic_state
            .tcp
            .take()
            .ok_or(NodeFault::TcpStateMissing)?;
        let connection = UnacceptedConnection::new(*flow_epoch, static_state, state);
        let created = connection.create(self.unaccepted.accept_queues.as_ref(), hold);
        if created.is_ok() {
            self.on_queued(dataplane, flow_epoch);
        }
        Ok(QueueAttempt {
            connection,
            created,
        })
    }

    /// Ends the arrival of a connection: replays its held packets, or lets the connection wait for a free place.
    ///
    /// # Errors
    /// The flow is not arriving here.
    pub fn end_queued(
        &mut self,
        dataplane: &Dataplane,
        hold: &mut PacketHold,
        attempt: QueueAttempt,
    ) -> Result<(), Failure> {
        let QueueAttempt {
            connection,
            created,
        } = attempt;
        let mut arrival = self
            .connections
            .remove(&connection.flow_epoch.flow)
            .ok_or(NodeFault::FlowNotArriving)?;
        self.ids.remove(&arrival.id);
        match created {
            Ok(()) => arrival.held_packets.replay(dataplane, hold),
            Err(why) => self.add_waiting(dataplane, connection, &why),
        }
        arrival.held_packets.free_slot(hold);
        Ok(())
    }

    /// Returns the unaccepted connection that an earlier daemon journaled for a recovered flow.
    pub fn journaled_unaccepted(&self, flow_epoch: &FlowEpoch) -> Option<UnacceptedConnection> {
        let journaled = self.journal.peek(&flow_epoch.flow)?;
        let (static_state, state) = decode_unaccepted(journaled)?;
        Some(UnacceptedConnection::new(*flow_epoch, static_state, state))
    }

    /// Returns the time at which [`ArrivingConnections::retry_waiting`] has something to do.
    #[must_use]
    pub fn next_queue_attempt(&self) -> Option<Instant> {
        let waiting = self.unaccepted.waiting.iter();
        waiting
            .filter_map(|connection| connection.wait)
            .map(|wait| wait.next_attempt)
            .min()
    }

    /// Tries the waiting connections whose pauses are over.
    pub fn retry_waiting(&mut self, dataplane: &Dataplane, hold: &HoldDevice) {
        let now = Instant::now();
        let is_due = |connection: &mut UnacceptedConnection| {
            connection.wait.is_none_or(|wait| wait.next_attempt <= now)
        };
        let due: Vec<_> = self.unaccepted.waiting.extract_if(.., is_due).collect();
        for connection in due {
            self.try_to_queue(dataplane, hold, connection);
        }
    }

    /// Returns true if an unaccepted connection is on its way into the queue of one of these listeners.
    #[must_use]
    pub fn has_unaccepted_for(&self, listeners: &[SocketEndpoint]) -> bool {
        let is_for_listener = |flow: &Flow| {
            let mut listeners = listeners.iter();
            listeners.any(|listener| listener.receives_new_flow(Protocol::Tcp, flow.local))
        };
        let arriving = self.connections.iter();
        let mut arriving = arriving
            .filter(|(_, arrival)| matches!(arrival.socket, ArrivalSocket::Queued))
            .map(|(flow, _)| flow);
        let mut waiting = self.unaccepted.waiting.iter();
        arriving.any(is_for_listener)
            || waiting.any(|connection| is_for_listener(&connection.flow_epoch.flow))
    }

    /// Creates a connection, or lets it wait.
    pub fn try_to_queue(
        &mut self,
        dataplane: &Dataplane,
        hold: &HoldDevice,
        connection: UnacceptedConnection,
    ) {
        match connection.create(self.unaccepted.accept_queues.as_ref(), hold) {
            Ok(()) => self.on_queued(dataplane, &connection.flow_epoch),
            Err(why) => self.add_waiting(dataplane, connection, &why),
        }
    }

    fn add_waiting(&mut self, dataplane: &Dataplane, waiting: UnacceptedConnection, why: &Failure) {
        let flow = waiting.flow_epoch.flow;
        let Some(wait) = QueueWait::after_attempt(waiting.wait, Instant::now()) else {
            tracing::warn!(%flow, %why, "lost an unaccepted connection: its accept queue had no room");
            if let Some(queue) = &self.unaccepted.accept_queues
                && let Err(error) = queue.pending_handshakes.remove(&flow_key(&flow))
            {
                tracing::warn!(%flow, %error, "the packets of a lost connection may be dropped later, too");
            }
            return self.on_queued(dataplane, &waiting.flow_epoch);
        };
        tracing::debug!(%flow, %why, "an unaccepted connection waits for room in an accept queue");
        // No packet of the flow may reach the stack before its socket exists.
        if let Err(error) = set_queued_state(dataplane, &waiting.flow_epoch, FlowState::TransitIn) {
            tracing::warn!(%flow, %error, "an unaccepted connection may be reset while it waits");
        }
        self.unaccepted.waiting.push(UnacceptedConnection {
            wait: Some(wait),
            ..waiting
        });
    }

    /// Marks the connection as owned here; from then on the kernel serves it.
    fn on_queued(&mut self, dataplane: &Dataplane, flow_epoch: &FlowEpoch) {
        if let Err(error) = set_queued_state(dataplane, flow_epoch, FlowState::Owned) {
            tracing::warn!(flow = %flow_epoch.flow, %error, "an unaccepted connection does not resume");
        }
        self.journal.remove(&flow_epoch.flow);
    }
}

fn set_queued_state(
    dataplane: &Dataplane,
    flow_epoch: &FlowEpoch,
    state: FlowState,
) -> Result<(), Failure> {
    let entry = FilterEntry {
        flow: flow_epoch.flow,
        epoch: flow_epoch.epoch,
        peer: NodeId(0),
        hold_slot: 0,
    };
    let set = dataplane.set_flows(&[entry], state);
    set.map_err(IntoFailure::into_failure)
}

/// Decodes the journaled state of an unaccepted connection.
fn decode_unaccepted(journaled: &JournaledFlow) -> Option<(TcpStaticState, TcpDynamicState)> {
    let static_blob: StaticBlob = decode(&journaled.static_blob).ok()?;
    let dynamic_blob: DynamicBlob = decode(&journaled.dynamic_blob).ok()?;
    (static_blob.is_unaccepted).then_some((static_blob.tcp?, dynamic_blob.tcp?))
}

/// Creates the socket in its listener's queue.
fn create_in_queue(
    queue: Option<&AcceptQueue>,
    hold: &HoldDevice,
    flow: &Flow,
    (static_state, state): (&TcpStaticState, &TcpDynamicState),
) -> Result<(), Failure> {
    let queue = queue.ok_or(KernelFault::AcceptQueuesUnsupported)?;
    let queued = holdfast_tcp_repair::unaccepted_connection(static_state, state)
        .map_err(IntoFailure::into_failure)?;
    let key = flow_key(flow);
    let handshake = to_repair_handshake(&queued.handshake);
    queue
        .pending_handshakes
        .set(&key, &handshake)
        .map_err(IntoFailure::into_failure)?;
    for packet in &queued.packets {
        hold.inject(packet);
    }
    // A busy kernel takes the packets later. With another sequence number they are dropped then, and do not reach the listener,
    // which would reset the client.
    let late = Handshake {
        sequence: !handshake.sequence,
        ..handshake
    };
    let pending = &queue.pending_handshakes;
    match pending
        .replace(&key, &late)
        .map_err(IntoFailure::into_failure)?
    {
        false => Ok(()),
        true => Err(ProgramFault::AcceptQueueFull.into()),
    }
}

fn to_repair_handshake(parsed: &holdfast_tcp_repair::HandshakeResult) -> Handshake {
    let (send_scale, receive_scale) = parsed.window_scale.unwrap_or_default();
    Handshake {
        peer_timestamp: 0,
        timestamp: parsed.timestamp,
        mss: parsed.mss,
        receive_scale,
        send_scale,
        ecn: u8::from(parsed.ecn),
        window_scaling: u8::from(parsed.window_scale.is_some()),
        sack: u8::from(parsed.sack),
        timestamps: u8::from(parsed.timestamps),
        microseconds: u8::from(parsed.microseconds),
        pad: [0; 3],
        sequence: parsed.sequence,
    }
}
