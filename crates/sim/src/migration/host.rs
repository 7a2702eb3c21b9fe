//! A host: processes and the kernel's state, which survive its daemon, and the daemon's commands in progress.

use crate::time::Time;
use holdfast_proto::migration::{
    Command, CommandToken, ProcessId, RecoveredMove, RecoveredMoveRole,
};
use holdfast_wire::move_frames::{DonorFlowEpoch, PeerConnections};
use holdfast_wire::{Flow, MoveId, NodeId};
use std::collections::BTreeMap;

/// State of a flow in a host's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KernelFlowState {
    Owned,
    Outgoing,
    Incoming,
    /// The flow has moved to this node.
    Moved(NodeId),
    Closing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelFlowEntry {
    pub(super) state: KernelFlowState,
    pub(super) epoch: u32,
    /// The move that holds the flow's packets.
    pub(super) id: Option<MoveId>,
}

/// A connection to another process of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PeerConnection {
    /// The connection's flow as this process sees it.
    pub(super) flow: Flow,
    /// The node that its packets are sent to.
    pub(super) peer: NodeId,
    /// Number of moves of the other end at its last `Switch`.
    pub(super) hops: u32,
}

/// The complete state of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SimulatedImage {
    pub(super) identity: ProcessIdentity,
    /// Number of its work steps.
    pub(super) content: u64,
    pub(super) flows: Vec<Flow>,
    pub(super) connections: Vec<PeerConnection>,
    pub(super) hops: u32,
}

/// Identity of a process: the number of an original, or the move that made a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ProcessIdentity {
    Original(usize),
    Clone(MoveId),
}

#[derive(Debug, Clone)]
pub(super) struct SimulatedProcess {
    pub(super) image: SimulatedImage,
    pub(super) running: bool,
}

/// The stored record of a move.
#[derive(Debug, Clone)]
pub(super) struct MoveRecord {
    pub(super) hops: u32,
    pub(super) role: RecoveredMoveRole,
}

/// A command in progress.
#[derive(Debug)]
pub(super) struct RunningCommand {
    pub(super) command: Command,
    pub(super) step: usize,
}

#[derive(Debug, Default)]
pub(super) struct SimulatedHost {
    pub(super) processes: BTreeMap<ProcessId, SimulatedProcess>,
    /// The stub processes that become restored ones, with their image after it is restored.
    pub(super) stub_processes: BTreeMap<MoveId, Option<SimulatedImage>>,
    pub(super) entries: BTreeMap<Flow, KernelFlowEntry>,
    pub(super) move_records: BTreeMap<MoveId, MoveRecord>,
    /// Stored translations of peers.
    pub(super) peer_translations: BTreeMap<MoveId, MoveRecord>,
    pub(super) running: BTreeMap<CommandToken, RunningCommand>,
    /// Time of the last scheduled step of a move.
    pub(super) busy_until: BTreeMap<MoveId, Time>,
    /// Moves of this incarnation without outcome.
    pub(super) pending_moves: Vec<MoveId>,
    processes_made: u64,
}

impl SimulatedHost {
    pub(super) fn make(&mut self, image: SimulatedImage) -> ProcessId {
        self.processes_made += 1;
        let id = ProcessId(self.processes_made);
        let running = true;
        let process = SimulatedProcess { image, running };
        self.processes.insert(id, process);
        id
    }

    /// Drops the daemon's commands in progress.
    pub(super) fn crash(&mut self) {
        self.running.clear();
        self.busy_until.clear();
        self.pending_moves.clear();
    }

    /// Returns the records that a restarted daemon finds.
    pub(super) fn recovered(&self) -> Vec<RecoveredMove> {
        let written = self.move_records.iter().chain(&self.peer_translations);
        let moves = written.map(|(id, written)| RecoveredMove {
            id: *id,
            hops: written.hops,
            role: written.role.clone(),
        });
        moves.collect()
    }

    pub(super) fn outbound_process(&self, id: MoveId) -> Option<ProcessId> {
        match &self.move_records.get(&id)?.role {
            RecoveredMoveRole::Donor { process, .. } => Some(*process),
            _ => None,
        }
    }

    /// Returns the flows for which a process may send.
    pub(super) fn flows_of(&self, process: &SimulatedProcess) -> Vec<DonorFlowEpoch> {
        let flows = process.image.flows.iter();
        let flows = flows.filter_map(|flow| {
            let entry = self.entries.get(flow)?;
            let (flow, epoch) = (*flow, entry.epoch);
            (entry.state == KernelFlowState::Owned).then_some(DonorFlowEpoch { flow, epoch })
        });
        flows.collect()
    }

    pub(super) fn peers_of(process: &SimulatedProcess) -> Vec<PeerConnections> {
        let mut peers: BTreeMap<NodeId, Vec<Flow>> = BTreeMap::new();
        for connection in &process.image.connections {
            let connections = peers.entry(connection.peer).or_default();
            connections.push(connection.flow);
        }
        let peers = peers.into_iter();
        let peers = peers.map(|(node, connections)| PeerConnections { node, connections });
        peers.collect()
    }

    pub(super) fn set_state(&mut self, flow: Flow, state: KernelFlowState, epoch: u32) {
        if let Some(entry) = self.entries.get_mut(&flow)
            && entry.epoch <= epoch
            && !matches!(
                entry.state,
                KernelFlowState::Closing | KernelFlowState::Moved(_)
            )
        {
            (entry.state, entry.epoch) = (state, epoch);
        }
    }
}
