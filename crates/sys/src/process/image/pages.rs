//! Memory of a tree, in pieces.

use serde::{Deserialize, Serialize};

/// Some pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Where, in the order of `bytes`.
    pub runs: Vec<Run>,
    /// Content of all runs that have one.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// Neighbouring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Whose.
    pub space: Space,
    /// First address, or offset in the shared memory.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// What is there.
    pub content: Content,
}

/// Whose memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Space {
    /// A process, by index.
    Process(u32),
    /// Shared memory, by index.
    Shared(u32),
}

/// What is in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// The next `length` bytes.
    Bytes,
    /// What is there in a new mapping: zeros, or the file.
    Fresh,
}

impl Pages {
    /// Each run with its content, if it has one. Stops where bytes are missing.
    pub fn iter(&self) -> impl Iterator<Item = (Run, Option<&[u8]>)> {
        let mut rest = self.bytes.as_slice();
        self.runs.iter().map_while(move |run| match run.content {
            Content::Fresh => Some((*run, None)),
            Content::Bytes => {
                let length = usize::try_from(run.length).ok()?;
                let (here, after) = rest.split_at_checked(length)?;
                rest = after;
                Some((*run, Some(here)))
            }
        })
    }
}
