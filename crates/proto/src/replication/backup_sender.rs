//! The contact node's side of the backup: snapshots, batches of changes, and handshakes that wait for them.

use super::config::ReplicatedServiceConfig;
use super::connection::Connection;
use super::event::{Event, Output};
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::replication_frames::{
    CHANGES_MAX, ConnectionChange, RECORDS_MAX, ReplicationFrame, ReplicationRoles,
};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound;

/// Largest number of changes that wait for a slow backup, before the backup counts as lost.
const CHANGES_WAITING_MAX: usize = 4 * CHANGES_MAX;
/// Largest number of frames without acknowledgement.
const FRAMES_UNACKED_MAX: u64 = 8;

/// The backup, and what it does not know yet.
#[derive(Debug)]
pub(super) struct BackupSender {
    target: Option<NodeId>,
    state: BackupState,
    term: u64,
    /// Number of the last frame that was sent to the backup.
    sequence: u64,
    /// Number of the last frame that the backup acknowledged.
    acked: u64,
    /// Time by which the backup must acknowledge something.
    ack_deadline: Option<Duration>,
    /// Number of the first part of the present snapshot.
    snapshot_begin: u64,
    changes: Vec<ConnectionChange>,
    /// Number of changes for which a handshake waits.
    handshakes_unsent: usize,
    roles: Option<ReplicationRoles>,
    /// Time at which the collected changes are sent.
    flush_at: Option<Duration>,
    /// Handshakes that wait, each with the number of the frame that the backup must have.
    waiting: VecDeque<(u64, SocketAddr)>,
}

/// The backup's knowledge of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackupState {
    /// There is no backup, or it does not answer. No handshake waits.
    Lost {
        /// Time of the next attempt to reach the backup.
        retry_at: Option<Duration>,
    },
    /// A snapshot is on its way; `last` is the last connection in it.
    Snapshot { last: Option<SocketAddr> },
    /// The backup has the snapshot, or its last part is on its way.
    Following,
}

impl BackupSender {
    pub fn new() -> BackupSender {
        BackupSender {
            target: None,
            state: BackupState::Lost { retry_at: None },
            term: 0,
            sequence: 0,
            acked: 0,
            ack_deadline: None,
            snapshot_begin: 0,
            changes: Vec::new(),
            handshakes_unsent: 0,
            roles: None,
            flush_at: None,
            waiting: VecDeque::new(),
        }
    }

    /// Takes the backup of a view; begins a term with a snapshot if it is another node.
    pub fn set_target(
        &mut self,
        now: Duration,
        target: Option<NodeId>,
        term: u64,
        io: &mut Io<'_>,
    ) {
        if target == self.target {
            return;
        }
        self.target = target;
        self.term = term;
        self.sequence = 0;
        self.acked = 0;
        self.restart(now, io);
    }

    /// Starts anew with a snapshot for the backup, if there is one.
    fn restart(&mut self, now: Duration, io: &mut Io<'_>) {
        self.clear(io);
        self.acked = self.sequence;
        self.state = match self.target {
            Some(_) => BackupState::Snapshot { last: None },
            None => BackupState::Lost { retry_at: None },
        };
        self.send_next(now, io);
    }

    /// Records that the backup cannot be reached.
    pub fn on_lost(&mut self, now: Duration, io: &mut Io<'_>) {
        let was_lost = matches!(self.state, BackupState::Lost { .. });
        self.clear(io);
        self.state = BackupState::Lost {
            retry_at: self.target.map(|_| now + io.config.backup_retry),
        };
        if let Some(node) = self.target.filter(|_| !was_lost) {
            io.outputs
                .push_back(Output::Event(Event::BackupLost { node }));
        }
    }

    pub fn is_target(&self, node: NodeId) -> bool {
        self.target == Some(node)
    }

    /// Adds a change. A change that opens a connection lets the client's handshake wait for the backup.
    pub fn on_change(&mut self, now: Duration, change: ConnectionChange, io: &mut Io<'_>) {
        let opened = opened_client(&change);
        if let BackupState::Lost { .. } = self.state {
            show(opened, io);
            return;
        }
        if self.changes.len() >= CHANGES_WAITING_MAX {
            self.on_lost(now, io);
            show(opened, io);
            return;
        }
        self.changes.push(change);
        self.handshakes_unsent += usize::from(opened.is_some());
        let latest = now + io.config.backup_delay;
        self.flush_at = Some(self.flush_at.map_or(latest, |at| at.min(latest)));
        // With nothing on its way a handshake need not wait for others.
        if opened.is_some() && self.acked == self.sequence || self.changes.len() >= CHANGES_MAX {
            self.flush(now, io);
        }
    }

    /// Sends the legs' changed roles to the backup.
    pub fn on_roles(&mut self, now: Duration, roles: ReplicationRoles, io: &mut Io<'_>) {
        if let BackupState::Lost { .. } = self.state {
            return;
        }
        self.roles = Some(roles);
        self.flush(now, io);
    }

    /// Takes the backup's acknowledgement of all frames up to `sequence`, and completes the handshakes that waited for them.
    pub fn on_ack(&mut self, now: Duration, term: u64, sequence: u64, io: &mut Io<'_>) {
        let is_lost = matches!(self.state, BackupState::Lost { .. });
        if is_lost || term != self.term || !(self.acked + 1..=self.sequence).contains(&sequence) {
            return;
        }
        self.acked = sequence;
        while let Some((needed, client)) = self.waiting.front().copied()
            && needed <= sequence
        {
            self.waiting.pop_front();
            show(Some(client), io);
        }
        let is_all = self.acked == self.sequence;
        self.ack_deadline = (!is_all).then(|| now + io.config.backup_ack_max);
        self.send_next(now, io);
    }

    /// Takes a request of the backup for a snapshot.
    pub fn on_snapshot_request(&mut self, now: Duration, term: u64, io: &mut Io<'_>) {
        // The present snapshot answers each request that was sent before its first part arrived.
        let is_answered = self.acked < self.snapshot_begin;
        if term == self.term && !is_answered {
            self.restart(now, io);
        }
    }

    pub fn poll_timeout(&self) -> Option<Duration> {
        let retry_at = match self.state {
            BackupState::Lost { retry_at } => retry_at,
            _ => None,
        };
        // Changes beyond the unacknowledged frames leave with an acknowledgement.
        let flush_at = self.flush_at.filter(|_| self.has_room());
        [retry_at, flush_at, self.ack_deadline]
            .into_iter()
            .flatten()
            .min()
    }

    pub fn handle_timeout(&mut self, now: Duration, io: &mut Io<'_>) {
        if self.ack_deadline.is_some_and(|at| at <= now) {
            self.on_lost(now, io);
        }
        if let BackupState::Lost { retry_at: Some(at) } = self.state
            && at <= now
        {
            self.restart(now, io);
        }
        if self.flush_at.is_some_and(|at| at <= now) {
            self.flush(now, io);
        }
    }

    fn has_room(&self) -> bool {
        self.sequence - self.acked < FRAMES_UNACKED_MAX
    }

    /// Sends the next part of a snapshot once the former frames are stored, and changes for which handshakes wait.
    fn send_next(&mut self, now: Duration, io: &mut Io<'_>) {
        if self.acked == self.sequence
            && let BackupState::Snapshot { last } = self.state
        {
            self.send_snapshot_part(now, last, io);
        }
        if self.handshakes_unsent > 0 || self.roles.is_some() {
            self.flush(now, io);
        }
    }

    fn send_snapshot_part(&mut self, now: Duration, last: Option<SocketAddr>, io: &mut Io<'_>) {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        let rest = io.connections.range((from, Bound::Unbounded));
        let records: Vec<_> = rest
            .take(RECORDS_MAX)
            .map(|(_, connection)| connection.record)
            .collect();
        let is_last = records.len() < RECORDS_MAX;
        let next = records.last().map(|record| record.client).or(last);
        self.state = match is_last {
            true => BackupState::Following,
            false => BackupState::Snapshot { last: next },
        };
        self.sequence += 1;
        if last.is_none() {
            self.snapshot_begin = self.sequence;
        }
        let frame = ReplicationFrame::Snapshot {
            term: self.term,
            service: io.config.service,
            sequence: self.sequence,
            roles: io.roles,
            records,
            is_first: last.is_none(),
            is_last,
        };
        self.send(now, frame, io);
        if let Some(node) = self.target.filter(|_| is_last) {
            io.outputs
                .push_back(Output::Event(Event::BackupComplete { node }));
        }
    }

    fn flush(&mut self, now: Duration, io: &mut Io<'_>) {
        if !self.has_room() || self.changes.is_empty() && self.roles.is_none() {
            return;
        }
        let count = self.changes.len().min(CHANGES_MAX);
        let changes: Vec<_> = self.changes.drain(..count).collect();
        self.flush_at = (!self.changes.is_empty()).then_some(now);
        self.sequence += 1;
        let opened = changes.iter().filter_map(opened_client);
        let waiting = opened.map(|client| (self.sequence, client));
        let before = self.waiting.len();
        self.waiting.extend(waiting);
        self.handshakes_unsent -= self.waiting.len() - before;
        let frame = ReplicationFrame::Delta {
            term: self.term,
            service: io.config.service,
            sequence: self.sequence,
            roles: self.roles.take(),
            changes,
        };
        self.send(now, frame, io);
    }

    fn send(&mut self, now: Duration, frame: ReplicationFrame, io: &mut Io<'_>) {
        if let Some(to) = self.target {
            self.ack_deadline
                .get_or_insert(now + io.config.backup_ack_max);
            io.outputs.push_back(Output::Send { to, frame });
        }
    }

    /// Forgets all that the backup does not know, and completes all handshakes that wait.
    fn clear(&mut self, io: &mut Io<'_>) {
        for (_, client) in self.waiting.drain(..) {
            show(Some(client), io);
        }
        for change in self.changes.drain(..) {
            show(opened_client(&change), io);
        }
        self.handshakes_unsent = 0;
        self.roles = None;
        self.flush_at = None;
        self.ack_deadline = None;
    }
}

/// The parts of the machine that the sender reads and writes.
pub(super) struct Io<'a> {
    pub config: &'a ReplicatedServiceConfig,
    pub connections: &'a BTreeMap<SocketAddr, Connection>,
    pub roles: ReplicationRoles,
    pub outputs: &'a mut VecDeque<Output>,
}

/// Returns the client of a connection that a change opens.
fn opened_client(change: &ConnectionChange) -> Option<SocketAddr> {
    match change {
        ConnectionChange::Opened(record) => Some(record.client),
        ConnectionChange::LegLeft { .. } | ConnectionChange::Closed { .. } => None,
    }
}

/// Completes a client's handshake, unless the connection has ended.
fn show(client: Option<SocketAddr>, io: &mut Io<'_>) {
    if let Some(client) = client.filter(|client| io.connections.contains_key(client)) {
        io.outputs.push_back(Output::ShowSynAck { client });
    }
}
