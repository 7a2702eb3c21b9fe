//! Actions of a daemon for its state machine: commands, the holder's table, crash and restart.

use super::HandoffBug;
use super::contact_change::ArbitrationTime;
use super::node::{KernelFlowState, RunningCommand, begin_results, flows_of};
use super::world::{HandoffDaemonAction, HandoffWorld, first_epoch, seconds};
use crate::node_group::{GroupWorld as _, change, node_id, node_index};
use holdfast_proto::flow_ownership;
use holdfast_proto::handoff::{
    Command, CommandToken, Event, FlowHandoffOutcome, FlowKeptReason, Handoff,
    HandoffMachineConfig, RequestId, Results,
};
use holdfast_wire::{ChangeKind, ChangeRefusal, Flow, OwnershipChange, OwnershipRecord};

impl HandoffWorld {
    pub(super) fn begin_command(&mut self, node: usize, command: Command) {
        let (token, results) = begin_results(&command);
        if let Command::Arbitrate { asker, changes, .. } = &command {
            if node_index(*asker) == node {
                self.on_request(node, changes);
            }
            let at = self.core.now + self.core.micros(1, 50);
            let at = at.max(self.nodes[node].arbitration_busy_until);
            self.nodes[node].arbitration_busy_until = at;
            self.core
                .schedule_action(node, at, HandoffDaemonAction::Arbitrate { token });
        }
        let flows = flows_of(&command);
        for (index, flow) in flows.iter().enumerate() {
            let mut at = self.core.now + self.core.command_duration(60);
            // Handle flow by flow, and not before earlier commands for the same flow.
            let busy_until = &mut self.nodes[node].busy_until;
            for earlier in &flows[..=index] {
                at = at.max(busy_until.get(earlier).copied().unwrap_or_default());
            }
            busy_until.insert(*flow, at);
            self.core
                .schedule_action(node, at, HandoffDaemonAction::Effect { token, index });
        }
        let running = RunningCommand {
            command,
            results,
            effects_left: flows.len(),
        };
        self.nodes[node].running.insert(token, running);
    }

    /// Applies changes to the kernel's table; runs on the holder's daemon.
    pub(super) fn arbitrate(&mut self, node: usize, token: CommandToken) {
        let Some(running) = self.nodes[node].running.get(&token) else {
            return;
        };
        let Command::Arbitrate { asker, changes, .. } = &running.command else {
            return;
        };
        let (asker, changes) = (*asker, changes.clone());
        match self.time_of_arbitration(node, token, (node_index(asker), &changes)) {
            ArbitrationTime::Now => {}
            ArbitrationTime::Later => return,
            ArbitrationTime::Never => {
                let refusals = changes.iter().map(|_| Err(ChangeRefusal { current: None }));
                if let Some(running) = self.nodes[node].running.get_mut(&token) {
                    running.results = Results::Arbitrated(refusals.collect());
                }
                return self.complete_within(node, token, 50);
            }
        }
        let mut results = Vec::new();
        for mut change in changes {
            let current = self.core.steering.get(&change.flow).copied();
            self.apply_bug(current, &mut change);
            let mut result = flow_ownership::apply_change(current, &change, asker);
            if let Some(record) = current
                && self.bug == Some(HandoffBug::CommitAfterRollback)
                && change.kind == ChangeKind::Commit
            {
                result = Ok(Some(OwnershipRecord::owned(asker, record.epoch + 1)));
            }
            self.core.record_result(change.flow, &result);
            self.count_change(&change, result.is_ok());
            results.push(result);
        }
        if let Some(running) = self.nodes[node].running.get_mut(&token) {
            running.results = Results::Arbitrated(results);
        }
        self.complete_within(node, token, 50);
    }

    fn apply_bug(&self, current: Option<OwnershipRecord>, change: &mut OwnershipChange) {
        match (self.bug, change.kind, current) {
            (Some(HandoffBug::NoEpochFloors), ChangeKind::Establish, _) => change.epoch = 1,
            (Some(HandoffBug::StaleEpochAccepted), ChangeKind::Establish, _) => {}
            (Some(HandoffBug::StaleEpochAccepted), _, Some(record)) => change.epoch = record.epoch,
            _ => {}
        }
    }

    fn count_change(&mut self, change: &OwnershipChange, ok: bool) {
        let kind = match change.kind {
            ChangeKind::Divert { .. } => "divert".to_owned(),
            kind => format!("{kind:?}").to_lowercase(),
        };
        let how = if ok { "granted" } else { "refused" };
        self.core.count(&format!("{kind} {how}"));
    }

    /// Handles a request to the holder: applies the bugs that do not wait for the answer.
    pub(super) fn on_request(&mut self, node: usize, changes: &[OwnershipChange]) {
        for change in changes {
            let flow = change.flow;
            match (self.bug, change.kind) {
                (Some(HandoffBug::ActivatesBeforeCommitted), ChangeKind::Commit) => {
                    self.nodes[node].activate(flow, change.epoch + 1);
                    self.core.changed_flows.push(flow);
                }
                (Some(HandoffBug::ResumesBeforeAnswer), ChangeKind::Rollback) => {
                    if let Some(entry) = self.nodes[node].kernel.get_mut(&flow)
                        && entry.state == KernelFlowState::Outgoing
                    {
                        entry.state = KernelFlowState::Owned;
                        self.core.changed_flows.push(flow);
                    }
                }
                _ => {}
            }
        }
    }

    pub(super) fn on_event(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { request, flows, .. } => {
                for (flow, outcome) in flows {
                    self.core.count(&outcome_name(&outcome));
                    if let Some(request) = request {
                        self.on_outcome(node, request, flow);
                    }
                }
            }
            Event::RequestFinished { request, .. } => {
                let pending = self.nodes[node].pending.remove(&request);
                if pending != Some(vec![]) {
                    let message = format!("a request finished with pending flows: {pending:?}");
                    self.core.set_violation(message);
                }
            }
            Event::ReportAnswered { change, result } => {
                self.on_change_result(node, change, result.ok().flatten())
            }
            Event::CommandFailed { command, .. } => {
                self.core.count(&format!("{command} failed repeatedly"));
            }
            Event::FlowsAccepted { batch: None, .. } => self.core.count("activated after restart"),
            Event::FlowsDiscarded { batch: None, .. } => self.core.count("discarded after restart"),
            Event::Ignored(ignored) => self.core.count(&format!("ignored {}", ignored.frame)),
            Event::HolderSilent { .. } => self.core.count("holder silent"),
            Event::FlowsAccepted { .. }
            | Event::FlowsDiscarded { .. }
            | Event::BatchFinished { .. } => {}
        }
    }

    /// Checks that each flow of a request has exactly one outcome.
    fn on_outcome(&mut self, node: usize, request: RequestId, flow: Flow) {
        let pending = self.nodes[node].pending.get_mut(&request);
        let position = pending.and_then(|open| {
            let position = open.iter().position(|other| *other == flow)?;
            Some(open.remove(position))
        });
        if position.is_none() {
            let message = format!("unexpected outcome of {flow}");
            self.core.set_violation(message);
        }
    }

    /// Records the holder's answer to an establish or a removal.
    fn on_change_result(
        &mut self,
        node: usize,
        change: OwnershipChange,
        record: Option<OwnershipRecord>,
    ) {
        let flow = change.flow;
        let kernel = &mut self.nodes[node].kernel;
        let Some(entry) = kernel.get_mut(&flow) else {
            return;
        };
        match (change.kind, record) {
            (ChangeKind::Establish, Some(record)) if entry.may_send() => {
                entry.epoch = entry.epoch.max(record.epoch);
            }
            (ChangeKind::Remove, _) if entry.state == KernelFlowState::Closing => {
                kernel.remove(&flow);
            }
            _ => {}
        }
        self.core.changed_flows.push(flow);
    }

    /// Starts a daemon with the state it finds in the kernel.
    pub(super) fn start_daemon(&mut self, node: usize) {
        let core = &mut self.core;
        let life = core.incarnation(node);
        let view = self.rebuilds.view.clone();
        let mut config = HandoffMachineConfig::new(node_id(node), core.boot(node));
        config.batch_flows_max = self.batch_flows_max;
        let epochs = core.steering.values().map(|record| record.epoch);
        let floor = (seconds(core.now) * 1_000 + 1).max(epochs.max().unwrap_or(0) + 1);
        config.new_flow_epoch_min = floor.max(life as u32 * 10_000);
        let mut machine = Handoff::new(config, view);
        // Half of the daemons have no spare processor time.
        machine.set_pause_between_batches((node + life as usize) % 2 == 1);
        core.daemons[node].machine = Some(machine);
        let mut recovered = self.nodes[node].recovered();
        for flow in &recovered {
            core.count(&format!("recovered {:?}", flow.role));
        }
        if self.bug == Some(HandoffBug::RestartResumes) {
            for entry in self.nodes[node].kernel.values_mut() {
                if entry.state == KernelFlowState::Outgoing {
                    entry.state = KernelFlowState::Owned;
                }
            }
            core.changed_flows
                .extend(recovered.iter().map(|flow| flow.flow));
            recovered
                .retain(|flow| self.nodes[node].kernel[&flow.flow].state != KernelFlowState::Owned);
        }
        if self.bug != Some(HandoffBug::RestartForgets) {
            self.drive_machine(node, |machine, now| {
                machine.handle_recovered(now, recovered)
            });
        }
        let now = self.core.now;
        let entries = self.nodes[node].kernel.iter();
        let reports = entries.filter_map(|(flow, entry)| match entry.state {
            KernelFlowState::Closing => Some(change(*flow, ChangeKind::Remove, entry.epoch)),
            KernelFlowState::Owned if entry.epoch == 0 => {
                Some(change(*flow, ChangeKind::Establish, first_epoch(now)))
            }
            _ => None,
        });
        let reports = reports.collect();
        self.drive_machine(node, |machine, now| machine.handle_changes(now, reports));
    }
}

/// Returns the name under which an outcome is counted.
fn outcome_name(outcome: &FlowHandoffOutcome) -> String {
    match outcome {
        FlowHandoffOutcome::Moved { .. } => "moved".to_owned(),
        FlowHandoffOutcome::Closed => "gone".to_owned(),
        FlowHandoffOutcome::Kept { reason } => match reason {
            FlowKeptReason::TimedOut { step, .. } => format!("kept: timed out in {step}"),
            FlowKeptReason::PeerLost { step, .. } => format!("kept: lost in {step}"),
            FlowKeptReason::Refused { .. } => "kept: refused".to_owned(),
            FlowKeptReason::Aborted { .. } => "kept: aborted".to_owned(),
            FlowKeptReason::Extract(_) => "kept: not extracted".to_owned(),
            FlowKeptReason::Unmovable(_) => "kept: unmovable".to_owned(),
            FlowKeptReason::NotDiverted(_) => "kept: not diverted".to_owned(),
            other => format!("kept: {other:?}"),
        },
    }
}
