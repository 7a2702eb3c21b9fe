//! The messages between a server program and the daemon.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::DatagramPiece;
use crate::{Drain, FlowText, Protocol};

/// A message from a server program to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// The first message of a session. Answered by [`FromDaemon::Opened`].
    Open {
        /// The program's name in lists for the operator.
        name: String,
    },
    /// The program has a listener (TCP) or bound socket (UDP) for this service, and accepts flows handed to it.
    Serve {
        /// The program's number for this service, unique in the session.
        service: u32,
        /// Pool handle of the service.
        pool: String,
        /// TCP or UDP.
        protocol: Protocol,
        /// Bound addresses of the socket; an unspecified address stands for every service address with this port.
        addresses: Vec<SocketAddr>,
    },
    /// The program accepts no more flows for this service; its present flows stay.
    Withdraw {
        /// Number of the service, from [`ToDaemon::Serve`].
        service: u32,
    },
    /// Flows that the program accepted itself (UDP: by receiving the first datagram). After a reconnect, all its flows
    /// except the reclaimed ones.
    Accepted {
        /// Number of the service that accepted the flows.
        service: u32,
        /// Flows that the program accepted.
        flows: Vec<FlowText>,
    },
    /// The program closed its descriptors of these flows (UDP: forgot them). TCP may still be closing the connections:
    /// the message says only that the program cannot hand them off.
    Closed {
        /// Flows whose descriptors the program closed.
        flows: Vec<FlowText>,
    },
    /// Hand these flows to another node. The descriptors of items that have one are attached, in order.
    ///
    /// The program does not touch the sockets until it receives [`FromDaemon::Moved`] or [`FromDaemon::Kept`] for each.
    HandOff {
        /// The program's number for this batch, unique in the session; for logs.
        batch: u64,
        /// Name of the node that takes the flows.
        to: String,
        /// The wait for the send queues.
        drain: Drain,
        /// The flows with their application state.
        items: Vec<HandOffItem>,
        /// True if this message ends the batch: larger batches are split.
        last: bool,
    },
    /// The program declines to hand these flows off, although asked to.
    Declined {
        /// Flows that the program does not hand off.
        flows: Vec<FlowText>,
        /// Reason for declining, for the operator.
        reason: String,
    },
    /// Answers [`FromDaemon::Collect`]: datagrams of one flow from the queue of the program's socket. A flow with many
    /// takes several messages; a flow with none takes one empty message.
    Collected {
        /// Flow that received the datagrams.
        flow: FlowText,
        /// Unread datagrams of the flow, oldest first.
        unread: Vec<DatagramPiece>,
        /// True if this message ends the flow's datagrams.
        last: bool,
    },
    /// The program has descriptor, application state and unread datagrams of these incoming flows.
    Received {
        /// Numbers of the flows, from [`FromDaemon::Incoming`].
        ids: Vec<u64>,
    },
    /// The program cannot take these incoming flows: it no longer serves the service, or already has such a flow. The
    /// program closed their descriptors.
    Refused {
        /// Numbers of the flows, from [`FromDaemon::Incoming`].
        ids: Vec<u64>,
        /// Reason why the program cannot take the flows.
        reason: String,
    },
    /// After a reconnect: these flows were in transit when the old connection broke. The descriptors of items that have
    /// one are attached, in order.
    Reclaim {
        /// Flows that were in transit when the connection to the daemon broke.
        items: Vec<ReclaimItem>,
    },
}

/// One flow of a [`ToDaemon::HandOff`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOffItem {
    /// Flow to hand off.
    pub flow: FlowText,
    /// State from which the program at the acceptor continues: opaque to Holdfast, at most
    /// [`APPLICATION_STATE_BYTES_MAX`](super::APPLICATION_STATE_BYTES_MAX).
    #[serde(with = "serde_bytes")]
    pub application_state: Vec<u8>,
    /// True if a descriptor is attached. A UDP flow of a shared socket has none: it has no socket of its own.
    pub descriptor: bool,
}

/// One flow of a [`ToDaemon::Reclaim`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimItem {
    /// Flow that the program reclaims after a reconnect.
    pub flow: FlowText,
    /// The program's service that the flow belongs to.
    pub service: u32,
    /// State of the flow when the connection broke, which decides about the answer.
    pub state: ReclaimedFlowState,
    /// True if a descriptor is attached, as in [`HandOffItem`].
    pub descriptor: bool,
}

/// The state of a reclaimed flow when the connection to the daemon broke.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReclaimedFlowState {
    /// The program had handed the flow off. Answered by `Moved` or `Kept`.
    Donated {
        /// Name of the node that should have taken the flow.
        to: String,
    },
    /// The flow was being handed to the program. Answered by `Activate` or `Cancel`.
    Incoming {
        /// Number of the flow, from [`FromDaemon::Incoming`].
        id: u64,
        /// True if the program has the flow's state. If false, the old daemon cannot have committed.
        received: bool,
    },
}

/// A message from the daemon to a server program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromDaemon {
    /// The session is open.
    Opened {
        /// Name of this node.
        node: String,
    },
    /// The operator (or the balancer) requests that these flows move. The program starts a handoff at its next safe
    /// point, or answers [`ToDaemon::Declined`]. Unknown flows are declined.
    HandoffRequested {
        /// Flows that the program is asked to hand off.
        flows: Vec<FlowText>,
        /// Name of the node that takes the flows.
        to: String,
        /// The wait for the send queues.
        drain: Drain,
    },
    /// Flows are arriving. The descriptors of items that have one are attached, in order: the sockets exist, but must
    /// not be used before [`FromDaemon::Activate`].
    Incoming {
        /// Flows that arrive from other nodes.
        items: Vec<IncomingItem>,
    },
    /// State of an incoming flow from the donor's program. The program answers [`ToDaemon::Received`] after the last
    /// part.
    State {
        /// Number of the flow, from [`FromDaemon::Incoming`].
        id: u64,
        /// Application state of the flow, opaque to Holdfast. In the first message of a flow; empty in further ones.
        #[serde(with = "serde_bytes")]
        application_state: Vec<u8>,
        /// UDP: datagrams that the donor's program had not read, oldest first.
        unread: Vec<DatagramPiece>,
        /// True if this message ends the flow's state.
        last: bool,
    },
    /// The flows belong to the program, and their sockets are active. The program sends no [`ToDaemon::Accepted`] for
    /// them.
    Activate {
        /// Numbers of the flows, from [`FromDaemon::Incoming`].
        ids: Vec<u64>,
    },
    /// The arrival of these flows is cancelled. The program closes their descriptors, which are silent.
    Cancel {
        /// Numbers of the flows, from [`FromDaemon::Incoming`].
        ids: Vec<u64>,
        /// Reason for cancelling the arrival.
        reason: String,
    },
    /// UDP: these flows are diverted. The program reads the remaining datagrams from its socket and answers one
    /// [`ToDaemon::Collected`] or more for each flow.
    Collect {
        /// Diverted flows, whose unread datagrams the program collects.
        flows: Vec<FlowText>,
    },
    /// The flows are on another node. The program closes its descriptors, which are silent.
    Moved {
        /// Flows that moved to another node.
        flows: Vec<FlowText>,
        /// Name of the node that took the flows.
        to: String,
    },
    /// The flows stay, and their sockets are active.
    Kept {
        /// Flows that stayed with the program.
        flows: Vec<FlowText>,
        /// Reason why the flows stayed.
        reason: String,
    },
    /// A request of the program failed; for its log. No further action follows.
    Error {
        /// The problem and its remedy.
        text: String,
    },
    /// Several [`FromDaemon::State`] in one message: each complete, and without datagrams.
    States {
        /// One item per incoming flow.
        items: Vec<StateItem>,
    },
}

/// One flow of a [`FromDaemon::States`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateItem {
    /// Number of the flow, from [`FromDaemon::Incoming`].
    pub id: u64,
    /// Application state of the flow, opaque to Holdfast.
    #[serde(with = "serde_bytes")]
    pub application_state: Vec<u8>,
}

/// One flow of a [`FromDaemon::Incoming`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingItem {
    /// The daemon's number for the flow, unique in a session even across daemon restarts: a daemon starts from a
    /// number that no earlier one reached, for instance its clock at start in nanoseconds.
    pub id: u64,
    /// The program's service that takes the flow.
    pub service: u32,
    /// Flow that arrives from another node.
    pub flow: FlowText,
    /// True if a descriptor is attached, as in [`HandOffItem`].
    pub descriptor: bool,
}
