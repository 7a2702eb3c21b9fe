//! Translation at the peers of a process's connections inside the group.
//!
//! The donor requests the preparation before the freeze, and an undo if the process stays; the acceptor requests the
//! switch when the process runs. Both repeat the request until the peer answers. A peer that has prepared and hears
//! nothing more asks the holder. A prepared connection does not begin to move itself, and a connection that moves
//! cannot be prepared: the two ends of a connection move one after the other.

use super::Migration;
use super::command::Command;
use super::event::Event;
use super::migration_core::{CommandPurpose, MoveTimer};
use super::requests_to_holder::HolderRequestPurpose;
use core::time::Duration;
use holdfast_wire::failure::{Failure, NodeFault};
use holdfast_wire::move_frames::{MoveFrame, PeerConnections, TranslationStep};
use holdfast_wire::{Flow, MoveId, NodeId, OwnershipRecord, RecordState};

/// A request to a peer that waits for its answer.
#[derive(Debug)]
pub(super) struct TranslateRequest {
    hops: u32,
    step: TranslationStep,
    to: NodeId,
    connections: Vec<Flow>,
    due: Option<Duration>,
    next_wait: Duration,
}

/// A translation prepared here, for the move of another node's process.
#[derive(Debug)]
pub(super) struct PreparedTranslation {
    hops: u32,
    to: NodeId,
    connections: Vec<Flow>,
    outcome_query_due: Option<Duration>,
}

impl Migration {
    /// Sends `step` to the peers of a move from this node.
    pub(super) fn translate_at_peers(&mut self, now: Duration, id: MoveId, step: TranslationStep) {
        let Some(outbound) = self.outbound_moves.get(&id) else {
            return;
        };
        let (hops, to, peers) = (outbound.hops, outbound.to, outbound.peers.clone());
        self.request_translation(now, id, (hops, to), step, peers);
    }

    pub(super) fn undo_at_peers(&mut self, now: Duration, id: MoveId, peers: Vec<PeerConnections>) {
        let Some(outbound) = self.outbound_moves.get(&id) else {
            return;
        };
        let target = (outbound.hops, outbound.to);
        self.request_translation(now, id, target, TranslationStep::Undo, peers);
    }

    pub(super) fn request_translation(
        &mut self,
        now: Duration,
        id: MoveId,
        (hops, to): (u32, NodeId),
        step: TranslationStep,
        peers: Vec<PeerConnections>,
    ) {
        for PeerConnections { node, connections } in peers {
            self.end_translate_request(id, node);
            let request = TranslateRequest {
                hops,
                step,
                to,
                connections,
                due: None,
                next_wait: self.core.config.retry_min,
            };
            self.translate_requests.insert((id, node), request);
            self.repeat_translate_request(now, id, node);
        }
    }

    pub(super) fn end_translate_request(&mut self, id: MoveId, peer: NodeId) {
        if let Some(mut request) = self.translate_requests.remove(&(id, peer)) {
            self.core.set_timer(
                MoveTimer::TranslateRequest(id, peer),
                &mut request.due,
                None,
            );
        }
    }

    pub(super) fn repeat_translate_request(&mut self, now: Duration, id: MoveId, peer: NodeId) {
        let max = self.core.config.retry_max;
        let Some(request) = self.translate_requests.get_mut(&(id, peer)) else {
            return;
        };
        let due = Some(now + request.next_wait);
        self.core
            .set_timer(MoveTimer::TranslateRequest(id, peer), &mut request.due, due);
        request.next_wait = (request.next_wait * 2).min(max);
        let (hops, step, to) = (request.hops, request.step, request.to);
        let connections = request.connections.clone();
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
    pub(super) fn repeat_translate_requests(&mut self, now: Duration, peer: NodeId) {
        let tells = self
            .translate_requests
            .keys()
            .filter(|(_, node)| *node == peer);
        let tells: Vec<MoveId> = tells.map(|(id, _)| *id).collect();
        for id in tells {
            self.repeat_translate_request(now, id, peer);
        }
    }

    /// Handles a peer's answer.
    pub(super) fn on_translated(
        &mut self,
        now: Duration,
        peer: NodeId,
        id: MoveId,
        step: TranslationStep,
        result: Result<(), Failure>,
    ) {
        if self
            .translate_requests
            .get(&(id, peer))
            .is_none_or(|tell| tell.step != step)
        {
            return self.core.outputs.report_ignored(
                peer,
                "TranslateResponse",
                "no open request for this step",
            );
        }
        self.end_translate_request(id, peer);
        if step == TranslationStep::Prepare {
            return self.on_peer_prepared(now, peer, id, result);
        }
        if let Err(error) = result {
            let command = "Translate";
            self.core
                .outputs
                .push_event(Event::CommandFailed { id, command, error });
        }
        self.remove_if_finished(now, id);
    }

    /// Handles `Translate`: a process with connections to this node moves.
    pub(super) fn on_translate(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        (hops, step, to): (u32, TranslationStep, NodeId),
        connections: Vec<Flow>,
    ) {
        if from != id.donor && from != to {
            return (self.core.outputs).report_ignored(
                from,
                "Translate",
                "the sender is neither donor nor acceptor",
            );
        }
        self.translate(now, id, Some(from), (hops, step, to), connections);
    }

    fn translate(
        &mut self,
        now: Duration,
        id: MoveId,
        asker: Option<NodeId>,
        (hops, step, to): (u32, TranslationStep, NodeId),
        connections: Vec<Flow>,
    ) {
        if step == TranslationStep::Prepare {
            if connections
                .iter()
                .any(|connection| self.is_other_end_moving(connection))
            {
                let failure = NodeFault::BothEndsMoving.into();
                return self.answer_translate(now, asker, id, step, Err(failure));
            }
            self.drop_prepared_translation(id);
            let prepared = PreparedTranslation {
                hops,
                to,
                connections: connections.clone(),
                outcome_query_due: None,
            };
            self.prepared_translations.insert(id, prepared);
        } else {
            // Removed here and not on completion: a `Prepare` that arrives in between belongs to another attempt.
            self.drop_prepared_translation(id);
        }
        let purpose = CommandPurpose::Translate(id, asker, step);
        self.core.push_command(purpose, |token| Command::Translate {
            token,
            id,
            hops,
            step,
            to,
            connections,
        });
    }

    pub(super) fn on_translation_done(
        &mut self,
        now: Duration,
        id: MoveId,
        (asker, step): (Option<NodeId>, TranslationStep),
        result: Result<(), Failure>,
    ) {
        match (step, &result) {
            (TranslationStep::Prepare, Ok(())) => self.schedule_outcome_query(now, id),
            (TranslationStep::Prepare, Err(_)) => self.drop_prepared_translation(id),
            _ => {}
        }
        self.answer_translate(now, asker, id, step, result);
    }

    fn answer_translate(
        &mut self,
        now: Duration,
        asker: Option<NodeId>,
        id: MoveId,
        step: TranslationStep,
        result: Result<(), Failure>,
    ) {
        match (asker, result) {
            (Some(asker), result) if asker == self.core.config.node => {
                self.on_translated(now, asker, id, step, result);
            }
            (Some(asker), result) => {
                let frame = MoveFrame::TranslateResponse { step, result };
                self.core.send(asker, id, frame);
            }
            (None, Err(why)) => {
                let command = "Translate";
                self.core.outputs.push_event(Event::CommandFailed {
                    id,
                    command,
                    error: why,
                });
            }
            (None, Ok(())) => {}
        }
    }

    pub(super) fn drop_prepared_translation(&mut self, id: MoveId) {
        if let Some(mut prepared) = self.prepared_translations.remove(&id) {
            self.core.set_timer(
                MoveTimer::OutcomeQuery(id),
                &mut prepared.outcome_query_due,
                None,
            );
        }
    }

    pub(super) fn recover_translation(
        &mut self,
        now: Duration,
        id: MoveId,
        (hops, to): (u32, NodeId),
        connections: Vec<Flow>,
    ) {
        let prepared = PreparedTranslation {
            hops,
            to,
            connections,
            outcome_query_due: None,
        };
        self.prepared_translations.insert(id, prepared);
        self.schedule_outcome_query(now, id);
    }

    fn schedule_outcome_query(&mut self, now: Duration, id: MoveId) {
        let due = now + self.core.config.outcome_query_interval;
        if let Some(prepared) = self.prepared_translations.get_mut(&id) {
            self.core.set_timer(
                MoveTimer::OutcomeQuery(id),
                &mut prepared.outcome_query_due,
                Some(due),
            );
        }
    }

    /// Asks the holder about a move that has been silent for long.
    pub(super) fn query_outcome(&mut self, now: Duration, id: MoveId) {
        if let Some(prepared) = self.prepared_translations.get_mut(&id) {
            prepared.outcome_query_due = None;
            self.request_lookup(
                now,
                Flow::process_key(id),
                HolderRequestPurpose::OutcomeQuery(id),
            );
        }
    }

    pub(super) fn on_outcome_answered(
        &mut self,
        now: Duration,
        id: MoveId,
        record: Option<OwnershipRecord>,
    ) {
        let Some(prepared) = self.prepared_translations.get(&id) else {
            return;
        };
        let step = match record.map(|record| record.state) {
            Some(RecordState::Transit { .. }) => return self.schedule_outcome_query(now, id),
            Some(RecordState::Owned { owner }) if owner == prepared.to => TranslationStep::Switch,
            // The record of a committed move stays until all peers have switched.
            _ => TranslationStep::Undo,
        };
        let target = (prepared.hops, step, prepared.to);
        let connections = prepared.connections.clone();
        self.translate(now, id, None, target, connections);
    }

    /// Returns true if this node has prepared for another node's move that includes the connection's other end.
    pub(super) fn has_prepared_translation(&self, connection: &Flow) -> bool {
        let other_end = connection.mirrored();
        let mut prepared = self.prepared_translations.values();
        prepared.any(|prepared| prepared.connections.contains(&other_end))
    }

    /// Returns true if the other end of a connection, as its moving process sees it, is moving away from this node.
    fn is_other_end_moving(&self, connection: &Flow) -> bool {
        let other_end = connection.mirrored();
        let peers = self
            .outbound_moves
            .values()
            .flat_map(|outbound| &outbound.peers);
        let mut connections = peers.flat_map(|peer| &peer.connections);
        connections.any(|other| *other == other_end)
    }
}
