//! Process migration: feeds [`holdfast_proto::migration`] and carries out its commands. Runs in the event loop of
//! [`crate::engine`].
//!
//! Each move has a thread of its own, because a tracer must stay on one thread and copying memory takes time: a donor's
//! thread (`donor`) or an acceptor's thread (`acceptor`). The threads report to the event loop (`told`) messages to
//! send and completed commands. State that must outlive the daemon is first written to a record (`records`).

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

/// State of all moves. The owner carries out the results of [`Moves::next`] and passes in frames and events.
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
    /// Flows whose packets are held for processes being moved here, sorted.
    armed: BTreeMap<MoveId, Vec<FlowAt>>,
    /// Processes that run here while their remaining pages are still being sent (post-copy).
    following: BTreeSet<MoveId>,
    /// Bytes of pieces that the acceptors' threads have not consumed yet.
    untaken: BTreeMap<MoveId, usize>,
    /// Sockets of moving processes.
    places: BTreeMap<MoveId, Vec<Place>>,
    /// Packets to give to this node's stack before the sockets of a restored process become active.
    packets: BTreeMap<MoveId, Vec<Vec<u8>>>,
    addresses: Addresses,
    /// Control groups of this node.
    groups: Groups,
    /// True if every node receives every packet.
    broadcast: bool,
    /// True if freezes run at real-time priority.
    hurries: bool,
    /// Names of the nodes.
    nodes: BTreeMap<NodeId, String>,
    teller: Teller,
}

/// Work that only the owner can do.
pub(crate) enum Next {
    /// Send a frame. A failure means that the peer is lost.
    Send(NodeId, Frame),
    /// Carry out the command (see [`Moves::execute`]).
    Do(Box<holdfast_proto::migration::Command>),
    /// Report the changes to the holder by way of the handoff machine.
    Report(Vec<holdfast_wire::Change>),
}

impl Moves {
    /// Opens the state, with the records of an earlier daemon.
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

    /// Reports an earlier daemon's records to the machine. Must be called first.
    pub(crate) fn recover(&mut self, now: Duration) {
        let found = self.records.found();
        for of in &found {
            tracing::warn!(id = %of.id, role = ?of.role, "a move that an earlier daemon left");
        }
        self.machine.handle_recovered(now, found);
    }

    /// Returns the machine, for inputs that concern nothing else here.
    pub(crate) fn machine(&mut self) -> &mut Migration {
        &mut self.machine
    }

    /// Returns the time of the machine's next timeout.
    pub(crate) fn wake(&self) -> Option<Duration> {
        self.machine.poll_timeout()
    }

    /// Returns the next piece of work; `None` if there is none.
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

    /// Handles a frame about a move, or an answer to this machine's request.
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
        // A donor that observes the window never has more in transit.
        let before = *untaken - bytes.len();
        if *untaken > 2 * WINDOW_BYTES {
            // The problem is reported once; further pieces are ignored.
            if before <= 2 * WINDOW_BYTES {
                let why = "the donor does not wait until its pieces are taken";
                acceptor.job(acceptor::Job::Refuse(why.to_owned()));
            }
            return;
        }
        acceptor.job(acceptor::Job::Piece { kind, more, bytes });
    }

    /// Handles the loss of a peer.
    pub(crate) fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        for donor in self.donors.values().filter(|donor| donor.to == peer) {
            donor.lost();
        }
        self.machine.handle_peer_lost(now, peer);
    }

    /// Reports a completed command to the machine.
    pub(crate) fn done(&mut self, now: Duration, completion: Completion) {
        self.machine.handle_done(now, completion);
    }

    /// Returns the service and node addresses.
    pub(crate) fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Returns the sockets of a moving process, as of the last round.
    pub(crate) fn places(&self, id: MoveId) -> &[Place] {
        self.places.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Takes the sockets of a process that was restored here.
    pub(crate) fn take_places(&mut self, id: MoveId) -> Vec<Place> {
        self.places.remove(&id).unwrap_or_default()
    }

    /// Takes the packets to give to the stack before the sockets of a restored process become active.
    pub(crate) fn take_packets(&mut self, id: MoveId) -> Vec<Vec<u8>> {
        self.packets.remove(&id).unwrap_or_default()
    }

    /// Returns the node to which a process moves.
    pub(crate) fn acceptor_of(&self, id: MoveId) -> Option<NodeId> {
        self.donors.get(&id).map(|donor| donor.to)
    }

    /// Returns the flows of moves in an earlier daemon's records; none of them belongs to a handoff.
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

    /// Returns the flows of processes that run here but whose moves an earlier daemon did not finish.
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

    /// Does the periodic work, once a second.
    pub(crate) fn upkeep(&mut self) {
        self.residents.look();
    }

    /// Returns the processes that were moved here.
    pub(crate) fn residents(&self) -> Vec<ResidentProcess> {
        self.residents.list()
    }
}
