//! Actions of operators, programs and clients; the start of daemons, and their reports.

use super::Bug;
use super::host::{State, Who};
use super::world::{Work, World};
use crate::group::{World as _, change, id};
use crate::random::Random;
use holdfast_proto::migration::{
    Config, Event, Migration, Options, Outcome, ProcessId, Reason, RecoveredRole, Request,
};
use holdfast_wire::migration::SocketStrategy;
use holdfast_wire::{Change, ChangeKind, Flow};
use std::time::Duration;

impl World {
    /// An operator moves or clones a process.
    pub(super) fn ask(&mut self, random: &mut Random) {
        let (node, to) = (
            random.below(self.hosts.len()),
            random.below(self.hosts.len()),
        );
        let clone = random.chance(self.copying);
        let post_copy = random.chance(0.3) && !clone;
        let options = Options {
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
        options: Options,
    ) {
        let now = Duration::from(self.core.now);
        let Some(machine) = self.core.daemons[node].machine.as_mut() else {
            return;
        };
        let request = Request {
            process,
            to: id(to),
            options,
        };
        if let Ok(begun) = machine.handle_request(now, request) {
            self.hosts[node].open.push(begun);
            if options.clone {
                self.clones.insert(begun);
            }
        }
        self.input(node, |_, _| {});
    }

    /// An operator cancels the moves in progress.
    pub(super) fn call_back(&mut self) {
        for node in 0..self.hosts.len() {
            for id in self.hosts[node].open.clone() {
                self.input(node, |machine, now| machine.handle_cancel(now, id));
            }
        }
    }

    /// Each running process does one work step.
    pub(super) fn serve(&mut self) {
        let processes = self.hosts.iter_mut();
        let processes = processes.flat_map(|host| host.processes.values_mut());
        for process in processes.filter(|process| process.running) {
            process.image.content += 1;
            if let Who::Original(number) = process.image.who {
                self.truths[number].content += 1;
            }
        }
    }

    /// Returns a random running process, with its host.
    fn somebody(&self, random: &mut Random) -> Option<(usize, ProcessId)> {
        let mut running = Vec::new();
        for (node, host) in self.hosts.iter().enumerate() {
            let processes = host.processes.iter();
            let here = processes.filter(|(_, process)| {
                process.running && matches!(process.image.who, Who::Original(_))
            });
            running.extend(here.map(|(id, _)| (node, *id)));
        }
        let place = random.below(running.len());
        running.get(place).copied()
    }

    /// A client connects.
    pub(super) fn connects(&mut self, random: &mut Random) {
        let Some((node, process)) = self.somebody(random) else {
            return;
        };
        let flow = self.new_flow(node);
        if let Some(process) = self.hosts[node].processes.get_mut(&process) {
            process.image.flows.push(flow);
        }
        self.core.count("opened");
        self.report_soon(node, change(flow, ChangeKind::Establish, 1));
    }

    /// A process closes a client's connection.
    pub(super) fn close_flow(&mut self, random: &mut Random) {
        let Some((node, process)) = self.somebody(random) else {
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
        self.closed(node, flow);
    }

    fn closed(&mut self, node: usize, flow: Flow) {
        let Some(entry) = self.hosts[node].entries.get_mut(&flow) else {
            return;
        };
        entry.state = State::Closing;
        let epoch = entry.epoch;
        let report = vec![change(flow, ChangeKind::Remove, epoch)];
        self.core.dirty.push(flow);
        self.input(node, |machine, _| machine.handle_changes(report));
    }

    /// Kills a process.
    pub(super) fn kill_process(&mut self, random: &mut Random) {
        let Some((node, process)) = self.somebody(random) else {
            return;
        };
        let Some(process) = self.hosts[node].processes.remove(&process) else {
            return;
        };
        if let Who::Original(number) = process.image.who {
            self.truths[number].alive = false;
        }
        self.core.count("killed");
        for flow in process.image.flows {
            self.closed(node, flow);
        }
    }

    fn report_soon(&mut self, node: usize, change: Change) {
        let at = self.core.now + self.core.micros(50, 3_000);
        self.core.own(node, at, Work::Report { change });
    }

    pub(super) fn told(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { id, outcome, .. } => {
                self.hosts[node].open.retain(|open| *open != id);
                self.core.count(&outcome_name(&outcome));
            }
            Event::Report { changes } => {
                for change in changes {
                    self.report_soon(node, change);
                }
            }
            Event::Accepted { .. } => self.core.count("accepted"),
            Event::Discarded { why, .. } => self.core.count(&format!("discarded: {why}")),
            Event::Failed { command, .. } => {
                self.core.count(&format!("{command} failed for good"));
            }
            Event::Ignored { what, .. } => self.core.count(&format!("ignored {what}")),
            Event::HolderSilent { .. } => self.core.count("holder silent"),
            Event::HolderForgot { .. } => self.core.count("holder forgot"),
            Event::Forwarded { .. } => self.core.count("forwarded"),
            Event::Round { .. } => self.core.count("round"),
            Event::Follows { .. } => self.core.count("memory follows"),
        }
    }

    pub(super) fn count_crash(&mut self, node: usize) {
        self.core.count("crash");
        for written in self.hosts[node].written.values() {
            let role = role_name(&written.role);
            self.core.count(&format!("crash as {role}"));
        }
    }

    /// Starts a daemon with the state it finds.
    pub(super) fn begin_daemon(&mut self, node: usize) {
        let core = &mut self.core;
        let peers = (0..core.nodes()).map(id);
        let config = Config::new(id(node), core.life(node), id(core.holder), peers);
        core.daemons[node].machine = Some(Migration::new(config));
        let recovered = self.hosts[node].recovered();
        for of in &recovered {
            self.core
                .count(&format!("recovered {}", role_name(&of.role)));
            if self.bug == Some(Bug::RestartThaws)
                && matches!(of.role, RecoveredRole::Donor { frozen: true, .. })
            {
                self.thaw(node, of.id);
            }
        }
        if self.bug != Some(Bug::RestartForgets) {
            self.input(node, |machine, now| {
                machine.handle_recovered(now, recovered)
            });
        }
        let entries = self.hosts[node].entries.clone();
        for (flow, entry) in entries {
            match entry.state {
                State::Closing => {
                    let report = vec![change(flow, ChangeKind::Remove, entry.epoch)];
                    self.input(node, |machine, _| machine.handle_changes(report));
                }
                State::Owned if entry.epoch == 1 => {
                    self.report_soon(node, change(flow, ChangeKind::Establish, 1));
                }
                _ => {}
            }
        }
    }
}

/// Returns the name under which an outcome is counted.
fn outcome_name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Moved => "moved".to_owned(),
        Outcome::Cloned => "cloned".to_owned(),
        Outcome::Kept { reason } => match reason {
            Reason::TimedOut { step, .. } => format!("kept: timed out in {step}"),
            Reason::PeerLost { step, .. } => format!("kept: lost in {step}"),
            Reason::Failed { step, .. } => format!("kept: failed in {step}"),
            other => {
                let text = format!("{other:?}");
                let end = text.find([' ', '(', '{']).unwrap_or(text.len());
                format!("kept: {}", &text[..end])
            }
        },
    }
}

fn role_name(role: &RecoveredRole) -> &'static str {
    match role {
        RecoveredRole::Donor { frozen: true, .. } => "donor, frozen",
        RecoveredRole::Donor { noted: Some(_), .. } => "donor, noted",
        RecoveredRole::Donor { .. } => "donor",
        RecoveredRole::Acceptor { gone: true, .. } => "acceptor, gone",
        RecoveredRole::Acceptor {
            restored: Some(_), ..
        } => "acceptor, restored",
        RecoveredRole::Acceptor { .. } => "acceptor",
        RecoveredRole::Peer { .. } => "peer",
    }
}
