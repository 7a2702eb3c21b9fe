//! Descriptors and sockets of a process being moved here.

use holdfast_checkpoint::image::{DescriptorUpdate, decode};
use holdfast_checkpoint::sockets::RestoredSockets;
use holdfast_wire::MoveId;
use holdfast_wire::failure::{Failure, ProtocolViolation};
use tokio::sync::oneshot;

use super::super::admission_policy::not_allowed;
use super::super::donor_sockets::{SocketStates, port_members, shares_port};
use super::super::image_messages::MessageKind;
use super::super::socket_endpoints::endpoint_of;
use super::super::worker_events::{EventSender, WorkerEvent};
use super::{AcceptorWorker, RESTORE_THREADS};
use crate::dataplane::retransmission_timeouts;
use crate::dataplane::shared_ports::{self, SharedPortState};
use crate::failure_conversion::IntoFailure;

impl AcceptorWorker {
    pub(super) fn restore_descriptors(
        &mut self,
        kind: MessageKind,
        message: &[u8],
    ) -> Result<(), Failure> {
        let found: DescriptorUpdate = decode(message).map_err(IntoFailure::into_failure)?;
        self.policy.check_descriptors(&found)?;
        if !self.refusals.is_empty() {
            return Ok(());
        }
        if self.sockets.is_none() {
            let first_port = self.policy.judge().first_port();
            self.sockets =
                Some(RestoredSockets::new(first_port).map_err(IntoFailure::into_failure)?);
            // Loaded before the freeze, which the loading would lengthen.
            retransmission_timeouts::load();
        }
        if found.sockets.values().any(shares_port) {
            shared_ports::load();
        }
        let (Some(sockets), Some(restorer)) = (&mut self.sockets, &mut self.restorer) else {
            return Err(ProtocolViolation::DescriptorsBeforeTree.into());
        };
        redirect_new_clients(&self.events, self.id, &found);
        let prepared = sockets.prepare(&found.sockets, &found.removed);
        prepared.map_err(IntoFailure::into_failure)?;
        match kind {
            MessageKind::LastDescriptors => {
                restorer.finish_descriptors(&found, &sockets.new_sockets())
            }
            _ => restorer.update_descriptors(&found, &sockets.new_sockets()),
        }
        .map_err(IntoFailure::into_failure)?;
        sockets.mark_handed_over();
        Ok(())
    }

    pub(super) fn restore_socket_states(
        &mut self,
        kind: MessageKind,
        given: SocketStates,
    ) -> Result<(), Failure> {
        let sockets = self
            .sockets
            .as_mut()
            .ok_or(ProtocolViolation::SocketStatesBeforeSockets)?;
        let SocketStates {
            at_us,
            states,
            clients,
            programs,
        } = given;
        let verdict = self.policy.judge().check_socket_states(&states);
        verdict.map_err(not_allowed)?;
        let packets = match kind {
            MessageKind::Snapshots => sockets
                .restore_early(states, at_us, RESTORE_THREADS)
                .map(|()| Vec::new()),
            MessageKind::Sockets => sockets.restore_some(states, RESTORE_THREADS),
            _ => sockets.restore_changed(states, at_us, RESTORE_THREADS),
        };
        let packets = packets.map_err(IntoFailure::into_failure)?;
        let shared = SharedPortState { clients, programs };
        shared_ports::restore(&port_members(sockets.iter()), &shared)?;
        if !packets.is_empty() {
            let id = self.id;
            self.events
                .send(WorkerEvent::PacketsToInject { id, packets });
        }
        Ok(())
    }
}

/// Waits until new clients of the sockets about to be made are redirected to the donor, where the program still runs.
fn redirect_new_clients(events: &EventSender, id: MoveId, found: &DescriptorUpdate) {
    let endpoints = found.sockets.values().filter_map(endpoint_of);
    let listeners: Vec<_> = endpoints
        .filter(|endpoint| endpoint.remote.is_none())
        .collect();
    if listeners.is_empty() {
        return;
    }
    let (reply, redirected) = oneshot::channel();
    events.send(WorkerEvent::RedirectNewClients {
        id,
        listeners,
        reply,
    });
    // If the daemon is ending, no client is redirected.
    let _ = redirected.blocking_recv();
}
