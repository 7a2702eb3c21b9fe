//! Unaccepted connections: created in the listener's accept queue at the acceptor, at the commit.

use std::net::SocketAddr;

use holdfast_bpf::AcceptQueue;
use holdfast_bpf::shared_with_c::{FlowState, Handshake};
use holdfast_proto::handoff::FlowEpoch;
use holdfast_sys::sock_diag;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::{Flow, NodeId, Protocol};

use super::Engine;
use super::state_blobs::{DynamicBlob, StaticBlob, decode};
use crate::app_server::SessionId;
use crate::config::ServiceConfig;
use crate::dataplane::{FilterEntry, HoldDevice, flow_key, sort_for_replay};

/// Session id of connections that no program gives or takes.
pub const NO_SESSION: SessionId = SessionId(0);

/// Number of attempts to put a connection into a full queue, one a second.
const ATTEMPTS_MAX: u32 = 30;

/// A connection that waits for a free place in its queue. Its packets wait at the client, which retransmits them.
pub struct WaitingConnection {
    flow_epoch: FlowEpoch,
    static_state: TcpStaticState,
    state: TcpDynamicState,
    attempts: u32,
}

impl WaitingConnection {
    fn new(flow_epoch: FlowEpoch, static_state: TcpStaticState, state: TcpDynamicState) -> Self {
        Self {
            flow_epoch,
            static_state,
            state,
            attempts: 0,
        }
    }
}

impl Engine {
    /// Returns the session that takes a flow, and the program's number for the service.
    pub(super) fn program_or_queue_for(
        &self,
        flow: &Flow,
        unaccepted: bool,
    ) -> Result<(SessionId, u32), String> {
        if unaccepted {
            return self.check_listener(flow.local).map(|()| (NO_SESSION, 0));
        }
        self.programs.program_for(flow).ok_or_else(|| {
            format!(
                "no server program on node {} serves {}; start one there",
                self.config.node.name, flow.local
            )
        })
    }

    /// Returns true if the program that was to take a flow has ended.
    pub(super) fn program_has_ended(&self, session: SessionId) -> bool {
        session != NO_SESSION && self.programs.get(session).is_none()
    }

    /// Checks that a program listens here at this service address, and that this kernel lets connections be put into
    /// accept queues.
    fn check_listener(&self, local: SocketAddr) -> Result<(), String> {
        let is_tcp_service =
            |service: &ServiceConfig| (service.protocol, service.address) == (Protocol::Tcp, local);
        if !self.config.services.iter().any(is_tcp_service) {
            return Err(format!("{local} is not a service of the group"));
        }
        if self.unaccepted.accept_queues.is_none() {
            return Err(
                "the acceptor's kernel does not support adding connections to accept queues".into(),
            );
        }
        match sock_diag::tcp_service_connections(local) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(format!(
                "no program listens at {local} on node {}",
                self.config.node.name
            )),
            Err(error) => Err(format!("cannot list the acceptor's sockets: {error}")),
        }
    }

    /// Creates the connection of a flow that this node has just become the owner of, or lets it wait. Its packets are
    /// held until the connection exists.
    pub(super) fn create_or_wait(&mut self, flow_epoch: &FlowEpoch) -> Result<(), String> {
        let arrival = self
            .arrivals
            .get_mut(&flow_epoch.flow)
            .ok_or("the flow is not arriving here")?;
        let static_state = arrival
            .static_state
            .take()
            .ok_or("the flow's socket options are missing")?;
        let state = arrival
            .dynamic_state
            .tcp
            .take()
            .ok_or("the flow's TCP state is missing")?;
        let created = self.create_connection(&flow_epoch.flow, (&static_state, &state));
        if created.is_ok() {
            self.on_queued(flow_epoch);
        }
        // Packets that arrived in the meantime are added to the held ones.
        self.read_hold();
        let arrival = self
            .arrivals
            .remove(&flow_epoch.flow)
            .ok_or("the flow is not arriving here")?;
        self.arrival_ids.remove(&arrival.id);
        self.hold_slots.release(arrival.slot);
        let mut packets = arrival.held_packets;
        match created {
            Ok(()) => {
                sort_for_replay(&mut packets);
                for packet in &packets {
                    self.hold.replay(&packet.bytes);
                }
            }
            Err(why) => self.add_waiting(
                WaitingConnection::new(*flow_epoch, static_state, state),
                &why,
            ),
        }
        Ok(())
    }

    /// Creates the connection of a recovered flow from its journal entry, or lets it wait. Returns false if the flow is
    /// not an unaccepted connection.
    pub(super) fn create_recovered_or_wait(&mut self, flow_epoch: &FlowEpoch) -> bool {
        let Some((static_state, state)) = self
            .journal
            .peek(&flow_epoch.flow)
            .and_then(decode_unaccepted)
        else {
            return false;
        };
        if let Some(unreclaimed) = self.unreclaimed.remove(&flow_epoch.flow) {
            self.hold_slots.release(unreclaimed.slot);
        }
        self.retry_connection(WaitingConnection::new(*flow_epoch, static_state, state));
        true
    }

    /// Tries the waiting connections again; called once a second.
    pub(super) fn retry_waiting(&mut self) {
        for waiting in std::mem::take(&mut self.unaccepted.waiting) {
            self.retry_connection(waiting);
        }
    }

    fn retry_connection(&mut self, waiting: WaitingConnection) {
        match self.create_connection(
            &waiting.flow_epoch.flow,
            (&waiting.static_state, &waiting.state),
        ) {
            Ok(()) => self.on_queued(&waiting.flow_epoch),
            Err(why) => self.add_waiting(waiting, &why),
        }
    }

    fn add_waiting(&mut self, waiting: WaitingConnection, why: &str) {
        let (flow, tries) = (waiting.flow_epoch.flow, waiting.attempts + 1);
        if tries > ATTEMPTS_MAX {
            tracing::warn!(%flow, why, "lost an unaccepted connection: its accept queue had no room");
            return self.on_queued(&waiting.flow_epoch);
        }
        tracing::debug!(%flow, why, "an unaccepted connection waits for room in an accept queue");
        // No packet of the flow may reach the stack before its socket exists.
        if let Err(error) = self.set_queued_state(&waiting.flow_epoch, FlowState::TransitIn) {
            tracing::warn!(%flow, error, "an unaccepted connection may be reset while it waits");
        }
        self.unaccepted.waiting.push(WaitingConnection {
            attempts: tries,
            ..waiting
        });
    }

    /// Marks the connection as owned here; from then on the kernel serves it.
    fn on_queued(&mut self, flow_epoch: &FlowEpoch) {
        if let Err(error) = self.set_queued_state(flow_epoch, FlowState::Owned) {
            tracing::warn!(flow = %flow_epoch.flow, error, "an unaccepted connection does not resume");
        }
        self.journal.remove(&flow_epoch.flow);
    }

    /// Creates the connection's socket in its listener's queue.
    fn create_connection(
        &self,
        flow: &Flow,
        state: (&TcpStaticState, &TcpDynamicState),
    ) -> Result<(), String> {
        create_in_queue(
            self.unaccepted.accept_queues.as_ref(),
            &self.hold,
            flow,
            state,
        )
    }

    fn set_queued_state(&self, flow_epoch: &FlowEpoch, state: FlowState) -> Result<(), String> {
        let entry = FilterEntry {
            flow: flow_epoch.flow,
            epoch: flow_epoch.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        let set = self.dataplane.set_flows(&[entry], state);
        set.map_err(|error| error.to_string())
    }
}

/// Decodes the journaled state of an unaccepted connection.
fn decode_unaccepted(
    journaled: &super::arrival_journal::JournaledFlow,
) -> Option<(TcpStaticState, TcpDynamicState)> {
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
) -> Result<(), String> {
    let queue = queue.ok_or("this kernel does not support adding connections to accept queues")?;
    let queued = holdfast_tcp_repair::unaccepted_connection(static_state, state)
        .map_err(|error| error.to_string())?;
    let key = flow_key(flow);
    let bpf_error = |error: holdfast_bpf::Error| error.to_string();
    let handshake = to_repair_handshake(&queued.handshake);
    queue
        .pending_handshakes
        .set(&key, &handshake)
        .map_err(bpf_error)?;
    for packet in &queued.packets {
        hold.inject(packet);
    }
    match queue.pending_handshakes.get(&key).map_err(bpf_error)? {
        None => Ok(()),
        Some(_) => {
            queue.pending_handshakes.remove(&key).map_err(bpf_error)?;
            Err("the listener is closed, or its accept queue is full".to_owned())
        }
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
