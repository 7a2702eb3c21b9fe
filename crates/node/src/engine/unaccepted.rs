//! Unaccepted connections of a process that has moved: handed off one by one into the queue of its listener at the
//! other node.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use holdfast_api::Drain;
use holdfast_api::app::FromDaemon;
use holdfast_bpf::Queue;
use holdfast_wire::{Flow, NodeId};
use tokio::sync::oneshot;

use super::donor::Donation;
use super::queued::{NOBODY, Waiting};
use super::{Engine, flow_of};
use crate::dataplane::{Dataplane, Hold};

/// State of unaccepted connections.
pub struct Unaccepted {
    /// Access to the accept queues of listeners, if the kernel supports it.
    pub(super) queue: Option<Queue>,
    /// Connections moved here that wait for a free place in a queue.
    pub(super) waiting: Vec<Waiting>,
    /// Connections being handed off from here, with the sender for their result.
    leaving: HashMap<Flow, oneshot::Sender<Result<(), String>>>,
}

impl Unaccepted {
    /// Attaches the queue program; starts without connections.
    pub(super) fn new(dataplane: &Dataplane, hold: &Hold) -> Self {
        let queue = dataplane.programs.attach_queue(hold.ifindex());
        let queue = queue.inspect_err(|error| {
            tracing::warn!(%error, "connections that wait to be accepted cannot come here");
        });
        Self {
            queue: queue.ok(),
            waiting: Vec::new(),
            leaving: HashMap::new(),
        }
    }
}

impl Engine {
    /// Hands one connection off; `reply` receives the result.
    pub(super) fn give_unaccepted(
        &mut self,
        (flow, to): (Flow, NodeId),
        socket: OwnedFd,
        reply: oneshot::Sender<Result<(), String>>,
    ) {
        self.unaccepted.leaving.insert(flow, reply);
        let to = self.name_of(to);
        if let Some(why) = self.not_to_give(NOBODY, &flow, &to, &[]) {
            return self.keep(NOBODY, &[flow], why);
        }
        let donation = Donation::new(NOBODY, Some(socket), Vec::new());
        self.donations.insert(flow, donation);
        self.operations
            .begin(vec![flow], to.clone(), Drain::None, false);
        self.request(NOBODY, vec![flow], &to, Drain::None);
    }

    /// Handles the messages that a program would get for its flows.
    pub(super) fn tell_leftovers(&mut self, message: &FromDaemon) {
        let (flows, result) = match message {
            FromDaemon::Gone { flows, .. } => (flows, Ok(())),
            FromDaemon::Kept { flows, reason } => (flows, Err(reason.clone())),
            _ => return,
        };
        for flow in flows.iter().filter_map(flow_of) {
            if let Some(reply) = self.unaccepted.leaving.remove(&flow) {
                // If the receiver has gone, it has closed its socket.
                let _ = reply.send(result.clone());
            }
        }
    }
}
