//! All that another process needs to go on with a connection. What is here is the whole connection: the program keeps
//! nothing else about it that the client could notice.

use serde::{Deserialize, Serialize};

use crate::source::Source;
use crate::upload::Upload;

/// A connection between two system calls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Read and not yet understood: a part of a head, or the begin of the next request.
    #[serde(with = "serde_bytes")]
    pub input: Vec<u8>,
    /// Made and not yet written: heads and short bodies.
    #[serde(with = "serde_bytes")]
    pub output: Vec<u8>,
    /// What the connection is at.
    pub work: Work,
    /// The connection ends after this work.
    pub close: bool,
}

/// What a connection is at.
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

/// The form's version: nodes may run different versions of this program for a while.
const VERSION: u8 = 1;

impl State {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_extend(self, vec![VERSION]).expect("the state has a form")
    }

    /// From bytes.
    ///
    /// # Errors
    /// Another version, or no state at all.
    pub fn decode(bytes: &[u8]) -> anyhow::Result<Self> {
        match bytes {
            [VERSION, rest @ ..] => Ok(postcard::from_bytes(rest)?),
            _ => anyhow::bail!("not version {VERSION}"),
        }
    }
}
