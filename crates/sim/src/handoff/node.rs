//! A node: the kernel's state and the server program's sockets, which survive its daemon, and the daemon's commands in
//! progress.

use super::HandoffBug;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::handoff::{
    Command, CommandToken, FlowKeptReason, FrozenFlow, RecoveredFlow, RecoveredFlowRole, RequestId,
    Results, SendQueueInfo, StaticFlow,
};
use holdfast_wire::failure::{Failure, KernelFault, NodeFault, ProgramFault, SystemError};
use holdfast_wire::{Flow, NodeId};
use std::collections::BTreeMap;
use std::time::Duration;

/// State of a flow in a node's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KernelFlowState {
    Owned,
    Prepared,
    Outgoing,
    Incoming,
    Moved,
    Closing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelFlowEntry {
    pub(super) state: KernelFlowState,
    /// The flow's epoch; 0 until the holder has confirmed the flow.
    pub(super) epoch: u32,
    pub(super) peer: NodeId,
}

impl KernelFlowEntry {
    pub(super) fn may_send(&self) -> bool {
        matches!(
            self.state,
            KernelFlowState::Owned | KernelFlowState::Prepared
        )
    }
}

/// A socket in the server program. Its only state is the number of bytes it has processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerSocket {
    pub(super) content: u64,
    pub(super) restored: bool,
}

/// A command in progress.
#[derive(Debug)]
pub(super) struct RunningCommand {
    pub(super) command: Command,
    pub(super) results: Results,
    pub(super) effects_left: usize,
}

#[derive(Debug, Default)]
pub(super) struct SimulatedNode {
    pub(super) kernel: BTreeMap<Flow, KernelFlowEntry>,
    pub(super) sockets: BTreeMap<Flow, ServerSocket>,
    pub(super) running: BTreeMap<CommandToken, RunningCommand>,
    /// Time of the last scheduled action on a flow; below, of the last arbitration.
    pub(super) busy_until: BTreeMap<Flow, Time>,
    pub(super) arbitration_busy_until: Time,
    /// Flows without outcome, per request of this incarnation.
    pub(super) pending: BTreeMap<RequestId, Vec<Flow>>,
}

impl SimulatedNode {
    /// Drops the daemon's commands in progress.
    pub(super) fn crash(&mut self) {
        self.running.clear();
        self.busy_until.clear();
        self.pending.clear();
    }

    /// Returns the flows that a restarted daemon finds in its maps.
    pub(super) fn recovered(&self) -> Vec<RecoveredFlow> {
        let entries = self.kernel.iter();
        let found = entries.filter_map(|(flow, entry)| {
            let role = match entry.state {
                KernelFlowState::Prepared => RecoveredFlowRole::DonorPrepared,
                KernelFlowState::Outgoing => RecoveredFlowRole::Donor,
                KernelFlowState::Incoming => RecoveredFlowRole::Acceptor,
                _ => return None,
            };
            let (flow, epoch, peer) = (*flow, entry.epoch, entry.peer);
            Some(RecoveredFlow {
                flow,
                epoch,
                role,
                peer,
            })
        });
        found.collect()
    }

    /// Executes a command for its flow number `index`.
    pub(super) fn execute(
        &mut self,
        running: &mut RunningCommand,
        index: usize,
        random: &mut Random,
        fails: bool,
        bug: Option<HandoffBug>,
    ) -> Flow {
        let flow = flow_of(&running.command, index);
        match (&running.command, &mut running.results) {
            (Command::ReadStatic { .. }, Results::ReadStatic(results)) => {
                results.push(self.read_static(flow, fails, random));
            }
            (Command::Drain { .. }, Results::Drained(queues)) => {
                queues.push(SendQueueInfo::default())
            }
            (
                Command::Freeze {
                    flows, acceptor, ..
                },
                Results::Frozen(results),
            ) => {
                let epoch = flows[index].epoch;
                results.push(self.freeze(flow, epoch, *acceptor, fails, bug));
            }
            (
                Command::Resume {
                    flows, in_doubt, ..
                },
                Results::Resumed(results),
            ) => {
                let epoch = flows[index].epoch;
                results.push(unless_failing(fails, || {
                    self.resume(flow, epoch, *in_doubt)
                }));
            }
            (
                Command::Close {
                    acceptor, flows, ..
                },
                Results::Closed(results),
            ) => {
                let epoch = flows[index].epoch;
                results.push(unless_failing(fails, || self.close(flow, epoch, *acceptor)));
            }
            (Command::PrepareSockets { flows, batch, .. }, Results::PreparedSockets(results)) => {
                let epoch = flows[index].epoch + 1;
                results.push(self.prepare(flow, epoch, batch.donor, fails));
            }
            (Command::Restore { flows, .. }, Results::Restored(results)) => {
                results.push(self.restore(flow, &flows[index].dynamic, fails, bug));
            }
            (Command::Activate { flows, .. }, Results::Activated(results)) => {
                results.push(unless_failing(fails, || {
                    self.activate(flow, flows[index].epoch)
                }));
            }
            (Command::Discard { .. }, Results::Discarded) => {
                if bug != Some(HandoffBug::DiscardLeavesEntry) {
                    self.discard(flow);
                }
            }
            (command, results) => unreachable!("{command:?} flow by flow, or {results:?}"),
        }
        running.effects_left -= 1;
        flow
    }

    fn read_static(
        &mut self,
        flow: Flow,
        fails: bool,
        random: &mut Random,
    ) -> Result<StaticFlow, FlowKeptReason> {
        let Some(entry) = self.kernel.get_mut(&flow) else {
            return Err(FlowKeptReason::UnknownFlow);
        };
        if entry.state != KernelFlowState::Owned {
            return Err(FlowKeptReason::OwnedElsewhere(None));
        }
        if fails || entry.epoch == 0 {
            let urgent = ProgramFault::UnmovableSocket("the flow has urgent data".into());
            return Err(FlowKeptReason::Unmovable(urgent.into()));
        }
        entry.state = KernelFlowState::Prepared;
        let unsent = random.between(0, 3) as u32 * 30_000;
        Ok(StaticFlow {
            epoch: entry.epoch,
            static_state: vec![1, 2, 3].into(),
            queue: SendQueueInfo {
                unsent,
                delivery_rate: random.between(0, 2) * 10_000_000,
                rtt: Duration::from_millis(1),
                ..SendQueueInfo::default()
            },
        })
    }

    fn freeze(
        &mut self,
        flow: Flow,
        epoch: u32,
        acceptor: NodeId,
        fails: bool,
        bug: Option<HandoffBug>,
    ) -> Result<FrozenFlow, Failure> {
        match (self.kernel.get_mut(&flow), self.sockets.get(&flow)) {
            (Some(entry), Some(socket)) if entry.state == KernelFlowState::Prepared => {
                if bug != Some(HandoffBug::FreezeKeepsSending) {
                    let (state, peer) = (KernelFlowState::Outgoing, acceptor);
                    *entry = KernelFlowEntry { state, epoch, peer };
                }
                if fails {
                    return Err(injected_failure());
                }
                Ok(FrozenFlow {
                    dynamic: socket.content.to_le_bytes().to_vec().into(),
                    application: vec![7].into(),
                })
            }
            _ => Err(ProgramFault::FlowClosed.into()),
        }
    }

    fn resume(&mut self, flow: Flow, epoch: u32, in_doubt: bool) {
        if in_doubt {
            return;
        }
        if let Some(entry) = self.kernel.get_mut(&flow)
            && matches!(
                entry.state,
                KernelFlowState::Owned | KernelFlowState::Prepared | KernelFlowState::Outgoing
            )
            && epoch >= entry.epoch
        {
            entry.state = KernelFlowState::Owned;
            entry.epoch = epoch;
        }
    }

    pub(super) fn close(&mut self, flow: Flow, epoch: u32, peer: NodeId) {
        if let Some(entry) = self.kernel.get_mut(&flow)
            && matches!(
                entry.state,
                KernelFlowState::Owned | KernelFlowState::Prepared | KernelFlowState::Outgoing
            )
        {
            entry.state = KernelFlowState::Moved;
            entry.epoch = entry.epoch.max(epoch);
            entry.peer = peer;
            self.sockets.remove(&flow);
        }
    }

    fn prepare(
        &mut self,
        flow: Flow,
        epoch: u32,
        peer: NodeId,
        fails: bool,
    ) -> Result<(), Failure> {
        let known = self.kernel.get(&flow).map(|entry| entry.state);
        if fails || !matches!(known, None | Some(KernelFlowState::Moved)) {
            return Err(injected_failure());
        }
        let state = KernelFlowState::Incoming;
        self.kernel
            .insert(flow, KernelFlowEntry { state, epoch, peer });
        let (content, restored) = (0, false);
        self.sockets
            .insert(flow, ServerSocket { content, restored });
        Ok(())
    }

    fn restore(
        &mut self,
        flow: Flow,
        dynamic: &[u8],
        fails: bool,
        bug: Option<HandoffBug>,
    ) -> Result<(), Failure> {
        let socket = self
            .sockets
            .get_mut(&flow)
            .ok_or(NodeFault::FlowNotPrepared)?;
        if fails {
            return Err(injected_failure());
        }
        let content: [u8; 8] = dynamic.try_into().map_err(|_| NodeFault::TcpStateMissing)?;
        let content = u64::from_le_bytes(content);
        let times = if bug == Some(HandoffBug::RestoresTwice) {
            2
        } else {
            1
        };
        socket.content += content * times;
        socket.restored = true;
        Ok(())
    }

    pub(super) fn activate(&mut self, flow: Flow, epoch: u32) {
        if let Some(entry) = self.kernel.get_mut(&flow)
            && entry.state == KernelFlowState::Incoming
        {
            entry.state = KernelFlowState::Owned;
            entry.epoch = epoch;
        }
    }

    fn discard(&mut self, flow: Flow) {
        if self
            .kernel
            .get(&flow)
            .is_some_and(|entry| entry.state == KernelFlowState::Incoming)
        {
            self.kernel.remove(&flow);
            self.sockets.remove(&flow);
        }
    }
}

fn unless_failing(fails: bool, effect: impl FnOnce()) -> Result<(), Failure> {
    if fails {
        return Err(injected_failure());
    }
    effect();
    Ok(())
}

/// Returns the failure of a step that the plan makes fail.
fn injected_failure() -> Failure {
    let action = "injected failure".into();
    let error = SystemError::Text("try again".into());
    KernelFault::SystemCall { action, error }.into()
}

/// Returns the flows of a command that is executed flow by flow; none for the holder's commands.
pub(super) fn flows_of(command: &Command) -> Vec<Flow> {
    match command {
        Command::ReadStatic { flows, .. }
        | Command::Drain { flows, .. }
        | Command::Discard { flows, .. } => flows.clone(),
        Command::Freeze { flows, .. }
        | Command::Resume { flows, .. }
        | Command::Close { flows, .. }
        | Command::Activate { flows, .. } => flows.iter().map(|flow| flow.flow).collect(),
        Command::PrepareSockets { flows, .. } => flows.iter().map(|flow| flow.flow).collect(),
        Command::Restore { flows, .. } => flows.iter().map(|flow| flow.flow).collect(),
        Command::Arbitrate { .. } | Command::Lookup { .. } => Vec::new(),
    }
}

fn flow_of(command: &Command, index: usize) -> Flow {
    match command {
        Command::ReadStatic { flows, .. }
        | Command::Drain { flows, .. }
        | Command::Discard { flows, .. } => flows[index],
        Command::Freeze { flows, .. }
        | Command::Resume { flows, .. }
        | Command::Close { flows, .. }
        | Command::Activate { flows, .. } => flows[index].flow,
        Command::PrepareSockets { flows, .. } => flows[index].flow,
        Command::Restore { flows, .. } => flows[index].flow,
        Command::Arbitrate { .. } | Command::Lookup { .. } => unreachable!(),
    }
}

/// Returns the token and the empty results of a command.
pub(super) fn begin_results(command: &Command) -> (CommandToken, Results) {
    match command {
        Command::ReadStatic { token, .. } => (*token, Results::ReadStatic(vec![])),
        Command::Drain { token, .. } => (*token, Results::Drained(vec![])),
        Command::Freeze { token, .. } => (*token, Results::Frozen(vec![])),
        Command::Resume { token, .. } => (*token, Results::Resumed(vec![])),
        Command::Close { token, .. } => (*token, Results::Closed(vec![])),
        Command::PrepareSockets { token, .. } => (*token, Results::PreparedSockets(vec![])),
        Command::Restore { token, .. } => (*token, Results::Restored(vec![])),
        Command::Activate { token, .. } => (*token, Results::Activated(vec![])),
        Command::Discard { token, .. } => (*token, Results::Discarded),
        Command::Arbitrate { token, .. } => (*token, Results::Arbitrated(vec![])),
        Command::Lookup { token, .. } => (*token, Results::LookedUp(vec![])),
    }
}
