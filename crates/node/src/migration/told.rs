//! Events that the migration threads report to the event loop.

use std::os::fd::OwnedFd;
use std::time::Instant;

use bytes::Bytes;
use holdfast_api::control::{ErrorBody, FollowedMemory, ProcessCheck};
use holdfast_proto::migration::{Completion, Token};
use holdfast_sys::process::acceptor::Restorer;
use holdfast_sys::process::donor::Held;
use holdfast_wire::migration::{FlowAt, Wanted};
use holdfast_wire::{Flow, MoveId, NodeId};
use tokio::sync::{mpsc, oneshot};

use super::places::Place;
use super::rehearsals::Inquiry;
use super::residents::Came;
use crate::engine::Turn;

/// An event of a migration thread.
pub(crate) enum Told {
    /// Send a piece to the acceptor.
    Piece {
        id: MoveId,
        to: NodeId,
        kind: u8,
        more: bool,
        bytes: Bytes,
    },
    /// Report taken bytes to the donor.
    Took {
        id: MoveId,
        bytes: u64,
        busy_us: u64,
        problem: Option<String>,
    },
    /// Send this node's verdict on the process to the donor.
    Judged { id: MoveId, refusals: Vec<String> },
    /// Request missing pages from the donor.
    Wanted { id: MoveId, wanted: Wanted },
    /// Request the next step of the hand-over of locks from the donor.
    Locks { id: MoveId, bytes: Bytes },
    /// A process that an earlier daemon restored has its locks.
    Locked {
        id: MoveId,
        token: Token,
        restorer: Restorer,
    },
    /// The remaining pages of a process that runs here, or will in a moment, are being sent; its thread continues.
    Follows { id: MoveId },
    /// The thread that receives the remaining pages has ended.
    Followed { id: MoveId },
    /// Progress of sending the remaining pages of a process that moved away.
    Memory { id: MoveId, memory: FollowedMemory },
    /// A command has ended.
    Done {
        id: Option<MoveId>,
        completion: Completion,
        /// Time from which its effect holds: the process is stopped, or runs.
        since: Instant,
    },
    /// The sockets of a departing process, reported before the end of the round or freeze that found them.
    Sockets { id: MoveId, sockets: Vec<Place> },
    /// Packets to give to this node's stack, in this order, before the sockets of a restored process become active.
    Packets { id: MoveId, packets: Vec<Vec<u8>> },
    /// Set the forwarding rule of a departing process that is about to be stopped, or is stopped.
    Turns {
        id: MoveId,
        turn: Turn,
        /// Reply with the datagram flows that began here since the last round.
        reply: oneshot::Sender<Result<Vec<Flow>, String>>,
    },
    /// Redirect new clients: these sockets are about to be made for a process that does not run here yet.
    Expected {
        id: MoveId,
        servers: Vec<Place>,
        reply: oneshot::Sender<()>,
    },
    /// Asks for the epochs of these flows. Flows that this node does not own are left out of the reply.
    Late {
        flows: Vec<Flow>,
        reply: oneshot::Sender<Vec<FlowAt>>,
    },
    /// An unaccepted connection of a process that has moved, and the process's node.
    Unaccepted {
        of: (Flow, NodeId),
        socket: OwnedFd,
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// No handshake is left here with the listeners of a process that moved to node `to`.
    Drained { to: NodeId, places: Vec<Place> },
    /// A process runs here, with its restorer and the recorded facts.
    Runs {
        id: MoveId,
        restorer: Restorer,
        held: Held,
        came: Came,
        /// Its sockets that are not connections.
        servers: Vec<Place>,
    },
    /// Result of an operator's check, without the predicted freeze.
    Inspected {
        check: Box<Result<ProcessCheck, ErrorBody>>,
        /// Connections of the process.
        flows: Vec<Flow>,
        inquiry: Inquiry,
    },
}

/// A thread's channel to the event loop.
#[derive(Clone)]
pub(crate) struct Teller(mpsc::UnboundedSender<Told>);

impl Teller {
    pub(super) fn tell(&self, told: Told) {
        // If the loop has ended, the event is lost; the process is ending too.
        let _ = self.0.send(told);
    }

    pub(super) fn done(&self, id: Option<MoveId>, completion: Completion) {
        self.done_since(id, completion, Instant::now());
    }

    pub(super) fn done_since(&self, id: Option<MoveId>, completion: Completion, since: Instant) {
        self.tell(Told::Done {
            id,
            completion,
            since,
        });
    }
}

/// The event loop's end of the channel. Its length is bounded by the windows of the moves.
pub(crate) type Listener = mpsc::UnboundedReceiver<Told>;

pub(super) fn way() -> (Teller, Listener) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Teller(sender), receiver)
}
