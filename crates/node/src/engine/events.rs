//! Events of the handoff machine and of the kernel programs.

use holdfast_bpf::shared_with_c::{
    EVENT_CLOSED, EVENT_ESTABLISHED, EVENT_SUPERSEDED, Event as KernelEvent, FlowState,
};
use holdfast_proto::handoff::{Event, FlowHandoffOutcome};
use holdfast_proto::machine_output::IgnoredInput;
use holdfast_wire::failure::{Failure, ProgramFault};
use holdfast_wire::frame::BatchId;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, OwnershipChange, OwnershipRecord, Protocol,
};

use super::Engine;
use crate::dataplane::{flow_from_key, monotonic_s};

/// `TCP_LAST_ACK`: the client closed first, so this side has no TIME_WAIT.
const TCP_LAST_ACK: u8 = 9;

impl Engine {
    pub(super) fn handle_event(&mut self, event: Event) {
        match event {
            Event::Outcome { batch, flows, .. } => {
                for (flow, outcome) in flows {
                    self.on_handoff_outcome(batch, &flow, &outcome);
                }
            }
            Event::BatchFinished {
                batch,
                acceptor,
                moved,
                kept,
                bytes,
                phases,
                ..
            } => {
                tracing::info!(%batch, %acceptor, moved, kept, bytes, freeze_us = phases.freeze().as_micros(), "handed off");
                if moved > 0 {
                    self.statistics.metrics().record_freeze(phases.freeze());
                }
                if moved == 0
                    && !self.peers.is_up(acceptor)
                    && let Some(membership) = &self.membership
                {
                    membership.report_failed_server_node(acceptor);
                }
                self.operations.on_batch_end(batch, bytes, &phases);
                self.machine
                    .set_pause_between_batches(self.donations.should_rest());
            }
            Event::FlowsAccepted { batch, flows } => self.on_flows_accepted(batch, &flows),
            Event::FlowsDiscarded {
                batch,
                flows,
                reason,
            } => self.on_flows_discarded(batch, &flows, &reason),
            Event::ReportAnswered { change, result } => self.on_change_result(&change, &result),
            Event::HolderSilent { holder, changes } => {
                tracing::warn!(%holder, changes, "the holder does not answer; asking again");
            }
            Event::CommandFailed {
                flow,
                command,
                error: why,
            } => {
                tracing::error!(%flow, command, %why, blame = %why.party(), "a command failed")
            }
            Event::Ignored(IgnoredInput {
                from,
                frame: what,
                reason: why,
            }) => tracing::debug!(%from, what, why, "ignored a frame"),
            Event::RequestFinished { .. } => {}
        }
    }

    fn on_flows_accepted(&mut self, batch: Option<BatchId>, flows: &[(Flow, Epoch)]) {
        tracing::info!(
            batch = batch.map(|b| b.to_string()),
            flows = flows.len(),
            "accepted"
        );
        for (flow, _) in flows {
            self.statistics.count_accepted();
            // A recovered flow keeps its journal entry until its program has reclaimed it.
            if !self.recovered.contains(flow) {
                self.arrivals.journal().remove(flow);
            }
        }
    }

    fn on_flows_discarded(&mut self, batch: Option<BatchId>, flows: &[Flow], why: &Failure) {
        tracing::warn!(
            batch = batch.map(|b| b.to_string()),
            flows = flows.len(),
            %why,
            blame = %why.party(),
            "discarded arriving flows"
        );
        for flow in flows {
            self.arrivals.journal().remove(flow);
        }
    }

    fn on_handoff_outcome(
        &mut self,
        batch: Option<BatchId>,
        flow: &Flow,
        outcome: &FlowHandoffOutcome,
    ) {
        self.statistics.count_outcome(outcome);
        match outcome {
            FlowHandoffOutcome::Moved { .. } => {}
            FlowHandoffOutcome::Kept { reason } => {
                tracing::info!(%flow, %reason, "kept");
                if let Some(session) = self.donations.on_kept(flow) {
                    self.programs.set_owner(session, *flow);
                    self.program_messages.send_kept(session, &[*flow], reason);
                }
            }
            FlowHandoffOutcome::Closed => {
                if let Some(donation) = self.donations.remove(flow) {
                    self.program_messages.send_moved(donation.session, flow, "");
                }
            }
        }
        if let Some(operation) = self.operations.on_flow_end(batch, flow, outcome) {
            self.request_next_flows(operation);
        }
    }

    /// Handles the holder's answer to a report that a flow began or ended.
    fn on_change_result(
        &mut self,
        change: &OwnershipChange,
        result: &Result<Option<OwnershipRecord>, ChangeRefusal>,
    ) {
        let flow = &change.flow;
        match (change.kind, result) {
            (ChangeKind::Establish, Ok(Some(record))) => {
                if let Some((state, mut value)) = self.dataplane.flow(flow)
                    && state == FlowState::Owned
                    && value.epoch != record.epoch
                {
                    value.epoch = record.epoch;
                    let key = crate::dataplane::flow_key(flow);
                    if let Err(error) = self.dataplane.programs.set_flows(&[key], &[value]) {
                        tracing::warn!(%flow, %error, "cannot update the flow's epoch in the filters");
                    }
                }
            }
            (ChangeKind::Establish, refused) => {
                tracing::debug!(%flow, ?refused, "the holder has not recorded a new flow yet");
                self.flow_history.add_unrecorded(*change);
            }
            (_, Err(refusal)) => {
                tracing::debug!(%flow, %refusal, "the holder's record of the flow differs")
            }
            _ => {}
        }
        if change.kind == ChangeKind::Remove {
            self.remove_closed_flow(flow, change.epoch);
        }
    }

    /// Handles events of the kernel programs.
    pub(super) fn handle_kernel_events(&mut self, events: &[KernelEvent]) {
        let mut changes = Vec::new();
        let now = self.now();
        for event in events {
            let Some(flow) = flow_from_key(&event.flow) else {
                continue;
            };
            match event.kind {
                EVENT_ESTABLISHED => {
                    self.process_flows.note_new_flow(flow);
                    if let Some(index) = self.dataplane.service_index(&flow) {
                        self.health.on_established(now, index, flow);
                    }
                    changes.push(OwnershipChange {
                        flow,
                        kind: ChangeKind::Establish,
                        epoch: event.epoch,
                    });
                }
                EVENT_CLOSED if event.detail == TCP_LAST_ACK => {
                    self.on_flow_end(&flow);
                    changes.extend(self.removal_of_closed_flow(&flow));
                }
                EVENT_CLOSED => self.on_flow_end(&flow),
                EVENT_SUPERSEDED => {
                    self.on_flow_end(&flow);
                    changes.push(self.end_reused_flow(flow, event.epoch));
                }
                _ => {}
            }
        }
        if !changes.is_empty() {
            self.report_changes(changes);
        }
    }

    /// Ends a flow whose ports a new connection uses at the node to which the server moved. The entry here forwards
    /// packets there until the holder has recorded the new connection.
    fn end_reused_flow(&mut self, flow: Flow, epoch: Epoch) -> OwnershipChange {
        self.flow_history.add_tombstone(flow, epoch);
        OwnershipChange {
            flow,
            kind: ChangeKind::Remove,
            epoch,
        }
    }

    /// Reports the whole flow table to the holder again, after events were lost. The holder ignores known flows.
    pub(super) fn report_table(&mut self) {
        let mut changes = Vec::new();
        for (flow, state, value) in self.dataplane.flows() {
            changes.extend(self.missed_change(flow, state, value.epoch));
        }
        self.report_changes(changes);
    }

    /// Returns the change that the holder may have missed for an entry in the flow table.
    pub(super) fn missed_change(
        &mut self,
        flow: Flow,
        state: FlowState,
        epoch: Epoch,
    ) -> Option<OwnershipChange> {
        match state {
            FlowState::Owned | FlowState::Prepared => Some(OwnershipChange {
                flow,
                kind: ChangeKind::Establish,
                epoch,
            }),
            // A private flow is forwarded as long as it lives.
            FlowState::Moved if self.private_flows.is_private(&flow) => None,
            // The lost event may have been the reuse of the flow's ports, so the removal is reported. The holder
            // refuses to remove a record that another node owns.
            FlowState::Moved => Some(self.end_reused_flow(flow, epoch)),
            _ => None,
        }
    }

    /// Reports begun and ended flows to the holder. Changes of a moving process's flows wait until the move has ended.
    pub(super) fn report_changes(&mut self, changes: Vec<OwnershipChange>) {
        let machine = self.migrations.machine();
        let moving = |change: &OwnershipChange| {
            machine.is_moving(&change.flow) || machine.has_arrived(&change.flow)
        };
        let (moving, others): (Vec<_>, Vec<_>) = changes.into_iter().partition(moving);
        if !moving.is_empty() {
            machine.handle_changes(moving);
        }
        if !others.is_empty() {
            let now = self.now();
            self.machine.handle_changes(now, others);
        }
    }

    fn on_flow_end(&mut self, flow: &Flow) {
        if flow.protocol == Protocol::Tcp {
            self.programs.clear_owner(flow);
            self.cancel_handoff_request(flow, &ProgramFault::FlowClosed.into());
        }
        self.flow_history.on_end(flow);
    }

    /// Returns the change that removes a closed flow's record at the holder, unless that change is under way. The flow's entry
    /// here stays until the holder has answered: if this daemon dies before, the next one finds the entry, and reports the end
    /// of the flow again.
    pub(super) fn removal_of_closed_flow(&mut self, flow: &Flow) -> Option<OwnershipChange> {
        let (state, value) = self.dataplane.flow(flow)?;
        let (epoch, now_s) = (value.epoch, monotonic_s());
        let is_due =
            state == FlowState::Closing && self.flow_history.begin_removal(*flow, epoch, now_s);
        is_due.then_some(OwnershipChange {
            flow: *flow,
            kind: ChangeKind::Remove,
            epoch,
        })
    }

    /// Removes the entry of a closed flow whose record the holder has removed, unless the entry is a later connection's with
    /// the same ports.
    fn remove_closed_flow(&mut self, flow: &Flow, epoch: Epoch) {
        self.flow_history.end_removal(flow);
        if let Some((FlowState::Closing, value)) = self.dataplane.flow(flow)
            && value.epoch <= epoch
            && let Err(error) = self.dataplane.remove_flow(flow)
        {
            tracing::warn!(%flow, %error, "cannot remove a closed flow from the flow table");
        }
    }
}
