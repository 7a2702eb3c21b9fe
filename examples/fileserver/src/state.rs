//! The state from which another process continues a connection. The state is complete: the program stores nothing else
//! about the connection that the client could notice.

use serde::{Deserialize, Serialize};

use crate::source::Source;
use crate::upload::Upload;

/// A connection between two system calls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Input that was read and not yet parsed: a part of a head, or the start of the next request.
    #[serde(with = "serde_bytes")]
    pub input: Vec<u8>,
    /// Output not yet written: heads and short bodies.
    #[serde(with = "serde_bytes")]
    pub output: Vec<u8>,
    /// The work in progress.
    pub work: Work,
    /// True if the connection ends after this work.
    pub close: bool,
}

/// The work in progress on a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// Waiting for a request.
    #[default]
    Idle,
    /// Sending `source` from `at` to `end`.
    Sending { source: Source, at: u64, end: u64 },
    /// Reading a body.
    Receiving(Upload),
}

/// Version of the encoding: nodes may temporarily run different versions of this program.
const VERSION: u8 = 1;

impl State {
    /// Encodes the state.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_extend(self, vec![VERSION]).expect("a state can be encoded")
    }

    /// Decodes a state.
    ///
    /// # Errors
    /// The bytes have another version, or are not a state.
    pub fn decode(bytes: &[u8]) -> anyhow::Result<Self> {
        match bytes {
            [VERSION, rest @ ..] => Ok(postcard::from_bytes(rest)?),
            _ => anyhow::bail!("the state is not of version {VERSION}"),
        }
    }
}
