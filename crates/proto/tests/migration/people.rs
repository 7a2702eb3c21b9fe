//! What operators, programs and clients do; how daemons die and come back.

use crate::fault::Fault;
use crate::host::{State, Who};
use crate::world::{What, World, change, id};
use holdfast_proto::migration::{
    Config, Event, Migration, Options, Outcome, ProcessId, Reason, RecoveredRole, Request,
};
use holdfast_wire::migration::SocketStrategy;
use holdfast_wire::{Change, ChangeKind, Flow, MoveId};
use std::time::Duration;

impl World {
    pub fn request(&mut self) {
        let node = self.rng.index(self.hosts.len());
        let to = self.rng.index(self.hosts.len());
        let options = Options {
            clone: self.rng.percent(12),
            sockets: SocketStrategy::Incremental,
            max_freeze: self.rng.percent(30).then_some(Duration::from_millis(4)),
            post_copy: self.rng.percent(50),
            verify: false,
        };
        let processes: Vec<ProcessId> = self.hosts[node].processes.keys().copied().collect();
        if processes.is_empty() {
            return;
        }
        let process = processes[self.rng.index(processes.len())];
        self.move_process(node, process, to, options);
    }

    pub fn move_process(
        &mut self,
        node: usize,
        process: ProcessId,
        to: usize,
        options: Options,
    ) -> Option<MoveId> {
        let now = self.now;
        let machine = self.hosts[node].machine.as_mut()?;
        let request = Request {
            process,
            to: id(to),
            options,
        };
        let begun = machine.handle_request(now, request).ok();
        if let Some(begun) = begun {
            self.hosts[node].open.push(begun);
            if options.clone {
                self.clones.insert(begun);
            }
        }
        self.input(node, |_, _| {});
        begun
    }

    /// An operator thinks better of it.
    pub fn cancel(&mut self) {
        for node in 0..self.hosts.len() {
            for id in self.hosts[node].open.clone() {
                self.input(node, |machine, now| machine.handle_cancel(now, id));
            }
        }
    }

    /// Each process that runs does something.
    pub fn work(&mut self) {
        for host in &mut self.hosts {
            for process in host
                .processes
                .values_mut()
                .filter(|process| process.running)
            {
                process.image.content += 1;
                if let Who::Original(number) = process.image.who {
                    self.truths[number].content += 1;
                }
            }
        }
    }

    /// A process that runs, with its host.
    fn somebody(&mut self) -> Option<(usize, ProcessId)> {
        let mut running = Vec::new();
        for (node, host) in self.hosts.iter().enumerate() {
            let processes = host.processes.iter();
            let here = processes.filter(|(_, process)| {
                process.running && matches!(process.image.who, Who::Original(_))
            });
            running.extend(here.map(|(id, _)| (node, *id)));
        }
        match running.len() {
            0 => None,
            count => Some(running[self.rng.index(count)]),
        }
    }

    /// A client connects.
    pub fn open(&mut self) {
        let Some((node, process)) = self.somebody() else {
            return;
        };
        let flow = self.new_flow(node);
        let process = self.hosts[node].processes.get_mut(&process);
        process.expect("it runs").image.flows.push(flow);
        self.count("opened");
        self.report_soon(node, change(flow, ChangeKind::Establish, 1));
    }

    /// A client's connection is closed by the process.
    pub fn close(&mut self) {
        let Some((node, process)) = self.somebody() else {
            return;
        };
        let host = &self.hosts[node];
        let flows = host.flows_of(&host.processes[&process]);
        if flows.is_empty() {
            return;
        }
        let flow = flows[self.rng.index(flows.len())].flow;
        let of = self.hosts[node].processes.get_mut(&process);
        of.expect("it runs")
            .image
            .flows
            .retain(|other| *other != flow);
        self.count("closed");
        self.closed(node, flow);
    }

    fn closed(&mut self, node: usize, flow: Flow) {
        let Some(entry) = self.hosts[node].entries.get_mut(&flow) else {
            return;
        };
        entry.state = State::Closing;
        let epoch = entry.epoch;
        let report = vec![change(flow, ChangeKind::Remove, epoch)];
        self.dirty.push(flow);
        self.input(node, |machine, _| machine.handle_changes(report));
    }

    /// Somebody kills a process.
    pub fn kill(&mut self) {
        let Some((node, process)) = self.somebody() else {
            return;
        };
        let Some(process) = self.hosts[node].processes.remove(&process) else {
            return;
        };
        if let Who::Original(number) = process.image.who {
            self.truths[number].alive = false;
        }
        self.count("killed");
        for flow in process.image.flows {
            self.closed(node, flow);
        }
    }

    pub fn report_soon(&mut self, node: usize, change: Change) {
        let life = self.hosts[node].life;
        let delay = self.micros(50, 3_000);
        self.at(delay, What::Report { node, life, change });
    }

    pub fn event(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { id, outcome, .. } => {
                self.hosts[node].open.retain(|open| *open != id);
                self.count_outcome(&outcome);
            }
            Event::Report { changes } => {
                for change in changes {
                    self.report_soon(node, change);
                }
            }
            Event::Accepted { .. } => self.count("accepted"),
            Event::Discarded { why, .. } => self.count(&format!("discarded: {why}")),
            Event::Failed { command, .. } => self.count(&format!("{command} failed for good")),
            Event::Ignored { what, .. } => self.count(&format!("ignored {what}")),
            Event::HolderSilent { .. } => self.count("holder silent"),
            Event::HolderForgot { .. } => self.count("holder forgot"),
            Event::Forwarded { .. } => self.count("forwarded"),
            Event::Round { .. } => self.count("round"),
        }
    }

    fn count_outcome(&mut self, outcome: &Outcome) {
        let what = match outcome {
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
        };
        self.count(&what);
    }

    pub fn crash(&mut self, node: usize) {
        if self.hosts[node].machine.is_none() {
            return;
        }
        let roles: Vec<String> = (self.hosts[node].written.values())
            .map(|written| role_name(&written.role).to_owned())
            .collect();
        for role in roles {
            self.count(&format!("crash as {role}"));
        }
        self.hosts[node].crash();
        for peer in (0..self.hosts.len()).filter(|peer| *peer != node) {
            self.break_channel(node, peer, 2_000);
        }
    }

    pub fn restart(&mut self, node: usize) {
        if self.hosts[node].machine.is_some() {
            return;
        }
        let peers = (0..self.hosts.len()).map(id);
        let life = self.hosts[node].life;
        let config = Config::new(id(node), life, id(self.holder), peers);
        self.hosts[node].machine = Some(Migration::new(config));
        let recovered = self.hosts[node].recovered();
        for of in &recovered {
            self.count(&format!("recovered {}", role_name(&of.role)));
            if self.fault == Fault::RestartThaws
                && matches!(of.role, RecoveredRole::Donor { frozen: true, .. })
            {
                self.thaw(node, of.id);
            }
        }
        if self.fault != Fault::RestartForgets {
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
        for peer in (0..self.hosts.len()).filter(|peer| *peer != node) {
            let delay = self.micros(100, 20_000);
            self.at(delay, What::Connect { a: node, b: peer });
        }
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
