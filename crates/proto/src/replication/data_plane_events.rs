//! Reactions to the observations of the data plane.

use super::Replication;
use super::config::LagPolicy;
use super::connection::Connection;
use super::event::{DataPlaneEvent, DropReason, Event, Output};
use super::silence::Silence;
use core::time::Duration;
use holdfast_wire::replication_frames::{
    ConnectionChange, ConnectionRecord, LEGS_MAX, LegIndex, LegSet, LegTranslation,
};
use std::net::SocketAddr;

/// Number of SYN segments after which a leg that answers none is dropped: single ones may have been lost.
const HANDSHAKE_ATTEMPTS_MAX: u32 = 3;

impl Replication {
    /// Takes an observation of the data plane.
    pub fn handle_data_plane(&mut self, now: Duration, event: DataPlaneEvent) {
        if !self.is_active {
            return;
        }
        match event {
            DataPlaneEvent::Opened { record } => self.on_opened(now, record),
            DataPlaneEvent::Closed { client } => self.forget_connection(now, client),
            DataPlaneEvent::HandshakeRefused {
                client,
                refused,
                answered,
            } => self.on_handshake_refused(now, client, refused, answered),
            DataPlaneEvent::HandshakeUnanswered {
                silent,
                answered,
                attempts,
                ..
            } => self.on_handshake_unanswered(now, silent.difference(answered), attempts, answered),
            DataPlaneEvent::LegReset {
                client,
                leg,
                acknowledged,
            } => {
                if let Some(connection) = self.connections.get_mut(&client) {
                    connection.set_left_at(leg, acknowledged);
                }
                self.leave_connection(now, client, leg);
            }
            DataPlaneEvent::LegFinished {
                client,
                leg,
                acknowledged,
            } => self.on_leg_finished(now, client, leg, acknowledged),
            DataPlaneEvent::OutputAfterFin { client, finished } => {
                self.on_output_after_fin(now, client, finished);
            }
            DataPlaneEvent::LegSilent {
                client,
                leg,
                silence,
                round_trip,
                answered,
            } => self.on_leg_silent(
                now,
                &Silence {
                    client,
                    leg,
                    silence,
                    round_trip,
                    answered,
                },
            ),
            DataPlaneEvent::LegStalled { client, leg, ahead } => {
                self.on_leg_stalled(now, client, leg, ahead);
            }
            DataPlaneEvent::LegLagging { client, leg, bytes } => {
                self.on_leg_lagging(now, client, leg, bytes);
            }
            DataPlaneEvent::Diverged {
                client,
                position,
                digests,
            } => self.on_diverged(now, client, position, &digests),
            DataPlaneEvent::Progress {
                client,
                acknowledged,
                behind,
                compared,
            } => self.on_progress(now, client, acknowledged, behind, compared),
            DataPlaneEvent::LegJoined {
                client,
                leg,
                translation,
            } => self.on_leg_joined(now, client, leg, translation),
        }
    }

    fn on_opened(&mut self, now: Duration, record: ConnectionRecord) {
        let client = record.client;
        // The data plane opens a connection anew when the client has begun another one with the same port.
        self.forget_connection(now, client);
        if self.connections.len() >= self.config.connections_max {
            self.outputs.push_back(Output::ResetClient { client });
            if !self.is_full {
                self.is_full = true;
                self.report(Event::ConnectionsFull);
            }
            return;
        }
        let serving = self.legs.serving();
        let mut connection = Connection::new(record, self.legs.primary, LegSet::EMPTY);
        connection.record.live = record.live.intersection(serving);
        connection.left = serving.difference(record.live);
        let has_all = connection.record.live == serving;
        self.connections.insert(client, connection);
        if !has_all {
            self.update_connection_roles(now, client);
        }
        // The roles may have left no leg.
        if let Some(connection) = self.connections.get(&client) {
            let change = ConnectionChange::Opened(connection.record);
            self.tell_backup(now, change);
        }
    }

    fn on_handshake_refused(
        &mut self,
        now: Duration,
        client: SocketAddr,
        refused: LegSet,
        answered: LegSet,
    ) {
        let serving = self.legs.serving();
        if !answered.intersection(serving).is_empty() {
            for leg in refused.iter() {
                self.drop_leg(now, leg, DropReason::Refused);
            }
            self.outputs.push_back(Output::SendWindowUpdate { client });
        } else if serving.difference(refused).is_empty() {
            self.outputs.push_back(Output::ResetClient { client });
        }
    }

    fn on_handshake_unanswered(
        &mut self,
        now: Duration,
        silent: LegSet,
        attempts: u32,
        answered: LegSet,
    ) {
        if answered.intersection(self.legs.serving()).is_empty() {
            return;
        }
        for leg in silent.iter() {
            if attempts >= HANDSHAKE_ATTEMPTS_MAX {
                self.drop_leg(now, leg, DropReason::NoAnswer);
            } else {
                let limit = self.config.limits.silence_extra;
                self.suspect(now, leg, now, limit);
            }
        }
    }

    fn on_leg_finished(
        &mut self,
        now: Duration,
        client: SocketAddr,
        leg: LegIndex,
        acknowledged: u32,
    ) {
        let patience = self.config.fin_patience;
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        let live = connection.record.live;
        if !live.contains(leg) || connection.finished.contains(leg) {
            return;
        }
        connection.finished.insert(leg);
        connection.set_left_at(leg, acknowledged);
        let is_agreed = live.difference(connection.finished).is_empty();
        match connection.fin_deadline {
            Some(deadline) if is_agreed => {
                connection.fin_deadline = None;
                self.fin_deadlines.remove(&(deadline, client));
            }
            None if !is_agreed => {
                let deadline = now + patience;
                connection.fin_deadline = Some(deadline);
                connection.fin_since = now;
                self.fin_deadlines.insert((deadline, client));
                self.check_server(leg);
            }
            _ => {}
        }
    }

    /// Takes a proof that some legs have ended a connection too early.
    fn on_output_after_fin(&mut self, now: Duration, client: SocketAddr, finished: LegSet) {
        let live = self.connections.get(&client).map(|c| c.record.live);
        let live = live.unwrap_or_default();
        if live.difference(finished).is_empty() {
            return;
        }
        for leg in finished.intersection(live).iter() {
            self.leave_connection(now, client, leg);
        }
    }

    /// Decides about a connection that some legs have ended and others have not: by majority, or else by the primary's word.
    /// A leg that is suspected has no word, and for some time neither has a leg that lacks bytes.
    pub(super) fn compare_finished(&mut self, now: Duration, client: SocketAddr) {
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        connection.fin_deadline = None;
        let live = connection.record.live;
        let finished = connection.finished.intersection(live);
        let unfinished = live.difference(finished);
        if finished.is_empty() || unfinished.is_empty() {
            return;
        }
        let (behind, primary) = (connection.behind, connection.primary);
        let is_wait_over = now >= connection.fin_since + self.config.fin_hold_max;
        let is_level = |leg: &LegIndex| is_wait_over || behind[leg.position()] == 0;
        let open = self.heard_legs(unfinished.iter().filter(is_level).collect());
        let is_open = match open.len().cmp(&finished.len()) {
            core::cmp::Ordering::Less => false,
            core::cmp::Ordering::Equal => unfinished.contains(primary),
            core::cmp::Ordering::Greater => true,
        };
        if open.is_empty() {
            let deadline = now + self.config.fin_patience;
            if let Some(connection) = self.connections.get_mut(&client) {
                connection.fin_deadline = Some(deadline);
                self.fin_deadlines.insert((deadline, client));
            }
            return;
        }
        if let Some(connection) = self.connections.get_mut(&client) {
            // A leg that has not ended has acknowledged at least the input that others had when they ended.
            let known = connection.acknowledged;
            open.iter()
                .for_each(|leg| connection.set_left_at(leg, known));
        }
        let wrong = if is_open { finished } else { open };
        for leg in wrong.iter() {
            self.leave_connection(now, client, leg);
        }
    }

    fn on_leg_stalled(&mut self, now: Duration, client: SocketAddr, leg: LegIndex, ahead: LegSet) {
        let Some(connection) = self.connections.get(&client) else {
            return;
        };
        let live = connection.record.live;
        let standing = connection.standing();
        // More output of a leg that is wrong is no proof.
        let is_right = |other: &LegIndex| !self.legs.doubt(*other, &standing).is_about_output();
        let right = ahead.intersection(live).without(leg);
        if live.contains(leg) && right.iter().any(|other| is_right(&other)) {
            self.drop_leg(now, leg, DropReason::Stalled);
        }
    }

    fn on_leg_lagging(&mut self, now: Duration, client: SocketAddr, leg: LegIndex, bytes: u32) {
        let is_level = matches!(
            self.legs.get(leg).map(|leg| &leg.phase),
            Some(super::legs::LegPhase::CaughtUp)
        );
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        if !is_level || !connection.record.live.contains(leg) {
            return;
        }
        match self.config.lagging {
            LagPolicy::Drop => self.drop_leg(now, leg, DropReason::Lagging),
            LagPolicy::Wait if connection.lagging.contains(leg) => {}
            LagPolicy::Wait => {
                connection.lagging.insert(leg);
                self.report(Event::Lagging { client, leg, bytes });
            }
        }
    }

    fn on_progress(
        &mut self,
        now: Duration,
        client: SocketAddr,
        acknowledged: u32,
        behind: [u32; LEGS_MAX],
        compared: LegSet,
    ) {
        let level_bytes = self.config.level_bytes;
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        connection.acknowledged = acknowledged;
        connection.behind = behind;
        connection.uncompared = connection.uncompared.difference(compared);
        let is_level = |leg: &LegIndex| behind[leg.position()] <= level_bytes;
        let live = connection.record.live.difference(connection.uncompared);
        let level: LegSet = live.iter().filter(is_level).collect();
        let without_input = connection.legs_without_input();
        for leg in level.iter() {
            self.on_level(leg, client);
        }
        for leg in without_input.iter() {
            self.drop_leg(now, leg, DropReason::MissedInput);
        }
    }

    fn on_leg_joined(
        &mut self,
        now: Duration,
        client: SocketAddr,
        leg: LegIndex,
        translation: LegTranslation,
    ) {
        if let Some(connection) = self.connections.get_mut(&client) {
            connection.record.legs[leg.position()] = Some(translation);
            connection.record.live.insert(leg);
            connection.left.remove(leg);
            let change = ConnectionChange::Opened(connection.record);
            self.tell_backup(now, change);
        }
    }
}
