//! The event loop. Feeds the handoff machine with messages from peers, server programs, the kernel and the operator,
//! and carries out the machine's commands.
//!
//! One task on one thread: each input is handled to its end, including every command that follows from it, before the
//! next input.
//!
//! [`Engine`] joins the parts of a node. A part has private fields and gets the rest as arguments, so that only the
//! engine knows in which order the parts take their steps:
//!
//! | part | purpose |
//! | --- | --- |
//! | `donations`, `arrivals` | connections that are being handed off from and to this node |
//! | `recovered_flows` | flows that an earlier daemon left in the middle of a handoff |
//! | `handoff_operations` | handoffs of the control API |
//! | `process_flows`, `private_flows` | flows of moving processes, connections at a node's own address |
//! | `client_placement`, `node_load` | where new clients go |
//! | `conductor` | balances loads, drains this node |
//! | `group_services` | services in the group's settings |
//! | `group`, `table_rebuild`, `deferred`, `contact_service` | the contact node, and what it does when it changes |
//! | `server_health` | which nodes' servers are well, and so get new clients |
//! | `replication` | replicated services, whose clients this contact node's replicator serves |
//! | `flow_history` | times of arrival, tombstones, reports that the holder refused |
//! | `holder` | ownership records, at the holder |
//! | `credentials` | certificates of this node, revocation lists of the group |
//! | `programs`, `program_messages` | server programs and the messages to them |
//! | `packet_hold` | packets of flows in transit |
//! | `statistics` | metrics and counts for the operator |
//! | `background_work` | work for which no freeze waits |
//!
//! The methods of [`Engine`] itself have files by input (`inbound_messages`, `events`, `control`, `migrations`) and by
//! the role in a handoff (`donor`, `acceptor`, `activate`, `recovery`); `role_change` has the change of the contact node.

mod acceptor;
mod activate;
mod arrivals;
mod background_work;
mod client_placement;
mod conductor;
mod contact_service;
mod control;
mod credentials;
mod deferred_requests;
mod dns_feed;
mod donations;
mod donor;
mod event_loop;
mod events;
mod fault_injection;
mod flow_history;
mod flow_reclaim;
mod flows;
mod group_role;
mod group_services;
mod handoff_operations;
mod hold_slots;
mod holder;
mod host_changes;
mod host_cleanup;
mod inbound_messages;
mod join_wait;
mod migrations;
mod network_setup;
mod node_load;
mod operator_view;
mod packet_hold;
mod private_flows;
mod process_flows;
mod program_messages;
mod programs;
mod recovered_flows;
mod recovery;
mod remote_drains;
mod replication;
mod role_change;
mod server_health;
mod setup;
mod start_check;
mod start_undo;
mod state_blobs;
mod statistics;
mod table_overflow;
#[cfg(feature = "test-faults")]
mod test_views;
mod tombstones;
mod unaccepted_connections;
mod unrecorded_flows;
mod upkeep;
mod waiting_clients;

use std::rc::Rc;
use std::time::{Duration, Instant};

use holdfast_api::FlowText;
use holdfast_proto::handoff::{Command, Completion, Handoff, Output};
use holdfast_proto::table_rebuild::TableRebuild;
use holdfast_wire::{Epoch, Flow, NodeId, Protocol};

pub use host_cleanup::{CleanupReport, RemovedAddress, clean_host};
pub use setup::{SetupError, check_capabilities, run_until_signal};
pub use start_check::check_start;

use crate::conductor::ConductorDriver;
use crate::config::Config;
use crate::credentials::CredentialDriver;
use crate::dataplane::Dataplane;
use crate::dns::DnsFeed;
use crate::membership::GroupMembership;
use crate::migration::Migrations;
use crate::peer_channel::Peers;
use crate::replication::ReplicationDriver;
use arrivals::ArrivingConnections;
use background_work::BackgroundWork;
use client_placement::ClientPlacement;
use contact_service::ContactService;
use deferred_requests::DeferredRequests;
use donations::Donations;
use fault_injection::{FaultInjector, InjectionPoint};
use flow_history::FlowHistory;
use group_role::GroupRole;
use group_services::GroupServices;
use handoff_operations::HandoffOperations;
use holder::Holder;
use node_load::NodeLoad;
use packet_hold::PacketHold;
use private_flows::PrivateFlows;
use process_flows::ProcessFlows;
use program_messages::ProgramMessages;
use programs::ConnectedPrograms;
use recovered_flows::RecoveredFlows;
use remote_drains::RemoteDrains;
use server_health::HealthMonitor;
use statistics::Statistics;
use waiting_clients::WaitingClients;

/// State of the daemon `holdfastd`.
pub struct Engine {
    config: Config,
    /// Start of the daemon, from which the machines' time counts.
    started: Instant,
    /// The kernel maps: services, nodes, and the state of each flow.
    dataplane: Dataplane,
    /// Packets of flows in transit.
    hold: PacketHold,
    /// The machine that decides the steps of handoffs.
    machine: Handoff,
    /// Handoffs of the control API.
    operations: HandoffOperations,
    /// Connections that are being handed off from this node.
    donations: Donations,
    /// Connections that are being handed off to this node.
    arrivals: ArrivingConnections,
    /// Flows that an earlier daemon left in transit, until their server programs reclaim them.
    recovered: RecoveredFlows,
    /// Moves of processes.
    migrations: Migrations,
    /// Flows of moving processes.
    process_flows: ProcessFlows,
    /// Connections at the address of a single node.
    private_flows: PrivateFlows,
    /// The choice of the nodes that get new clients.
    placement: ClientPlacement,
    /// Judgement on this node's servers and on other nodes.
    health: HealthMonitor,
    /// The DNS server, which must know the addresses that serve; none if this node answers no queries.
    dns: Option<Rc<DnsFeed>>,
    /// Last time at which this node reached the contact node.
    contact_reached_at: Option<Duration>,
    /// Balances the loads of the group, and drains this node.
    conductor: ConductorDriver,
    /// Orders to drain other nodes.
    remote_drains: RemoteDrains,
    /// The load of this node.
    node_load: NodeLoad,
    /// Services in the group's settings.
    group_services: GroupServices,
    /// The replication of services.
    replication: ReplicationDriver,
    /// Flows that arrived, left, or were refused by the holder.
    flow_history: FlowHistory,
    /// The view of the group, which says who is contact node.
    group: GroupRole,
    /// The machine by which a new holder learns the flows of all nodes.
    table_rebuild: TableRebuild,
    /// The store of ownership, at the holder.
    holder: Option<Holder>,
    /// Number of this daemon start, greater than any earlier one of this node.
    boot: u64,
    /// Certificates of this node and revocation lists of the group.
    credentials: CredentialDriver,
    /// Least epoch of flows that begin: seconds since 2020 at the start of the daemon.
    epoch_floor: Epoch,
    /// Requests that the holder cannot decide yet.
    deferred: DeferredRequests,
    /// Service addresses at the contact node.
    contact_service: ContactService,
    /// New clients that wait for a contact node that serves.
    waiting_clients: WaitingClients,
    /// Time at which this node, a former holder, forgets its table.
    former_holder_until: Option<Duration>,
    /// Channels to the other nodes.
    peers: Peers,
    /// The membership, in a group that runs itself.
    membership: Option<Rc<GroupMembership>>,
    /// Server programs with their services and flows.
    programs: ConnectedPrograms,
    /// Messages to the server programs.
    program_messages: ProgramMessages,
    /// Metrics and counts for the operator.
    statistics: Statistics,
    /// Work in slices, for which no freeze waits.
    background_work: BackgroundWork,
    /// Faults that a test wants.
    faults: FaultInjector,
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
        self.run_table_rebuild();
        loop {
            self.run_handoff_machine();
            while self.run_migration_machine() {
                self.run_handoff_machine();
            }
            if !self.run_conductor_machine() {
                break;
            }
        }
        self.run_health_machine();
        self.run_credential_machine();
        self.program_messages.send_collected();
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
            } => self.arbitrate(token, asker, changes),
            Command::Lookup { token, flows } => self.look_up(token, &flows),
        }
    }

    /// Dispatches held packets: to the arriving flow, to the donated flow, or to the stack.
    fn read_hold(&mut self) {
        while let Some((flow, packet)) = self.hold.read() {
            let (dataplane, hold) = (&self.dataplane, &self.hold);
            let Some(packet) = self
                .process_flows
                .hold_or_replay(dataplane, hold, &flow, packet)
            else {
                continue;
            };
            let Some(packet) = self.arrivals.hold_or_replay(dataplane, hold, &flow, packet) else {
                continue;
            };
            let Some(packet) = self.donations.keep_out_of_order(&flow, packet) else {
                continue;
            };
            if dataplane.is_owned_here(&flow) {
                hold.device().replay(&packet.bytes);
            } else if packet.begins_connection() {
                self.on_waiting_client(packet);
            }
        }
    }

    fn node_name(&self, node: NodeId) -> String {
        self.group
            .name_of(node)
            .map_or_else(|| format!("node {node}"), str::to_owned)
    }
}

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
