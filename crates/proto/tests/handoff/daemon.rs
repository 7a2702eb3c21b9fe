//! What a daemon does for its machine: commands, the holder's table, crash and restart.

use crate::fault::Fault;
use crate::node::{Running, State, flows_of, start};
use crate::world::{What, World, change, id, index};
use holdfast_proto::handoff::{Command, Config, Event, Handoff, Results, Token};
use holdfast_proto::ownership;
use holdfast_wire::{Change, ChangeKind, Record};

impl World {
    pub fn begin(&mut self, node: usize, command: Command) {
        let life = self.nodes[node].life;
        let (token, results) = start(&command);
        if let Command::Arbitrate { asker, changes, .. } = &command {
            if index(*asker) == node {
                let changes = changes.clone();
                self.asks(node, &changes);
            }
            let until = self.nodes[node]
                .arbitrates_until
                .max(self.now + self.micros(1, 50));
            self.nodes[node].arbitrates_until = until;
            self.at(until - self.now, What::Arbitrate { node, life, token });
        }
        let flows = flows_of(&command);
        for (index, flow) in flows.iter().enumerate() {
            let slow = if self.trouble(2) { 400_000 } else { 60 };
            let mut at = self.now + self.micros(1, slow);
            // Flow by flow, and never before what was commanded earlier for the flow.
            for earlier in &flows[..=index] {
                let until = self.nodes[node].busy_until.get(earlier);
                at = at.max(until.copied().unwrap_or_default());
            }
            self.nodes[node].busy_until.insert(*flow, at);
            self.at(
                at - self.now,
                What::Effect {
                    node,
                    life,
                    token,
                    index,
                },
            );
        }
        let left = flows.len();
        let running = Running {
            command,
            results,
            left,
        };
        self.nodes[node].running.insert(token, running);
    }

    /// The daemon of the holder applies changes to the kernel's table.
    pub fn arbitrate(&mut self, node: usize, token: Token) {
        assert_eq!(
            node, self.holder,
            "seed {}: only the holder arbitrates",
            self.seed
        );
        let life = self.nodes[node].life;
        let running = &self.nodes[node].running[&token];
        let Command::Arbitrate { asker, changes, .. } = &running.command else {
            panic!("not an arbitration");
        };
        let (asker, changes) = (*asker, changes.clone());
        let mut results = Vec::new();
        for mut change in changes {
            let current = self.steering.get(&change.flow).copied();
            self.bend(current, &mut change);
            let mut result = ownership::apply(current, &change, asker);
            if let Some(record) = current
                && self.fault == Fault::CommitAfterRollback
                && change.kind == ChangeKind::Commit
            {
                result = Ok(Some(Record::owned(asker, record.epoch + 1)));
            }
            if let Ok(record) = &result {
                match record {
                    Some(record) => self.steering.insert(change.flow, *record),
                    None => self.steering.remove(&change.flow),
                };
                self.dirty.push(change.flow);
            }
            self.tally_change(&change, result.is_ok());
            results.push(result);
        }
        let node_state = &mut self.nodes[node];
        node_state.running.get_mut(&token).expect("runs").results = Results::Arbitrated(results);
        let delay = self.micros(0, 50);
        self.at(delay, What::Complete { node, life, token });
    }

    fn bend(&self, current: Option<Record>, change: &mut Change) {
        match (self.fault, change.kind, current) {
            (Fault::NoFloors, ChangeKind::Establish, _) => change.epoch = 1,
            (Fault::StaleEpochAccepted, ChangeKind::Establish, _) => {}
            (Fault::StaleEpochAccepted, _, Some(record)) => change.epoch = record.epoch,
            _ => {}
        }
    }

    fn tally_change(&mut self, change: &Change, ok: bool) {
        let kind = match change.kind {
            ChangeKind::Divert { .. } => "divert".to_owned(),
            kind => format!("{kind:?}").to_lowercase(),
        };
        self.count(&format!(
            "{kind} {}",
            if ok { "granted" } else { "refused" }
        ));
    }

    /// The machine asks the holder: where the faults that do not wait for the answer come in.
    pub fn asks(&mut self, node: usize, changes: &[Change]) {
        for change in changes {
            let flow = change.flow;
            match (self.fault, change.kind) {
                (Fault::ActivatesBeforeCommitted, ChangeKind::Commit) => {
                    self.nodes[node].activate(flow, change.epoch + 1);
                    self.dirty.push(flow);
                }
                (Fault::ResumesUnasked, ChangeKind::Rollback) => {
                    if let Some(entry) = self.nodes[node].kernel.get_mut(&flow)
                        && entry.state == State::Out
                    {
                        entry.state = State::Owned;
                        self.dirty.push(flow);
                    }
                }
                _ => {}
            }
        }
    }

    pub fn event(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { request, flows, .. } => {
                for (flow, outcome) in flows {
                    self.count_outcome(&outcome);
                    let Some(request) = request else {
                        continue;
                    };
                    let open = self.nodes[node].open.get_mut(&request);
                    let open = open.unwrap_or_else(|| panic!("an outcome of no request"));
                    let place = open.iter().position(|other| *other == flow);
                    open.remove(
                        place.unwrap_or_else(|| {
                            panic!("seed {}: two outcomes of {flow}", self.seed)
                        }),
                    );
                }
            }
            Event::RequestFinished { request, .. } => {
                let open = self.nodes[node].open.remove(&request);
                assert_eq!(
                    open,
                    Some(vec![]),
                    "seed {}: a request ended early",
                    self.seed
                );
            }
            Event::Changed { change, result } => self.changed(node, change, result.ok().flatten()),
            Event::Failed { command, .. } => self.count(&format!("{command} failed for good")),
            Event::Accepted { batch: None, .. } => self.count("activated after restart"),
            Event::Discarded { batch: None, .. } => self.count("discarded after restart"),
            Event::Ignored { what, .. } => self.count(&format!("ignored {what}")),
            Event::HolderSilent { .. } => self.count("holder silent"),
            Event::Accepted { .. } | Event::Discarded { .. } | Event::BatchFinished { .. } => {}
        }
    }

    /// The daemon notes what the holder said to an establish or a removal.
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
        self.dirty.push(flow);
    }

    pub fn crash(&mut self, node: usize) {
        if self.nodes[node].machine.is_none() {
            return;
        }
        self.count("crash");
        let states: Vec<State> = self.nodes[node]
            .kernel
            .values()
            .map(|entry| entry.state)
            .collect();
        for state in states {
            self.count(&format!("crash with a flow {state:?}"));
        }
        self.nodes[node].crash();
        for peer in (0..self.nodes.len()).filter(|peer| *peer != node) {
            self.break_channel(node, peer, 2_000);
        }
    }

    pub fn restart(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        let peers = (0..self.nodes.len()).map(id);
        let life = self.nodes[node].life;
        let mut config = Config::new(id(node), life, id(self.holder), peers);
        config.batch_flows_max = self.batch_flows_max;
        let highest = self.steering.values().map(|record| record.epoch).max();
        config.epoch_floor = (self.now.as_secs() as u32 * 1_000 + 1).max(highest.unwrap_or(0) + 1);
        config.epoch_floor = config.epoch_floor.max(life as u32 * 10_000);
        self.nodes[node].machine = Some(Handoff::new(config));
        let mut recovered = self.nodes[node].recovered();
        for flow in &recovered {
            let role = format!("recovered {:?}", flow.role);
            self.count(&role);
        }
        if self.fault == Fault::RestartResumes {
            for entry in self.nodes[node].kernel.values_mut() {
                if entry.state == State::Out {
                    entry.state = State::Owned;
                }
            }
            self.dirty.extend(recovered.iter().map(|flow| flow.flow));
            recovered.retain(|flow| self.nodes[node].kernel[&flow.flow].state != State::Owned);
        }
        if self.fault != Fault::RestartForgets {
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
        for peer in (0..self.nodes.len()).filter(|peer| *peer != node) {
            let delay = self.micros(100, 20_000);
            self.at(delay, What::Connect { a: node, b: peer });
        }
    }
}
