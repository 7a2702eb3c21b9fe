//! Recovery after a restart: moves that the daemon finds unfinished in its saved state.
//!
//! A donor that may have diverted rolls back: the holder's answer tells whether the process moved. An acceptor that may
//! have asked to commit rolls back as well: the record names this node only if the commit was granted. Both requests
//! name the same records in the same order as without a restart.

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

/// Saved state of a move. A node may be donor or acceptor, and peer as well; it then has two of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredMove {
    /// The move.
    pub id: MoveId,
    /// Number of earlier moves of the process.
    pub hops: u32,
    /// Role of this node in the move.
    pub role: RecoveredRole,
}

/// Role of a node in a saved move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecoveredRole {
    /// The node gives the process: `CopyRound` was commanded.
    Donor {
        /// The process.
        process: ProcessId,
        /// The acceptor.
        to: NodeId,
        /// True for a clone: the original stays.
        clone: bool,
        /// Arguments of the last `Note`; none if there was none.
        noted: Option<(Vec<FlowAt>, Vec<PeerConnections>)>,
        /// True if `Freeze` was commanded: the process may be stopped.
        frozen: bool,
    },
    /// The node takes the process: `Build` was commanded.
    Acceptor {
        /// Arguments of `Restore`; none if it was not commanded.
        restored: Option<(Vec<FlowAt>, Vec<PeerConnections>)>,
        /// True if the process runs: `Go` was carried out. The epoch of the process's record is then 3.
        gone: bool,
    },
    /// The node has prepared a translation.
    Peer {
        /// The node to which the process moves.
        to: NodeId,
        /// The connections as the moving process sees them.
        connections: Vec<Flow>,
    },
}

/// Epoch at which an acceptor owns a process's record.
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
        // Peers may have been told of the move.
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
        // A refusal names the current record.
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
