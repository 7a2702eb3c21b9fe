//! Failures that one node reports to another or to a person: the party at fault, the cause, and the words for both.
//!
//! Machines, threads and frames carry a [`Failure`]. [`Cause`] and [`Context`] hold data; their `Display` is the only
//! place where this data becomes text. A program distinguishes failures by [`Failure::party`] and [`Failure::cause`].
//!
//! A cause is created as a fault of its usual party, such as [`NodeFault`], and becomes a failure by `From` or `?`.

mod cause;
mod context;
mod kernel_fault;
mod node_fault;
mod operator_fault;
mod peer_fault;
mod program_fault;
mod protocol_violation;
mod text;

pub use cause::Cause;
pub use context::{Context, HandoffStep, MigrationStep, Step};
pub use kernel_fault::KernelFault;
pub use node_fault::NodeFault;
pub use operator_fault::OperatorFault;
pub use peer_fault::PeerFault;
pub use program_fault::ProgramFault;
pub use protocol_violation::ProtocolViolation;
pub use text::{SystemError, TEXT_BYTES_MAX, Text};

use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Maximum number of contexts of a failure. Further ones are dropped.
pub const CONTEXTS_MAX: usize = 8;

/// The party that can remove the cause of a failure, as seen from the node that holds the failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Party {
    /// The daemon of this node, or the state that it is in.
    ThisNode,
    /// Another node, or the path to it.
    Peer,
    /// The server program that moves or serves a connection, or a client of the program.
    Program,
    /// The operator: a request, a configuration, or the software and files of a host.
    Operator,
    /// The kernel: a refused system call, or a feature that is missing.
    Kernel,
}

impl Party {
    const ALL: [Party; 5] = [
        Party::ThisNode,
        Party::Peer,
        Party::Program,
        Party::Operator,
        Party::Kernel,
    ];

    /// The party's name, for logs.
    pub fn name(self) -> &'static str {
        match self {
            Party::ThisNode => "node",
            Party::Peer => "peer",
            Party::Program => "program",
            Party::Operator => "operator",
            Party::Kernel => "kernel",
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A failed step. The size of the type is that of a pointer, so that results of flows stay small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(Box<FailureContent>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct FailureContent {
    party: Party,
    /// Surroundings of the cause, the innermost first.
    contexts: Vec<Context>,
    cause: Cause,
}

impl Failure {
    /// Returns a failure for which `party` is to blame.
    pub fn new(party: Party, cause: impl Into<Cause>) -> Failure {
        Failure(Box::new(FailureContent {
            party,
            contexts: Vec::new(),
            cause: cause.into(),
        }))
    }

    /// Returns the party to blame.
    pub fn party(&self) -> Party {
        self.0.party
    }

    /// Returns the cause of the failure, without its contexts.
    pub fn cause(&self) -> &Cause {
        &self.0.cause
    }

    /// Returns the contexts, the innermost first.
    pub fn contexts(&self) -> &[Context] {
        &self.0.contexts
    }

    /// Adds a context around the failure. A failure with [`CONTEXTS_MAX`] contexts stays as it is.
    #[must_use]
    pub fn within(mut self, context: Context) -> Failure {
        if self.0.contexts.len() < CONTEXTS_MAX {
            self.0.contexts.push(context);
        }
        self
    }

    /// Returns the failure with another party to blame.
    #[must_use]
    pub fn blame(mut self, party: Party) -> Failure {
        self.0.party = party;
        self
    }

    /// Returns a failure received from a peer as seen from this node: the peer's own fault becomes [`Party::Peer`], and
    /// the fault of the peer's counterpart becomes [`Party::ThisNode`].
    #[must_use]
    pub fn from_peer(mut self) -> Failure {
        self.0.party = match self.0.party {
            Party::ThisNode => Party::Peer,
            Party::Peer => Party::ThisNode,
            other => other,
        };
        self
    }

    /// Returns the encoded failure, for a message that has nothing else.
    pub fn encode(&self) -> Vec<u8> {
        // Numbers, addresses and text can always be written to memory.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// Returns the failure of a message that [`Failure::encode`] made. Other bytes give [`Cause::Unknown`].
    pub fn decode(bytes: &[u8]) -> Failure {
        postcard::from_bytes(bytes).unwrap_or_else(|_| Cause::Unknown.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for context in self.0.contexts.iter().rev() {
            write!(f, "{context}: ")?;
        }
        self.0.cause.fmt(f)
    }
}

impl std::error::Error for Failure {}

/// Returns several failures as one text.
pub fn join(failures: &[Failure]) -> String {
    let texts: Vec<String> = failures.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// A failure on the wire. Bytes with their count hold the cause and then the contexts, so that a release that does not
/// know the cause can skip it.
#[derive(Serialize, Deserialize)]
struct EncodedFailure<'a> {
    /// The party's position in [`Party::ALL`].
    party: u8,
    #[serde(borrow)]
    content: &'a [u8],
}

impl Serialize for Failure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let FailureContent {
            party,
            contexts,
            cause,
        } = &*self.0;
        let content = contexts
            .iter()
            .try_fold(
                postcard::to_stdvec(cause).map_err(S::Error::custom)?,
                |bytes, context| postcard::to_extend(context, bytes),
            )
            .map_err(S::Error::custom)?;
        EncodedFailure {
            party: *party as u8,
            content: &content,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Failure {
    /// An unknown cause gives [`Cause::Unknown`]. Contexts are dropped from the first unknown one on.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Failure, D::Error> {
        let EncodedFailure { party, content } = EncodedFailure::deserialize(deserializer)?;
        let (cause, mut rest) =
            postcard::take_from_bytes::<Cause>(content).unwrap_or((Cause::Unknown, &[]));
        let party = Party::ALL.get(usize::from(party)).copied();
        let mut failure = Failure::new(party.unwrap_or(cause.usual_party()), cause);
        while failure.0.contexts.len() < CONTEXTS_MAX
            && let Ok((context, after)) = postcard::take_from_bytes::<Context>(rest)
        {
            failure.0.contexts.push(context);
            rest = after;
        }
        Ok(failure)
    }
}

#[cfg(test)]
mod tests;
