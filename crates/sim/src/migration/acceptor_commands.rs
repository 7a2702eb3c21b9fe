//! Actions of an acceptor's daemon, in steps.

use super::MigrationBug;
use super::host::{KernelFlowEntry, KernelFlowState, MoveRecord, ProcessIdentity};
use super::world::{MigrationWorld, injected_outcome};
use holdfast_proto::migration::{Command, RecoveredMoveRole, Results, ResumeReport};
use holdfast_wire::failure::{Failure, NodeFault};
use holdfast_wire::{Flow, MoveId};

impl MigrationWorld {
    pub(super) fn execute_acceptor_step(
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
            Command::Examine { .. } => {
                let refusals = outcome.map_err(|why| vec![why]);
                Some(Results::Examined(refusals))
            }
            Command::Build { id, offer, .. } => {
                let role = RecoveredMoveRole::Acceptor {
                    restored: None,
                    committed: false,
                    resumed: false,
                };
                let hops = offer.hops;
                host.move_records.insert(*id, MoveRecord { hops, role });
                host.stub_processes.insert(*id, None);
                Some(Results::Built(outcome))
            }
            Command::Arm { id, flows, .. } => {
                let held = flows.iter().map(|of| (of.flow, of.epoch + 1)).collect();
                let armed = outcome.and_then(|()| self.hold_flows(node, *id, held));
                Some(Results::Armed(armed))
            }
            Command::Restore {
                id, flows, peers, ..
            } => {
                if let Some(written) = host.move_records.get_mut(id)
                    && let RecoveredMoveRole::Acceptor { restored, .. } = &mut written.role
                {
                    *restored = Some((flows.clone(), peers.clone()));
                }
                if last && !fails {
                    host.stub_processes
                        .insert(*id, self.images.get(id).cloned());
                }
                last.then_some(Results::Restored(outcome))
            }
            Command::Resume { .. } => self.resume(node, command, step, fails),
            Command::Discard { id, .. } => {
                if bug != Some(MigrationBug::DiscardLeavesHolds) {
                    host.entries.retain(|_, entry| {
                        entry.state != KernelFlowState::Incoming || entry.id != Some(*id)
                    });
                }
                host.stub_processes.remove(id);
                host.move_records.remove(id);
                Some(Results::Discarded)
            }
            other => unreachable!("an acceptor does {other:?}"),
        }
    }

    fn hold_flows(
        &mut self,
        node: usize,
        id: MoveId,
        held: Vec<(Flow, u32)>,
    ) -> Result<(), Failure> {
        let host = &mut self.hosts[node];
        for (flow, epoch) in held {
            match host.entries.get(&flow).map(|entry| entry.state) {
                None | Some(KernelFlowState::Moved(_)) => {}
                Some(KernelFlowState::Incoming) if host.entries[&flow].id == Some(id) => {}
                Some(_) => return Err(NodeFault::FlowInOtherMove(flow).into()),
            }
            let (state, id) = (KernelFlowState::Incoming, Some(id));
            host.entries
                .insert(flow, KernelFlowEntry { state, epoch, id });
        }
        Ok(())
    }

    /// Activates the flows, then resumes the process, then stores that it runs.
    fn resume(
        &mut self,
        node: usize,
        command: &Command,
        step: usize,
        fails: bool,
    ) -> Option<Results> {
        let Command::Resume {
            id,
            flows,
            lost_flows: lost,
            ..
        } = command
        else {
            unreachable!("{command:?} as a resume");
        };
        let host = &mut self.hosts[node];
        let role = host.move_records.get(id).map(|written| &written.role);
        let done = matches!(
            role,
            None | Some(RecoveredMoveRole::Acceptor { resumed: true, .. })
        );
        if done || fails {
            let failed = injected_outcome(true).map(|()| ResumeReport::default());
            return Some(Results::Resumed(if done {
                Ok(ResumeReport::default())
            } else {
                failed
            }));
        }
        match step {
            0 => {
                for flow in flows {
                    let entry = host.entries.get(&flow.flow);
                    if entry.is_some_and(|entry| entry.state == KernelFlowState::Incoming) {
                        host.set_state(flow.flow, KernelFlowState::Owned, flow.epoch);
                    }
                    self.core.changed_flows.push(flow.flow);
                }
                host.entries.retain(|_, entry| {
                    entry.state != KernelFlowState::Incoming || entry.id != Some(*id)
                });
                None
            }
            1 => {
                self.start_process(node, *id, lost);
                None
            }
            _ => {
                if let Some(written) = host.move_records.get_mut(id)
                    && let RecoveredMoveRole::Acceptor { resumed: gone, .. } = &mut written.role
                {
                    *gone = true;
                }
                Some(Results::Resumed(Ok(ResumeReport::default())))
            }
        }
    }

    /// Resumes the restored process, unless it runs already.
    pub(super) fn start_process(&mut self, node: usize, id: MoveId, lost: &[Flow]) {
        let host = &mut self.hosts[node];
        let Some(stub_process) = host.stub_processes.remove(&id) else {
            return;
        };
        let Some(mut image) = stub_process else {
            return self
                .core
                .set_violation(format!("{id} resumes an empty process"));
        };
        image.hops += 1;
        if !lost.is_empty() {
            self.core.count("flow lost");
        }
        image.flows.retain(|flow| !lost.contains(flow));
        if matches!(image.identity, ProcessIdentity::Clone(_)) {
            self.clones_run.insert(image.identity);
        }
        host.make(image);
    }
}
