//! Translation at the peers of a process's connections inside the group.
//!
//! The donor requests the preparation before the freeze, and an undo if the process stays; the acceptor requests the
//! switch when the process runs. Both repeat the request until the peer answers. A peer that has prepared and hears
//! nothing more asks the holder. A prepared connection does not begin to move itself, and a connection that moves
//! cannot be prepared: the two ends of a connection move one after the other.

use super::Migration;
use super::asks::AskPurpose;
use super::command::Command;
use super::core::{Purpose, Timer};
use super::event::Event;
use core::time::Duration;
use holdfast_wire::migration::{MoveFrame, PeerConnections, TranslateStep};
use holdfast_wire::{Flow, MoveId, NodeId, Record, RecordState};

/// A request to a peer that waits for its answer.
#[derive(Debug)]
pub(super) struct Tell {
    hops: u32,
    step: TranslateStep,
    to: NodeId,
    connections: Vec<Flow>,
    due: Option<Duration>,
    wait: Duration,
}

/// A translation prepared here, for the move of another node's process.
#[derive(Debug)]
pub(super) struct Prepared {
    hops: u32,
    to: NodeId,
    connections: Vec<Flow>,
    doubt: Option<Duration>,
}

impl Migration {
    /// Sends `step` to the peers of a move from this node.
    pub(super) fn tell_peers(&mut self, now: Duration, id: MoveId, step: TranslateStep) {
        let Some(given) = self.donor.get(&id) else {
            return;
        };
        let (hops, to, peers) = (given.hops, given.to, given.peers.clone());
        self.tell(now, id, (hops, to), step, peers);
    }

    pub(super) fn undo_peers(&mut self, now: Duration, id: MoveId, peers: Vec<PeerConnections>) {
        let Some(given) = self.donor.get(&id) else {
            return;
        };
        let of = (given.hops, given.to);
        self.tell(now, id, of, TranslateStep::Undo, peers);
    }

    pub(super) fn tell(
        &mut self,
        now: Duration,
        id: MoveId,
        (hops, to): (u32, NodeId),
        step: TranslateStep,
        peers: Vec<PeerConnections>,
    ) {
        for PeerConnections { node, connections } in peers {
            self.end_tell(id, node);
            let tell = Tell {
                hops,
                step,
                to,
                connections,
                due: None,
                wait: self.core.config.ask_retry_min,
            };
            self.tells.insert((id, node), tell);
            self.tell_again(now, id, node);
        }
    }

    pub(super) fn end_tell(&mut self, id: MoveId, peer: NodeId) {
        if let Some(mut tell) = self.tells.remove(&(id, peer)) {
            self.core
                .set_timer(Timer::Tell(id, peer), &mut tell.due, None);
        }
    }

    pub(super) fn tell_again(&mut self, now: Duration, id: MoveId, peer: NodeId) {
        let max = self.core.config.ask_retry_max;
        let Some(tell) = self.tells.get_mut(&(id, peer)) else {
            return;
        };
        let due = Some(now + tell.wait);
        self.core
            .set_timer(Timer::Tell(id, peer), &mut tell.due, due);
        tell.wait = (tell.wait * 2).min(max);
        let (hops, step, to) = (tell.hops, tell.step, tell.to);
        let connections = tell.connections.clone();
        if peer == self.core.config.node {
            return self.translate(now, id, Some(peer), (hops, step, to), connections);
        }
        let frame = MoveFrame::Translate {
            hops,
            step,
            to,
            connections,
        };
        self.core.send(peer, id, frame);
    }

    /// Repeats open requests to a peer over its new channel, because the earlier ones may be lost.
    pub(super) fn tell_all_again(&mut self, now: Duration, peer: NodeId) {
        let tells = self.tells.keys().filter(|(_, node)| *node == peer);
        let tells: Vec<MoveId> = tells.map(|(id, _)| *id).collect();
        for id in tells {
            self.tell_again(now, id, peer);
        }
    }

    /// Handles a peer's answer.
    pub(super) fn translated(
        &mut self,
        now: Duration,
        peer: NodeId,
        id: MoveId,
        step: TranslateStep,
        result: Result<(), String>,
    ) {
        if self
            .tells
            .get(&(id, peer))
            .is_none_or(|tell| tell.step != step)
        {
            return self.core.ignored(peer, "Translated", "it was not told so");
        }
        self.end_tell(id, peer);
        if step == TranslateStep::Prepare {
            return self.peer_prepared(now, peer, id, result);
        }
        if let Err(why) = result {
            let command = "Translate";
            self.core.event(Event::Failed { id, command, why });
        }
        self.forget_if_over(now, id);
    }

    /// Handles `Translate`: a process with connections to this node moves.
    pub(super) fn translate_asked(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        (hops, step, to): (u32, TranslateStep, NodeId),
        connections: Vec<Flow>,
    ) {
        if from != id.donor && from != to {
            return (self.core).ignored(from, "Translate", "the move is not the sender's");
        }
        self.translate(now, id, Some(from), (hops, step, to), connections);
    }

    fn translate(
        &mut self,
        now: Duration,
        id: MoveId,
        asker: Option<NodeId>,
        (hops, step, to): (u32, TranslateStep, NodeId),
        connections: Vec<Flow>,
    ) {
        if step == TranslateStep::Prepare {
            if connections
                .iter()
                .any(|connection| self.moves_here(connection))
            {
                let why = "the other end of a connection is moving itself".to_owned();
                return self.answer_translate(now, asker, id, step, Err(why));
            }
            self.end_prepared(id);
            let prepared = Prepared {
                hops,
                to,
                connections: connections.clone(),
                doubt: None,
            };
            self.prepared.insert(id, prepared);
        } else {
            // Removed here and not on completion: a `Prepare` that arrives in between belongs to another attempt.
            self.end_prepared(id);
        }
        let purpose = Purpose::Translate(id, asker, step);
        self.core.command(purpose, |token| Command::Translate {
            token,
            id,
            hops,
            step,
            to,
            connections,
        });
    }

    pub(super) fn translation_done(
        &mut self,
        now: Duration,
        id: MoveId,
        (asker, step): (Option<NodeId>, TranslateStep),
        result: Result<(), String>,
    ) {
        match (step, &result) {
            (TranslateStep::Prepare, Ok(())) => self.doubt_later(now, id),
            (TranslateStep::Prepare, Err(_)) => self.end_prepared(id),
            _ => {}
        }
        self.answer_translate(now, asker, id, step, result);
    }

    fn answer_translate(
        &mut self,
        now: Duration,
        asker: Option<NodeId>,
        id: MoveId,
        step: TranslateStep,
        result: Result<(), String>,
    ) {
        match (asker, result) {
            (Some(asker), result) if asker == self.core.config.node => {
                self.translated(now, asker, id, step, result);
            }
            (Some(asker), result) => {
                let frame = MoveFrame::Translated { step, result };
                self.core.send(asker, id, frame);
            }
            (None, Err(why)) => {
                let command = "Translate";
                self.core.event(Event::Failed { id, command, why });
            }
            (None, Ok(())) => {}
        }
    }

    pub(super) fn end_prepared(&mut self, id: MoveId) {
        if let Some(mut prepared) = self.prepared.remove(&id) {
            self.core
                .set_timer(Timer::Doubt(id), &mut prepared.doubt, None);
        }
    }

    pub(super) fn recover_prepared(
        &mut self,
        now: Duration,
        id: MoveId,
        (hops, to): (u32, NodeId),
        connections: Vec<Flow>,
    ) {
        let prepared = Prepared {
            hops,
            to,
            connections,
            doubt: None,
        };
        self.prepared.insert(id, prepared);
        self.doubt_later(now, id);
    }

    fn doubt_later(&mut self, now: Duration, id: MoveId) {
        let due = now + self.core.config.doubt_timeout;
        if let Some(prepared) = self.prepared.get_mut(&id) {
            self.core
                .set_timer(Timer::Doubt(id), &mut prepared.doubt, Some(due));
        }
    }

    /// Asks the holder about a move that has been silent for long.
    pub(super) fn doubt(&mut self, now: Duration, id: MoveId) {
        if let Some(prepared) = self.prepared.get_mut(&id) {
            prepared.doubt = None;
            self.look_up(now, Flow::of_move(id), AskPurpose::Doubt(id));
        }
    }

    pub(super) fn doubt_answered(&mut self, now: Duration, id: MoveId, record: Option<Record>) {
        let Some(prepared) = self.prepared.get(&id) else {
            return;
        };
        let step = match record.map(|record| record.state) {
            Some(RecordState::Transit { .. }) => return self.doubt_later(now, id),
            Some(RecordState::Owned { owner }) if owner == prepared.to => TranslateStep::Switch,
            // The record of a committed move stays until all peers have switched.
            _ => TranslateStep::Undo,
        };
        let of = (prepared.hops, step, prepared.to);
        let connections = prepared.connections.clone();
        self.translate(now, id, None, of, connections);
    }

    /// Returns true if this node has prepared for another node's move that includes the connection's other end.
    pub(super) fn is_prepared(&self, connection: &Flow) -> bool {
        let other_end = connection.mirrored();
        let mut prepared = self.prepared.values();
        prepared.any(|prepared| prepared.connections.contains(&other_end))
    }

    /// Returns true if the other end of a connection, as its moving process sees it, is moving away from this node.
    fn moves_here(&self, connection: &Flow) -> bool {
        let here = connection.mirrored();
        let peers = self.donor.values().flat_map(|given| &given.peers);
        let mut connections = peers.flat_map(|peer| &peer.connections);
        connections.any(|other| *other == here)
    }
}
