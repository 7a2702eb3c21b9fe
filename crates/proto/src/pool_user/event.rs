//! Events of a pool user, for the programs that use pools.

use super::{LinkId, RequestId, SessionId};
use holdfast_wire::rserpool::{
    ElementId, ErrorCause, PolicyKind, PoolElement, PoolHandle, RegistrarId,
};

/// An event of the pool user's machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The answer to [`super::PoolUser::handle_select`].
    Selected {
        /// Request that is answered.
        request: RequestId,
        /// The selected element.
        element: PoolElement,
    },
    /// The answer to [`super::PoolUser::handle_resolve`].
    Resolved {
        /// Request that is answered.
        request: RequestId,
        /// The pool's policy.
        policy: PolicyKind,
        /// The pool's elements, or the registrar's selection of them, in the registrar's order.
        elements: Vec<PoolElement>,
    },
    /// A request for an element or for a pool failed.
    RequestFailed {
        /// Request that failed.
        request: RequestId,
        /// Reason of the failure.
        error: ResolveError,
    },
    /// Elements of a watched pool, reported first and after each change; none if the pool does not exist.
    PoolChanged {
        /// Handle of the watched pool.
        handle: PoolHandle,
        /// The pool's elements, in the registrar's order.
        elements: Vec<PoolElement>,
    },
    /// A session has an element; data may flow on the link.
    SessionUp {
        /// Session that has an element.
        session: SessionId,
        /// The link to the element.
        link: LinkId,
        /// Identifier of the session's element.
        element: ElementId,
        /// True if the element was given a cookie, which has the state of the session at an earlier element.
        resumed: bool,
    },
    /// A session's element is lost, and another is sought. The client should keep data that the element may not have
    /// received, to send it again.
    SessionBroken {
        /// Session that lost its element.
        session: SessionId,
        /// The closed link.
        link: LinkId,
        /// Identifier of the lost element.
        element: ElementId,
    },
    /// A session has ended: no element was found for it in time.
    SessionFailed {
        /// Session that has ended.
        session: SessionId,
        /// Last error in the search for an element.
        error: ResolveError,
    },
    /// The user has a new home registrar.
    NewHome {
        /// Number of the registrar, if known.
        registrar: Option<RegistrarId>,
    },
    /// The home registrar was lost or does not answer; the user seeks another.
    HomeLost,
    /// No registrar was reached in a round of attempts; the user continues to try.
    NoRegistrar,
    /// The registrar reported an error in a message.
    ErrorReported(Vec<ErrorCause>),
}

/// Reason for a failed resolution.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The registrar knows no such pool.
    #[error("there is no such pool; `holdfast pool list` shows those there are")]
    UnknownPool,
    /// The pool exists, but none of its elements could be reached.
    #[error("no element of the pool can be reached")]
    NoElement,
    /// No registrar was reached in time.
    #[error("no registrar could be reached; check that one runs at the configured addresses")]
    NoRegistrar,
    /// No registrar answered in time.
    #[error("no registrar answered in time")]
    Unanswered,
    /// The registrar refused.
    #[error("the registrar refused: {}", .0.iter().map(ErrorCause::to_string).collect::<Vec<_>>().join(", "))]
    Refused(Vec<ErrorCause>),
}
