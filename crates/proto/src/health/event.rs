//! Inputs and outputs of the health machine.

use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::{HealthFrame, ServerProblem, ServerState, ServiceEndpoint};
use std::collections::BTreeMap;
use std::fmt;

/// The listening sockets of a service at this node, as the kernel lists them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListenerSample {
    /// Clients that wait at each socket.
    pub queues: Vec<QueueSample>,
    /// Number of handshakes that this node has completed for the service; `None` for a service without handshakes.
    pub handshakes: Option<u64>,
}

/// Clients that wait at one socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSample {
    /// The socket's cookie.
    pub socket: u64,
    /// Number of connections that wait to be accepted (TCP), or bytes that wait to be read (UDP).
    pub waiting: u32,
}

/// An active check of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckKind {
    /// A connection to the server.
    Connect,
    /// A program of the operator.
    Script,
}

/// Reason why a node gets no new clients of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exclusion {
    /// The node has no connection to the contact node.
    NotConnected,
    /// The node is connected and does not answer.
    Silent,
    /// No server listens at the node.
    NoServer,
    /// The server at the node does not serve.
    Problem(ServerProblem),
    /// The node is being drained. Its server takes new clients if no other node has a server that does.
    Draining,
}

impl Exclusion {
    /// Returns true if new clients would surely not be served. A node that is silent or hangs may recover in time.
    pub(super) fn is_certain(&self) -> bool {
        let closed = ServerProblem::ListenerClosed;
        *self == Exclusion::NoServer || *self == Exclusion::Problem(closed)
    }
}

impl fmt::Display for Exclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exclusion::NotConnected => f.write_str("the node is not connected"),
            Exclusion::Silent => f.write_str("the node does not answer"),
            Exclusion::NoServer => f.write_str("no server listens there"),
            Exclusion::Problem(problem) => problem.fmt(f),
            Exclusion::Draining => f.write_str("the node is being drained"),
        }
    }
}

/// An action that the health machine asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame.
    Send {
        /// Node that receives the frame, never this one.
        to: NodeId,
        /// Frame for the receiver's health machine.
        frame: HealthFrame,
    },
    /// Ask a node for a sign of life at once.
    Probe {
        /// Node to ask, never this one.
        node: NodeId,
    },
    /// Place new clients of a service by these shares. Existing flows stay where they are.
    Place {
        /// Service whose new clients are placed.
        service: ServiceEndpoint,
        /// Share of each node in the service's new clients; not all are 0.
        weights: BTreeMap<NodeId, u32>,
    },
    /// Report an event to the operator.
    Event(Event),
}

/// An event of the health machine, for the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The state of this node's server of a service has changed.
    ServerChanged {
        /// Service of the server.
        service: ServiceEndpoint,
        /// The server's new state.
        state: ServerState,
    },
    /// A node has been silent and gets no new clients.
    NodeSilent {
        /// Node that has been silent.
        node: NodeId,
        /// Duration of the node's silence.
        silence: Duration,
    },
    /// A silent node answers again and may get new clients.
    NodeHeard {
        /// Node that answers again.
        node: NodeId,
    },
    /// A node stops getting new clients of a service.
    Excluded {
        /// Service whose new clients go to other nodes.
        service: ServiceEndpoint,
        /// Node that stops getting new clients.
        node: NodeId,
        /// Reason for excluding the node.
        reason: Exclusion,
    },
    /// A node gets new clients of a service again.
    Included {
        /// Service of the new clients.
        service: ServiceEndpoint,
        /// Node that gets new clients again.
        node: NodeId,
    },
    /// No node could serve new clients of a service: they go to nodes that hang or are silent, or else to all.
    NobodyServes {
        /// Service that no node could serve.
        service: ServiceEndpoint,
    },
}

/// State of a service at one node, for the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeHealth {
    /// Node to which the shares and the exclusion apply.
    pub node: NodeId,
    /// The node's share of new clients by the operator's wish.
    pub weight: u32,
    /// The node's share of new clients in force.
    pub placed_weight: u32,
    /// Reason why the node should get none; `None` if the node may get new clients.
    pub exclusion: Option<Exclusion>,
}
