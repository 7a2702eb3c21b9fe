//! The messages.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::Piece;
use crate::{Drain, FlowText, Protocol};

/// What a server program says to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// The first message of a session. Answered by [`FromDaemon::Opened`].
    Open {
        /// What the operator sees in lists: the program's name.
        name: String,
    },
    /// The program has a listener (TCP) or bound socket (UDP) for this service, and takes flows handed to it.
    Serve {
        /// The program's number for this service, unique in the session.
        service: u32,
        /// The pool handle.
        pool: String,
        /// TCP or UDP.
        protocol: Protocol,
        /// Where the socket is bound; an unspecified address stands for every service address with this port.
        addresses: Vec<SocketAddr>,
    },
    /// The program takes no more flows for this service; those it has stay.
    Withdraw {
        /// As in [`ToDaemon::Serve`].
        service: u32,
    },
    /// Flows that the program accepted itself (UDP: whose first datagram it got). After a reconnect, all it has but
    /// those it reclaims.
    Accepted {
        /// By which service they came.
        service: u32,
        /// The flows.
        flows: Vec<FlowText>,
    },
    /// The program closed its descriptors of these flows (UDP: forgot them). TCP may still be ending them: this says
    /// only that there is nobody to ask for a handoff.
    Closed {
        /// The flows.
        flows: Vec<FlowText>,
    },
    /// Hand these flows to another node. The descriptors of those items that have one come with the message, in order.
    ///
    /// The program does not touch the sockets until it has [`FromDaemon::Gone`] or [`FromDaemon::Kept`] for each.
    HandOff {
        /// The program's number for this batch, unique in the session; for logs.
        batch: u64,
        /// Name of the node that is to take them.
        to: String,
        /// Whether to wait for the send queues first.
        drain: Drain,
        /// The flows with their application state.
        items: Vec<HandOffItem>,
        /// Whether the batch ends with this message: bigger ones are split.
        last: bool,
    },
    /// The program does not hand these flows off, although it was asked to.
    Declined {
        /// The flows.
        flows: Vec<FlowText>,
        /// Why, for the operator.
        reason: String,
    },
    /// Answers [`FromDaemon::Collect`]: datagrams of one flow that were in the queue of the program's socket. A flow
    /// with many takes several messages; a flow with none takes one, empty.
    Collected {
        /// The flow.
        flow: FlowText,
        /// The datagrams, oldest first.
        unread: Vec<Piece>,
        /// Whether this flow's datagrams end with this message.
        last: bool,
    },
    /// The program has descriptor, application state and unread datagrams of these incoming flows.
    Received {
        /// As in [`FromDaemon::Incoming`].
        ids: Vec<u64>,
    },
    /// The program cannot take these incoming flows: it serves them no more, or has such a flow. It closed their
    /// descriptors.
    Refused {
        /// As in [`FromDaemon::Incoming`].
        ids: Vec<u64>,
        /// Why.
        reason: String,
    },
    /// After a reconnect: these flows were on their way when the old connection broke. Descriptors of those items that
    /// have one come with the message, in order.
    Reclaim {
        /// The flows.
        items: Vec<ReclaimItem>,
    },
}

/// One flow of a [`ToDaemon::HandOff`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOffItem {
    /// Which flow.
    pub flow: FlowText,
    /// What the program at the acceptor needs to go on: opaque to Holdfast, at most
    /// [`APPLICATION_STATE_BYTES_MAX`](super::APPLICATION_STATE_BYTES_MAX).
    #[serde(with = "serde_bytes")]
    pub application_state: Vec<u8>,
    /// Whether a descriptor comes along. A UDP flow of a shared socket has none: it has no socket of its own.
    pub descriptor: bool,
}

/// One flow of a [`ToDaemon::Reclaim`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimItem {
    /// Which flow.
    pub flow: FlowText,
    /// To which of the program's services it belongs.
    pub service: u32,
    /// What it was waiting for.
    pub was: StillWaiting,
    /// Whether a descriptor comes along, as in [`HandOffItem`].
    pub descriptor: bool,
}

/// What a reclaimed flow was waiting for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StillWaiting {
    /// It was handed off. Answered by `Gone` or `Kept`.
    Donated {
        /// Name of the node that was to take it.
        to: String,
    },
    /// It came in. Answered by `Go` or `Cancel`.
    Incoming {
        /// As in [`FromDaemon::Incoming`].
        id: u64,
        /// Whether the program has its state. If not, the old daemon cannot have committed.
        received: bool,
    },
}

/// What the daemon says to a server program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromDaemon {
    /// The session is open.
    Opened {
        /// Name of this node.
        node: String,
    },
    /// The operator (or the balancer) wants these flows elsewhere. The program calls a handoff at its next safe point,
    /// or answers [`ToDaemon::Declined`]. Flows that it does not know, it declines.
    Asked {
        /// The flows.
        flows: Vec<FlowText>,
        /// Name of the node that is to take them.
        to: String,
        /// Whether to wait for the send queues first.
        drain: Drain,
    },
    /// Flows are coming. Descriptors of those items that have one come with the message, in order: sockets that exist,
    /// but must not be used before [`FromDaemon::Go`].
    Incoming {
        /// The flows.
        items: Vec<IncomingItem>,
    },
    /// What the donor's program said about an incoming flow. Answered by [`ToDaemon::Received`] after the last one.
    State {
        /// As in [`FromDaemon::Incoming`].
        id: u64,
        /// Opaque to Holdfast. In the first message of an id; empty in further ones.
        #[serde(with = "serde_bytes")]
        application_state: Vec<u8>,
        /// UDP: datagrams that the donor's program had not read, oldest first.
        unread: Vec<Piece>,
        /// Whether this id's state ends with this message.
        last: bool,
    },
    /// These flows are the program's, and their sockets live. No [`ToDaemon::Accepted`] is sent for them.
    Go {
        /// As in [`FromDaemon::Incoming`].
        ids: Vec<u64>,
    },
    /// These flows do not come after all. The program closes their descriptors, which are silent.
    Cancel {
        /// As in [`FromDaemon::Incoming`].
        ids: Vec<u64>,
        /// Why.
        reason: String,
    },
    /// UDP: these flows are diverted. The program reads what is left in its socket and answers one
    /// [`ToDaemon::Collected`] or more for each.
    Collect {
        /// The flows.
        flows: Vec<FlowText>,
    },
    /// These flows live elsewhere. The program closes its descriptors, which are silent.
    Gone {
        /// The flows.
        flows: Vec<FlowText>,
        /// Name of the node that took them.
        to: String,
    },
    /// These flows stay, and their sockets live.
    Kept {
        /// The flows.
        flows: Vec<FlowText>,
        /// Why.
        reason: String,
    },
    /// Something the program said could not be done, for its log. Nothing else follows from it.
    Error {
        /// What, and what to do.
        text: String,
    },
    /// Several [`FromDaemon::State`] in one message: each whole, and without datagrams.
    States {
        /// One for each incoming flow.
        items: Vec<StateItem>,
    },
}

/// One flow of a [`FromDaemon::States`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateItem {
    /// As in [`FromDaemon::Incoming`].
    pub id: u64,
    /// Opaque to Holdfast.
    #[serde(with = "serde_bytes")]
    pub application_state: Vec<u8>,
}

/// One flow of a [`FromDaemon::Incoming`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingItem {
    /// The daemon's number for it. Never used again in a session, not even by the daemon's successor: the daemon takes
    /// its numbers from a start that no earlier one reached, for instance the clock's nanoseconds at its start.
    pub id: u64,
    /// Which of the program's services takes it.
    pub service: u32,
    /// Which flow.
    pub flow: FlowText,
    /// Whether a descriptor comes along, as in [`HandOffItem`].
    pub descriptor: bool,
}
