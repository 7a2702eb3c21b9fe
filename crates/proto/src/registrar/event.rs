//! What a registrar tells of itself: events for logs, counters for metrics.

use super::{AssociationId, Protocol};
use holdfast_wire::rserpool::{CauseCode, ElementId, PoolHandle, RegistrarId};

/// Something happened that happens seldom. What happens all the time is in [`Counters`].
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
    /// An element that this registrar was home of is gone.
    Removed {
        handle: PoolHandle,
        id: ElementId,
        why: Gone,
    },
    /// The start is over: elements and users are served.
    Ready { elements: usize },
    /// A mentor did not help: refused, silent or out of reach.
    MentorFailed,
    /// A registrar was heard for the first time, or again after it was believed dead.
    PeerUp(RegistrarId),
    /// A registrar does not answer.
    PeerDead(RegistrarId),
    /// This registrar wants the elements of one that is dead.
    TakeoverBegun(RegistrarId),
    /// It lets another have them, or the target lives.
    TakeoverEnded(RegistrarId),
    /// A registrar took over the elements of another; so many changed their home here.
    TakenOver {
        target: RegistrarId,
        by: RegistrarId,
        elements: usize,
    },
    /// A peer's checksum differs from what is known of its elements: they are asked for.
    OutOfStep {
        peer: RegistrarId,
        announced: u16,
        known: u16,
    },
    /// A peer's elements were learnt anew; so many that it does not have were removed.
    InStep { peer: RegistrarId, removed: usize },
    /// An element of a peer's does not fit into its pool, which another registrar made otherwise.
    Inconsistent {
        handle: PoolHandle,
        id: ElementId,
        home: RegistrarId,
    },
    /// A message was not heeded.
    Ignored {
        from: Option<AssociationId>,
        protocol: Protocol,
        why: &'static str,
    },
    /// An association was aborted for what it sent.
    Aborted {
        association: AssociationId,
        why: &'static str,
    },
    /// A peer reports errors.
    ErrorReported {
        from: AssociationId,
        protocol: Protocol,
        causes: Vec<CauseCode>,
    },
}

/// Why an element was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gone {
    /// It left.
    Deregistered,
    /// It did not register anew in time.
    Expired,
    /// It did not answer a keep-alive.
    Silent,
    /// It could not be reached.
    Unreachable,
    /// Too many of its users could not reach it.
    Reported,
    /// The operator no longer allows it.
    Forbidden,
}

/// How often things happened since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "names that say it")]
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
    /// Messages dropped because their host sends too many.
    pub limited: u64,
    /// Requests and reports of who may not make them, and messages of who may not be a registrar.
    pub denied: u64,
    /// Registrations beyond a limit.
    pub over_limit: u64,
    /// Reports that made nobody ask: their host had reported the element before, or it had just answered.
    pub reports_unheeded: u64,
    /// Associations refused because there are too many.
    pub associations_refused: u64,
    /// Associations ended for what was sent on them, or that nothing was.
    pub aborted: u64,
    /// Datagrams that came by multicast and were not believed.
    pub multicast_unheeded: u64,
}
