//! Actions of a donor's daemon, in steps.

use super::Bug;
use super::host::{Host, Image, Process, State, Who, Written};
use super::world::World;
use holdfast_proto::migration::{
    CheckReport, Command, FlowEpoch, FreezeReport, ProcessId, RecoveredRole, Results, RoundReport,
    Shape,
};
use holdfast_wire::{Flow, MoveId};

/// Size of every simulated process.
const ONE_THREAD: Shape = Shape {
    processes: 1,
    threads: 1,
    mappings: 20,
    shared: 0,
};

impl World {
    pub(super) fn give(
        &mut self,
        node: usize,
        command: &Command,
        (step, last): (usize, bool),
        fails: bool,
    ) -> Option<Results> {
        let outcome = if fails {
            Err("no luck".to_owned())
        } else {
            Ok(())
        };
        let bug = self.bug;
        let host = &mut self.hosts[node];
        match command {
            Command::Check { process, .. } => Some(self.examine(node, *process, fails)),
            Command::CopyRound { .. } => Some(self.copy(node, command, fails)),
            Command::Note {
                id, flows, peers, ..
            } => {
                if let Some(written) = host.written.get_mut(id)
                    && let RecoveredRole::Donor { noted, .. } = &mut written.role
                    && bug != Some(Bug::NotesNothing)
                {
                    *noted = Some((flows.clone(), peers.clone()));
                }
                Some(Results::Noted(outcome))
            }
            Command::Freeze { .. } => self.freeze(node, command, step, fails),
            Command::Thaw { id, flows, .. } => {
                for of in flows {
                    let held = host.entries.get(&of.flow);
                    if held.is_some_and(|entry| entry.state != State::In) {
                        host.set(of.flow, State::Owned, of.epoch);
                    }
                    self.core.dirty.push(of.flow);
                }
                if last && !fails {
                    self.thaw(node, *id);
                }
                last.then_some(Results::Thawed(outcome))
            }
            Command::Release {
                id, flows, kept, ..
            } => {
                let moved = flows.iter().map(|of| (of, State::Moved));
                let kept = kept.iter().map(|of| (of, State::Owned));
                for (of, state) in moved.chain(kept) {
                    host.set(of.flow, state, of.epoch);
                    self.core.dirty.push(of.flow);
                }
                if last && !fails {
                    self.release(node, *id);
                }
                last.then_some(Results::Released(outcome))
            }
            other => unreachable!("a donor does {other:?}"),
        }
    }

    fn examine(&mut self, node: usize, process: ProcessId, fails: bool) -> Results {
        let host = &self.hosts[node];
        let Some(process) = host.processes.get(&process).filter(|_| !fails) else {
            return Results::Checked(Err(vec!["it uses io_uring".to_owned()]));
        };
        let peers = Host::peers_of(process);
        Results::Checked(Ok(CheckReport {
            hops: process.image.hops,
            memory: 1 << 20,
            shape: ONE_THREAD,
            sockets: process.image.flows.len() as u32,
            flows: host.flows_of(process),
            peers,
            forwarded: Vec::new(),
            description: vec![1, 2, 3].into(),
        }))
    }

    fn copy(&mut self, node: usize, command: &Command, fails: bool) -> Results {
        let Command::CopyRound {
            id,
            process,
            to,
            round,
            ..
        } = command
        else {
            unreachable!("{command:?} as a round");
        };
        let clone = self.clones.contains(id);
        let dirty = (4_u64 << 20) >> (2 * (*round).min(10)).min(20);
        let duration = self.core.micros(100, 3_000).into();
        let host = &mut self.hosts[node];
        let Some(of) = host.processes.get(process).cloned().filter(|_| !fails) else {
            return Results::Copied(Err("it is gone".to_owned()));
        };
        let role = RecoveredRole::Donor {
            process: *process,
            to: *to,
            clone,
            noted: None,
            frozen: false,
        };
        let hops = of.image.hops;
        host.written.entry(*id).or_insert(Written { hops, role });
        let peers = Host::peers_of(&of);
        Results::Copied(Ok(RoundReport {
            refusals: Vec::new(),
            copied: 1 << 20,
            saved: 1 << 18,
            dirty,
            dirtied_in: duration,
            duration,
            shape: ONE_THREAD,
            sockets: of.image.flows.len() as u32,
            flows: host.flows_of(&of),
            peers,
            forwarded: Vec::new(),
        }))
    }

    /// Freezes a process: first its flows stop sending, then the process is stopped, then sent.
    fn freeze(
        &mut self,
        node: usize,
        command: &Command,
        step: usize,
        fails: bool,
    ) -> Option<Results> {
        let Command::Freeze {
            id,
            flows,
            clone,
            post_copy,
            ..
        } = command
        else {
            unreachable!("{command:?} as a freeze");
        };
        let failed = |why: &str| Some(Results::Frozen(Err(why.to_owned())));
        let host = &mut self.hosts[node];
        let Some(process) = host.given(*id) else {
            return failed("nothing is written of it");
        };
        if step == 0 {
            if let Some(written) = host.written.get_mut(id)
                && let RecoveredRole::Donor { frozen, .. } = &mut written.role
            {
                *frozen = true;
            }
            for of in flows {
                host.set(of.flow, State::Out, of.epoch);
                self.core.dirty.push(of.flow);
            }
            return None;
        }
        let Some(of) = host.processes.get_mut(&process).filter(|_| !fails) else {
            return failed("it is gone");
        };
        if !clone && self.bug != Some(Bug::FreezeKeepsRunning) {
            of.running = false;
        }
        let mut image = of.image.clone();
        if *clone {
            image = Image {
                who: Who::Copy(*id),
                flows: Vec::new(),
                connections: Vec::new(),
                ..image
            };
        }
        let of = of.clone();
        self.images.insert(*id, image);
        if *post_copy {
            self.following.insert(*id);
        }
        let report = self.frozen_report(node, &of, flows, *id);
        Some(Results::Frozen(Ok(report)))
    }

    /// Returns the report on a stopped process, or on the stopped copy of one.
    fn frozen_report(
        &mut self,
        node: usize,
        of: &Process,
        flows: &[FlowEpoch],
        id: MoveId,
    ) -> FreezeReport {
        let late = self.hosts[node].flows_of(of);
        let gone = flows.iter().map(|of| of.flow);
        let gone: Vec<Flow> = gone.filter(|flow| !of.image.flows.contains(flow)).collect();
        if !late.is_empty() && !self.clones.contains(&id) {
            self.core.count("flows came late");
        }
        FreezeReport {
            bytes: 10_000,
            follows: if self.following.contains(&id) {
                1 << 20
            } else {
                0
            },
            gone,
            late,
            ..FreezeReport::default()
        }
    }

    pub(super) fn thaw(&mut self, node: usize, id: MoveId) {
        let host = &mut self.hosts[node];
        if let Some(process) = host.given(id)
            && let Some(process) = host.processes.get_mut(&process)
        {
            process.running = true;
        }
        if let Some(written) = host.written.get_mut(&id)
            && let RecoveredRole::Donor { noted, frozen, .. } = &mut written.role
        {
            *frozen = false;
            *noted = noted.take().map(|(_, peers)| (Vec::new(), peers));
        }
    }

    pub(super) fn release(&mut self, node: usize, id: MoveId) {
        let host = &mut self.hosts[node];
        if let Some(process) = host.given(id) {
            host.processes.remove(&process);
        }
        host.written.remove(&id);
    }
}
