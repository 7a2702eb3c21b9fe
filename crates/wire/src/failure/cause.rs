//! Causes of failures, sorted by the party that is usually to blame.

use super::{
    Failure, KernelFault, NodeFault, OperatorFault, Party, PeerFault, ProgramFault,
    ProtocolViolation,
};
use serde::{Deserialize, Serialize};

/// The cause of a failure. The order of the variants is part of the format: append new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Cause {
    /// Another node sent a cause that this release cannot read.
    #[error(
        "the other node reported a failure that this release does not know: run the same release on both nodes"
    )]
    Unknown,
    /// A state of the daemon.
    #[error("{0}")]
    Node(#[from] NodeFault),
    /// The silence or a decision of another node.
    #[error("{0}")]
    Peer(#[from] PeerFault),
    /// A frame or message of another node that contradicts the protocol.
    #[error("{0}")]
    Protocol(#[from] ProtocolViolation),
    /// A feature or action of a server program.
    #[error("{0}")]
    Program(#[from] ProgramFault),
    /// A request, a configuration, or a property of a host.
    #[error("{0}")]
    Operator(#[from] OperatorFault),
    /// A refusal of the kernel.
    #[error("{0}")]
    Kernel(#[from] KernelFault),
}

impl Cause {
    /// Returns the party that is usually to blame, as seen from the node that finds the cause.
    pub fn usual_party(&self) -> Party {
        match self {
            Cause::Node(_) => Party::ThisNode,
            Cause::Peer(_) | Cause::Protocol(_) | Cause::Unknown => Party::Peer,
            Cause::Program(_) => Party::Program,
            Cause::Operator(_) => Party::Operator,
            Cause::Kernel(_) => Party::Kernel,
        }
    }
}

impl From<Cause> for Failure {
    /// Blames the usual party ([`Cause::usual_party`]).
    fn from(cause: Cause) -> Failure {
        Failure::new(cause.usual_party(), cause)
    }
}

/// Implements the conversion of a kind of causes to a failure, for which the usual party is to blame.
macro_rules! failure_from {
    ($($kind:ty),*) => {
        $(impl From<$kind> for Failure {
            /// Blames the usual party ([`Cause::usual_party`]).
            fn from(cause: $kind) -> Failure {
                Cause::from(cause).into()
            }
        })*
    };
}

failure_from!(
    NodeFault,
    PeerFault,
    ProtocolViolation,
    ProgramFault,
    OperatorFault,
    KernelFault
);
