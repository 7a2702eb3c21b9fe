//! Unaccepted connections: created in the listener's accept queue at the acceptor, at the commit.

use std::net::SocketAddr;

use holdfast_bpf::Queue;
use holdfast_bpf::shared::{FlowState, Handshake};
use holdfast_proto::handoff::FlowEpoch;
use holdfast_sys::sock_diag;
use holdfast_sys::tcp_repair::{self, TcpDynamic, TcpStatic};
use holdfast_wire::{Flow, NodeId, Protocol};

use super::Engine;
use super::blob::{DynamicBlob, StaticBlob, decode};
use crate::app::SessionId;
use crate::config::Service;
use crate::dataplane::{Entry, Hold, in_order, key_of};

/// Session id of connections that no program gives or takes.
pub const NOBODY: SessionId = SessionId(0);

/// Number of attempts to put a connection into a full queue, one a second.
const TRIES: u32 = 30;

/// A connection that waits for a free place in its queue. Its packets wait at the client, which retransmits them.
pub struct Waiting {
    of: FlowEpoch,
    fixed: TcpStatic,
    state: TcpDynamic,
    tries: u32,
}

impl Waiting {
    fn new(of: FlowEpoch, fixed: TcpStatic, state: TcpDynamic) -> Self {
        Self {
            of,
            fixed,
            state,
            tries: 0,
        }
    }
}

impl Engine {
    /// Returns the session that takes a flow, and the program's number for the service.
    pub(super) fn taker(&self, flow: &Flow, unaccepted: bool) -> Result<(SessionId, u32), String> {
        if unaccepted {
            return self.has_queue(flow.local).map(|()| (NOBODY, 0));
        }
        self.programs.taker(flow).ok_or_else(|| {
            format!(
                "no server program on node {} serves {}; start one there",
                self.config.node.name, flow.local
            )
        })
    }

    /// Returns true if the program that was to take a flow has ended.
    pub(super) fn has_ended(&self, session: SessionId) -> bool {
        session != NOBODY && self.programs.get(session).is_none()
    }

    /// Checks that a program listens here at this service address, and that this kernel lets connections be put into
    /// accept queues.
    fn has_queue(&self, local: SocketAddr) -> Result<(), String> {
        let is_it =
            |service: &Service| (service.protocol, service.address) == (Protocol::Tcp, local);
        if !self.config.services.iter().any(is_it) {
            return Err(format!("{local} is no service of the group"));
        }
        if self.unaccepted.queue.is_none() {
            return Err(
                "its kernel lets nobody put connections into the queue of a listener".into(),
            );
        }
        match sock_diag::tcp_service(local) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(format!(
                "nobody listens at {local} on node {}",
                self.config.node.name
            )),
            Err(error) => Err(format!("its sockets cannot be listed: {error}")),
        }
    }

    /// Creates the connection of a flow that this node has just become the owner of, or lets it wait. Its packets are
    /// held until the connection exists.
    pub(super) fn queue_up(&mut self, of: &FlowEpoch) -> Result<(), String> {
        let arrival = self.arrivals.get_mut(&of.flow).ok_or("it is not here")?;
        let fixed = arrival.fixed.take().ok_or("it has no options")?;
        let state = arrival.state.tcp.take().ok_or("it has no state")?;
        let made = self.make(&of.flow, (&fixed, &state));
        if made.is_ok() {
            self.is_queued(of);
        }
        // Packets that arrived in the meantime are added to the held ones.
        self.read_hold();
        let arrival = self.arrivals.remove(&of.flow).ok_or("it is not here")?;
        self.arrival_ids.remove(&arrival.id);
        self.slots.give_back(arrival.slot);
        let mut held = arrival.held;
        match made {
            Ok(()) => {
                in_order(&mut held);
                for packet in &held {
                    self.hold.replay(&packet.bytes);
                }
            }
            Err(why) => self.wait(Waiting::new(*of, fixed, state), &why),
        }
        Ok(())
    }

    /// Creates the connection of a recovered flow from its journal entry, or lets it wait. Returns false if the flow is
    /// not an unaccepted connection.
    pub(super) fn queue_up_recovered(&mut self, of: &FlowEpoch) -> bool {
        let Some((fixed, state)) = self.journal.peek(&of.flow).and_then(unaccepted) else {
            return false;
        };
        if let Some(had) = self.recovered.remove(&of.flow) {
            self.slots.give_back(had.slot);
        }
        self.wait_in_queue(Waiting::new(*of, fixed, state));
        true
    }

    /// Tries the waiting connections again; called once a second.
    pub(super) fn poll_queues(&mut self) {
        for waiting in std::mem::take(&mut self.unaccepted.waiting) {
            self.wait_in_queue(waiting);
        }
    }

    fn wait_in_queue(&mut self, waiting: Waiting) {
        match self.make(&waiting.of.flow, (&waiting.fixed, &waiting.state)) {
            Ok(()) => self.is_queued(&waiting.of),
            Err(why) => self.wait(waiting, &why),
        }
    }

    fn wait(&mut self, waiting: Waiting, why: &str) {
        let (flow, tries) = (waiting.of.flow, waiting.tries + 1);
        if tries > TRIES {
            tracing::warn!(%flow, why, "a connection that nobody accepted is lost");
            return self.is_queued(&waiting.of);
        }
        tracing::debug!(%flow, why, "a connection waits for room in a queue");
        // No packet of the flow may reach the stack before its socket exists.
        if let Err(error) = self.set_queued(&waiting.of, FlowState::TransitIn) {
            tracing::warn!(%flow, error, "a connection that waits may be reset");
        }
        self.unaccepted.waiting.push(Waiting { tries, ..waiting });
    }

    /// Marks the connection as owned here; from then on the kernel serves it.
    fn is_queued(&mut self, of: &FlowEpoch) {
        if let Err(error) = self.set_queued(of, FlowState::Owned) {
            tracing::warn!(flow = %of.flow, error, "a connection that waits to be accepted stays silent");
        }
        self.journal.ended(&of.flow);
    }

    /// Creates the connection's socket in its listener's queue.
    fn make(&self, flow: &Flow, of: (&TcpStatic, &TcpDynamic)) -> Result<(), String> {
        make(self.unaccepted.queue.as_ref(), &self.hold, flow, of)
    }

    fn set_queued(&self, of: &FlowEpoch, state: FlowState) -> Result<(), String> {
        let entry = Entry {
            flow: of.flow,
            epoch: of.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        let set = self.dataplane.set_flows(&[entry], state);
        set.map_err(|error| error.to_string())
    }
}

/// Decodes the journaled state of an unaccepted connection.
fn unaccepted(journaled: &super::journal::Journaled) -> Option<(TcpStatic, TcpDynamic)> {
    let fixed: StaticBlob = decode(&journaled.fixed).ok()?;
    let state: DynamicBlob = decode(&journaled.state).ok()?;
    (fixed.unaccepted).then_some((fixed.tcp?, state.tcp?))
}

/// Creates the socket in its listener's queue.
fn make(
    queue: Option<&Queue>,
    hold: &Hold,
    flow: &Flow,
    (fixed, state): (&TcpStatic, &TcpDynamic),
) -> Result<(), String> {
    let queue = queue.ok_or("this kernel lets nobody put connections into a queue")?;
    let made = tcp_repair::queued(fixed, state).map_err(|error| error.to_string())?;
    let key = key_of(flow);
    let failed = |error: holdfast_bpf::Error| error.to_string();
    let handshake = handshake(&made.handshake);
    queue.waiting.set(&key, &handshake).map_err(failed)?;
    for packet in &made.packets {
        hold.inject(packet);
    }
    match queue.waiting.get(&key).map_err(failed)? {
        None => Ok(()),
        Some(_) => {
            queue.waiting.remove(&key).map_err(failed)?;
            Err("its listener has no room, or is gone".to_owned())
        }
    }
}

fn handshake(of: &tcp_repair::Handshake) -> Handshake {
    let (send_scale, receive_scale) = of.window_scale.unwrap_or_default();
    Handshake {
        peer_timestamp: 0,
        timestamp: of.timestamp,
        mss: of.mss,
        receive_scale,
        send_scale,
        ecn: u8::from(of.ecn),
        scales: u8::from(of.window_scale.is_some()),
        sack: u8::from(of.sack),
        timestamps: u8::from(of.timestamps),
        microseconds: u8::from(of.microseconds),
        pad: [0; 3],
        sequence: of.sequence,
    }
}
