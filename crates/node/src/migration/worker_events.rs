//! Events that the migration threads report to the event loop.

use std::os::fd::OwnedFd;
use std::time::Instant;

use bytes::Bytes;
use holdfast_api::control::{ErrorBody, PostCopyMemory, ProcessCheck};
use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::ProcessRef;
use holdfast_proto::migration::{CommandToken, Completion};
use holdfast_wire::failure::Failure;
use holdfast_wire::move_frames::{DonorFlowEpoch, PageRequest};
use holdfast_wire::{Flow, MoveId, NodeId};
use tokio::sync::{mpsc, oneshot};

use super::arrived_processes::ProcessInfo;
use super::rehearsals::MoveInquiry;
use super::socket_endpoints::SocketEndpoint;

/// Forwarding rule for packets of a process that is moving away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// Data goes to the acceptor. Pure acknowledgements stay here as long as the process runs.
    Data,
    /// All packets go to the acceptor, because the process is stopped.
    All,
}

/// An event of a migration thread.
pub(crate) enum WorkerEvent {
    /// Send a piece of the image to the acceptor.
    SendPiece {
        id: MoveId,
        to: NodeId,
        kind: u8,
        more: bool,
        bytes: Bytes,
    },
    /// Report to the donor the bytes of the image that were taken.
    ReportTaken {
        id: MoveId,
        bytes: u64,
        busy_us: u64,
        problem: Option<Failure>,
    },
    /// Send this node's verdict on the process to the donor.
    SendVerdict { id: MoveId, refusals: Vec<Failure> },
    /// Request missing pages from the donor.
    RequestPages { id: MoveId, request: PageRequest },
    /// Request the next step of the hand-over of locks from the donor.
    RequestLocks { id: MoveId, bytes: Bytes },
    /// A process that an earlier daemon restored has its locks.
    LocksAcquired {
        id: MoveId,
        token: CommandToken,
        restorer: Restorer,
    },
    /// The remaining pages of a process that runs here, or will in a moment, are being sent; its thread continues.
    PostcopyStarted { id: MoveId },
    /// The thread that receives the remaining pages has ended.
    PostcopyEnded { id: MoveId },
    /// Progress of sending the remaining pages of a process that moved away.
    PostcopyProgress { id: MoveId, memory: PostCopyMemory },
    /// A command of the migration machine has ended.
    CommandDone {
        id: Option<MoveId>,
        completion: Completion,
        /// Time from which its effect holds: the process is stopped, or runs.
        effective_at: Instant,
    },
    /// The sockets of a departing process, reported before the end of the round or freeze that found them.
    SocketsFound {
        id: MoveId,
        sockets: Vec<SocketEndpoint>,
    },
    /// Packets to give to this node's stack, in this order, before the sockets of a restored process become active.
    PacketsToInject { id: MoveId, packets: Vec<Vec<u8>> },
    /// Set the forwarding rule of a departing process that is about to be stopped, or is stopped.
    SetRedirect {
        id: MoveId,
        redirect: Redirect,
        /// Reply with the datagram flows that began here since the last round.
        reply: oneshot::Sender<Result<Vec<Flow>, Failure>>,
    },
    /// Redirect new clients: these sockets are about to be made for a process that does not run here yet.
    RedirectNewClients {
        id: MoveId,
        listeners: Vec<SocketEndpoint>,
        reply: oneshot::Sender<()>,
    },
    /// Asks for the epochs of these flows. Flows that this node does not own are left out of the reply.
    OwnedFlows {
        flows: Vec<Flow>,
        reply: oneshot::Sender<Vec<DonorFlowEpoch>>,
    },
    /// An unaccepted connection of a process that has moved, and the process's node.
    HandOffUnaccepted {
        flow_and_acceptor: (Flow, NodeId),
        socket: OwnedFd,
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// Asks whether another node still hands connections off into the queues of these listeners.
    HasUnacceptedArrivals {
        listeners: Vec<SocketEndpoint>,
        reply: oneshot::Sender<bool>,
    },
    /// Redirect new clients to node `to`, where the process of these listeners runs.
    RedirectToAcceptor {
        to: NodeId,
        endpoints: Vec<SocketEndpoint>,
        reply: oneshot::Sender<()>,
    },
    /// No handshake is left here with the listeners of a process that moved to node `to`.
    HandshakesDrained {
        to: NodeId,
        endpoints: Vec<SocketEndpoint>,
    },
    /// A process runs here, with its restorer and the recorded facts.
    ProcessRuns {
        id: MoveId,
        restorer: Restorer,
        restorer_ref: ProcessRef,
        info: ProcessInfo,
        /// Its sockets that are not connections.
        listeners: Vec<SocketEndpoint>,
    },
    /// Result of an operator's check, without the predicted freeze.
    CheckDone {
        check: Box<Result<ProcessCheck, ErrorBody>>,
        /// Connections of the process.
        flows: Vec<Flow>,
        inquiry: MoveInquiry,
    },
}

/// A thread's channel to the event loop.
#[derive(Clone)]
pub(crate) struct EventSender(mpsc::UnboundedSender<WorkerEvent>);

impl EventSender {
    pub(super) fn send(&self, event: WorkerEvent) {
        // If the loop has ended, the event is lost; the process is ending too.
        let _ = self.0.send(event);
    }

    pub(super) fn command_done(&self, id: Option<MoveId>, completion: Completion) {
        self.command_done_since(id, completion, Instant::now());
    }

    pub(super) fn command_done_since(
        &self,
        id: Option<MoveId>,
        completion: Completion,
        effective_at: Instant,
    ) {
        self.send(WorkerEvent::CommandDone {
            id,
            completion,
            effective_at,
        });
    }
}

/// The event loop's end of the channel. Its length is bounded by the windows of the moves.
pub(crate) type EventReceiver = mpsc::UnboundedReceiver<WorkerEvent>;

pub(super) fn event_channel() -> (EventSender, EventReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (EventSender(sender), receiver)
}
