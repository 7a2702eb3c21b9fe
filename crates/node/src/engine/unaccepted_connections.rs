//! Unaccepted connections of a process that has moved: handed off one by one into the queue of its listener at the
//! other node.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use holdfast_api::Drain;
use holdfast_api::app::FromDaemon;
use holdfast_bpf::AcceptQueue;
use holdfast_wire::{Flow, NodeId};
use tokio::sync::oneshot;

use super::accept_queue::{NO_SESSION, WaitingConnection};
use super::donor::DonatedConnection;
use super::{Engine, flow_from_text};
use crate::dataplane::{Dataplane, HoldDevice};

/// State of unaccepted connections.
pub struct UnacceptedConnections {
    /// Access to the accept queues of listeners, if the kernel supports it.
    pub(super) accept_queues: Option<AcceptQueue>,
    /// Connections moved here that wait for a free place in a queue.
    pub(super) waiting: Vec<WaitingConnection>,
    /// Connections being handed off from here, with the sender for their result.
    reply_senders: HashMap<Flow, oneshot::Sender<Result<(), String>>>,
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
            reply_senders: HashMap::new(),
        }
    }
}

impl Engine {
    /// Hands one connection off; `reply` receives the result.
    pub(super) fn hand_off_unaccepted(
        &mut self,
        (flow, to): (Flow, NodeId),
        socket: OwnedFd,
        reply: oneshot::Sender<Result<(), String>>,
    ) {
        self.unaccepted.reply_senders.insert(flow, reply);
        let to = self.node_name(to);
        if let Some(why) = self.handoff_obstacle(NO_SESSION, &flow, &to, &[]) {
            return self.send_kept(NO_SESSION, &[flow], why);
        }
        let donation = DonatedConnection::new(NO_SESSION, Some(socket), Vec::new());
        self.donations.insert(flow, donation);
        self.operations
            .begin(vec![flow], to.clone(), Drain::None, false);
        self.request_handoff(NO_SESSION, vec![flow], &to, Drain::None);
    }

    /// Handles the messages that a program would get for its flows.
    pub(super) fn on_unaccepted_message(&mut self, message: &FromDaemon) {
        let (flows, result) = match message {
            FromDaemon::Moved { flows, .. } => (flows, Ok(())),
            FromDaemon::Kept { flows, reason } => (flows, Err(reason.clone())),
            _ => return,
        };
        for flow in flows.iter().filter_map(flow_from_text) {
            if let Some(reply) = self.unaccepted.reply_senders.remove(&flow) {
                // If the receiver has gone, it has closed its socket.
                let _ = reply.send(result.clone());
            }
        }
    }
}
