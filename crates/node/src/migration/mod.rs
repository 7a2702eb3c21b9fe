//! Processes that move: feeds [`holdfast_proto::migration`] and carries out what it asks, beside [`crate::engine`], whose
//! event loop both share.
//!
//! The work is done by threads, one for each move, since a tracer must stay on one thread and memory takes its time: a
//! donor's (`donor`), an acceptor's (`acceptor`). They tell the event loop (`told`) what to send and what has ended.
//! What must outlive the daemon is written down first (`records`).

mod acceptor;
mod asked;
mod beginnings;
mod carry;
mod check;
mod connections;
mod domains;
mod donor;
mod follow;
mod heard;
mod keyrings;
mod left;
mod leftovers;
mod locks;
mod names;
mod operations;
mod pack;
mod pieces;
mod places;
mod policy;
mod records;
mod rehearsals;
mod residents;
mod sights;
mod state;
mod steps;
mod told;
mod units;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_api::control::ResidentProcess;
use holdfast_proto::migration::{
    Completion, Config as MachineConfig, Event, Migration, Output, RecoveredRole,
};
use holdfast_sys::cgroup::Groups;
use holdfast_wire::migration::{FlowAt, MoveFrame};
use holdfast_wire::{Flow, Frame, MoveId, NodeId};

pub use acceptor::RESTORER;
pub(crate) use names::{name_of_command, name_of_results, token_of};
pub(crate) use told::{Listener, Told};

use crate::config::{Config, Reach};
use acceptor::Acceptor;
use donor::Donor;
use operations::Operations;
use pieces::WINDOW_BYTES;
pub(crate) use places::{Addresses, Place};
use policy::Policy;
use records::Records;
pub(crate) use rehearsals::Inquiry;
use rehearsals::Rehearsals;
use residents::Residents;
use told::Teller;

/// The room of moves. Its owner takes what [`Moves::next`] gives, and feeds it what it hears.
pub(crate) struct Moves {
    machine: Migration,
    enabled: bool,
    policy: Policy,
    records: Records,
    residents: Residents,
    operations: Operations,
    rehearsals: Rehearsals,
    donors: BTreeMap<MoveId, Donor>,
    acceptors: BTreeMap<MoveId, Acceptor>,
    /// Flows whose packets wait for processes that come, in their order.
    armed: BTreeMap<MoveId, Vec<FlowAt>>,
    /// Memory follows these processes, which run here.
    following: BTreeSet<MoveId>,
    /// Bytes of pieces that acceptors' threads have not taken yet.
    untaken: BTreeMap<MoveId, usize>,
    /// The sockets of processes that move.
    places: BTreeMap<MoveId, Vec<Place>>,
    /// For this node's stack, before sockets of processes that come act.
    packets: BTreeMap<MoveId, Vec<Vec<u8>>>,
    addresses: Addresses,
    /// The control groups of this node.
    groups: Groups,
    /// Every node gets every packet.
    broadcast: bool,
    /// Freezes go ahead of ordinary threads.
    hurries: bool,
    /// What nodes are called.
    nodes: BTreeMap<NodeId, String>,
    teller: Teller,
}

/// Something that only the owner can do.
pub(crate) enum Next {
    /// Send a frame; if that fails, the peer is lost.
    Send(NodeId, Frame),
    /// Carry this out (see [`Moves::execute`]).
    Do(Box<holdfast_proto::migration::Command>),
    /// Report these to the holder, as the handoff's machine does.
    Report(Vec<holdfast_wire::Change>),
}

impl Moves {
    /// A room with what an earlier daemon left.
    ///
    /// # Errors
    /// The run directory cannot be used.
    pub(crate) fn open(
        machine: MachineConfig,
        config: &Config,
    ) -> std::io::Result<(Moves, Listener)> {
        let groups = config.node.cgroup().map_err(std::io::Error::other)?;
        let groups = Groups::new(groups);
        let records = Records::open(&config.node.run_dir)?;
        let (teller, listener) = told::way();
        let nodes = config
            .nodes()
            .map(|(id, name)| (id, name.to_owned()))
            .collect();
        let addresses = Addresses::new(
            config.services.iter().map(|service| service.address.ip()),
            config.addresses(),
        );
        let moves = Moves {
            machine: Migration::new(machine),
            enabled: config.migration.enabled,
            policy: Policy::new(
                &config.migration,
                addresses.clone(),
                (config.services.iter()).map(|service| service.address.port()),
            ),
            residents: Residents::open(records.residents(), groups.clone()),
            records,
            operations: Operations::default(),
            rehearsals: Rehearsals::default(),
            donors: BTreeMap::new(),
            acceptors: BTreeMap::new(),
            armed: BTreeMap::new(),
            following: BTreeSet::new(),
            untaken: BTreeMap::new(),
            places: BTreeMap::new(),
            packets: BTreeMap::new(),
            addresses,
            groups,
            hurries: config.node.realtime,
            broadcast: matches!(config.group.reach, Reach::Broadcast { .. }),
            nodes,
            teller,
        };
        Ok((moves, listener))
    }

    /// Tells the machine what an earlier daemon wrote down; before anything else.
    pub(crate) fn recover(&mut self, now: Duration) {
        let found = self.records.found();
        for of in &found {
            tracing::warn!(id = %of.id, role = ?of.role, "a move that an earlier daemon left");
        }
        self.machine.handle_recovered(now, found);
    }

    /// The machine, for what needs nothing of this room.
    pub(crate) fn machine(&mut self) -> &mut Migration {
        &mut self.machine
    }

    /// When the machine is to be woken.
    pub(crate) fn wake(&self) -> Option<Duration> {
        self.machine.poll_timeout()
    }

    /// The next thing to do; none when all is done.
    pub(crate) fn next(&mut self) -> Option<Next> {
        loop {
            return Some(match self.machine.poll_output()? {
                Output::Send { to, frame } => Next::Send(to, frame),
                Output::Do(command) => Next::Do(Box::new(command)),
                Output::Event(Event::Report { changes }) => Next::Report(changes),
                Output::Event(event) => {
                    self.event(&event);
                    continue;
                }
            });
        }
    }

    fn event(&mut self, event: &Event) {
        self.operations.event(event);
        match event {
            Event::Outcome {
                id,
                outcome,
                summary,
            } => {
                if self.rehearsals.end(*id, outcome) {
                    return;
                }
                let freeze_us = summary.phases.freeze().as_micros();
                tracing::info!(%id, ?outcome, freeze_us, bytes = summary.bytes, "a move has ended");
            }
            Event::Accepted { id, flows } => {
                tracing::info!(%id, flows = flows.len(), "a process has come");
            }
            Event::Discarded { id, why } => tracing::warn!(%id, why, "given up as acceptor"),
            Event::HolderSilent { holder } => {
                tracing::warn!(%holder, "the holder does not answer; asking again");
            }
            Event::HolderForgot { id } => {
                tracing::warn!(%id, "the holder does not know a move any more; asking the acceptor");
            }
            Event::Failed { id, command, why } => {
                tracing::error!(%id, command, why, "could not be carried out");
            }
            Event::Ignored { from, what, why } => tracing::debug!(%from, what, why, "ignored"),
            Event::Round { .. }
            | Event::Forwarded { .. }
            | Event::Follows { .. }
            | Event::Report { .. } => {
                tracing::debug!(?event, "a move goes on");
            }
        }
    }

    /// Takes a frame about a move, or an answer that is this machine's.
    pub(crate) fn handle_frame(&mut self, now: Duration, from: NodeId, frame: Frame) {
        match frame {
            Frame::Move {
                id,
                frame: MoveFrame::Piece { kind, more, bytes },
            } if id.donor == from => self.piece(id, kind, more, bytes),
            Frame::Move {
                id,
                frame:
                    MoveFrame::Took {
                        bytes,
                        busy_us,
                        problem,
                    },
            } => {
                let donor = self.donors.get(&id).filter(|donor| donor.to == from);
                if let Some(donor) = donor {
                    donor.took((bytes, busy_us), problem.as_deref());
                }
            }
            Frame::Move {
                id,
                frame: MoveFrame::Judged { refusals },
            } => {
                let donor = self.donors.get(&id).filter(|donor| donor.to == from);
                donor
                    .into_iter()
                    .for_each(|donor| donor.judged(refusals.clone()));
            }
            Frame::Move {
                id,
                frame: MoveFrame::Wanted(wanted),
            } => self.wanted(from, id, wanted),
            Frame::Move {
                id,
                frame: MoveFrame::Locks { bytes },
            } => {
                let donor = self.donors.get(&id).filter(|donor| donor.to == from);
                if let Some(donor) = donor {
                    donor.job(donor::Job::Locks(bytes));
                }
            }
            frame => self.machine.handle_frame(now, from, frame),
        }
    }

    fn piece(&mut self, id: MoveId, kind: u8, more: bool, bytes: bytes::Bytes) {
        let Some(acceptor) = self.acceptors.get(&id) else {
            return self.unknown_piece(id, kind);
        };
        let untaken = self.untaken.entry(id).or_default();
        *untaken += bytes.len();
        // A donor that waits for us never has more on its way.
        let before = *untaken - bytes.len();
        if *untaken > 2 * WINDOW_BYTES {
            // Nothing of it is taken any more, and that is said once.
            if before <= 2 * WINDOW_BYTES {
                let why = "the donor does not wait until its pieces are taken";
                acceptor.job(acceptor::Job::Refuse(why.to_owned()));
            }
            return;
        }
        acceptor.job(acceptor::Job::Piece { kind, more, bytes });
    }

    /// A peer cannot be reached any more.
    pub(crate) fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        for donor in self.donors.values().filter(|donor| donor.to == peer) {
            donor.lost();
        }
        self.machine.handle_peer_lost(now, peer);
    }

    /// A command has ended.
    pub(crate) fn done(&mut self, now: Duration, completion: Completion) {
        self.machine.handle_done(now, completion);
    }

    /// Which addresses are whose.
    pub(crate) fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// The sockets of a process that moves, as last seen.
    pub(crate) fn places(&self, id: MoveId) -> &[Place] {
        self.places.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Those of one that has come.
    pub(crate) fn take_places(&mut self, id: MoveId) -> Vec<Place> {
        self.places.remove(&id).unwrap_or_default()
    }

    /// What is to be given to the stack before the sockets of a process that comes act.
    pub(crate) fn take_packets(&mut self, id: MoveId) -> Vec<Vec<u8>> {
        self.packets.remove(&id).unwrap_or_default()
    }

    /// To whom a process goes.
    pub(crate) fn acceptor_of(&self, id: MoveId) -> Option<NodeId> {
        self.donors.get(&id).map(|donor| donor.to)
    }

    /// Flows of moves that an earlier daemon wrote down: they are no handoff's.
    pub(crate) fn written_flows(&self) -> BTreeSet<Flow> {
        let lists = self
            .records
            .found()
            .into_iter()
            .filter_map(|of| match of.role {
                RecoveredRole::Donor { noted, .. } => noted,
                RecoveredRole::Acceptor { restored, .. } => restored,
                RecoveredRole::Peer { .. } => None,
            });
        lists
            .flat_map(|(flows, _)| flows)
            .map(|of| of.flow)
            .collect()
    }

    /// Flows of processes that run here, but for whose move an earlier daemon has not done everything.
    pub(crate) fn running_flows(&self) -> BTreeSet<Flow> {
        let found = self.records.found().into_iter();
        let lists = found.filter_map(|of| match of.role {
            RecoveredRole::Acceptor {
                restored,
                gone: true,
            } => restored,
            _ => None,
        });
        lists
            .flat_map(|(flows, _)| flows)
            .map(|of| of.flow)
            .collect()
    }

    /// Once a second.
    pub(crate) fn upkeep(&mut self) {
        self.residents.look();
    }

    /// The processes that came here.
    pub(crate) fn residents(&self) -> Vec<ResidentProcess> {
        self.residents.list()
    }
}
