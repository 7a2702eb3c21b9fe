//! Replication of the connections of one service (paper 003): the contact node's replicator sends each packet of a client to a
//! primary and its replicas, and a replica goes on inside the same connection when the primary dies.
//!
//! The data plane moves packets: it translates numbers per leg, shows the client the lowest acknowledgement of all live
//! legs, lets a replica send no further than the client has been sent to, holds back FIN and RST, and compares the
//! outputs. This machine decides: which legs serve, which one the client sees, when a client is reset.
//!
//! ```text
//!   data plane ── DataPlaneEvent ──►┌─────────────┐── SetRoles, SetConnectionRoles, SendWindowUpdate ──► data plane
//!   heartbeats ── handle_heard ────►│ Replication │── ShowSynAck, ResetClient ─────────────────────────► data plane
//!   health ────── handle_server ───►│             │── Send ────► BackupCopy at the backup
//!   operator ──── promote, stop ───►└─────────────┘── Probe, CheckServer, Event
//! ```
//!
//! - **A leg that missed input is useless**: a leg that ends a connection leaves it, and leaves the service once the others
//!   acknowledge further input there. So every byte that a client was told is acknowledged is in each live leg.
//! - **Silence is not proof**: a lost packet silences a busy leg for longer than the silence limit. A silent leg is probed, and
//!   dropped if its node does not answer either, while other legs are heard. If none is heard, this node's own link may be
//!   broken, and nobody is dropped before `last_leg_patience` is over.
//! - **Promotion** takes the leg with the least doubt, and among several the one that lacks the fewest bytes. A leg whose
//!   output differed, or was not compared, is promoted only when no sound leg lives.
//! - **The last leg** is dropped only when its node is lost; then its clients are reset. When the last leg of one connection
//!   resets it, the client is reset.

mod backup_copy;
mod backup_sender;
mod config;
mod connection;
mod data_plane_events;
mod divergence;
mod event;
mod leg_changes;
mod leg_report;
mod legs;
pub mod mask;
mod operator;
mod silence;
#[cfg(test)]
mod tests;

pub use backup_copy::BackupCopy;
pub use config::{DivergencePolicy, LagPolicy, ReplicatedServiceConfig, WatchLimits};
pub use event::{CommandError, DataPlaneEvent, DropReason, Event, Output, Protection};
pub use leg_report::{LegReport, LegStanding};

use crate::view::View;
use backup_sender::{BackupSender, Io};
use connection::Connection;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::{ServerProblem, ServerState};
use holdfast_wire::replication_frames::{
    ConnectionChange, LEGS_MAX, LegIndex, LegSet, ReplicationFrame, ReplicationRoles,
};
use legs::{LegPhase, Legs, Standing};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

/// The replicator's machine for one service, at the contact node.
#[derive(Debug)]
pub struct Replication {
    config: ReplicatedServiceConfig,
    legs: Legs,
    connections: BTreeMap<SocketAddr, Connection>,
    /// Connections that some legs have ended, by the time at which the legs are compared.
    fin_deadlines: BTreeSet<(Duration, SocketAddr)>,
    backup: BackupSender,
    /// True while this node is the contact node.
    is_active: bool,
    /// True if a connection was refused for lack of room, and none has ended since.
    is_full: bool,
    protection: Protection,
    outputs: VecDeque<Output>,
}

impl Replication {
    /// Returns the machine of a service whose servers have no connections yet. The first node has the primary.
    ///
    /// # Errors
    /// There is no node, or there are more than [`LEGS_MAX`], or a node is named twice.
    pub fn new(
        now: Duration,
        config: ReplicatedServiceConfig,
        nodes: &[NodeId],
        view: &View,
    ) -> Result<Replication, CommandError> {
        if nodes.is_empty() {
            return Err(CommandError::NoLegs);
        }
        if nodes.len() > LEGS_MAX {
            return Err(CommandError::Full);
        }
        let is_repeated = |(index, node): &(usize, &NodeId)| nodes[..*index].contains(node);
        if let Some((_, node)) = nodes.iter().enumerate().find(is_repeated) {
            return Err(CommandError::NodeHasLeg(*node));
        }
        let positions = std::array::from_fn(|index| nodes.get(index).copied());
        let legs = Legs::new(now, positions, LegIndex::FIRST);
        Ok(Replication::start(now, config, legs, BTreeMap::new(), view))
    }

    /// Returns the machine of a service whose replicator was at another node, with the connections that this node knows as
    /// its backup.
    ///
    /// # Errors
    /// The copy has no leg that serves.
    pub fn succeed(
        now: Duration,
        config: ReplicatedServiceConfig,
        copy: &BackupCopy,
        view: &View,
    ) -> Result<Replication, CommandError> {
        let roles = copy.roles().ok_or(CommandError::NoLegs)?;
        if roles.live.is_empty() {
            return Err(CommandError::NoLegs);
        }
        let node = |index: usize| {
            let leg = LegIndex::new(index).filter(|leg| roles.live.contains(*leg))?;
            roles.nodes[leg.position()]
        };
        let legs = Legs::new(now, std::array::from_fn(node), roles.primary);
        let connections: BTreeMap<_, _> = copy
            .connections()
            .map(|record| {
                // Output on its way when the former contact node died was compared by nobody.
                let uncompared = record.live.without(roles.primary);
                let mut connection = Connection::new(record, roles.primary, uncompared);
                connection.left = roles.live.difference(record.live);
                connection.left_before = connection.left;
                (record.client, connection)
            })
            .collect();
        let mut machine = Replication::start(now, config, legs, connections, view);
        for client in machine.clients() {
            let record = machine.connections[&client].record;
            machine.outputs.push_back(Output::Adopt(record));
            if record.live != machine.legs.serving() {
                machine.update_connection_roles(now, client);
            }
        }
        Ok(machine)
    }

    fn start(
        now: Duration,
        config: ReplicatedServiceConfig,
        legs: Legs,
        connections: BTreeMap<SocketAddr, Connection>,
        view: &View,
    ) -> Replication {
        let mut machine = Replication {
            protection: legs.protection(config.replicas),
            config,
            legs,
            connections,
            fin_deadlines: BTreeSet::new(),
            backup: BackupSender::new(),
            is_active: true,
            is_full: false,
            outputs: VecDeque::new(),
        };
        let limits = machine.config.limits;
        machine.outputs.push_back(Output::SetWatchLimits(limits));
        let roles = machine.legs.roles();
        machine.outputs.push_back(Output::SetRoles(roles));
        let protection = Event::Protection(machine.protection);
        machine.outputs.push_back(Output::Event(protection));
        machine.handle_view(now, view);
        machine
    }

    /// Takes a newer view. A node that is not the contact node forgets its outputs and does nothing more.
    pub fn handle_view(&mut self, now: Duration, view: &View) {
        self.is_active &= view.contact_node == self.config.node;
        if !self.is_active {
            self.outputs.clear();
            return;
        }
        for leg in LegIndex::all() {
            let node = self.legs.get(leg).map(|leg| leg.node);
            if node.is_some_and(|node| !view.contains(node)) {
                self.drop_leg(now, leg, DropReason::NodeRemoved);
            }
        }
        let backup = view.backups.first().copied();
        let backup = backup.filter(|node| *node != self.config.node);
        self.with_backup(|sender, io| sender.set_target(now, backup, view.epoch, io));
    }

    /// Takes a frame of the backup.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: &ReplicationFrame) {
        let is_own = frame.service() == self.config.service;
        if !self.is_active || !is_own || !self.backup.is_target(from) {
            return;
        }
        match *frame {
            ReplicationFrame::Ack { term, sequence, .. } => {
                self.with_backup(|sender, io| sender.on_ack(now, term, sequence, io));
            }
            ReplicationFrame::SnapshotRequest { term, .. } => {
                self.with_backup(|sender, io| sender.on_snapshot_request(now, term, io));
            }
            ReplicationFrame::Snapshot { .. }
            | ReplicationFrame::Delta { .. }
            | ReplicationFrame::ServerQuery { .. }
            | ReplicationFrame::ServerAnswer { .. } => {}
        }
    }

    /// Records that the channel to a node is lost. Frames on their way may be lost, too.
    pub fn handle_peer_lost(&mut self, now: Duration, node: NodeId) {
        if self.is_active && self.backup.is_target(node) {
            self.with_backup(|sender, io| sender.on_lost(now, io));
        }
    }

    /// Records a sign of life of a node: a heartbeat, the answer to a probe, or any packet of its leg.
    pub fn handle_heard(&mut self, now: Duration, node: NodeId) {
        if let Some(leg) = self.legs.at_node(node) {
            self.on_heard(now, leg);
        }
    }

    /// Takes the state of the service's server at a node.
    pub fn handle_server(&mut self, now: Duration, node: NodeId, state: &ServerState) {
        let ended = ServerState::Failing(ServerProblem::ListenerClosed);
        let Some(leg) = self.legs.at_node(node).filter(|_| self.is_active) else {
            return;
        };
        let is_preparing = |leg: &legs::Leg| matches!(leg.phase, LegPhase::Preparing);
        let has_ended = *state == ended || *state == ServerState::Absent;
        if has_ended && !self.legs.get(leg).is_some_and(is_preparing) {
            self.drop_leg(now, leg, DropReason::ServerEnded);
        }
    }

    /// Returns the next action for the daemon.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which to call [`Replication::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Duration> {
        if !self.is_active {
            return None;
        }
        let fin = self.fin_deadlines.first().map(|(at, _)| *at);
        let times = [fin, self.backup.poll_timeout(), self.silence_timeout()];
        times
            .into_iter()
            .chain([self.catch_up_timeout()])
            .flatten()
            .min()
    }

    /// Handles all deadlines of the replication that are due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        if !self.is_active {
            return;
        }
        self.poll_silence(now);
        self.poll_catch_up(now);
        while let Some((at, client)) = self.fin_deadlines.first().copied()
            && at <= now
        {
            self.fin_deadlines.remove(&(at, client));
            self.compare_finished(now, client);
        }
        self.with_backup(|sender, io| sender.handle_timeout(now, io));
    }

    /// Returns the roles of the legs.
    pub fn roles(&self) -> ReplicationRoles {
        self.legs.roles()
    }

    /// Returns the number of connections.
    pub fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Returns the protection in force.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Returns the clients of the connections.
    pub fn clients(&self) -> Vec<SocketAddr> {
        self.connections.keys().copied().collect()
    }

    fn report(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    fn with_backup(&mut self, act: impl FnOnce(&mut BackupSender, &mut Io<'_>)) {
        let mut io = Io {
            config: &self.config,
            connections: &self.connections,
            roles: self.legs.roles(),
            outputs: &mut self.outputs,
        };
        act(&mut self.backup, &mut io);
    }

    fn tell_backup(&mut self, now: Duration, change: ConnectionChange) {
        self.with_backup(|sender, io| sender.on_change(now, change, io));
    }

    fn update_protection(&mut self) {
        let protection = self.legs.protection(self.config.replicas);
        if protection != self.protection {
            self.protection = protection;
            self.report(Event::Protection(protection));
        }
    }

    /// Returns the standing of the legs in all connections together.
    fn standing(&self) -> Standing {
        let mut sum = Standing::default();
        for connection in self.connections.values() {
            sum.add(&connection.standing());
        }
        sum
    }

    /// Returns the legs whose absence or presence may decide about a connection: legs that serve and are not suspected.
    fn heard_legs(&self, among: LegSet) -> LegSet {
        let is_heard = |leg: &LegIndex| {
            let leg = self.legs.get(*leg);
            leg.is_some_and(|leg| leg.suspicion.is_none())
        };
        among.iter().filter(is_heard).collect()
    }
}
