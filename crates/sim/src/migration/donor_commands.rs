//! Actions of a donor's daemon, in steps.

use super::MigrationBug;
use super::host::{
    KernelFlowState, MoveRecord, ProcessIdentity, SimulatedHost, SimulatedImage, SimulatedProcess,
};
use super::world::{MigrationWorld, injected_outcome};
use holdfast_proto::migration::{
    CheckReport, Command, FlowEpoch, FreezeReport, ProcessId, ProcessTree, RecoveredMoveRole,
    Results, RoundReport,
};
use holdfast_wire::failure::{Failure, NodeFault, ProgramFault};
use holdfast_wire::{Flow, MoveId};

/// Size of every simulated process.
const ONE_THREAD: ProcessTree = ProcessTree {
    processes: 1,
    threads: 1,
    mappings: 20,
    shared_bytes: 0,
};

impl MigrationWorld {
    pub(super) fn execute_donor_step(
        &mut self,
        node: usize,
        command: &Command,
        (step, last): (usize, bool),
        fails: bool,
    ) -> Option<Results> {
        let outcome = injected_outcome(fails);
        let bug = self.bug;
        let host = &mut self.hosts[node];
        match command {
            Command::Check { process, .. } => Some(self.examine(node, *process, fails)),
            Command::CopyRound { .. } => Some(self.copy(node, command, fails)),
            Command::SaveFlows {
                id, flows, peers, ..
            } => {
                if let Some(written) = host.move_records.get_mut(id)
                    && let RecoveredMoveRole::Donor {
                        saved_flows: noted, ..
                    } = &mut written.role
                    && bug != Some(MigrationBug::NotesNotStored)
                {
                    *noted = Some((flows.clone(), peers.clone()));
                }
                Some(Results::FlowsSaved(outcome))
            }
            Command::Freeze { .. } => self.freeze(node, command, step, fails),
            Command::Thaw { id, flows, .. } => {
                for flow in flows {
                    let entry = host.entries.get(&flow.flow);
                    if entry.is_some_and(|entry| entry.state != KernelFlowState::Incoming) {
                        host.set_state(flow.flow, KernelFlowState::Owned, flow.epoch);
                    }
                    self.core.changed_flows.push(flow.flow);
                }
                if last && !fails {
                    self.thaw(node, *id);
                }
                last.then_some(Results::Thawed(outcome))
            }
            Command::Release {
                id,
                to,
                flows,
                kept,
                ..
            } => {
                let moved = flows.iter().map(|of| (of, KernelFlowState::Moved(*to)));
                let kept = kept.iter().map(|of| (of, KernelFlowState::Owned));
                for (of, state) in moved.chain(kept) {
                    host.set_state(of.flow, state, of.epoch);
                    self.core.changed_flows.push(of.flow);
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
            let io_uring = ProgramFault::CannotMove("the process uses io_uring".into());
            return Results::Checked(Err(vec![io_uring.into()]));
        };
        let peers = SimulatedHost::peers_of(process);
        Results::Checked(Ok(CheckReport {
            hops: process.image.hops,
            memory: 1 << 20,
            tree: ONE_THREAD,
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
            return Results::Copied(Err(ProgramFault::ProgramEnded.into()));
        };
        let role = RecoveredMoveRole::Donor {
            process: *process,
            to: *to,
            clone,
            saved_flows: None,
            maybe_stopped: false,
        };
        let hops = of.image.hops;
        host.move_records
            .entry(*id)
            .or_insert(MoveRecord { hops, role });
        let peers = SimulatedHost::peers_of(&of);
        Results::Copied(Ok(RoundReport {
            refusals: Vec::new(),
            sent_bytes: 1 << 20,
            saved_bytes: 1 << 18,
            dirty_bytes: dirty,
            dirty_interval: duration,
            duration,
            tree: ONE_THREAD,
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
        let failed = |why: Failure| Some(Results::Frozen(Err(why)));
        let host = &mut self.hosts[node];
        let Some(process) = host.outbound_process(*id) else {
            return failed(NodeFault::UnknownMove.into());
        };
        if step == 0 {
            if let Some(written) = host.move_records.get_mut(id)
                && let RecoveredMoveRole::Donor {
                    maybe_stopped: frozen,
                    ..
                } = &mut written.role
            {
                *frozen = true;
            }
            for flow in flows {
                host.set_state(flow.flow, KernelFlowState::Outgoing, flow.epoch);
                self.core.changed_flows.push(flow.flow);
            }
            return None;
        }
        let Some(of) = host.processes.get_mut(&process).filter(|_| !fails) else {
            return failed(ProgramFault::ProgramEnded.into());
        };
        if !clone && self.bug != Some(MigrationBug::FreezeKeepsRunning) {
            of.running = false;
        }
        let mut image = of.image.clone();
        if *clone {
            image = SimulatedImage {
                identity: ProcessIdentity::Clone(*id),
                flows: Vec::new(),
                connections: Vec::new(),
                ..image
            };
        }
        let of = of.clone();
        self.images.insert(*id, image);
        if *post_copy {
            self.postcopy_moves.insert(*id);
        }
        let report = self.freeze_report(node, &of, flows, *id);
        Some(Results::Frozen(Ok(report)))
    }

    /// Returns the result of `Freeze` for a stopped process, or for the stopped copy of one.
    fn freeze_report(
        &mut self,
        node: usize,
        process: &SimulatedProcess,
        flows: &[FlowEpoch],
        id: MoveId,
    ) -> FreezeReport {
        let late_flows = self.hosts[node].flows_of(process);
        let closed_flows = flows.iter().map(|of| of.flow);
        let closed_flows: Vec<Flow> = closed_flows
            .filter(|flow| !process.image.flows.contains(flow))
            .collect();
        if !late_flows.is_empty() && !self.clones.contains(&id) {
            self.core.count("late flows");
        }
        FreezeReport {
            sent_bytes: 10_000,
            post_copy_bytes: if self.postcopy_moves.contains(&id) {
                1 << 20
            } else {
                0
            },
            closed_flows,
            late_flows,
            ..FreezeReport::default()
        }
    }

    /// Resumes a process that this move stopped; another move may have stopped it since.
    pub(super) fn thaw(&mut self, node: usize, id: MoveId) {
        let host = &mut self.hosts[node];
        let role = host.move_records.get(&id).map(|written| &written.role);
        if let Some(RecoveredMoveRole::Donor {
            process,
            maybe_stopped: true,
            ..
        }) = role
            && let Some(process) = host.processes.get_mut(process)
        {
            process.running = true;
        }
        if let Some(written) = host.move_records.get_mut(&id)
            && let RecoveredMoveRole::Donor {
                saved_flows: noted,
                maybe_stopped: frozen,
                ..
            } = &mut written.role
        {
            *frozen = false;
            *noted = noted.take().map(|(_, peers)| (Vec::new(), peers));
        }
    }

    pub(super) fn release(&mut self, node: usize, id: MoveId) {
        let host = &mut self.hosts[node];
        if let Some(process) = host.outbound_process(id) {
            host.processes.remove(&process);
        }
        host.move_records.remove(&id);
    }
}
