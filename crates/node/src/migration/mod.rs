//! Process migration: feeds [`holdfast_proto::migration`] and carries out its commands. Runs in the event loop of
//! [`crate::engine`].
//!
//! Each move has a thread of its own, because a tracer must stay on one thread and copying memory takes time: a donor's
//! thread (`donor`) or an acceptor's thread (`acceptor`). The threads report to the event loop (`worker_events`) messages to
//! send and completed commands. State that must outlive the daemon is first written to a record (`move_records`).

mod acceptor;
mod admission_policy;
mod command_names;
mod commands;
mod compression;
mod control_requests;
mod crash_recovery;
mod donor;
mod donor_sockets;
mod donor_state;
mod event_handlers;
mod image_messages;
mod keyrings;
mod landlock_domains;
mod lingering_listeners;
mod lock_handover;
mod migration_operations;
mod move_records;
mod postcopy_receiver;
mod process_check;
mod rehearsals;
mod residents;
mod restore_setup;
mod socket_endpoints;
mod step_timer;
mod systemd_units;
mod tcp_snapshots;
mod worker_events;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_api::control::ResidentProcess;
use holdfast_proto::machine_output::IgnoredInput;
use holdfast_proto::migration::{
    Completion, Event, Migration, MigrationMachineConfig as MachineConfig, MoveOutcome, Output,
    RecoveredRole,
};
use holdfast_sys::cgroup::ControlGroups;
use holdfast_wire::move_frames::{DonorFlow, MoveFrame};
use holdfast_wire::{Flow, Frame, MoveId, NodeId};

pub use acceptor::RESTORER_ARG;
pub(crate) use command_names::{name_of_command, name_of_results, token_of};
pub(crate) use worker_events::{EventReceiver, WorkerEvent};

use crate::config::Config;
use crate::engine::configured_view;
use crate::metrics::Metrics;
use crate::reach::reach_of;
use acceptor::AcceptorThread;
use admission_policy::AdmissionPolicy;
use donor::DonorThread;
use image_messages::WINDOW_BYTES;
use migration_operations::MigrationOperations;
use move_records::MoveRecords;
pub(crate) use rehearsals::MoveInquiry;
use rehearsals::Rehearsals;
use residents::Residents;
pub(crate) use socket_endpoints::{MovableAddresses, SocketEndpoint};
use worker_events::EventSender;

/// State of all moves. The owner carries out the results of [`Migrations::next_output`] and passes in frames and events.
pub(crate) struct Migrations {
    machine: Migration,
    enabled: bool,
    policy: AdmissionPolicy,
    records: MoveRecords,
    residents: Residents,
    operations: MigrationOperations,
    rehearsals: Rehearsals,
    donors: BTreeMap<MoveId, DonorThread>,
    acceptors: BTreeMap<MoveId, AcceptorThread>,
    /// Flows whose packets are held for processes being moved here, sorted.
    armed_flows: BTreeMap<MoveId, Vec<DonorFlow>>,
    /// Processes that run here while their remaining pages are still being sent (post-copy).
    in_postcopy: BTreeSet<MoveId>,
    /// Bytes of pieces that the acceptors' threads have not consumed yet.
    unconsumed_bytes: BTreeMap<MoveId, usize>,
    /// Sockets of moving processes.
    endpoints: BTreeMap<MoveId, Vec<SocketEndpoint>>,
    /// Packets to give to this node's stack before the sockets of a restored process become active.
    packets: BTreeMap<MoveId, Vec<Vec<u8>>>,
    addresses: MovableAddresses,
    /// Control groups of this node.
    cgroups: ControlGroups,
    /// True if every node receives every packet.
    every_node_receives: bool,
    /// True if freezes run at real-time priority.
    realtime: bool,
    /// Names of the nodes.
    node_names: BTreeMap<NodeId, String>,
    events: EventSender,
    metrics: Metrics,
}

/// Work that only the owner can do.
pub(crate) enum MachineOutput {
    /// Send a frame. A failure means that the peer is lost.
    Send(NodeId, Frame),
    /// Carry out the command (see [`Migrations::execute`]).
    Execute(Box<holdfast_proto::migration::Command>),
    /// Report the changes to the holder by way of the handoff machine.
    Report(Vec<holdfast_wire::OwnershipChange>),
}

impl Migrations {
    /// Opens the state, with the records of an earlier daemon.
    ///
    /// # Errors
    /// The run directory cannot be used.
    pub(crate) fn open(
        machine: MachineConfig,
        config: &Config,
        metrics: Metrics,
    ) -> std::io::Result<(Migrations, EventReceiver)> {
        let cgroup_path = config.node.cgroup().map_err(std::io::Error::other)?;
        let cgroups = ControlGroups::new(cgroup_path);
        let records = MoveRecords::open(&config.node.run_dir)?;
        let (events, listener) = worker_events::event_channel();
        let nodes = config
            .nodes()
            .map(|(id, name)| (id, name.to_owned()))
            .collect();
        let addresses = MovableAddresses::new(
            config.services.iter().map(|service| service.address.ip()),
            config.addresses(),
        );
        let moves = Migrations {
            machine: Migration::new(machine, configured_view(config)),
            enabled: config.migration.enabled,
            policy: AdmissionPolicy::new(
                &config.migration,
                addresses.clone(),
                (config.services.iter()).map(|service| service.address.port()),
            ),
            residents: Residents::open(records.residents_file(), cgroups.clone()),
            records,
            operations: MigrationOperations::default(),
            rehearsals: Rehearsals::default(),
            donors: BTreeMap::new(),
            acceptors: BTreeMap::new(),
            armed_flows: BTreeMap::new(),
            in_postcopy: BTreeSet::new(),
            unconsumed_bytes: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            packets: BTreeMap::new(),
            addresses,
            cgroups,
            realtime: config.node.realtime,
            every_node_receives: reach_of(config.group.reach).every_node_receives(),
            node_names: nodes,
            events,
            metrics,
        };
        Ok((moves, listener))
    }

    /// Reports an earlier daemon's records to the machine. Must be called first.
    pub(crate) fn recover(&mut self, now: Duration) {
        let found = self.records.recovered_moves();
        for recovered in &found {
            tracing::warn!(id = %recovered.id, role = ?recovered.role, "recovering a move of an earlier daemon");
        }
        self.machine.handle_recovered(now, found);
    }

    /// Returns the machine, for inputs that concern nothing else here.
    pub(crate) fn machine(&mut self) -> &mut Migration {
        &mut self.machine
    }

    /// Returns the time of the machine's next timeout.
    pub(crate) fn next_wake(&self) -> Option<Duration> {
        self.machine.poll_timeout()
    }

    /// Returns the next piece of work; `None` if there is none.
    pub(crate) fn next_output(&mut self) -> Option<MachineOutput> {
        loop {
            return Some(match self.machine.poll_output()? {
                Output::Send { to, frame } => MachineOutput::Send(to, frame),
                Output::Execute(command) => MachineOutput::Execute(Box::new(command)),
                Output::Event(Event::ReportChanges { changes }) => MachineOutput::Report(changes),
                Output::Event(event) => {
                    self.on_event(&event);
                    continue;
                }
            });
        }
    }

    fn on_event(&mut self, event: &Event) {
        self.operations.on_event(event);
        match event {
            Event::Outcome {
                id,
                outcome,
                summary,
            } => {
                if self.rehearsals.on_move_end(*id, outcome) {
                    return;
                }
                let freeze = summary.phases.freeze();
                match outcome {
                    MoveOutcome::Moved => {
                        self.metrics.count_migration("moved");
                        // A daemon that has completed an earlier daemon's move did not see all phases.
                        if !summary.phases.restore.is_zero() {
                            self.metrics.record_migration_freeze(freeze);
                        }
                    }
                    MoveOutcome::Cloned => self.metrics.count_migration("cloned"),
                    MoveOutcome::Kept { .. } => self.metrics.count_migration("kept"),
                }
                let freeze_us = freeze.as_micros();
                tracing::info!(%id, ?outcome, freeze_us, bytes = summary.freeze_bytes, "a move has ended");
            }
            Event::ProcessAccepted { id, flows } => {
                tracing::info!(%id, flows = flows.len(), "a process has arrived");
            }
            Event::ProcessDiscarded { id, reason: why } => {
                tracing::warn!(%id, why, "discarded an arriving process")
            }
            Event::HolderSilent { holder } => {
                tracing::warn!(%holder, "the holder does not answer; asking again");
            }
            Event::HolderLostTable { id } => {
                tracing::warn!(%id, "the holder no longer knows a move; asking the acceptor");
            }
            Event::CommandFailed {
                id,
                command,
                error: why,
            } => {
                tracing::error!(%id, command, why, "a command failed");
            }
            Event::Ignored(IgnoredInput {
                from,
                frame: what,
                reason: why,
            }) => tracing::debug!(%from, what, why, "ignored a frame"),
            Event::RoundEnded { .. }
            | Event::ConnectionsForwarded { .. }
            | Event::PostCopyStarted { .. }
            | Event::ReportChanges { .. } => {
                tracing::debug!(?event, "progress of a move");
            }
        }
    }

    /// Handles a frame about a move, or an answer to this machine's request.
    pub(crate) fn handle_frame(&mut self, now: Duration, from: NodeId, frame: Frame) {
        match frame {
            Frame::Move {
                id,
                frame: MoveFrame::Piece { kind, more, bytes },
            } if id.donor == from => self.on_piece(id, kind, more, bytes),
            Frame::Move {
                id,
                frame:
                    MoveFrame::PiecesProcessed {
                        bytes,
                        busy_us,
                        problem,
                    },
            } => {
                let donor = self.donors.get(&id).filter(|donor| donor.acceptor == from);
                if let Some(donor) = donor {
                    donor.on_taken((bytes, busy_us), problem.as_deref());
                }
            }
            Frame::Move {
                id,
                frame: MoveFrame::CheckResult { refusals },
            } => {
                let donor = self.donors.get(&id).filter(|donor| donor.acceptor == from);
                donor
                    .into_iter()
                    .for_each(|donor| donor.on_judged(refusals.clone()));
            }
            Frame::Move {
                id,
                frame: MoveFrame::PageRequest(request),
            } => self.on_pages_requested(from, id, request),
            Frame::Move {
                id,
                frame: MoveFrame::LockHandover { bytes },
            } => {
                let donor = self.donors.get(&id).filter(|donor| donor.acceptor == from);
                if let Some(donor) = donor {
                    donor.send_job(donor::DonorJob::Locks(bytes));
                }
            }
            frame => self.machine.handle_frame(now, from, frame),
        }
    }

    fn on_piece(&mut self, id: MoveId, kind: u8, more: bool, bytes: bytes::Bytes) {
        let Some(acceptor) = self.acceptors.get(&id) else {
            return self.on_unknown_piece(id, kind);
        };
        let unconsumed = self.unconsumed_bytes.entry(id).or_default();
        *unconsumed += bytes.len();
        // A donor that observes the window never has more in transit.
        let before = *unconsumed - bytes.len();
        if *unconsumed > 2 * WINDOW_BYTES {
            // The problem is reported once; further pieces are ignored.
            if before <= 2 * WINDOW_BYTES {
                let why = "the donor sends more than the window allows";
                acceptor.send_job(acceptor::AcceptorJob::Refuse(why.to_owned()));
            }
            return;
        }
        acceptor.send_job(acceptor::AcceptorJob::Piece { kind, more, bytes });
    }

    /// Handles the loss of a peer.
    pub(crate) fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        for donor in self.donors.values().filter(|donor| donor.acceptor == peer) {
            donor.on_channel_lost();
        }
        self.machine.handle_peer_lost(now, peer);
    }

    /// Reports a completed command to the machine.
    pub(crate) fn on_completion(&mut self, now: Duration, completion: Completion) {
        self.machine.handle_completion(now, completion);
    }

    /// Returns the service and node addresses.
    pub(crate) fn addresses(&self) -> &MovableAddresses {
        &self.addresses
    }

    /// Returns the sockets of a moving process, as of the last round.
    pub(crate) fn endpoints(&self, id: MoveId) -> &[SocketEndpoint] {
        self.endpoints.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Takes the sockets of a process that was restored here.
    pub(crate) fn take_endpoints(&mut self, id: MoveId) -> Vec<SocketEndpoint> {
        self.endpoints.remove(&id).unwrap_or_default()
    }

    /// Takes the packets to give to the stack before the sockets of a restored process become active.
    pub(crate) fn take_packets(&mut self, id: MoveId) -> Vec<Vec<u8>> {
        self.packets.remove(&id).unwrap_or_default()
    }

    /// Returns the node to which a process moves.
    pub(crate) fn acceptor_of(&self, id: MoveId) -> Option<NodeId> {
        self.donors.get(&id).map(|donor| donor.acceptor)
    }

    /// Returns the flows of moves in an earlier daemon's records; none of them belongs to a handoff.
    pub(crate) fn recorded_flows(&self) -> BTreeSet<Flow> {
        let lists = self
            .records
            .recovered_moves()
            .into_iter()
            .filter_map(|recovered| match recovered.role {
                RecoveredRole::Donor {
                    saved_flows: noted, ..
                } => noted,
                RecoveredRole::Acceptor { restored, .. } => restored,
                RecoveredRole::Peer { .. } => None,
            });
        lists
            .flat_map(|(flows, _)| flows)
            .map(|flow_at| flow_at.flow)
            .collect()
    }

    /// Returns the flows of processes that run here but whose moves an earlier daemon did not finish.
    pub(crate) fn running_flows(&self) -> BTreeSet<Flow> {
        let found = self.records.recovered_moves().into_iter();
        let lists = found.filter_map(|recovered| match recovered.role {
            RecoveredRole::Acceptor {
                restored,
                resumed: true,
            } => restored,
            _ => None,
        });
        lists
            .flat_map(|(flows, _)| flows)
            .map(|flow_at| flow_at.flow)
            .collect()
    }

    /// Does the periodic work, once a second.
    pub(crate) fn upkeep(&mut self) {
        self.residents.remove_ended();
    }

    /// Returns the processes that were moved here.
    pub(crate) fn residents(&self) -> Vec<ResidentProcess> {
        self.residents.list()
    }
}
