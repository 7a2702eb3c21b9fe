//! A group with daemons that migrate processes.

use super::host::{
    KernelFlowEntry, KernelFlowState, PeerConnection, ProcessIdentity, SimulatedHost,
    SimulatedImage,
};
use super::{MigrationBug, MigrationRunConfig, MigrationSpecificConfig};
use crate::node_group::{
    self, GroupCore, RebuildingWorld as _, TableRebuilds, client_flow, node_id, pairs,
};
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::flow_ownership::ProcessTransits;
use holdfast_proto::migration::{Command, CommandToken, Completion, Event, Migration, Results};
use holdfast_proto::view::View;
use holdfast_wire::failure::{Failure, KernelFault, SystemError};
use holdfast_wire::move_frames::TranslationStep;
use holdfast_wire::{Flow, Frame, MoveId, OwnershipChange, Protocol};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};

/// An action of a daemon for its state machine.
#[derive(Debug)]
pub(super) enum MigrationDaemonAction {
    Effect {
        token: CommandToken,
    },
    Complete {
        token: CommandToken,
        results: Results,
    },
    /// The group's membership has a new view.
    HearView(View),
    /// The holder considers the waiting requests of a node again.
    RetryDeferred {
        from: usize,
    },
    WakeRebuild,
    /// The daemon reports a flow to the holder, as the handoff state machine does.
    Report {
        change: OwnershipChange,
    },
}

/// The expected state of a process, independent of its location.
#[derive(Debug)]
pub(super) struct ExpectedProcess {
    pub(super) alive: bool,
    pub(super) content: u64,
}

#[derive(Debug)]
pub(super) struct MigrationWorld {
    pub(super) core: GroupCore<Migration, MigrationDaemonAction>,
    pub(super) hosts: Vec<SimulatedHost>,
    pub(super) holder_busy_until: Time,
    /// The holder's memory of flows that were diverted with a process.
    pub(super) group_commit: ProcessTransits,
    /// The highest epoch of each flow.
    pub(super) epochs: BTreeMap<Flow, u32>,
    /// Process images that daemons have sent to each other.
    pub(super) images: BTreeMap<MoveId, SimulatedImage>,
    pub(super) expected_processes: Vec<ExpectedProcess>,
    pub(super) clones: BTreeSet<MoveId>,
    /// Moves with memory sent by post-copy.
    pub(super) postcopy_moves: BTreeSet<MoveId>,
    /// Clones that have run.
    pub(super) clones_run: BTreeSet<ProcessIdentity>,
    /// Translation requests to peers: sender, its incarnation, move, peer, step.
    pub(super) translation_requests: BTreeSet<(usize, u64, MoveId, usize, u8)>,
    pub(super) bug: Option<MigrationBug>,
    pub(super) rebuilds: TableRebuilds,
    /// Share of requests for a clone.
    pub(super) clone_share: f64,
    flows_made: u64,
}

impl node_group::GroupWorld for MigrationWorld {
    type Specific = MigrationSpecificConfig;
    type Machine = Migration;
    type Event = MigrationDaemonAction;

    fn new(config: &MigrationRunConfig, seed: u64) -> MigrationWorld {
        let mut world = MigrationWorld {
            core: GroupCore::new(config, seed),
            hosts: (0..config.nodes)
                .map(|_| SimulatedHost::default())
                .collect(),
            holder_busy_until: Time::ZERO,
            group_commit: ProcessTransits::default(),
            epochs: BTreeMap::new(),
            images: BTreeMap::new(),
            expected_processes: Vec::new(),
            clones: BTreeSet::new(),
            postcopy_moves: BTreeSet::new(),
            clones_run: BTreeSet::new(),
            translation_requests: BTreeSet::new(),
            bug: config.specific.bug,
            rebuilds: TableRebuilds::new(config.nodes, config.holder),
            clone_share: config.specific.clone_share,
            flows_made: 0,
        };
        for node in 0..config.nodes {
            world.restart(node);
        }
        for (a, b) in pairs(config.nodes) {
            world.connect(a, b);
        }
        world.populate(&config.specific.initial_nodes);
        for _ in 0..config.flows {
            let mut random = Random::new(world.core.random.number());
            world.open(&mut random);
        }
        world
    }

    fn core(&mut self) -> &mut GroupCore<Migration, MigrationDaemonAction> {
        &mut self.core
    }

    fn timers_fire(&self) -> bool {
        self.bug != Some(MigrationBug::NoTimers)
    }

    fn send(&mut self, from: usize, to: usize, frame: Frame) {
        self.send_frame(from, to, frame);
    }

    fn deliver(&mut self, from: usize, to: usize, frame: Frame) {
        self.deliver_frame(from, to, frame);
    }

    fn start_command(&mut self, node: usize, command: Command) {
        self.begin_command(node, command);
    }

    fn handle_event(&mut self, node: usize, event: Event) {
        self.on_event(node, event);
    }

    fn execute_action(&mut self, node: usize, event: MigrationDaemonAction) {
        match event {
            MigrationDaemonAction::Effect { token } => self.execute_effect(node, token),
            MigrationDaemonAction::Complete { token, results } => {
                self.drive_machine(node, |machine, now| {
                    machine.handle_completion(now, Completion { token, results });
                })
            }
            MigrationDaemonAction::Report { change } => self.report(node, change),
            MigrationDaemonAction::HearView(view) => self.hear_view(node, view),
            MigrationDaemonAction::RetryDeferred { from } => self.retry_deferred(node, from),
            MigrationDaemonAction::WakeRebuild => self.wake_rebuild(node),
        }
    }

    fn crash(&mut self, node: usize) {
        self.count_crash(node);
        self.hosts[node].crash();
        self.rebuilds.crash(node);
        if node == self.core.holder {
            self.group_commit = ProcessTransits::default();
        }
        self.core.kill(node);
    }

    fn restart(&mut self, node: usize) {
        self.start_daemon(node);
        self.start_rebuild(node);
        self.core.connect_to_others(node);
    }

    fn request(&mut self, random: &mut Random) {
        self.request_migration(random);
    }

    fn cancel(&mut self) {
        self.cancel_moves();
    }

    fn serve_all(&mut self) {
        self.serve();
    }

    fn close(&mut self, random: &mut Random) {
        self.close_flow(random);
    }

    fn open(&mut self, random: &mut Random) {
        self.connect_client(random);
    }

    fn change_contact(&mut self, random: &mut Random) {
        self.change_contact_node(random);
    }

    fn kill(&mut self, random: &mut Random) {
        self.kill_process(random);
    }

    fn check(&mut self) -> Result<(), String> {
        self.check_processes_run_once()?;
        self.check_changed_flows()
    }

    fn check_end(&mut self) -> Result<(), String> {
        self.check_idle_state()
    }
}

impl MigrationWorld {
    /// Creates the processes, of which the first two are connected to each other.
    fn populate(&mut self, homes: &[usize]) {
        let end = |of: usize| SocketAddr::from((Ipv4Addr::new(10, 9, 0, of as u8 + 1), 77));
        for (number, home) in homes.iter().enumerate() {
            let other = 1 - number.min(1);
            let flow = Flow {
                protocol: Protocol::Tcp,
                local: end(number),
                remote: end(other),
            };
            let connection = (number < 2).then(|| PeerConnection {
                flow,
                peer: node_id(homes[other]),
                hops: 0,
            });
            self.hosts[*home].make(SimulatedImage {
                identity: ProcessIdentity::Original(number),
                content: 0,
                flows: Vec::new(),
                connections: connection.into_iter().collect(),
                hops: 0,
            });
            let (alive, content) = (true, 0);
            self.expected_processes
                .push(ExpectedProcess { alive, content });
        }
    }

    /// Creates a flow that was never used before.
    pub(super) fn new_flow(&mut self, node: usize) -> Flow {
        let flow = client_flow(self.flows_made);
        self.flows_made += 1;
        let (state, epoch, id) = (KernelFlowState::Owned, 1, None);
        let entry = KernelFlowEntry { state, epoch, id };
        self.hosts[node].entries.insert(flow, entry);
        flow
    }

    /// Returns true if a peer was told the same before, in this incarnation of the daemon; records that it was told.
    pub(super) fn is_repeated_translation(
        &mut self,
        (from, to): (usize, usize),
        id: MoveId,
        step: TranslationStep,
    ) -> bool {
        let life = self.core.incarnation(from);
        !self
            .translation_requests
            .insert((from, life, id, to, step as u8))
    }
}

/// Returns the outcome of a step that the plan makes fail or succeed.
pub(super) fn injected_outcome(fails: bool) -> Result<(), Failure> {
    if fails {
        let action = "injected failure".into();
        let error = SystemError::Text("try again".into());
        Err(KernelFault::SystemCall { action, error }.into())
    } else {
        Ok(())
    }
}
