//! The copy of a replicator's connections at a backup.

use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::{
    ConnectionChange, ConnectionRecord, ReplicationFrame, ReplicationRoles, canonical,
};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Knowledge of the contact node's replicator of one service, as far as this node has learned it.
#[derive(Debug, Clone)]
pub struct BackupCopy {
    service: ServiceEndpoint,
    connections_max: usize,
    term: u64,
    sequence: u64,
    roles: Option<ReplicationRoles>,
    records: BTreeMap<SocketAddr, ConnectionRecord>,
    /// Connections of which the present snapshot has said nothing yet; none if no snapshot is on its way.
    unconfirmed: Option<BTreeSet<SocketAddr>>,
}

impl BackupCopy {
    /// Returns an empty copy, for at most `connections_max` connections.
    pub fn new(service: ServiceEndpoint, connections_max: usize) -> BackupCopy {
        BackupCopy {
            service,
            connections_max,
            term: 0,
            sequence: 0,
            roles: None,
            records: BTreeMap::new(),
            unconfirmed: None,
        }
    }

    /// Stores a frame of the contact node, and returns the answer. Frames of an earlier term have none.
    pub fn handle_frame(&mut self, frame: ReplicationFrame) -> Option<ReplicationFrame> {
        match frame {
            ReplicationFrame::Snapshot {
                term,
                service,
                sequence,
                roles,
                records,
                is_first,
                is_last,
            } if service == self.service && term >= self.term => {
                if !is_first && !self.follows(term, sequence) {
                    return Some(self.request_snapshot(term));
                }
                if is_first {
                    // The former records stay until the snapshot is complete: half a snapshot would be worse.
                    self.unconfirmed = Some(self.records.keys().copied().collect());
                }
                self.roles = Some(roles);
                for record in records {
                    self.store(record);
                }
                if is_last {
                    for client in self.unconfirmed.take().unwrap_or_default() {
                        self.records.remove(&client);
                    }
                }
                Some(self.acknowledge(term, sequence))
            }
            ReplicationFrame::Delta {
                term,
                service,
                sequence,
                roles,
                changes,
            } if service == self.service && term >= self.term => {
                if !self.follows(term, sequence) {
                    return Some(self.request_snapshot(term));
                }
                self.roles = roles.or(self.roles);
                for change in changes {
                    self.apply(change);
                }
                Some(self.acknowledge(term, sequence))
            }
            _ => None,
        }
    }

    fn follows(&self, term: u64, sequence: u64) -> bool {
        term == self.term && Some(sequence) == self.sequence.checked_add(1)
    }

    fn request_snapshot(&self, term: u64) -> ReplicationFrame {
        ReplicationFrame::SnapshotRequest {
            term,
            service: self.service,
        }
    }

    fn acknowledge(&mut self, term: u64, sequence: u64) -> ReplicationFrame {
        self.term = term;
        self.sequence = sequence;
        ReplicationFrame::Ack {
            term,
            service: self.service,
            sequence,
        }
    }

    fn store(&mut self, record: ConnectionRecord) {
        let client = canonical(record.client);
        if self.records.len() < self.connections_max || self.records.contains_key(&client) {
            self.records.insert(client, record);
            self.confirm(client);
        }
    }

    fn apply(&mut self, change: ConnectionChange) {
        match change {
            ConnectionChange::Opened(record) => self.store(record),
            ConnectionChange::LegLeft { client, leg } => {
                if let Some(record) = self.records.get_mut(&client) {
                    record.live.remove(leg);
                }
            }
            ConnectionChange::Closed { client } => {
                self.records.remove(&client);
                self.confirm(client);
            }
        }
    }

    fn confirm(&mut self, client: SocketAddr) {
        if let Some(unconfirmed) = &mut self.unconfirmed {
            unconfirmed.remove(&client);
        }
    }

    /// Returns the roles of the legs; none before the first snapshot.
    pub fn roles(&self) -> Option<ReplicationRoles> {
        self.roles
    }

    /// Returns the connections that a live leg serves, in the order of their clients.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionRecord> {
        let live = self.roles.map(|roles| roles.live).unwrap_or_default();
        self.records.values().filter_map(move |record| {
            let live = record.live.intersection(live);
            (!live.is_empty()).then_some(ConnectionRecord { live, ..*record })
        })
    }

    /// Returns true if no snapshot is on its way.
    pub fn is_complete(&self) -> bool {
        self.roles.is_some() && self.unconfirmed.is_none()
    }
}
