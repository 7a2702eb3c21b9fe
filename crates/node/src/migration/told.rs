//! What the threads that carry moves out tell the event loop.

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

/// Something a thread has to say.
pub(crate) enum Told {
    /// To be sent to the acceptor.
    Piece {
        id: MoveId,
        to: NodeId,
        kind: u8,
        more: bool,
        bytes: Bytes,
    },
    /// To be said to the donor.
    Took {
        id: MoveId,
        bytes: u64,
        busy_us: u64,
        problem: Option<String>,
    },
    /// To be said to the donor: why this node does not take its process.
    Judged { id: MoveId, refusals: Vec<String> },
    /// To be said to the donor: what is missing of memory that follows.
    Wanted { id: MoveId, wanted: Wanted },
    /// To be said to the donor: the next step of the hand-over of locks.
    Locks { id: MoveId, bytes: Bytes },
    /// A process that an earlier daemon had put together has its locks.
    Locked {
        id: MoveId,
        token: Token,
        restorer: Restorer,
    },
    /// Memory follows a process that runs here, or will in a moment: its thread goes on.
    Follows { id: MoveId },
    /// Its thread has ended.
    Followed { id: MoveId },
    /// What of the memory of a process that left has followed it.
    Memory { id: MoveId, memory: FollowedMemory },
    /// A command has ended.
    Done {
        id: Option<MoveId>,
        completion: Completion,
        /// Since when what it began goes on: a process stands still, or runs.
        since: Instant,
    },
    /// The sockets of a process on its way from here, before the round or freeze that found them has ended.
    Sockets { id: MoveId, sockets: Vec<Place> },
    /// To be given to this node's stack before the sockets of a process that comes act, in this order.
    Packets { id: MoveId, packets: Vec<Vec<u8>> },
    /// A process on its way from here is about to stand still, or does.
    Turns {
        id: MoveId,
        turn: Turn,
        /// With the datagram flows that began here since the last round.
        reply: oneshot::Sender<Result<Vec<Flow>, String>>,
    },
    /// These sockets of a process that comes are about to be made, and it does not run yet.
    Expected {
        id: MoveId,
        servers: Vec<Place>,
        reply: oneshot::Sender<()>,
    },
    /// At which epochs are these this node's? Those that are not, are left out.
    Late {
        flows: Vec<Flow>,
        reply: oneshot::Sender<Vec<FlowAt>>,
    },
    /// A connection that a program which has left had not accepted, and where the program is.
    Unaccepted {
        of: (Flow, NodeId),
        socket: OwnedFd,
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// Nothing is left here of what a program listened at that has gone to a node.
    Drained { to: NodeId, places: Vec<Place> },
    /// A process runs here from now on: who put it together, and what was known of it.
    Runs {
        id: MoveId,
        restorer: Restorer,
        held: Held,
        came: Came,
        /// Its sockets that are no connections.
        servers: Vec<Place>,
    },
    /// What the operator wanted to know of a process, but for the freeze.
    Inspected {
        check: Box<Result<ProcessCheck, ErrorBody>>,
        /// Its connections.
        flows: Vec<Flow>,
        inquiry: Inquiry,
    },
}

/// A thread's way to the event loop.
#[derive(Clone)]
pub(crate) struct Teller(mpsc::UnboundedSender<Told>);

impl Teller {
    pub(super) fn tell(&self, told: Told) {
        // A loop that has ended hears nothing; its process ends too.
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

/// The event loop's end. What is in it is bounded by what may be on its way of each move.
pub(crate) type Listener = mpsc::UnboundedReceiver<Told>;

pub(super) fn way() -> (Teller, Listener) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Teller(sender), receiver)
}
