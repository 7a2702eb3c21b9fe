//! A host: processes and the kernel's state, which survive, and the daemon, which may not.

use holdfast_proto::migration::{
    Command, Migration, ProcessId, RecoveredMove, RecoveredRole, Token,
};
use holdfast_wire::migration::{FlowAt, PeerConnections};
use holdfast_wire::{Flow, MoveId, NodeId};
use std::collections::BTreeMap;
use std::time::Duration;

/// What the kernel lets a host do with a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Owned,
    Out,
    In,
    Moved,
    Closing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub state: State,
    pub epoch: u32,
    /// Whose hold it is.
    pub id: Option<MoveId>,
}

/// A connection to another process of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// As this process sees it.
    pub flow: Flow,
    /// Where its packets go.
    pub peer: NodeId,
    /// Of the other end's last switch.
    pub hops: u32,
}

/// All that a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub who: Who,
    /// Everything it has done.
    pub content: u64,
    pub flows: Vec<Flow>,
    pub connections: Vec<Connection>,
    pub hops: u32,
}

/// Who a process is: the number of an original, or the move that made a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    Original(usize),
    Copy(MoveId),
}

#[derive(Debug, Clone)]
pub struct Process {
    pub image: Image,
    pub running: bool,
}

/// What was written down of a move.
#[derive(Debug, Clone)]
pub struct Written {
    pub hops: u32,
    pub role: RecoveredRole,
}

/// A command under way.
pub struct Running {
    pub command: Command,
    pub step: usize,
}

pub struct Host {
    pub id: NodeId,
    pub machine: Option<Migration>,
    /// Counts the daemon's lives.
    pub life: u64,
    pub processes: BTreeMap<ProcessId, Process>,
    /// Made for processes that are taken; with all that was restored.
    pub husks: BTreeMap<MoveId, Option<Image>>,
    pub entries: BTreeMap<Flow, Entry>,
    pub written: BTreeMap<MoveId, Written>,
    /// Translations.
    pub prepared: BTreeMap<MoveId, Written>,
    pub running: BTreeMap<Token, Running>,
    /// When the last effect for a move happens.
    pub busy_until: BTreeMap<MoveId, Duration>,
    pub wake: Option<Duration>,
    /// Moves without outcome, of this life.
    pub open: Vec<MoveId>,
    pub processes_made: u64,
}

impl Host {
    pub fn new(id: NodeId) -> Host {
        Host {
            id,
            machine: None,
            life: 0,
            processes: BTreeMap::new(),
            husks: BTreeMap::new(),
            entries: BTreeMap::new(),
            written: BTreeMap::new(),
            prepared: BTreeMap::new(),
            running: BTreeMap::new(),
            busy_until: BTreeMap::new(),
            wake: None,
            open: Vec::new(),
            processes_made: 0,
        }
    }

    pub fn make(&mut self, image: Image) -> ProcessId {
        self.processes_made += 1;
        let id = ProcessId(self.processes_made);
        let running = true;
        let process = Process { image, running };
        self.processes.insert(id, process);
        id
    }

    pub fn crash(&mut self) {
        self.machine = None;
        self.life += 1;
        self.running.clear();
        self.busy_until.clear();
        self.open.clear();
        self.wake = None;
    }

    /// What a restarted daemon finds.
    pub fn recovered(&self) -> Vec<RecoveredMove> {
        let written = self.written.iter().chain(&self.prepared);
        let moves = written.map(|(id, written)| RecoveredMove {
            id: *id,
            hops: written.hops,
            role: written.role.clone(),
        });
        moves.collect()
    }

    pub fn given(&self, id: MoveId) -> Option<ProcessId> {
        match &self.written.get(&id)?.role {
            RecoveredRole::Donor { process, .. } => Some(*process),
            _ => None,
        }
    }

    /// The flows of a process that it may speak for.
    pub fn flows_of(&self, process: &Process) -> Vec<FlowAt> {
        let flows = process.image.flows.iter();
        let flows = flows.filter_map(|flow| {
            let entry = self.entries.get(flow)?;
            let (flow, epoch) = (*flow, entry.epoch);
            (entry.state == State::Owned).then_some(FlowAt { flow, epoch })
        });
        flows.collect()
    }

    pub fn peers_of(process: &Process) -> Vec<PeerConnections> {
        let mut peers: BTreeMap<NodeId, Vec<Flow>> = BTreeMap::new();
        for connection in &process.image.connections {
            let connections = peers.entry(connection.peer).or_default();
            connections.push(connection.flow);
        }
        let peers = peers.into_iter();
        let peers = peers.map(|(node, connections)| PeerConnections { node, connections });
        peers.collect()
    }

    pub fn set(&mut self, flow: Flow, state: State, epoch: u32) {
        if let Some(entry) = self.entries.get_mut(&flow)
            && entry.epoch <= epoch
            && !matches!(entry.state, State::Closing | State::Moved)
        {
            (entry.state, entry.epoch) = (state, epoch);
        }
    }
}
