//! Actions of a daemon for its state machine: commands, the holder's table, crash and restart.

use super::Bug;
use super::node::{Running, State, flows_of, start};
use super::world::{Work, World, seconds};
use crate::group::{World as _, change, id, index};
use holdfast_proto::handoff::{
    Command, Config, Event, Handoff, Outcome, Reason, RequestId, Results, Token,
};
use holdfast_proto::ownership;
use holdfast_wire::{Change, ChangeKind, Flow, Record};

impl World {
    pub(super) fn begin_command(&mut self, node: usize, command: Command) {
        let (token, results) = start(&command);
        if let Command::Arbitrate { asker, changes, .. } = &command {
            if index(*asker) == node {
                self.asks(node, changes);
            }
            let at = self.core.now + self.core.micros(1, 50);
            let at = at.max(self.nodes[node].arbitrates_until);
            self.nodes[node].arbitrates_until = at;
            self.core.own(node, at, Work::Arbitrate { token });
        }
        let flows = flows_of(&command);
        for (index, flow) in flows.iter().enumerate() {
            let mut at = self.core.now + self.core.takes(60);
            // Handle flow by flow, and not before earlier commands for the same flow.
            let busy_until = &mut self.nodes[node].busy_until;
            for earlier in &flows[..=index] {
                at = at.max(busy_until.get(earlier).copied().unwrap_or_default());
            }
            busy_until.insert(*flow, at);
            self.core.own(node, at, Work::Effect { token, index });
        }
        let running = Running {
            command,
            results,
            left: flows.len(),
        };
        self.nodes[node].running.insert(token, running);
    }

    /// Applies changes to the kernel's table; runs on the holder's daemon.
    pub(super) fn arbitrate(&mut self, node: usize, token: Token) {
        if node != self.core.holder {
            let what = format!("node {} arbitrates and is not the holder", id(node));
            return self.core.violated(what);
        }
        let Some(running) = self.nodes[node].running.get(&token) else {
            return;
        };
        let Command::Arbitrate { asker, changes, .. } = &running.command else {
            return;
        };
        let (asker, changes) = (*asker, changes.clone());
        let mut results = Vec::new();
        for mut change in changes {
            let current = self.core.steering.get(&change.flow).copied();
            self.bend(current, &mut change);
            let mut result = ownership::apply(current, &change, asker);
            if let Some(record) = current
                && self.bug == Some(Bug::CommitAfterRollback)
                && change.kind == ChangeKind::Commit
            {
                result = Ok(Some(Record::owned(asker, record.epoch + 1)));
            }
            self.core.record(change.flow, &result);
            self.count_change(&change, result.is_ok());
            results.push(result);
        }
        if let Some(running) = self.nodes[node].running.get_mut(&token) {
            running.results = Results::Arbitrated(results);
        }
        self.complete_within(node, token, 50);
    }

    fn bend(&self, current: Option<Record>, change: &mut Change) {
        match (self.bug, change.kind, current) {
            (Some(Bug::NoFloors), ChangeKind::Establish, _) => change.epoch = 1,
            (Some(Bug::StaleEpochAccepted), ChangeKind::Establish, _) => {}
            (Some(Bug::StaleEpochAccepted), _, Some(record)) => change.epoch = record.epoch,
            _ => {}
        }
    }

    fn count_change(&mut self, change: &Change, ok: bool) {
        let kind = match change.kind {
            ChangeKind::Divert { .. } => "divert".to_owned(),
            kind => format!("{kind:?}").to_lowercase(),
        };
        let how = if ok { "granted" } else { "refused" };
        self.core.count(&format!("{kind} {how}"));
    }

    /// Handles a request to the holder: applies the bugs that do not wait for the answer.
    pub(super) fn asks(&mut self, node: usize, changes: &[Change]) {
        for change in changes {
            let flow = change.flow;
            match (self.bug, change.kind) {
                (Some(Bug::ActivatesBeforeCommitted), ChangeKind::Commit) => {
                    self.nodes[node].activate(flow, change.epoch + 1);
                    self.core.dirty.push(flow);
                }
                (Some(Bug::ResumesUnasked), ChangeKind::Rollback) => {
                    if let Some(entry) = self.nodes[node].kernel.get_mut(&flow)
                        && entry.state == State::Out
                    {
                        entry.state = State::Owned;
                        self.core.dirty.push(flow);
                    }
                }
                _ => {}
            }
        }
    }

    pub(super) fn told(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { request, flows, .. } => {
                for (flow, outcome) in flows {
                    self.core.count(&name(&outcome));
                    if let Some(request) = request {
                        self.ended(node, request, flow);
                    }
                }
            }
            Event::RequestFinished { request, .. } => {
                let open = self.nodes[node].open.remove(&request);
                if open != Some(vec![]) {
                    let what = format!("a request ended, and had {open:?} left");
                    self.core.violated(what);
                }
            }
            Event::Changed { change, result } => self.changed(node, change, result.ok().flatten()),
            Event::Failed { command, .. } => {
                self.core.count(&format!("{command} failed for good"));
            }
            Event::Accepted { batch: None, .. } => self.core.count("activated after restart"),
            Event::Discarded { batch: None, .. } => self.core.count("discarded after restart"),
            Event::Ignored { what, .. } => self.core.count(&format!("ignored {what}")),
            Event::HolderSilent { .. } => self.core.count("holder silent"),
            Event::Accepted { .. } | Event::Discarded { .. } | Event::BatchFinished { .. } => {}
        }
    }

    /// Checks that each flow of a request has exactly one outcome.
    fn ended(&mut self, node: usize, request: RequestId, flow: Flow) {
        let open = self.nodes[node].open.get_mut(&request);
        let place = open.and_then(|open| {
            let place = open.iter().position(|other| *other == flow)?;
            Some(open.remove(place))
        });
        if place.is_none() {
            let what = format!("an outcome of {flow}, which none was owed");
            self.core.violated(what);
        }
    }

    /// Records the holder's answer to an establish or a removal.
    fn changed(&mut self, node: usize, change: Change, record: Option<Record>) {
        let flow = change.flow;
        let kernel = &mut self.nodes[node].kernel;
        let Some(entry) = kernel.get_mut(&flow) else {
            return;
        };
        match (change.kind, record) {
            (ChangeKind::Establish, Some(record)) if entry.speaks() => {
                entry.epoch = entry.epoch.max(record.epoch);
            }
            (ChangeKind::Remove, _) if entry.state == State::Closing => {
                kernel.remove(&flow);
            }
            _ => {}
        }
        self.core.dirty.push(flow);
    }

    /// Starts a daemon with the state it finds in the kernel.
    pub(super) fn begin_daemon(&mut self, node: usize) {
        let core = &mut self.core;
        let peers = (0..core.nodes()).map(id);
        let life = core.life(node);
        let mut config = Config::new(id(node), life, id(core.holder), peers);
        config.batch_flows_max = self.batch_flows_max;
        let epochs = core.steering.values().map(|record| record.epoch);
        let floor = (seconds(core.now) * 1_000 + 1).max(epochs.max().unwrap_or(0) + 1);
        config.epoch_floor = floor.max(life as u32 * 10_000);
        let mut machine = Handoff::new(config);
        // Half of the daemons have no spare processor time.
        machine.give_way((node + life as usize) % 2 == 1);
        core.daemons[node].machine = Some(machine);
        let mut recovered = self.nodes[node].recovered();
        for flow in &recovered {
            core.count(&format!("recovered {:?}", flow.role));
        }
        if self.bug == Some(Bug::RestartResumes) {
            for entry in self.nodes[node].kernel.values_mut() {
                if entry.state == State::Out {
                    entry.state = State::Owned;
                }
            }
            core.dirty.extend(recovered.iter().map(|flow| flow.flow));
            recovered.retain(|flow| self.nodes[node].kernel[&flow.flow].state != State::Owned);
        }
        if self.bug != Some(Bug::RestartForgets) {
            self.input(node, |machine, now| {
                machine.handle_recovered(now, recovered)
            });
        }
        let entries = self.nodes[node].kernel.iter();
        let reports = entries.filter_map(|(flow, entry)| match entry.state {
            State::Closing => Some(change(*flow, ChangeKind::Remove, entry.epoch)),
            State::Owned if entry.epoch == 0 => Some(change(*flow, ChangeKind::Establish, 1)),
            _ => None,
        });
        let reports = reports.collect();
        self.input(node, |machine, now| machine.handle_changes(now, reports));
    }
}

/// Returns the name under which an outcome is counted.
fn name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Moved { .. } => "moved".to_owned(),
        Outcome::Gone => "gone".to_owned(),
        Outcome::Kept { reason } => match reason {
            Reason::TimedOut { step, .. } => format!("kept: timed out in {step}"),
            Reason::PeerLost { step, .. } => format!("kept: lost in {step}"),
            Reason::Refused { .. } => "kept: refused".to_owned(),
            Reason::Aborted { .. } => "kept: aborted".to_owned(),
            Reason::Extract(_) => "kept: not extracted".to_owned(),
            Reason::NotDiverted(_) => "kept: not diverted".to_owned(),
            other => format!("kept: {other:?}"),
        },
    }
}
