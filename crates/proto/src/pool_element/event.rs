//! Events of a pool element.

use holdfast_wire::rserpool::{ElementId, ErrorCause, PolicyKind, RegistrarId};
use std::fmt;

/// An event of the pool element's machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The element is in its pool. Emitted if it was not before, or if its identifier has changed.
    Registered {
        /// The element's identifier.
        id: ElementId,
        /// Warnings from the registrar.
        warnings: Vec<ErrorCause>,
    },
    /// A registrar refused the registration, and a retry would not help. The element is not in its pool;
    /// [`super::PoolElement::handle_register`] tries again.
    RegistrationRefused(RegistrationRefusal),
    /// The registration's life ended before it could be renewed; the element continues to try.
    RegistrationExpired,
    /// The element has a new home registrar.
    NewHome {
        /// Number of the registrar, if known yet.
        registrar: Option<RegistrarId>,
    },
    /// The home registrar was lost or does not answer; the element seeks another.
    HomeLost,
    /// No registrar was reached in a round of attempts; the element continues to try.
    NoRegistrar,
    /// Several registrations in a row had no answer. RFC 5352 section 3.1 would stop there; the element continues,
    /// because otherwise it would stay out of its pool once registrars are back.
    Unanswered {
        /// Number of registrations.
        attempts: u32,
    },
    /// The registrar reported an error in a message.
    ErrorReported(Vec<ErrorCause>),
    /// The end of [`super::PoolElement::handle_deregister`]; no event follows.
    Deregistered(DeregistrationResult),
}

/// Result of a deregistration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeregistrationResult {
    /// No registrar has the element in its handlespace.
    Confirmed,
    /// No registrar confirmed in time: the element may be listed until its registration's life ends.
    TimedOut,
    /// The registrar refused the deregistration.
    Refused(Vec<ErrorCause>),
}

/// A registrar's refusal of a registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the registrar refused the registration: {}", causes_text(causes))]
pub struct RegistrationRefusal {
    /// The registrar's causes; empty if it gave none.
    pub causes: Vec<ErrorCause>,
}

/// Error for a policy of another kind than the registration's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the element is registered with policy {has}; to use {wanted}, deregister and register it anew"
)]
pub struct PolicyKindMismatch {
    /// The registered policy.
    pub has: PolicyKind,
    /// The requested policy.
    pub wanted: PolicyKind,
}

fn causes_text(causes: &[ErrorCause]) -> impl fmt::Display {
    if causes.is_empty() {
        return "no reason given".to_owned();
    }
    let words: Vec<String> = causes.iter().map(ErrorCause::to_string).collect();
    words.join(", ")
}
