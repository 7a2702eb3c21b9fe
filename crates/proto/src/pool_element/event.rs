//! What happened to a pool element.

use holdfast_wire::rserpool::{Cause, ElementId, PolicyKind, RegistrarId};
use std::fmt;

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The element is in its pool: told when it was not, or when its identifier has changed.
    Registered {
        /// Its identifier.
        id: ElementId,
        /// What the registrar warns of.
        warnings: Vec<Cause>,
    },
    /// A registrar refused the registration, and trying again would not help. The element is not in its pool (any more);
    /// [`super::PoolElement::handle_register`] tries anew.
    Refused(Refusal),
    /// The registration's life ended before it could be renewed; the element goes on trying.
    Expired,
    /// The home registrar is another.
    NewHome {
        /// Who, if it is known yet.
        registrar: Option<RegistrarId>,
    },
    /// The home registrar was lost or does not answer; another is sought.
    HomeLost,
    /// No registrar was reached in a round of attempts; the element goes on trying.
    NoRegistrar,
    /// So many registrations in a row had no answer. RFC 5352 section 3.1 would stop; the element goes on, for it would stay
    /// out of its pool when registrars are back.
    Unanswered {
        /// How many.
        attempts: u32,
    },
    /// The registrar found something wrong with a message.
    Reported(Vec<Cause>),
    /// The end of [`super::PoolElement::handle_deregister`]; nothing follows.
    Left(Departure),
}

/// How a deregistration ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
    /// The element is in no registrar's handlespace.
    Confirmed,
    /// No registrar confirmed it in time: the element may be listed until its registration's life ends.
    TimedOut,
    /// The registrar refused.
    Refused(Vec<Cause>),
}

/// A registrar's refusal of a registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the registrar refused the registration: {}", words(causes))]
pub struct Refusal {
    /// Its reasons; none if it gave none.
    pub causes: Vec<Cause>,
}

/// A policy of another kind than the element registered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the element is registered with policy {has}; to use {wanted}, deregister and register it anew"
)]
pub struct PolicyChanged {
    /// The element's.
    pub has: PolicyKind,
    /// What was asked for.
    pub wanted: PolicyKind,
}

fn words(causes: &[Cause]) -> impl fmt::Display {
    if causes.is_empty() {
        return "it does not say why".to_owned();
    }
    let words: Vec<String> = causes.iter().map(Cause::to_string).collect();
    words.join(", ")
}
