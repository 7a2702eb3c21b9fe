//! Actions of operators, programs and clients; the start of daemons, and their reports.

use super::MigrationBug;
use super::host::{KernelFlowState, ProcessIdentity};
use super::world::{MigrationDaemonAction, MigrationWorld};
use crate::node_group::{GroupWorld as _, change, node_id};
use crate::random::Random;
use holdfast_proto::migration::{
    Event, Migration, MigrationMachineConfig, MoveOutcome, MoveRequest, MoveRequestOptions,
    ProcessId, ProcessKeptReason, RecoveredMoveRole,
};
use holdfast_wire::move_frames::SocketStrategy;
use holdfast_wire::{ChangeKind, Flow, OwnershipChange};
use std::time::Duration;

impl MigrationWorld {
    /// An operator moves or clones a process.
    pub(super) fn request_migration(&mut self, random: &mut Random) {
        let (node, to) = (
            random.below(self.hosts.len()),
            random.below(self.hosts.len()),
        );
        let clone = random.chance(self.clone_share);
        let post_copy = random.chance(0.3) && !clone;
        let options = MoveRequestOptions {
            clone,
            sockets: SocketStrategy::Incremental,
            // No freeze is as short as 1 ms, so memory is then sent by post-copy.
            max_freeze: match post_copy {
                true => Some(Duration::from_millis(1)),
                false => random.chance(0.3).then_some(Duration::from_millis(4)),
            },
            post_copy,
            verify: false,
            rehearsal: random.chance(0.05),
        };
        let processes: Vec<ProcessId> = self.hosts[node].processes.keys().copied().collect();
        if !processes.is_empty() {
            let process = processes[random.below(processes.len())];
            self.move_process(node, process, to, options);
        }
    }

    pub(super) fn move_process(
        &mut self,
        node: usize,
        process: ProcessId,
        to: usize,
        options: MoveRequestOptions,
    ) {
        let now = Duration::from(self.core.now);
        let Some(machine) = self.core.daemons[node].machine.as_mut() else {
            return;
        };
        let request = MoveRequest {
            process,
            to: node_id(to),
            options,
        };
        if let Ok(begun) = machine.handle_request(now, request) {
            self.hosts[node].pending_moves.push(begun);
            if options.clone {
                self.clones.insert(begun);
            }
        }
        self.drive_machine(node, |_, _| {});
    }

    /// An operator cancels the moves in progress.
    pub(super) fn cancel_moves(&mut self) {
        for node in 0..self.hosts.len() {
            for id in self.hosts[node].pending_moves.clone() {
                self.drive_machine(node, |machine, now| machine.handle_cancel(now, id));
            }
        }
    }

    /// Each running process does one work step.
    pub(super) fn serve(&mut self) {
        let processes = self.hosts.iter_mut();
        let processes = processes.flat_map(|host| host.processes.values_mut());
        for process in processes.filter(|process| process.running) {
            process.image.content += 1;
            if let ProcessIdentity::Original(number) = process.image.identity {
                self.expected_processes[number].content += 1;
            }
        }
    }

    /// Returns a random running process, with its host.
    fn random_process(&self, random: &mut Random) -> Option<(usize, ProcessId)> {
        let mut running = Vec::new();
        for (node, host) in self.hosts.iter().enumerate() {
            let processes = host.processes.iter();
            let running_here = processes.filter(|(_, process)| {
                process.running && matches!(process.image.identity, ProcessIdentity::Original(_))
            });
            running.extend(running_here.map(|(id, _)| (node, *id)));
        }
        let position = random.below(running.len());
        running.get(position).copied()
    }

    /// A client connects.
    pub(super) fn connect_client(&mut self, random: &mut Random) {
        let Some((node, process)) = self.random_process(random) else {
            return;
        };
        let flow = self.new_flow(node);
        if let Some(process) = self.hosts[node].processes.get_mut(&process) {
            process.image.flows.push(flow);
        }
        self.core.count("opened");
        self.schedule_report(node, change(flow, ChangeKind::Establish, 1));
    }

    /// A process closes a client's connection.
    pub(super) fn close_flow(&mut self, random: &mut Random) {
        let Some((node, process)) = self.random_process(random) else {
            return;
        };
        let host = &mut self.hosts[node];
        let flows = host.flows_of(&host.processes[&process]);
        let Some(of) = flows.get(random.below(flows.len())) else {
            return;
        };
        let flow = of.flow;
        if let Some(process) = host.processes.get_mut(&process) {
            process.image.flows.retain(|other| *other != flow);
        }
        self.core.count("closed");
        self.on_closed(node, flow);
    }

    fn on_closed(&mut self, node: usize, flow: Flow) {
        let Some(entry) = self.hosts[node].entries.get_mut(&flow) else {
            return;
        };
        entry.state = KernelFlowState::Closing;
        let epoch = entry.epoch;
        let report = vec![change(flow, ChangeKind::Remove, epoch)];
        self.core.changed_flows.push(flow);
        self.drive_machine(node, |machine, _| machine.handle_changes(report));
    }

    /// Kills a process chosen at random, and closes its flows.
    pub(super) fn kill_process(&mut self, random: &mut Random) {
        let Some((node, process)) = self.random_process(random) else {
            return;
        };
        let Some(process) = self.hosts[node].processes.remove(&process) else {
            return;
        };
        if let ProcessIdentity::Original(number) = process.image.identity {
            self.expected_processes[number].alive = false;
        }
        self.core.count("killed");
        for flow in process.image.flows {
            self.on_closed(node, flow);
        }
    }

    fn schedule_report(&mut self, node: usize, change: OwnershipChange) {
        let at = self.core.now + self.core.micros(50, 3_000);
        self.core
            .schedule_action(node, at, MigrationDaemonAction::Report { change });
    }

    pub(super) fn on_event(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { id, outcome, .. } => {
                self.hosts[node].pending_moves.retain(|open| *open != id);
                self.core.count(&outcome_name(&outcome));
            }
            Event::ReportChanges { changes } => {
                for change in changes {
                    self.schedule_report(node, change);
                }
            }
            Event::ProcessAccepted { .. } => self.core.count("accepted"),
            Event::ProcessDiscarded { reason: why, .. } => {
                self.core.count(&format!("discarded: {why}"))
            }
            Event::CommandFailed { command, .. } => {
                self.core.count(&format!("{command} failed permanently"));
            }
            Event::Ignored(ignored) => self.core.count(&format!("ignored {}", ignored.frame)),
            Event::HolderSilent { .. } => self.core.count("holder silent"),
            Event::HolderLostTable { .. } => self.core.count("holder lost its table"),
            Event::ConnectionsForwarded { .. } => self.core.count("forwarded"),
            Event::RoundEnded { .. } => self.core.count("round"),
            Event::PostCopyStarted { .. } => self.core.count("post-copy started"),
        }
    }

    pub(super) fn count_crash(&mut self, node: usize) {
        self.core.count("crash");
        for written in self.hosts[node].move_records.values() {
            let role = role_name(&written.role);
            self.core.count(&format!("crash as {role}"));
        }
    }

    /// Starts a daemon with the state it finds.
    pub(super) fn start_daemon(&mut self, node: usize) {
        let core = &mut self.core;
        let view = self.rebuilds.view.clone();
        let config = MigrationMachineConfig::new(node_id(node), core.boot(node));
        core.daemons[node].machine = Some(Migration::new(config, view));
        let recovered = self.hosts[node].recovered();
        for recovered_move in &recovered {
            self.core
                .count(&format!("recovered {}", role_name(&recovered_move.role)));
            if self.bug == Some(MigrationBug::RestartThaws)
                && matches!(
                    recovered_move.role,
                    RecoveredMoveRole::Donor {
                        maybe_stopped: true,
                        ..
                    }
                )
            {
                self.thaw(node, recovered_move.id);
            }
        }
        if self.bug != Some(MigrationBug::RestartForgets) {
            self.drive_machine(node, |machine, now| {
                machine.handle_recovered(now, recovered)
            });
        }
        let entries = self.hosts[node].entries.clone();
        for (flow, entry) in entries {
            match entry.state {
                KernelFlowState::Closing => {
                    let report = vec![change(flow, ChangeKind::Remove, entry.epoch)];
                    self.drive_machine(node, |machine, _| machine.handle_changes(report));
                }
                KernelFlowState::Owned if entry.epoch == 1 => {
                    self.schedule_report(node, change(flow, ChangeKind::Establish, 1));
                }
                _ => {}
            }
        }
    }
}

/// Returns the name under which an outcome is counted.
fn outcome_name(outcome: &MoveOutcome) -> String {
    match outcome {
        MoveOutcome::Moved => "moved".to_owned(),
        MoveOutcome::Cloned => "cloned".to_owned(),
        MoveOutcome::Kept { reason } => match reason {
            ProcessKeptReason::TimedOut { step, .. } => format!("kept: timed out in {step}"),
            ProcessKeptReason::PeerLost { step, .. } => format!("kept: lost in {step}"),
            ProcessKeptReason::Failed { step, .. } => format!("kept: failed in {step}"),
            other => {
                let text = format!("{other:?}");
                let end = text.find([' ', '(', '{']).unwrap_or(text.len());
                format!("kept: {}", &text[..end])
            }
        },
    }
}

fn role_name(role: &RecoveredMoveRole) -> &'static str {
    match role {
        RecoveredMoveRole::Donor {
            maybe_stopped: true,
            ..
        } => "donor, frozen",
        RecoveredMoveRole::Donor {
            saved_flows: Some(_),
            ..
        } => "donor, flows saved",
        RecoveredMoveRole::Donor { .. } => "donor",
        RecoveredMoveRole::Acceptor { resumed: true, .. } => "acceptor, resumed",
        RecoveredMoveRole::Acceptor {
            restored: Some(_), ..
        } => "acceptor, restored",
        RecoveredMoveRole::Acceptor { .. } => "acceptor",
        RecoveredMoveRole::Peer { .. } => "peer",
    }
}
