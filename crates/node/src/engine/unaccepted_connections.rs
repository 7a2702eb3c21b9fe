//! Unaccepted connections of a process that has moved: handed off one by one into the queue of its listener at the
//! other node.

use std::os::fd::OwnedFd;

use holdfast_api::Drain;
use holdfast_wire::{Flow, NodeId};
use tokio::sync::oneshot;

use super::Engine;
use super::donations::DonatedConnection;
use super::program_messages::NO_SESSION;

impl Engine {
    /// Hands one connection off; `reply` receives the result.
    pub(super) fn hand_off_unaccepted(
        &mut self,
        (flow, to): (Flow, NodeId),
        socket: OwnedFd,
        reply: oneshot::Sender<Result<(), String>>,
    ) {
        self.program_messages.expect_result(flow, reply);
        let to = self.node_name(to);
        if let Some(why) = self.handoff_obstacle(NO_SESSION, &flow, &to, &[]) {
            return self.program_messages.send_kept(NO_SESSION, &[flow], &why);
        }
        let donation = DonatedConnection::new(NO_SESSION, Some(socket), Vec::new());
        self.donations.insert(flow, donation);
        self.operations
            .begin(vec![flow], to.clone(), Drain::None, false);
        self.request_handoff(NO_SESSION, vec![flow], &to, Drain::None);
    }
}
