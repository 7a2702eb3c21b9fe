//! Process migration: feeds [`holdfast_proto::migration`] and carries out its commands. Runs in the event loop of the
//! daemon, whose module `engine` passes in frames and events and writes the filters.
//!
//! Each move has a thread of its own, because a tracer must stay on one thread and copying memory takes time: a donor's
//! thread (`donor`) or an acceptor's thread (`acceptor`). The threads report to the event loop (`worker_events`) messages to
//! send and completed commands. The event loop keeps the threads in `donor_moves` and `acceptor_moves`. State that must
//! outlive the daemon is first written to a record (`move_records`).

mod acceptor;
mod acceptor_moves;
mod admission_policy;
mod arrived_processes;
mod command_names;
mod commands;
mod compression;
mod control_requests;
mod crash_recovery;
mod donor;
mod donor_moves;
mod donor_sockets;
mod donor_state;
mod event_handlers;
mod image_messages;
mod keyrings;
mod landlock_refusal;
mod lingering_listeners;
mod lock_handover;
mod migration_operations;
mod migration_settings;
mod move_records;
mod postcopy_receiver;
mod process_check;
mod rehearsals;
mod restore_setup;
mod socket_endpoints;
mod step_timer;
mod systemd_units;
mod tcp_snapshots;
mod worker_events;

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_api::control::ResidentProcess;
use holdfast_proto::machine_output::IgnoredInput;
use holdfast_proto::migration::{
    Completion, Event, Migration, MigrationMachineConfig as MachineConfig, MoveOutcome, Output,
    RecoveredMoveRole,
};
use holdfast_proto::view::View;
use holdfast_wire::failure::Failure;
use holdfast_wire::move_frames::MoveFrame;
use holdfast_wire::{Flow, Frame, MoveId, NodeId};

pub use acceptor::RESTORER_ARG;
pub(crate) use command_names::{name_of_command, name_of_results, token_of};
pub(crate) use worker_events::{EventReceiver, Redirect, WorkerEvent};

use crate::conductor::MoveResult;
use crate::config::{Config, ServiceConfig};
use crate::metrics::Metrics;
use acceptor_moves::AcceptorMoves;
use admission_policy::AdmissionPolicy;
use arrived_processes::ArrivedProcesses;
use donor::DonorJob;
use donor_moves::DonorMoves;
use migration_operations::MigrationOperations;
use migration_settings::MigrationSettings;
use move_records::{MoveRecords, MoveRole, RecordEntry};
pub(crate) use process_check::{check_process, obstacle as blocker_failure};
pub(crate) use rehearsals::MoveInquiry;
use rehearsals::Rehearsals;
pub(crate) use socket_endpoints::{MovableAddresses, SocketEndpoint};
use worker_events::EventSender;

/// State of all moves. The owner carries out the results of [`Migrations::next_output`] and passes in frames and events.
pub(crate) struct Migrations {
    machine: Migration,
    /// This node's settings for moves, and the names of the nodes.
    settings: MigrationSettings,
    /// Decides which processes may come here.
    policy: AdmissionPolicy,
    /// Records that outlive the daemon.
    records: MoveRecords,
    /// Processes that were moved here.
    arrived_processes: ArrivedProcesses,
    /// Migrations of the control API.
    operations: MigrationOperations,
    /// Questions of the operator whether another node takes a process.
    rehearsals: Rehearsals,
    /// Moves away from this node.
    donor_moves: DonorMoves,
    /// Moves to this node.
    acceptor_moves: AcceptorMoves,
    /// The move that the conductor requested, and its end once it has ended.
    conductor_move: Option<(MoveId, Option<MoveResult>)>,
    /// Channel on which threads report to the event loop.
    events: EventSender,
    /// Metrics of this node.
    metrics: Metrics,
}

/// An action of the migration machine that only the engine can carry out.
pub(crate) enum MigrationOutput {
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
        view: View,
        config: &Config,
        metrics: Metrics,
    ) -> std::io::Result<(Migrations, EventReceiver)> {
        let settings = MigrationSettings::new(config)?;
        let records = MoveRecords::open(&config.node.run_dir)?;
        let (events, listener) = worker_events::event_channel();
        let moves = Migrations {
            machine: Migration::new(machine, view),
            policy: AdmissionPolicy::new(
                &config.migration,
                settings.addresses.clone(),
                (config.services.iter()).map(|service| service.address.port()),
            ),
            arrived_processes: ArrivedProcesses::open(
                records.residents_file(),
                settings.cgroups.clone(),
            ),
            settings,
            records,
            operations: MigrationOperations::default(),
            rehearsals: Rehearsals::default(),
            donor_moves: DonorMoves::default(),
            acceptor_moves: AcceptorMoves::default(),
            conductor_move: None,
            events,
            metrics,
        };
        Ok((moves, listener))
    }

    /// Admits sockets at these services, and no longer at former ones, to processes that arrive.
    pub(crate) fn set_services(&mut self, services: &[ServiceConfig]) {
        let addresses = services.iter().map(|service| service.address.ip());
        self.settings.addresses.set_services(addresses);
        let ports = services.iter().map(|service| service.address.port());
        self.policy = self.policy.with_service_ports(ports);
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

    /// Sets the names of the nodes of a new view.
    pub(crate) fn set_node_names(&mut self, names: std::collections::BTreeMap<NodeId, String>) {
        self.settings.set_node_names(names);
    }

    /// Returns the time of the machine's next timeout.
    pub(crate) fn next_wake(&self) -> Option<Duration> {
        self.machine.poll_timeout()
    }

    /// Returns the next piece of work; `None` if there is none.
    pub(crate) fn next_output(&mut self) -> Option<MigrationOutput> {
        loop {
            return Some(match self.machine.poll_output()? {
                Output::Send { to, frame } => MigrationOutput::Send(to, frame),
                Output::Execute(command) => MigrationOutput::Execute(Box::new(command)),
                Output::Event(Event::ReportChanges { changes }) => MigrationOutput::Report(changes),
                Output::Event(event) => {
                    self.on_event(&event);
                    continue;
                }
            });
        }
    }

    fn on_event(&mut self, event: &Event) {
        self.note_conductor_move_end(event);
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
                tracing::warn!(%id, %why, blame = %why.party(), "discarded an arriving process")
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
                tracing::error!(%id, command, %why, blame = %why.party(), "a command failed");
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

    /// Notes the end of the move that the conductor requested.
    fn note_conductor_move_end(&mut self, event: &Event) {
        if let Event::Outcome {
            id,
            outcome,
            summary,
        } = event
            && let Some((moving, result)) = &mut self.conductor_move
            && moving == id
        {
            let freeze_us = summary.phases.freeze().as_secs_f64() * 1e6;
            let has_moved = matches!(outcome, MoveOutcome::Moved);
            *result = Some(MoveResult {
                end: match outcome {
                    MoveOutcome::Moved | MoveOutcome::Cloned => Ok(()),
                    MoveOutcome::Kept { reason } => Err(reason.failure()),
                },
                freeze_us: has_moved.then_some(freeze_us),
                forwarded: self.operations.forwarded(*id),
            });
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
                if let Some(donor) = self.donor_moves.thread_for(id, from) {
                    donor.on_taken((bytes, busy_us), problem);
                }
            }
            Frame::Move {
                id,
                frame: MoveFrame::CheckResult { refusals },
            } => {
                if let Some(donor) = self.donor_moves.thread_for(id, from) {
                    donor.on_judged(refusals);
                }
            }
            Frame::Move {
                id,
                frame: MoveFrame::PageRequest(request),
            } => self.on_pages_requested(from, id, request),
            Frame::Move {
                id,
                frame: MoveFrame::LockHandover { bytes },
            } => {
                if let Some(donor) = self.donor_moves.thread_for(id, from) {
                    donor.send_job(DonorJob::Locks(bytes));
                }
            }
            frame => self.machine.handle_frame(now, from, frame),
        }
    }

    fn on_piece(&mut self, id: MoveId, kind: u8, more: bool, bytes: bytes::Bytes) {
        if !self.acceptor_moves.on_piece(id, kind, more, bytes) {
            self.on_unknown_piece(id, kind);
        }
    }

    /// Handles the loss of a peer.
    pub(crate) fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.donor_moves.on_peer_lost(peer);
        self.machine.handle_peer_lost(now, peer);
    }

    /// Reports a completed command to the machine.
    pub(crate) fn on_completion(&mut self, now: Duration, completion: Completion) {
        self.machine.handle_completion(now, completion);
    }

    /// Records that the holder has committed a process to this node: a later daemon knows that also from no holder.
    ///
    /// # Errors
    /// The record cannot be written.
    pub(crate) fn record_commit(&self, id: MoveId) -> Result<(), Failure> {
        let record = self.records.record_of(id, MoveRole::Acceptor);
        record.write(&RecordEntry::Committed)
    }

    /// Returns the service and node addresses.
    pub(crate) fn addresses(&self) -> &MovableAddresses {
        &self.settings.addresses
    }

    /// Returns the sockets of a departing process, as of the last round.
    pub(crate) fn endpoints(&self, id: MoveId) -> &[SocketEndpoint] {
        self.donor_moves.endpoints(id)
    }

    /// Takes the sockets that are not connections of a process that was restored here.
    pub(crate) fn take_listeners(&mut self, id: MoveId) -> Vec<SocketEndpoint> {
        self.acceptor_moves.take_listeners(id)
    }

    /// Takes the packets to give to the stack before the sockets of a restored process become active.
    pub(crate) fn take_packets(&mut self, id: MoveId) -> Vec<Vec<u8>> {
        self.acceptor_moves.take_packets(id)
    }

    /// Returns the node to which a process moves.
    pub(crate) fn acceptor_of(&self, id: MoveId) -> Option<NodeId> {
        self.donor_moves.acceptor_of(id)
    }

    /// Returns the flows of moves in an earlier daemon's records; none of them belongs to a handoff.
    pub(crate) fn recorded_flows(&self) -> BTreeSet<Flow> {
        let lists = self
            .records
            .recovered_moves()
            .into_iter()
            .filter_map(|recovered| match recovered.role {
                RecoveredMoveRole::Donor {
                    saved_flows: noted, ..
                } => noted,
                RecoveredMoveRole::Acceptor { restored, .. } => restored,
                RecoveredMoveRole::Peer { .. } => None,
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
            RecoveredMoveRole::Acceptor {
                restored,
                resumed: true,
                ..
            } => restored,
            _ => None,
        });
        lists
            .flat_map(|(flows, _)| flows)
            .map(|flow_at| flow_at.flow)
            .collect()
    }

    /// Returns the number of moves from and to this node that have not ended.
    pub(crate) fn moves_under_way(&self) -> usize {
        self.machine.moves_under_way()
    }

    /// Returns true if processes may move from and to this node.
    pub(crate) fn is_enabled(&self) -> bool {
        self.settings.enabled
    }

    /// Does the periodic work, once a second.
    pub(crate) fn upkeep(&mut self) {
        self.arrived_processes.remove_ended();
    }

    /// Returns the PIDs of the restorers, the parents of the processes that were moved here.
    pub(crate) fn restorers(&self) -> BTreeSet<i32> {
        self.arrived_processes.restorers()
    }

    /// Returns the processes that were moved here.
    pub(crate) fn residents(&self) -> Vec<ResidentProcess> {
        self.arrived_processes.list()
    }
}
