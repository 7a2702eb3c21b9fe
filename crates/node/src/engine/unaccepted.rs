//! Connections that wait to be accepted by a program that has left: they are handed off, one by one, into the queue of its listener at the
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

/// What is known of connections that nobody has accepted.
pub struct Unaccepted {
    /// The way into the queues of listeners, where the kernel has one.
    pub(super) queue: Option<Queue>,
    /// Those that have come and wait for room in a queue.
    pub(super) waiting: Vec<Waiting>,
    /// Those on their way from here, and who wants to know whether they have gone.
    leaving: HashMap<Flow, oneshot::Sender<Result<(), String>>>,
}

impl Unaccepted {
    /// None yet.
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
    /// Hands one off; `reply` says what has become of it.
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

    /// What a program would have been told.
    pub(super) fn tell_leftovers(&mut self, message: &FromDaemon) {
        let (flows, result) = match message {
            FromDaemon::Gone { flows, .. } => (flows, Ok(())),
            FromDaemon::Kept { flows, reason } => (flows, Err(reason.clone())),
            _ => return,
        };
        for flow in flows.iter().filter_map(flow_of) {
            if let Some(reply) = self.unaccepted.leaving.remove(&flow) {
                // Who does not wait any more has closed its socket.
                let _ = reply.send(result.clone());
            }
        }
    }
}
