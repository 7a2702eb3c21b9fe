//! What happened, for whoever uses pools.

use super::{Link, RequestId, SessionId};
use holdfast_wire::rserpool::{Cause, ElementId, PolicyKind, PoolElement, PoolHandle, RegistrarId};

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The answer to [`super::PoolUser::handle_select`].
    Selected {
        /// The request.
        request: RequestId,
        /// Whom to use.
        element: PoolElement,
    },
    /// The answer to [`super::PoolUser::handle_resolve`].
    Resolved {
        /// The request.
        request: RequestId,
        /// The pool's policy.
        policy: PolicyKind,
        /// Its elements, or those that the registrar chose, in the registrar's order.
        elements: Vec<PoolElement>,
    },
    /// A request has no answer.
    Failed {
        /// The request.
        request: RequestId,
        /// Why.
        error: ResolveError,
    },
    /// A watched pool: its elements, first and whenever they have changed; none if there is no such pool.
    Changed {
        /// The pool.
        handle: PoolHandle,
        /// Its elements, in the registrar's order.
        elements: Vec<PoolElement>,
    },
    /// A session has an element; data may flow on the link.
    SessionUp {
        /// The session.
        session: SessionId,
        /// The link to the element.
        link: Link,
        /// The element.
        element: ElementId,
        /// Whether the element was given a cookie, the state of the session at an element before it.
        resumed: bool,
    },
    /// A session's element is lost, another is sought: keep what it may not have received, to send it again.
    SessionBroken {
        /// The session.
        session: SessionId,
        /// The link that is closed.
        link: Link,
        /// The element.
        element: ElementId,
    },
    /// A session has ended: no element was found for it in time.
    SessionFailed {
        /// The session.
        session: SessionId,
        /// What was wrong last.
        error: ResolveError,
    },
    /// The registrar that is asked is another.
    NewHome {
        /// Who, if it is known.
        registrar: Option<RegistrarId>,
    },
    /// The home registrar was lost or does not answer; another is sought.
    HomeLost,
    /// No registrar was reached in a round of attempts; the user goes on trying.
    NoRegistrar,
    /// The registrar found something wrong with a message.
    Reported(Vec<Cause>),
}

/// Why a pool's elements are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The registrar knows no such pool.
    #[error("there is no such pool; `holdfast pool list` shows those there are")]
    UnknownPool,
    /// There is a pool, but no element that could be reached.
    #[error("no element of the pool can be reached")]
    NoElement,
    /// No registrar was reached in time.
    #[error("no registrar was reached; look whether one runs at the configured addresses")]
    NoRegistrar,
    /// No registrar answered in time.
    #[error("no registrar answered in time")]
    Unanswered,
    /// The registrar refused.
    #[error("the registrar refused: {}", .0.iter().map(Cause::to_string).collect::<Vec<_>>().join(", "))]
    Refused(Vec<Cause>),
}
