//! The event loop. Feeds the handoff machine with messages from peers, server programs, the kernel and the operator,
//! and carries out the machine's commands.
//!
//! One task on one thread: each input is handled to its end, including every command that follows from it, before the
//! next input.

mod acceptor;
mod activate;
mod blob;
mod congestion;
mod control;
mod donor;
mod events;
mod faults;
mod fences;
mod flows;
mod fullness;
mod holder;
mod journal;
mod moves;
mod network;
mod operations;
mod pressure;
mod private;
mod programs;
mod query;
mod queued;
mod read;
mod reclaim;
mod recover;
mod run;
mod sessions;
mod settling;
mod setup;
mod slots;
mod successors;
mod tombstones;
mod unaccepted;
mod unrecorded;
mod upkeep;
mod work;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use holdfast_api::app::FromDaemon;
use holdfast_api::control::HandoffCounts;
use holdfast_api::{Drain, FlowText};
use holdfast_proto::handoff::{Command, Completion, Handoff, Output};
use holdfast_sys::tcp_repair::{Preparer, StaticReader};
use holdfast_wire::{Flow, MoveId, NodeId, Protocol};

pub(crate) use fences::Turn;
pub use setup::{SetupError, check_capabilities, start};

use crate::app::{AppServer, SessionId};
use crate::channel::Peers;
use crate::config::Config;
use crate::dataplane::{Dataplane, Hold};
use crate::metrics::Metrics;
use crate::migration::Moves;
use acceptor::{Arrival, Preparing};
use congestion::Congestion;
use donor::{Collecting, Donation, Draining};
use faults::{Faults, Moment};
use fences::{Coming, Fences, Leaving};
use fullness::Fullness;
use holder::Holder;
use journal::Journal;
use operations::Operations;
use pressure::Pressure;
use private::Private;
use programs::Programs;
use queued::NOBODY;
use recover::Recovered;
use settling::Settling;
use slots::Slots;
use successors::Successors;
use tombstones::Tombstones;
use unaccepted::Unaccepted;
use unrecorded::Unrecorded;
use work::Work;

/// State of the daemon.
pub struct Engine {
    config: Config,
    started: Instant,
    dataplane: Dataplane,
    hold: Hold,
    machine: Handoff,
    /// Processor contention on this host.
    pressure: Pressure,
    moves: Moves,
    fences: Fences,
    /// Flows of processes that are being moved to this node.
    coming: BTreeMap<MoveId, Coming>,
    /// Flows of processes that are about to stop here and move away.
    leaving: BTreeMap<MoveId, Leaving>,
    /// Datagram flows that began here since the last pre-copy round of each move.
    newcomers: BTreeMap<MoveId, Vec<Flow>>,
    holder: Option<Holder>,
    peers: Peers,
    apps: AppServer,
    metrics: Metrics,
    preparer: Preparer,
    static_reader: StaticReader,
    /// Time at which moved sockets get their longest retransmission timeouts back.
    settling: Settling,
    congestion: Congestion,
    programs: Programs,
    donations: HashMap<Flow, Donation>,
    arrivals: HashMap<Flow, Arrival>,
    arrival_ids: HashMap<u64, (Flow, u32)>,
    next_arrival: u64,
    slots: Slots,
    journal: Journal,
    drain_poll_at: Option<Duration>,
    preparing: Vec<Preparing>,
    draining: Vec<Draining>,
    collecting: Vec<Collecting>,
    unaccepted: Unaccepted,
    /// `Gone` messages that the current command has produced so far; sent together.
    gone: BTreeMap<(SessionId, String), Vec<FlowText>>,
    /// `Asked` messages that the current input has produced so far; sent together.
    asked: HashMap<(SessionId, String, Drain), Vec<FlowText>>,
    operations: Operations,
    tombstones: Tombstones,
    /// Flows of this node that the holder has refused to record.
    unrecorded: Unrecorded,
    successors: Successors,
    fullness: Fullness,
    /// Number of lost kernel-program events at the last reading of the counter.
    events_lost: u64,
    private: Private,
    /// Flows that an earlier daemon left in transit, until their server programs reclaim them.
    recovered: HashMap<Flow, Recovered>,
    weights: BTreeMap<u16, BTreeMap<NodeId, u32>>,
    placement_epoch: u32,
    counts: HandoffCounts,
    /// Monotonic time at which a flow received by handoff became active; kept until the flow ends here.
    taken_at_ns: HashMap<Flow, u64>,
    problems: Vec<String>,
    /// Test setting: number of ticks by which this node's TCP clock is moved ahead (all namespaces share one clock).
    clock_shift: Option<u32>,
    faults: Faults,
    work: Work,
}

impl Engine {
    /// Returns the machine's time, which counts from the daemon's start.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn done(&mut self, completion: Completion) {
        let now = self.now();
        self.machine.handle_done(now, completion);
    }

    /// Carries out all pending commands of the machines.
    fn pump(&mut self) {
        self.pump_handoffs();
        while self.pump_moves() {
            self.pump_handoffs();
        }
        self.tell_gone();
        self.tell_asked();
    }

    fn pump_handoffs(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send { to, frame } => {
                    if let Err(error) = self.peers.send(to, &frame) {
                        tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
                        let now = self.now();
                        self.machine.handle_peer_lost(now, to);
                    }
                }
                Output::Do(command) => self.carry_out(command),
                Output::Event(event) => self.handle_event(event),
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        let name = faults::name_of(&command);
        let count = faults::count_of(&command);
        self.faults.at(name, Moment::Before, count);
        let in_slices = matches!(
            command,
            Command::ReadStatic { .. } | Command::PrepareSockets { .. }
        );
        self.execute(command);
        if !in_slices {
            self.faults.at(name, Moment::After, count);
        }
    }

    fn execute(&mut self, command: Command) {
        if matches!(command, Command::Resume { .. } | Command::Discard { .. }) {
            self.finish_work();
        }
        match command {
            Command::ReadStatic { token, flows } => self.read_static(token, flows),
            Command::Drain {
                token,
                flows,
                deadline,
            } => self.drain(token, flows, deadline),
            Command::Freeze {
                token,
                acceptor,
                flows,
            } => self.freeze(token, acceptor, flows),
            Command::Resume {
                token,
                flows,
                in_doubt,
            } => self.resume(token, &flows, in_doubt),
            Command::Close {
                token,
                acceptor,
                flows,
            } => self.close(token, acceptor, &flows),
            Command::PrepareSockets {
                token,
                batch,
                flows,
            } => self.prepare_sockets(token, batch, flows),
            Command::Restore {
                token,
                batch,
                flows,
            } => self.restore(token, batch, &flows),
            Command::Activate { token, flows } => self.activate(token, &flows),
            Command::Discard { token, flows } => self.discard(token, &flows),
            Command::Arbitrate {
                token,
                asker,
                changes,
            } => self.arbitrate(token, asker, &changes),
            Command::Lookup { token, flows } => self.look_up(token, &flows),
        }
    }

    fn tell(&mut self, session: SessionId, message: &FromDaemon, descriptors: Vec<OwnedFd>) {
        if session == NOBODY {
            return self.tell_leftovers(message);
        }
        if let Err(error) = self.apps.send(session, message, descriptors) {
            tracing::debug!(?session, %error, "a server program was not told");
        }
    }

    /// Sends the collected `Gone` messages, in chunks that fit one message.
    fn tell_gone(&mut self) {
        for ((session, to), flows) in std::mem::take(&mut self.gone) {
            for flows in flows.chunks(FLOWS_PER_MESSAGE) {
                let gone = FromDaemon::Gone {
                    flows: flows.to_vec(),
                    to: to.clone(),
                };
                self.tell(session, &gone, Vec::new());
            }
        }
    }

    /// Dispatches held packets: to the arriving flow, to the donated flow, or to the stack.
    fn read_hold(&mut self) {
        while let Some((flow, packet)) = self.hold.read() {
            let Some(packet) = self.held(&flow, packet) else {
                continue;
            };
            if let Some(arrival) = self.arrivals.get_mut(&flow) {
                if arrival.released {
                    self.hold.replay(&packet.bytes);
                    self.dataplane.programs.holds.replayed(arrival.slot);
                } else {
                    arrival.held.push(packet);
                }
            } else if let Some(donation) = self.donations.get_mut(&flow) {
                donation.out_of_order.push(packet);
            } else if self.dataplane.is_ours(&flow) {
                self.hold.replay(&packet.bytes);
            }
        }
    }

    fn name_of(&self, node: NodeId) -> String {
        self.config
            .name_of(node)
            .map_or_else(|| format!("node {node}"), str::to_owned)
    }
}

/// Flows in one message to a program; at most 40 bytes each, so that the message fits.
const FLOWS_PER_MESSAGE: usize = 1024;

/// Converts a flow to the API's type.
fn text_of(flow: &Flow) -> FlowText {
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
        Protocol::Process => unreachable!("a process is no flow"),
    }
}

/// Converts a flow of the API to the wire type.
fn flow_of(text: &FlowText) -> Option<Flow> {
    Flow::new(protocol_of(text.protocol()), text.local(), text.remote()).ok()
}

fn protocol_of(protocol: holdfast_api::Protocol) -> Protocol {
    match protocol {
        holdfast_api::Protocol::Tcp => Protocol::Tcp,
        holdfast_api::Protocol::Udp => Protocol::Udp,
    }
}
