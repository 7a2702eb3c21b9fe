//! After a restart: moves that the last life of the daemon left in the middle.
//!
//! A donor that may have diverted rolls back: the holder's answer tells whether the process moved. An acceptor that may
//! have asked to commit rolls back as well: only if it was granted the commit, the record names this node. Both name the
//! same records in the same order as ever.

use super::acceptor::{Stage, Taken};
use super::asks::{Answers, AskPurpose};
use super::command::ProcessId;
use super::donor::Given;
use super::event::Reason;
use super::give::{At, Place};
use super::take::changes;
use super::{Migration, Options};
use core::time::Duration;
use holdfast_wire::migration::{FlowAt, MoveFrame, PeerConnections};
use holdfast_wire::{ChangeKind, Epoch, Flow, MoveId, NodeId};

/// What was written down of a move. A node may be donor or acceptor, and peer as well: then there are two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredMove {
    /// Which.
    pub id: MoveId,
    /// How often the process had moved before.
    pub hops: u32,
    /// What this node does in it.
    pub role: RecoveredRole,
}

/// What a node does in a move that was written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecoveredRole {
    /// It gives the process: `CopyRound` was commanded.
    Donor {
        /// The process.
        process: ProcessId,
        /// To whom.
        to: NodeId,
        /// The original stays.
        clone: bool,
        /// Of the last `Note`; none if there was none.
        noted: Option<(Vec<FlowAt>, Vec<PeerConnections>)>,
        /// `Freeze` was commanded: the process may be stopped.
        frozen: bool,
    },
    /// It takes the process: `Build` was commanded.
    Acceptor {
        /// Of `Restore`; none if it was not commanded.
        restored: Option<(Vec<FlowAt>, Vec<PeerConnections>)>,
        /// It runs: of the last `Go`, with the epoch of the process's record, which is 3.
        gone: bool,
    },
    /// It has prepared a translation.
    Peer {
        /// To whom the process moves.
        to: NodeId,
        /// The connections as the moving process sees them.
        connections: Vec<Flow>,
    },
}

/// The epoch at which an acceptor owns a process's record.
const COMMITTED: Epoch = super::asks::TRANSIT + 1;

impl Migration {
    pub(super) fn recovered(&mut self, now: Duration, moves: Vec<RecoveredMove>) {
        for RecoveredMove { id, hops, role } in moves {
            match role {
                RecoveredRole::Donor {
                    process,
                    to,
                    clone,
                    noted,
                    frozen,
                } => {
                    let options = Options {
                        clone,
                        ..Options::default()
                    };
                    let mut given = Given::new(process, to, options, now);
                    given.hops = hops;
                    given.frozen = frozen && !clone;
                    self.recover_given(now, id, given, noted);
                }
                RecoveredRole::Acceptor { restored, gone } => {
                    let mut taken = Taken::new(Stage::Waiting, now);
                    taken.hops = hops;
                    self.recover_taken(now, id, taken, restored, gone);
                }
                RecoveredRole::Peer { to, connections } => {
                    self.recover_prepared(now, id, (hops, to), connections);
                }
            }
        }
    }

    fn recover_given(
        &mut self,
        now: Duration,
        id: MoveId,
        mut given: Given,
        noted: Option<(Vec<FlowAt>, Vec<PeerConnections>)>,
    ) {
        let (to, asked) = (given.to, noted.is_some());
        let (flows, peers) = noted.unwrap_or_default();
        let at = At::Frozen;
        let places = flows.iter().map(|of| {
            let epoch = of.epoch;
            (of.flow, Place { epoch, at })
        });
        given.flows = places.collect();
        given.peers = peers;
        given.asked = asked;
        // Peers may have been told.
        given.part = 1;
        let named: Vec<Flow> = given.flows.keys().copied().collect();
        self.donor.insert(id, given);
        let begun = self.core.begin_flows(id, named.into_iter());
        debug_assert!(begun.is_ok(), "a flow was written down twice");
        let reason = Reason::Restarted.to_string();
        self.core.send(to, id, MoveFrame::Abort { reason });
        match asked {
            true => self.roll_back(now, id),
            false => self.thaw(now, id),
        }
    }

    fn recover_taken(
        &mut self,
        now: Duration,
        id: MoveId,
        mut taken: Taken,
        restored: Option<(Vec<FlowAt>, Vec<PeerConnections>)>,
        gone: bool,
    ) {
        let known = restored.is_some();
        let (flows, peers) = restored.unwrap_or_default();
        taken.flows = flows;
        taken.peers = peers;
        if gone {
            taken.stage = Stage::Gone;
            taken.epoch = COMMITTED;
            taken.wait = self.core.config.ask_retry_min;
            self.acceptor.insert(id, taken);
            self.switch_peers(now, id);
            return self.say_done(now, id);
        }
        let named: Vec<Flow> = taken.flows.iter().map(|flow| flow.flow).collect();
        let rollback = changes(id, ChangeKind::Rollback, &taken.flows);
        if known {
            taken.stage = Stage::Committing;
        }
        self.acceptor.insert(id, taken);
        let begun = self.core.begin_flows(id, named.into_iter());
        debug_assert!(begun.is_ok(), "a flow was written down twice");
        match known {
            true => drop(self.ask(now, rollback, AskPurpose::Restarted(id))),
            false => self.discard(id, "the daemon restarted before it had all of it"),
        }
    }

    pub(super) fn restarted_take_answered(&mut self, now: Duration, id: MoveId, answers: Answers) {
        let node = self.core.config.node;
        if self.taken_in(id, Stage::Committing).is_none() {
            return;
        }
        // What is refused names the record as it stands.
        let records = answers.into_iter();
        let mut records = records.map(|answer| answer.unwrap_or_else(|refusal| refusal.current));
        match records.next().flatten() {
            Some(record) if record.is_owned_by(node) => self.go(now, id, record, records),
            _ => {
                self.discard(id, "the daemon restarted before it was committed");
                self.say_never(id, "its daemon restarted before it was committed");
            }
        }
    }
}
