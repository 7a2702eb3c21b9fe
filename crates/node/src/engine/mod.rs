//! The event loop. Feeds the handoff machine with messages from peers, server programs, the kernel and the operator,
//! and carries out the machine's commands.
//!
//! One task on one thread: each input is handled to its end, including every command that follows from it, before the
//! next input.

mod accept_queue;
mod acceptor;
mod activate;
mod arrival_journal;
mod background_work;
mod congestion;
mod control;
mod cpu_pressure;
mod deferred_options;
mod donor;
mod event_loop;
mod events;
mod fault_injection;
mod flow_reclaim;
mod flows;
mod handoff_operations;
mod hold_slots;
mod holder;
mod inbound_messages;
mod migrations;
mod network_setup;
mod operator_view;
mod private_flows;
mod process_flows;
mod programs;
mod read_static;
mod recovery;
mod setup;
mod state_blobs;
mod successors;
mod table_overflow;
mod tombstones;
mod unaccepted_connections;
mod unrecorded_flows;
mod upkeep;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use holdfast_api::app::FromDaemon;
use holdfast_api::control::HandoffCounts;
use holdfast_api::{Drain, FlowText};
use holdfast_proto::handoff::{Command, Completion, Handoff, Output};
use holdfast_tcp_repair::{SocketPreparer, TcpStaticReader};
use holdfast_wire::{Flow, MoveId, NodeId, Protocol};

pub(crate) use process_flows::Redirect;
pub(crate) use setup::configured_view;
pub use setup::{SetupError, check_capabilities, run_until_signal};

use crate::app_server::{AppServer, SessionId};
use crate::config::Config;
use crate::dataplane::{Dataplane, HoldDevice};
use crate::metrics::Metrics;
use crate::migration::Migrations;
use crate::peer_channel::Peers;
use accept_queue::NO_SESSION;
use acceptor::{ArrivingConnection, PendingPrepare};
use arrival_journal::ArrivalJournal;
use background_work::BackgroundWork;
use congestion::CongestionRestorer;
use cpu_pressure::CpuPressure;
use deferred_options::DeferredOptions;
use donor::{DonatedConnection, PendingCollect, PendingDrain};
use fault_injection::{FaultInjector, InjectionPoint};
use handoff_operations::HandoffOperations;
use hold_slots::HoldSlots;
use holder::Holder;
use private_flows::PrivateFlows;
use process_flows::{HeldFlows, InboundProcess, OutboundProcess};
use programs::ConnectedPrograms;
use recovery::UnreclaimedFlow;
use successors::Successors;
use table_overflow::TableOverflow;
use tombstones::Tombstones;
use unaccepted_connections::UnacceptedConnections;
use unrecorded_flows::UnrecordedFlows;

/// State of the daemon.
pub struct Engine {
    config: Config,
    started: Instant,
    dataplane: Dataplane,
    hold: HoldDevice,
    machine: Handoff,
    /// Processor contention on this host.
    cpu_pressure: CpuPressure,
    migrations: Migrations,
    held_flows: HeldFlows,
    /// Flows of processes that are being moved to this node.
    inbound: BTreeMap<MoveId, InboundProcess>,
    /// Flows of processes that are about to stop here and move away.
    outbound: BTreeMap<MoveId, OutboundProcess>,
    /// Datagram flows that began here since the last pre-copy round of each move.
    new_datagram_flows: BTreeMap<MoveId, Vec<Flow>>,
    holder: Option<Holder>,
    peers: Peers,
    apps: AppServer,
    metrics: Metrics,
    preparer: SocketPreparer,
    static_reader: TcpStaticReader,
    /// Time at which moved sockets get their longest retransmission timeouts back.
    deferred_options: DeferredOptions,
    congestion: CongestionRestorer,
    programs: ConnectedPrograms,
    donations: HashMap<Flow, DonatedConnection>,
    arrivals: HashMap<Flow, ArrivingConnection>,
    arrival_ids: HashMap<u64, (Flow, u32)>,
    next_arrival: u64,
    hold_slots: HoldSlots,
    journal: ArrivalJournal,
    drain_poll_at: Option<Duration>,
    pending_prepares: Vec<PendingPrepare>,
    pending_drains: Vec<PendingDrain>,
    pending_collects: Vec<PendingCollect>,
    unaccepted: UnacceptedConnections,
    /// `Moved` messages that the current command has produced so far; sent together.
    gone_messages: BTreeMap<(SessionId, String), Vec<FlowText>>,
    /// `HandoffRequested` messages that the current input has produced so far; sent together.
    asked_messages: HashMap<(SessionId, String, Drain), Vec<FlowText>>,
    operations: HandoffOperations,
    tombstones: Tombstones,
    /// Flows of this node that the holder has refused to record.
    unrecorded: UnrecordedFlows,
    successors: Successors,
    table_overflow: TableOverflow,
    /// Number of lost kernel-program events at the last reading of the counter.
    events_lost: u64,
    private_flows: PrivateFlows,
    /// Flows that an earlier daemon left in transit, until their server programs reclaim them.
    unreclaimed: HashMap<Flow, UnreclaimedFlow>,
    weights: BTreeMap<u16, BTreeMap<NodeId, u32>>,
    placement_epoch: u32,
    handoff_counts: HandoffCounts,
    /// Monotonic time at which a flow received by handoff became active; kept until the flow ends here.
    taken_at_ns: HashMap<Flow, u64>,
    problems: Vec<String>,
    /// Test setting: number of ticks by which this node's TCP clock is moved ahead (all namespaces share one clock).
    clock_shift: Option<u32>,
    faults: FaultInjector,
    background_work: BackgroundWork,
}

impl Engine {
    /// Returns the machine's time, which counts from the daemon's start.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn complete_handoff_command(&mut self, completion: Completion) {
        let now = self.now();
        self.machine.handle_completion(now, completion);
    }

    /// Carries out all pending commands of the machines.
    fn run_machines(&mut self) {
        self.run_handoff_machine();
        while self.run_migration_machine() {
            self.run_handoff_machine();
        }
        self.send_moved_messages();
        self.send_handoff_requests();
    }

    fn run_handoff_machine(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send { to, frame } => {
                    if let Err(error) = self.peers.send(to, &frame) {
                        tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
                        let now = self.now();
                        self.machine.handle_peer_lost(now, to);
                    }
                }
                Output::Execute(command) => self.execute_with_faults(command),
                Output::Event(event) => self.handle_event(event),
            }
        }
    }

    fn execute_with_faults(&mut self, command: Command) {
        let name = fault_injection::command_name(&command);
        let count = fault_injection::flow_count(&command);
        self.faults
            .inject_if_due(name, InjectionPoint::Before, count);
        let runs_in_slices = matches!(
            command,
            Command::ReadStatic { .. } | Command::PrepareSockets { .. }
        );
        self.execute_handoff_command(command);
        if !runs_in_slices {
            self.faults
                .inject_if_due(name, InjectionPoint::After, count);
        }
    }

    fn execute_handoff_command(&mut self, command: Command) {
        if matches!(command, Command::Resume { .. } | Command::Discard { .. }) {
            self.finish_background_work();
        }
        match command {
            Command::ReadStatic { token, flows } => self.read_static(token, flows),
            Command::Drain {
                token,
                flows,
                deadline,
            } => self.drain_send_queues(token, flows, deadline),
            Command::Freeze {
                token,
                acceptor,
                flows,
            } => self.freeze_flows(token, acceptor, flows),
            Command::Resume {
                token,
                flows,
                in_doubt,
            } => self.resume_flows(token, &flows, in_doubt),
            Command::Close {
                token,
                acceptor,
                flows,
            } => self.close_flows(token, acceptor, &flows),
            Command::PrepareSockets {
                token,
                batch,
                flows,
            } => self.prepare_sockets(token, batch, flows),
            Command::Restore {
                token,
                batch,
                flows,
            } => self.restore_flows(token, batch, &flows),
            Command::Activate { token, flows } => self.activate_arrivals(token, &flows),
            Command::Discard { token, flows } => self.discard_arrivals(token, &flows),
            Command::Arbitrate {
                token,
                asker,
                changes,
            } => self.arbitrate(token, asker, &changes),
            Command::Lookup { token, flows } => self.look_up(token, &flows),
        }
    }

    fn send_to_program(
        &mut self,
        session: SessionId,
        message: &FromDaemon,
        descriptors: Vec<OwnedFd>,
    ) {
        if session == NO_SESSION {
            return self.on_unaccepted_message(message);
        }
        if let Err(error) = self.apps.send(session, message, descriptors) {
            tracing::debug!(?session, %error, "cannot send a message to a server program");
        }
    }

    /// Sends the collected `Moved` messages, in chunks that fit one message.
    fn send_moved_messages(&mut self) {
        for ((session, to), flows) in std::mem::take(&mut self.gone_messages) {
            for flows in flows.chunks(FLOWS_PER_MESSAGE) {
                let message = FromDaemon::Moved {
                    flows: flows.to_vec(),
                    to: to.clone(),
                };
                self.send_to_program(session, &message, Vec::new());
            }
        }
    }

    /// Dispatches held packets: to the arriving flow, to the donated flow, or to the stack.
    fn read_hold(&mut self) {
        while let Some((flow, packet)) = self.hold.read() {
            let Some(packet) = self.hold_or_replay(&flow, packet) else {
                continue;
            };
            if let Some(arrival) = self.arrivals.get_mut(&flow) {
                if arrival.released {
                    self.hold.replay(&packet.bytes);
                    self.dataplane
                        .programs
                        .hold_counters
                        .count_replayed(arrival.slot);
                } else {
                    arrival.held_packets.push(packet);
                }
            } else if let Some(donation) = self.donations.get_mut(&flow) {
                donation.out_of_order.push(packet);
            } else if self.dataplane.is_owned_here(&flow) {
                self.hold.replay(&packet.bytes);
            }
        }
    }

    fn node_name(&self, node: NodeId) -> String {
        self.config
            .name_of(node)
            .map_or_else(|| format!("node {node}"), str::to_owned)
    }
}

/// Flows in one message to a program; at most 40 bytes each, so that the message fits.
const FLOWS_PER_MESSAGE: usize = 1024;

/// Converts a flow to the API's type.
fn flow_text(flow: &Flow) -> FlowText {
    let protocol = api_protocol(flow.protocol);
    // Both types have the same rule about address families, so the conversion cannot fail.
    FlowText::new(protocol, flow.local, flow.remote).expect("a flow has one family")
}

/// Converts a protocol to the API's type. The record of a moving process is not a flow and never gets here: neither the
/// map nor the machine returns one, and a peer that names one in a handoff is refused.
fn api_protocol(protocol: Protocol) -> holdfast_api::Protocol {
    match protocol {
        Protocol::Tcp => holdfast_api::Protocol::Tcp,
        Protocol::Udp => holdfast_api::Protocol::Udp,
        Protocol::Process => unreachable!("a process is not a flow"),
    }
}

/// Converts a flow of the API to the wire type.
fn flow_from_text(text: &FlowText) -> Option<Flow> {
    Flow::new(wire_protocol(text.protocol()), text.local(), text.remote()).ok()
}

fn wire_protocol(protocol: holdfast_api::Protocol) -> Protocol {
    match protocol {
        holdfast_api::Protocol::Tcp => Protocol::Tcp,
        holdfast_api::Protocol::Udp => Protocol::Udp,
    }
}
