//! Events of the handoff machine and of the kernel programs.

use holdfast_api::app::FromDaemon;
use holdfast_bpf::shared::{
    EVENT_CLOSED, EVENT_ESTABLISHED, EVENT_FOLLOWED, Event as KernelEvent, FlowState,
};
use holdfast_proto::handoff::{Event, Outcome};
use holdfast_wire::frame::BatchId;
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, Protocol, Record, Refusal};

use super::tombstones::Tombstone;
use super::{Engine, text_of};
use crate::dataplane::{flow_of, monotonic_s};

/// `TCP_LAST_ACK`: the client closed first, so this side has no TIME_WAIT.
const LAST_ACK: u8 = 9;

impl Engine {
    pub(super) fn handle_event(&mut self, event: Event) {
        match event {
            Event::Outcome { batch, flows, .. } => {
                for (flow, outcome) in flows {
                    self.outcome(batch, &flow, &outcome);
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
                    self.metrics.frozen_for(phases.freeze());
                }
                self.operations.batch_ended(batch, bytes, &phases);
                self.machine.give_way(self.pressure.is_high());
            }
            Event::Accepted { batch, flows } => {
                tracing::info!(
                    batch = batch.map(|b| b.to_string()),
                    flows = flows.len(),
                    "accepted"
                );
                for (flow, _) in flows {
                    self.metrics.handoff_ended("accepted");
                    self.counts.accepted += 1;
                    // A recovered flow keeps its journal entry until its program has reclaimed it.
                    if !self.recovered.contains_key(&flow) {
                        self.journal.ended(&flow);
                    }
                }
            }
            Event::Discarded { batch, flows, why } => {
                tracing::warn!(
                    batch = batch.map(|b| b.to_string()),
                    flows = flows.len(),
                    why,
                    "given up as acceptor"
                );
                for flow in flows {
                    self.journal.ended(&flow);
                }
            }
            Event::Changed { change, result } => self.changed(&change, &result),
            Event::HolderSilent { holder, changes } => {
                tracing::warn!(%holder, changes, "the holder does not answer; asking again");
            }
            Event::Failed { flow, command, why } => {
                tracing::error!(%flow, command, why, "could not be carried out")
            }
            Event::Ignored { from, what, why } => tracing::debug!(%from, what, why, "ignored"),
            Event::RequestFinished { .. } => {}
        }
    }

    fn outcome(&mut self, batch: Option<BatchId>, flow: &Flow, outcome: &Outcome) {
        match outcome {
            Outcome::Moved { .. } => {
                self.metrics.handoff_ended("moved");
                self.counts.donated += 1;
            }
            Outcome::Kept { reason } => {
                self.metrics.handoff_ended("kept");
                self.counts.kept += 1;
                tracing::info!(%flow, %reason, "kept");
                if let Some(donation) = self.donations.get_mut(flow) {
                    let session = donation.session;
                    // The duplicate of the descriptor is needed until the holder has answered.
                    donation.told = true;
                    if !donation.in_doubt {
                        self.donations.remove(flow);
                    }
                    self.programs.has(session, *flow);
                    let kept = FromDaemon::Kept {
                        flows: vec![text_of(flow)],
                        reason: reason.to_string(),
                    };
                    self.tell(session, &kept, Vec::new());
                }
            }
            Outcome::Gone => {
                if let Some(donation) = self.donations.remove(flow) {
                    let gone = FromDaemon::Gone {
                        flows: vec![text_of(flow)],
                        to: String::new(),
                    };
                    self.tell(donation.session, &gone, Vec::new());
                }
            }
        }
        if let Some(operation) = self.operations.ended(batch, flow, outcome) {
            self.ask_programs(operation);
        }
    }

    /// Handles the holder's answer to a report that a flow began or ended.
    fn changed(&mut self, change: &Change, result: &Result<Option<Record>, Refusal>) {
        let flow = &change.flow;
        match (change.kind, result) {
            (ChangeKind::Establish, Ok(Some(record))) => {
                if let Some((state, mut value)) = self.dataplane.flow(flow)
                    && state == FlowState::Owned
                    && value.epoch != record.epoch
                {
                    value.epoch = record.epoch;
                    let key = crate::dataplane::key_of(flow);
                    if let Err(error) = self.dataplane.programs.set_flows(&[key], &[value]) {
                        tracing::warn!(%flow, %error, "its epoch is not known to the filters");
                    }
                }
            }
            (ChangeKind::Establish, refused) => {
                tracing::debug!(%flow, ?refused, "the holder does not record a new flow yet");
                self.unrecorded.add(*change);
            }
            (_, Err(refusal)) => tracing::debug!(%flow, %refusal, "the holder has it otherwise"),
            _ => {}
        }
    }

    /// Handles events of the kernel programs.
    pub(super) fn handle_kernel(&mut self, events: &[KernelEvent]) {
        let mut changes = Vec::new();
        for event in events {
            let Some(flow) = flow_of(&event.flow) else {
                continue;
            };
            match event.kind {
                EVENT_ESTABLISHED => {
                    self.note_newcomer(flow);
                    changes.push(Change {
                        flow,
                        kind: ChangeKind::Establish,
                        epoch: event.epoch,
                    });
                }
                EVENT_CLOSED if event.detail == LAST_ACK => {
                    self.end_of_flow(&flow);
                    changes.extend(self.removal(&flow));
                }
                EVENT_CLOSED => self.end_of_flow(&flow),
                EVENT_FOLLOWED => {
                    self.end_of_flow(&flow);
                    changes.push(self.followed(flow, event.epoch));
                }
                _ => {}
            }
        }
        if !changes.is_empty() {
            self.report(changes);
        }
    }

    /// Ends a flow whose ports a new connection uses at the node to which the server moved. The entry here forwards
    /// packets there until the holder has recorded the new connection.
    fn followed(&mut self, flow: Flow, epoch: Epoch) -> Change {
        self.tombstones
            .add(monotonic_s(), Tombstone { flow, epoch });
        Change {
            flow,
            kind: ChangeKind::Remove,
            epoch,
        }
    }

    /// Reports the whole flow table to the holder again, after events were lost. The holder ignores known flows.
    pub(super) fn report_table(&mut self) {
        let mut changes = Vec::new();
        for (flow, state, value) in self.dataplane.flows() {
            changes.extend(self.reportable(flow, state, value.epoch));
        }
        self.report(changes);
    }

    /// Returns the change that the holder may have missed for an entry in the flow table.
    pub(super) fn reportable(
        &mut self,
        flow: Flow,
        state: FlowState,
        epoch: Epoch,
    ) -> Option<Change> {
        match state {
            FlowState::Owned | FlowState::Prepared => Some(Change {
                flow,
                kind: ChangeKind::Establish,
                epoch,
            }),
            // A private flow is forwarded as long as it lives.
            FlowState::Moved if self.moves.addresses().is_private(&flow) => None,
            // The lost event may have been the reuse of the flow's ports, so the removal is reported. The holder
            // refuses to remove a record that another node owns.
            FlowState::Moved => Some(self.followed(flow, epoch)),
            _ => None,
        }
    }

    fn end_of_flow(&mut self, flow: &Flow) {
        if flow.protocol == Protocol::Tcp {
            self.programs.lost(flow);
            self.nobody_to_ask(flow, "it was closed meanwhile");
        }
        self.taken_at_ns.remove(flow);
    }

    /// Removes a closed flow's entry here, and returns the change that removes its record at the holder.
    pub(super) fn removal(&mut self, flow: &Flow) -> Option<Change> {
        let (state, value) = self.dataplane.flow(flow)?;
        if state != FlowState::Closing {
            return None;
        }
        if let Err(error) = self.dataplane.forget(flow) {
            tracing::warn!(%flow, %error, "a closed flow stays in the table");
        }
        Some(Change {
            flow: *flow,
            kind: ChangeKind::Remove,
            epoch: value.epoch,
        })
    }
}
