//! Reports of a registrar: events for logs, counters for metrics.

use super::{AssociationId, PoolProtocol};
use holdfast_wire::rserpool::{CauseCode, ElementId, PoolHandle, RegistrarId};

/// A rare event. [`Counters`] count the frequent ones.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that say no more than their type")]
pub enum Event {
    /// An element registered for the first time.
    Registered { handle: PoolHandle, id: ElementId },
    /// A registration was refused.
    Refused {
        handle: PoolHandle,
        id: ElementId,
        cause: CauseCode,
    },
    /// An element of this registrar was removed.
    Removed {
        handle: PoolHandle,
        id: ElementId,
        reason: RemovalReason,
    },
    /// The start is complete: elements and users are served.
    Ready { elements: usize },
    /// A mentor failed: it refused, was silent or could not be reached.
    MentorFailed,
    /// A registrar was heard for the first time, or again after it was taken for dead.
    PeerUp(RegistrarId),
    /// A registrar does not answer.
    PeerDead(RegistrarId),
    /// This registrar began to take over the elements of a dead one.
    TakeoverBegun(RegistrarId),
    /// This registrar gave up a takeover: another registrar continues it, or the target lives.
    TakeoverEnded(RegistrarId),
    /// A registrar took over another one, and `elements` changed their home here.
    TakenOver {
        target: RegistrarId,
        by: RegistrarId,
        elements: usize,
    },
    /// A peer's checksum differs from the known one: its handle table is requested.
    OutOfSync {
        peer: RegistrarId,
        announced: u16,
        known: u16,
    },
    /// A peer's elements were resynchronised; `removed` of them were missing from its table.
    Resynchronised { peer: RegistrarId, removed: usize },
    /// A peer's element does not fit into its pool, which another registrar created differently.
    Inconsistent {
        handle: PoolHandle,
        id: ElementId,
        home: RegistrarId,
    },
    /// A message was ignored.
    Ignored {
        from: Option<AssociationId>,
        protocol: PoolProtocol,
        reason: &'static str,
    },
    /// An association was aborted because of its messages or its silence.
    Aborted {
        association: AssociationId,
        reason: &'static str,
    },
    /// A peer reported errors.
    ErrorReported {
        from: AssociationId,
        protocol: PoolProtocol,
        causes: Vec<CauseCode>,
    },
}

/// Reason for removing an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RemovalReason {
    /// The element deregistered.
    Deregistered,
    /// The element did not re-register in time.
    Expired,
    /// The element did not answer a keep-alive.
    Silent,
    /// The element could not be reached.
    Unreachable,
    /// Too many users reported the element unreachable.
    Reported,
    /// The operator withdrew the element's permission.
    Forbidden,
}

/// Numbers of events since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "self-explanatory names")]
pub struct Counters {
    pub registrations: u64,
    pub reregistrations: u64,
    pub refusals: u64,
    pub deregistrations: u64,
    pub resolutions: u64,
    pub resolutions_refused: u64,
    pub keep_alives: u64,
    pub unreachable_reports: u64,
    pub updates_sent: u64,
    pub updates_received: u64,
    pub resynchronisations: u64,
    pub takeovers: u64,
    pub malformed: u64,
    /// Messages dropped because their host sent too many.
    pub rate_limited: u64,
    /// Requests and reports without permission, and ENRP messages from hosts that may not be registrars.
    pub access_denied: u64,
    /// Registrations refused because of a limit.
    pub limit_refusals: u64,
    /// Reports that caused no keep-alive: their host had reported the element before, or the element had just answered.
    pub reports_ignored: u64,
    /// Associations refused because there are too many.
    pub associations_refused: u64,
    /// Associations aborted because of their messages or their silence.
    pub associations_aborted: u64,
    /// Multicast datagrams that were not accepted.
    pub multicast_ignored: u64,
}
