//! The donor's second half: acceptor and peers prepare, the holder diverts, the process is frozen and sent.
//!
//! Flows may appear until the process is stopped. Flows that no round has seen are armed, diverted and sent during the
//! freeze: the steps are repeated once, for them alone.

use super::Migration;
use super::asks::{Answers, AskPurpose, OWNED, of_process};
use super::command::Command;
use super::core::{Moving, Purpose, Timer};
use super::donor::{Given, Stage};
use super::event::{Event, Reason, Step};
use core::time::Duration;
use holdfast_wire::migration::{FlowAt, MoveFrame, TranslateStep};
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, MoveId, NodeId, RecordState, Refusal};

/// Time until a flow that was not diverted is requested again.
const DIVERT_AGAIN: Duration = Duration::from_millis(1);

/// A flow of a process that this node gives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Epoch at which this node owns the flow.
    pub epoch: Epoch,
    pub at: At,
}

/// Progress of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Ours,
    Diverted,
    Frozen,
    /// Closed by the process before the freeze: the remains belong to this node, at the epoch of this entry.
    Gone,
    /// The holder has no record of the flow: it moved and was closed there, or was closed here before the holder heard
    /// of it.
    Unrecorded,
}

pub(super) fn place(flow: &FlowAt) -> (Flow, Place) {
    let (epoch, at) = (flow.epoch, At::Ours);
    (flow.flow, Place { epoch, at })
}

impl Given {
    pub(super) fn flows_at(&self, at: At) -> impl Iterator<Item = FlowAt> + '_ {
        let flows = self.flows.iter().filter(move |(_, place)| place.at == at);
        flows.map(|(flow, place)| FlowAt {
            flow: *flow,
            epoch: place.epoch,
        })
    }
}

impl Migration {
    /// Prepares the freeze at acceptor and peers, after the rounds.
    pub(super) fn prepare_freeze(&mut self, now: Duration, id: MoveId) {
        let config = &self.core.config;
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.since = now;
        // The other end may be on this node too.
        let known = |node: &NodeId| config.peers.contains(node) || config.node == *node;
        given.peers.retain(|peer| known(&peer.node));
        given.unprepared = given.peers.iter().map(|peer| peer.node).collect();
        let forwarded = given.forwarded.clone();
        self.arm(id);
        self.set_deadline(id, Some(now + self.core.config.arm_timeout));
        self.tell_peers(now, id, TranslateStep::Prepare);
        if !forwarded.is_empty() {
            let connections = forwarded;
            self.core.event(Event::Forwarded { id, connections });
        }
    }

    /// Has the acceptor hold the packets of flows that are about to be diverted.
    pub(super) fn arm(&mut self, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Arming;
        given.part += 1;
        given.armed = false;
        let (to, part) = (given.to, given.part);
        let flows = given.flows_at(At::Ours).collect();
        self.core.send(to, id, MoveFrame::Arm { part, flows });
    }

    pub(super) fn armed(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        part: u32,
        result: Result<(), String>,
    ) {
        let Some(given) = self.given_in(id, Stage::Arming) else {
            return self.core.ignored(from, "Armed", "it is not waited for");
        };
        if given.part != part {
            return self.core.ignored(from, "Armed", "it answers another");
        }
        if let Err(why) = result {
            let (by, whys) = (from, vec![why]);
            return self.fail(now, id, Reason::Refused { by, whys });
        }
        given.armed = true;
        self.note(now, id);
    }

    /// Handles a peer's report on its preparation.
    pub(super) fn peer_prepared(
        &mut self,
        now: Duration,
        peer: NodeId,
        id: MoveId,
        result: Result<(), String>,
    ) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        if !given.unprepared.remove(&peer) || given.stage != Stage::Arming {
            return;
        }
        match result {
            Ok(()) => self.note(now, id),
            Err(why) => self.fail(now, id, Reason::PeerRefused { by: peer, why }),
        }
    }

    /// Forwards the connections of peers that did not answer.
    pub(super) fn forward_unprepared(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let silent = std::mem::take(&mut given.unprepared);
        let silent_peers = given
            .peers
            .extract_if(.., |peer| silent.contains(&peer.node));
        let silent_peers: Vec<_> = silent_peers.collect();
        let connections = silent_peers.iter().flat_map(|peer| &peer.connections);
        let connections: Vec<Flow> = connections.copied().collect();
        given.forwarded.extend(&connections);
        self.undo_peers(now, id, silent_peers);
        self.core.event(Event::Forwarded { id, connections });
        self.note(now, id);
    }

    /// Saves the flows that are about to be diverted, once acceptor and peers are prepared.
    fn note(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        if !given.armed || !given.unprepared.is_empty() {
            return;
        }
        let took = now.saturating_sub(given.since);
        if !given.asked {
            given.since = now;
            given.summary.phases.arm = took;
        }
        self.set_deadline(id, None);
        self.command_note(id);
    }

    fn command_note(&mut self, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Noting;
        let flows = given.flows.iter().map(|(flow, place)| FlowAt {
            flow: *flow,
            epoch: place.epoch,
        });
        let (flows, peers) = (flows.collect(), given.peers.clone());
        self.core.command(Purpose::Note(id), |token| Command::Note {
            token,
            id,
            flows,
            peers,
        });
    }

    pub(super) fn noted(&mut self, now: Duration, id: MoveId, result: Result<(), String>) {
        if self.given_in(id, Stage::Noting).is_none() {
            return;
        }
        if let Err(why) = result {
            let step = Step::Arm;
            return self.fail(now, id, Reason::Failed { step, why });
        }
        // One deadline covers all repetitions.
        if self.donor[&id].deadline.is_none() {
            self.set_deadline(id, Some(now + self.core.config.divert_timeout));
        }
        self.divert(now, id);
    }

    /// Asks the holder to divert the remaining flows; the first request also diverts the process itself.
    pub(super) fn divert(&mut self, now: Duration, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Diverting;
        let kind = ChangeKind::Divert { acceptor: given.to };
        let mut changes = Vec::new();
        if !std::mem::replace(&mut given.asked, true) {
            changes.push(of_process(id, ChangeKind::Establish, OWNED));
            changes.push(of_process(id, kind, OWNED));
        }
        let flows = given.flows_at(At::Ours);
        changes.extend(flows.map(|FlowAt { flow, epoch }| Change { flow, kind, epoch }));
        let question = self.ask(now, changes, AskPurpose::Divert(id));
        if let Some(given) = self.donor.get_mut(&id) {
            given.question = Some(question);
        }
    }

    pub(super) fn diverted(&mut self, now: Duration, id: MoveId, answers: Answers) {
        let node = self.core.config.node;
        let moving = &self.core.moving;
        let diverting = |given: &&mut Given| given.stage == Stage::Diverting;
        let Some(given) = self.donor.get_mut(&id).filter(diverting) else {
            return;
        };
        given.question = None;
        let acceptor = given.to;
        let transit = RecordState::Transit {
            donor: node,
            acceptor,
        };
        let mut answers = answers.into_iter();
        let pending: Vec<Flow> = given.flows_at(At::Ours).map(|flow| flow.flow).collect();
        if answers.len() > pending.len() {
            let process = answers.nth(1).unwrap_or(Err(Refusal { current: None }));
            let current = process.unwrap_or_else(|refusal| refusal.current);
            if current.is_none_or(|record| record.state != transit) {
                return self.fail(now, id, Reason::NotDiverted(Refusal { current }));
            }
        }
        let mut wrong = None;
        let mut missing = false;
        for (flow, answer) in pending.into_iter().zip(answers) {
            let record = answer.unwrap_or_else(|refusal| refusal.current);
            let closed = moving.get(&flow).is_some_and(Moving::is_removed);
            let Some(place) = given.flows.get_mut(&flow) else {
                continue;
            };
            match record {
                Some(record) if record.state == transit => {
                    place.epoch = record.epoch.saturating_sub(1);
                    place.at = At::Diverted;
                }
                _ if closed => place.at = At::Gone,
                // The holder has not heard of the flow yet, or knows it at another epoch: request it again.
                None => missing = true,
                Some(record) if record.is_owned_by(node) => {
                    place.epoch = record.epoch;
                    missing = true;
                }
                Some(record) => wrong = Some(Reason::NotOurs { flow, record }),
            }
        }
        match wrong {
            Some(reason) => self.fail(now, id, reason),
            None if missing => self.divert_later(now, id),
            None => self.freeze(now, id),
        }
    }

    fn divert_later(&mut self, now: Duration, id: MoveId) {
        let due = now + DIVERT_AGAIN;
        if let Some(given) = self.donor.get_mut(&id) {
            self.core
                .set_timer(Timer::Divert(id), &mut given.divert_again, Some(due));
        }
    }

    /// Repeats the divert of flows that the holder did not divert. Their epochs may have changed, and are saved first.
    pub(super) fn divert_again(&mut self, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.divert_again = None;
        if given.stage != Stage::Diverting || given.question.is_some() {
            return;
        }
        self.command_note(id);
    }
}
