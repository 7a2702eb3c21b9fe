//! The messages by which a backup learns what the replicator at the contact node knows of its connections, so that the
//! contact node's successor can go on.
//!
//! A [`ConnectionRecord`] has the part of a connection's state that no packet repeats: initial sequence numbers and the
//! translation of each leg. Windows, acknowledgements and positions are not recorded, because the first packets after a
//! succession carry them.

use crate::NodeId;
use crate::frame::bounded_list_of;
use crate::health_frames::ServiceEndpoint;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;

/// Maximum number of legs of a service: one primary and up to three replicas.
pub const LEGS_MAX: usize = 4;
/// Maximum number of connections in one part of a snapshot.
pub const RECORDS_MAX: usize = 1_024;
/// Maximum number of changes in one delta.
pub const CHANGES_MAX: usize = 4_096;
/// Largest window scale (RFC 7323, section 2.3).
const WINDOW_SCALE_MAX: u8 = 14;

/// One of the servers of a replicated service, by its position in the service's list of legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct LegIndex(u8);

impl LegIndex {
    /// The first leg.
    pub const FIRST: LegIndex = LegIndex(0);

    /// Returns the leg at a position; none at [`LEGS_MAX`] and above.
    pub fn new(position: usize) -> Option<LegIndex> {
        (position < LEGS_MAX).then_some(LegIndex(position as u8))
    }

    /// Returns all positions in order.
    pub fn all() -> impl Iterator<Item = LegIndex> {
        (0..LEGS_MAX as u8).map(LegIndex)
    }

    /// Returns the position in the list of legs.
    pub fn position(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for LegIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "leg {}", self.0)
    }
}

impl From<LegIndex> for u8 {
    fn from(leg: LegIndex) -> u8 {
        leg.0
    }
}

impl TryFrom<u8> for LegIndex {
    type Error = RecordError;

    fn try_from(position: u8) -> Result<LegIndex, RecordError> {
        LegIndex::new(usize::from(position)).ok_or(RecordError::NoSuchLeg(position))
    }
}

/// A set of legs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct LegSet(u8);

impl LegSet {
    /// The set without legs.
    pub const EMPTY: LegSet = LegSet(0);

    /// Returns the set of one leg.
    pub fn of(leg: LegIndex) -> LegSet {
        LegSet(1 << leg.0)
    }

    /// Returns true if a leg is in the set.
    pub fn contains(self, leg: LegIndex) -> bool {
        self.0 >> leg.0 & 1 == 1
    }

    /// Returns true if no leg is in the set.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of legs.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Adds a leg to the set.
    pub fn insert(&mut self, leg: LegIndex) {
        self.0 |= 1 << leg.0;
    }

    /// Removes a leg from the set.
    pub fn remove(&mut self, leg: LegIndex) {
        self.0 &= !(1 << leg.0);
    }

    /// Returns the legs that are in either set.
    #[must_use]
    pub fn union(self, other: LegSet) -> LegSet {
        LegSet(self.0 | other.0)
    }

    /// Returns the legs that are in both sets.
    #[must_use]
    pub fn intersection(self, other: LegSet) -> LegSet {
        LegSet(self.0 & other.0)
    }

    /// Returns the legs that are not in the other set.
    #[must_use]
    pub fn difference(self, other: LegSet) -> LegSet {
        LegSet(self.0 & !other.0)
    }

    /// Returns the set without a leg.
    #[must_use]
    pub fn without(self, leg: LegIndex) -> LegSet {
        self.difference(LegSet::of(leg))
    }

    /// Returns the legs in order.
    pub fn iter(self) -> impl Iterator<Item = LegIndex> {
        LegIndex::all().filter(move |leg| self.contains(*leg))
    }
}

impl FromIterator<LegIndex> for LegSet {
    fn from_iter<I: IntoIterator<Item = LegIndex>>(legs: I) -> LegSet {
        let mut set = LegSet::EMPTY;
        legs.into_iter().for_each(|leg| set.insert(leg));
        set
    }
}

impl From<LegSet> for u8 {
    fn from(set: LegSet) -> u8 {
        set.0
    }
}

impl TryFrom<u8> for LegSet {
    type Error = RecordError;

    fn try_from(bits: u8) -> Result<LegSet, RecordError> {
        match bits >> LEGS_MAX {
            0 => Ok(LegSet(bits)),
            _ => Err(RecordError::NoSuchLeg(bits.ilog2() as u8)),
        }
    }
}

/// A record that no replicator writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The position of a leg is out of range.
    #[error(
        "a service has at most {LEGS_MAX} legs, and the record names leg {0}; run the same release on both nodes"
    )]
    NoSuchLeg(u8),
    /// A leg serves the connection, and the record has no translation for it.
    #[error(
        "the record has no translation for {0}, which serves the connection; run the same release on both nodes"
    )]
    NoTranslation(LegIndex),
    /// A window scale is larger than TCP allows.
    #[error("window scale {0} is above {WINDOW_SCALE_MAX}; run the same release on both nodes")]
    WindowScale(u8),
    /// The primary of a group with live legs is not one of them.
    #[error("the primary, {0}, is not alive; run the same release on both nodes")]
    DeadPrimary(LegIndex),
    /// A leg serves, and the record does not name its node.
    #[error("{0} serves, and its node is not named; run the same release on both nodes")]
    NoNode(LegIndex),
}

/// The legs of a service and their roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedReplicationRoles")]
pub struct ReplicationRoles {
    /// The leg that clients see.
    pub primary: LegIndex,
    /// The legs that serve. Without any the service is dead.
    pub live: LegSet,
    /// Node of each leg that serves; none at the other positions.
    pub nodes: [Option<NodeId>; LEGS_MAX],
}

#[derive(Deserialize)]
struct UncheckedReplicationRoles {
    primary: LegIndex,
    live: LegSet,
    nodes: [Option<NodeId>; LEGS_MAX],
}

impl TryFrom<UncheckedReplicationRoles> for ReplicationRoles {
    type Error = RecordError;

    fn try_from(roles: UncheckedReplicationRoles) -> Result<ReplicationRoles, RecordError> {
        if !roles.live.is_empty() && !roles.live.contains(roles.primary) {
            return Err(RecordError::DeadPrimary(roles.primary));
        }
        let is_homeless = |leg: &LegIndex| roles.nodes[leg.position()].is_none();
        if let Some(leg) = roles.live.iter().find(is_homeless) {
            return Err(RecordError::NoNode(leg));
        }
        Ok(ReplicationRoles {
            primary: roles.primary,
            live: roles.live,
            nodes: roles.nodes,
        })
    }
}

/// Translation between one leg's numbers and the numbers that the client sees. All sums wrap at 2^32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedTranslation")]
pub struct LegTranslation {
    /// The client's sequence number minus the leg's own.
    pub sequence_offset: u32,
    /// The timestamp that the client sees minus the leg's own.
    pub timestamp_offset: u32,
    /// Maximum segment size that the leg announced, in bytes.
    pub mss: u16,
    /// Window scale that the leg announced.
    pub window_scale: u8,
}

#[derive(Deserialize)]
struct UncheckedTranslation {
    sequence_offset: u32,
    timestamp_offset: u32,
    mss: u16,
    window_scale: u8,
}

impl TryFrom<UncheckedTranslation> for LegTranslation {
    type Error = RecordError;

    fn try_from(leg: UncheckedTranslation) -> Result<LegTranslation, RecordError> {
        Ok(LegTranslation {
            sequence_offset: leg.sequence_offset,
            timestamp_offset: leg.timestamp_offset,
            mss: leg.mss,
            window_scale: checked_window_scale(leg.window_scale)?,
        })
    }
}

fn checked_window_scale(scale: u8) -> Result<u8, RecordError> {
    match scale {
        0..=WINDOW_SCALE_MAX => Ok(scale),
        _ => Err(RecordError::WindowScale(scale)),
    }
}

/// A connection as a successor has to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedRecord")]
pub struct ConnectionRecord {
    /// Address and port of the client, which name the connection within its service.
    pub client: SocketAddr,
    /// The client's initial sequence number.
    pub client_isn: u32,
    /// Initial sequence number that the client was shown.
    pub service_isn: u32,
    /// Maximum segment size that the client was shown, in bytes.
    pub mss: u16,
    /// Window scale that the client announced.
    pub client_window_scale: u8,
    /// Window scale that the client was shown.
    pub service_window_scale: u8,
    /// True if both sides agreed on timestamps.
    pub has_timestamps: bool,
    /// The legs that serve the connection.
    pub live: LegSet,
    /// Translation of each leg; present for all that serve the connection.
    pub legs: [Option<LegTranslation>; LEGS_MAX],
}

#[derive(Deserialize)]
struct UncheckedRecord {
    client: SocketAddr,
    client_isn: u32,
    service_isn: u32,
    mss: u16,
    client_window_scale: u8,
    service_window_scale: u8,
    has_timestamps: bool,
    live: LegSet,
    legs: [Option<LegTranslation>; LEGS_MAX],
}

impl TryFrom<UncheckedRecord> for ConnectionRecord {
    type Error = RecordError;

    fn try_from(record: UncheckedRecord) -> Result<ConnectionRecord, RecordError> {
        let is_untranslated = |leg: &LegIndex| record.legs[leg.position()].is_none();
        if let Some(leg) = record.live.iter().find(is_untranslated) {
            return Err(RecordError::NoTranslation(leg));
        }
        Ok(ConnectionRecord {
            client: canonical(record.client),
            client_isn: record.client_isn,
            service_isn: record.service_isn,
            mss: record.mss,
            client_window_scale: checked_window_scale(record.client_window_scale)?,
            service_window_scale: checked_window_scale(record.service_window_scale)?,
            has_timestamps: record.has_timestamps,
            live: record.live,
            legs: record.legs,
        })
    }
}

/// Returns the form in which a client's address names a connection: a mapped IPv6 address becomes IPv4, flow label and
/// scope are dropped.
pub fn canonical(client: SocketAddr) -> SocketAddr {
    SocketAddr::new(client.ip().to_canonical(), client.port())
}

/// A change of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectionChange {
    /// A connection has begun, or a record replaces the earlier one of the same client.
    Opened(ConnectionRecord),
    /// A leg no longer serves the connection.
    LegLeft {
        /// Address and port of the connection's client.
        client: SocketAddr,
        /// The leg that has left the connection.
        leg: LegIndex,
    },
    /// The connection has ended.
    Closed {
        /// Address and port of the ended connection's client.
        client: SocketAddr,
    },
}

/// A message about the connections of one replicated service. The order of the variants is part of the format.
///
/// `term` is the epoch of the view with which the sender's role as contact node began; `sequence` counts the snapshot
/// parts and deltas of a term.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicationFrame {
    /// Contact node to backup: some of the connections. The first part replaces everything that the backup knows of the
    /// service. Deltas may follow a part before the last one.
    Snapshot {
        /// See [`ReplicationFrame`].
        term: u64,
        /// The replicated service that the snapshot describes.
        service: ServiceEndpoint,
        /// See [`ReplicationFrame`].
        sequence: u64,
        /// The legs and their roles.
        roles: ReplicationRoles,
        /// The connections of this part.
        #[serde(deserialize_with = "bounded_list_of::<_, _, RECORDS_MAX>")]
        records: Vec<ConnectionRecord>,
        /// True in the first part.
        is_first: bool,
        /// True in the last part.
        is_last: bool,
    },
    /// Contact node to backup: changes since the frame before.
    Delta {
        /// See [`ReplicationFrame`].
        term: u64,
        /// The replicated service whose connections have changed.
        service: ServiceEndpoint,
        /// See [`ReplicationFrame`].
        sequence: u64,
        /// The legs and their roles, if they changed.
        roles: Option<ReplicationRoles>,
        /// The changes in their order.
        #[serde(deserialize_with = "bounded_list_of::<_, _, CHANGES_MAX>")]
        changes: Vec<ConnectionChange>,
    },
    /// Backup to contact node: all frames up to this one are stored.
    Ack {
        /// See [`ReplicationFrame`].
        term: u64,
        /// The replicated service whose frames are stored.
        service: ServiceEndpoint,
        /// Sequence number of the last stored frame.
        sequence: u64,
    },
    /// Backup to contact node: a frame is missing; begin again with a snapshot.
    SnapshotRequest {
        /// The term of the frame that could not be stored.
        term: u64,
        /// The replicated service whose connections the backup needs again.
        service: ServiceEndpoint,
    },
    /// Contact node to a node with a leg: answer at once whether the leg's server listens.
    ServerQuery {
        /// The replicated service that the leg belongs to.
        service: ServiceEndpoint,
    },
    /// Node with a leg to contact node: the answer to [`ReplicationFrame::ServerQuery`].
    ServerAnswer {
        /// The replicated service that the leg belongs to.
        service: ServiceEndpoint,
        /// True if a server listens at the node's address and the service's port.
        listens: bool,
        /// True if the server's answers to clients are routed to the contact node.
        is_routed: bool,
    },
}

impl ReplicationFrame {
    /// Returns the frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            ReplicationFrame::Snapshot { .. } => "ReplicationSnapshot",
            ReplicationFrame::Delta { .. } => "ReplicationDelta",
            ReplicationFrame::Ack { .. } => "ReplicationAck",
            ReplicationFrame::SnapshotRequest { .. } => "ReplicationSnapshotRequest",
            ReplicationFrame::ServerQuery { .. } => "ReplicaServerQuery",
            ReplicationFrame::ServerAnswer { .. } => "ReplicaServerAnswer",
        }
    }

    /// Returns the replicated service that the frame is about.
    pub fn service(&self) -> ServiceEndpoint {
        match self {
            ReplicationFrame::Snapshot { service, .. }
            | ReplicationFrame::Delta { service, .. }
            | ReplicationFrame::Ack { service, .. }
            | ReplicationFrame::SnapshotRequest { service, .. }
            | ReplicationFrame::ServerQuery { service }
            | ReplicationFrame::ServerAnswer { service, .. } => *service,
        }
    }
}
