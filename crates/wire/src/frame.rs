//! The messages between daemons.
//!
//! A frame is generic over how it holds its blobs, so that decoding first borrows from the buffer it came in and then
//! takes shares of that buffer: no blob is copied. Everybody else uses [`Frame`], whose blobs are [`Bytes`].

use crate::migration::{MoveFrameOf, MoveId};
use crate::{Change, Epoch, Flow, NodeId, Record, Refusal};
use bytes::Bytes;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::marker::PhantomData;

/// The most entries a list in a frame may have; a longer one is malformed.
pub const ENTRIES_MAX: usize = 65_536;

/// One batch of connections that are handed off together. Unique in the life of the group: a donor's restart changes
/// `boot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BatchId {
    /// The node that gives the connections.
    pub donor: NodeId,
    /// The donor's daemon's start, in any unit that grows from start to start.
    pub boot: u64,
    /// Counts the donor's batches since then.
    pub seq: u64,
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}.{}", self.donor, self.boot, self.seq)
    }
}

/// A flow the acceptor is to prepare a socket for. Its place in the list is its index in the batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrepareFlow<B = Bytes> {
    /// The flow.
    pub flow: Flow,
    /// The epoch at which the donor owns it; the transit has the next one.
    pub epoch: Epoch,
    /// Socket and TCP options, coded by `sys`.
    pub static_state: B,
}

/// The rest of a flow's state, taken while the donor was frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateFlow<B = Bytes> {
    /// Which flow of the batch, by its place in [`FrameOf::Prepare`].
    pub index: u32,
    /// Sequence numbers and queues, coded by `sys`.
    pub dynamic: B,
    /// What the server program wants its successor to know.
    pub application: B,
}

/// How long the acceptor took for its part of a batch, in microseconds of its own clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptorTimes {
    /// From the last `State` to the sockets restored.
    pub restore_us: u32,
    /// From there to the last connection active: the holder's answer and the activation.
    pub commit_us: u32,
}

/// A frame with [`Bytes`] for blobs: the only form outside this crate.
pub type Frame = FrameOf<Bytes>;

/// What daemons say to each other. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(serialize = "B: Serialize", deserialize = "B: Deserialize<'de>"))]
pub enum FrameOf<B> {
    /// First on every channel, both ways.
    Hello {
        /// Who speaks.
        node: NodeId,
        /// Its daemon's start, as in [`BatchId::boot`].
        boot: u64,
        /// The name of the group, which must be the same.
        group: String,
    },
    /// Donor to acceptor: make sockets for these flows.
    Prepare {
        /// The batch.
        batch: BatchId,
        /// Its flows.
        #[serde(deserialize_with = "bounded")]
        flows: Vec<PrepareFlow<B>>,
    },
    /// Acceptor to donor: what came of it, per flow in the order of `Prepare`; a refusal says why.
    Prepared {
        /// The batch.
        batch: BatchId,
        /// One for each flow.
        #[serde(deserialize_with = "bounded")]
        results: Vec<Result<(), String>>,
    },
    /// Anyone to the holder: change these records.
    Ask {
        /// Chosen by the asker, given back in the answer.
        request: u64,
        /// The changes, each on its own.
        #[serde(deserialize_with = "bounded")]
        changes: Vec<Change>,
    },
    /// The holder's answer, per change in the order of `Ask`: the record after the change (none after a removal), or
    /// why there was none.
    Answer {
        /// Of the `Ask`.
        request: u64,
        /// One for each change.
        #[serde(deserialize_with = "bounded")]
        results: Vec<Result<Option<Record>, Refusal>>,
    },
    /// Donor to acceptor: the state of flows that are frozen. Flows of the batch that no `State` names are not coming.
    State {
        /// The batch.
        batch: BatchId,
        /// Some or all of its flows.
        #[serde(deserialize_with = "bounded")]
        flows: Vec<StateFlow<B>>,
        /// Whether no more is to come.
        last: bool,
    },
    /// Acceptor to donor: how it ended, per flow in the order of `Prepare`: the epoch at which the acceptor owns the
    /// flow, or why it does not take it.
    Done {
        /// The batch.
        batch: BatchId,
        /// One for each flow.
        #[serde(deserialize_with = "bounded")]
        results: Vec<Result<Epoch, String>>,
        /// How long it took.
        times: AcceptorTimes,
    },
    /// Either side of a batch to the other: give it up, unless it is committed.
    Abort {
        /// The batch.
        batch: BatchId,
        /// Why.
        reason: String,
    },
    /// Anyone to the holder: who has these flows?
    Query {
        /// Chosen by the asker, given back in the answer.
        request: u64,
        /// The flows.
        #[serde(deserialize_with = "bounded")]
        flows: Vec<Flow>,
    },
    /// The holder's answer, per flow in the order of `Query`.
    QueryAnswer {
        /// Of the `Query`.
        request: u64,
        /// One for each flow.
        #[serde(deserialize_with = "bounded")]
        records: Vec<Option<Record>>,
    },
    /// Are you there?
    Ping {
        /// Any number.
        token: u64,
    },
    /// Yes.
    Pong {
        /// Of the `Ping`.
        token: u64,
    },
    /// About the move of a process.
    Move {
        /// Which.
        id: MoveId,
        /// What.
        frame: MoveFrameOf<B>,
    },
}

impl<B> FrameOf<B> {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            FrameOf::Hello { .. } => "Hello",
            FrameOf::Prepare { .. } => "Prepare",
            FrameOf::Prepared { .. } => "Prepared",
            FrameOf::Ask { .. } => "Ask",
            FrameOf::Answer { .. } => "Answer",
            FrameOf::State { .. } => "State",
            FrameOf::Done { .. } => "Done",
            FrameOf::Abort { .. } => "Abort",
            FrameOf::Query { .. } => "Query",
            FrameOf::QueryAnswer { .. } => "QueryAnswer",
            FrameOf::Ping { .. } => "Ping",
            FrameOf::Pong { .. } => "Pong",
            FrameOf::Move { frame, .. } => frame.name(),
        }
    }

    /// The same frame with each blob put through `convert`.
    pub(crate) fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> FrameOf<C> {
        match self {
            FrameOf::Prepare { batch, flows } => FrameOf::Prepare {
                batch,
                flows: flows.into_iter().map(|flow| flow.map(&convert)).collect(),
            },
            FrameOf::State { batch, flows, last } => FrameOf::State {
                batch,
                flows: flows.into_iter().map(|flow| flow.map(&convert)).collect(),
                last,
            },
            FrameOf::Hello { node, boot, group } => FrameOf::Hello { node, boot, group },
            FrameOf::Prepared { batch, results } => FrameOf::Prepared { batch, results },
            FrameOf::Ask { request, changes } => FrameOf::Ask { request, changes },
            FrameOf::Answer { request, results } => FrameOf::Answer { request, results },
            FrameOf::Done {
                batch,
                results,
                times,
            } => FrameOf::Done {
                batch,
                results,
                times,
            },
            FrameOf::Abort { batch, reason } => FrameOf::Abort { batch, reason },
            FrameOf::Query { request, flows } => FrameOf::Query { request, flows },
            FrameOf::QueryAnswer { request, records } => FrameOf::QueryAnswer { request, records },
            FrameOf::Ping { token } => FrameOf::Ping { token },
            FrameOf::Pong { token } => FrameOf::Pong { token },
            FrameOf::Move { id, frame } => FrameOf::Move {
                id,
                frame: frame.map_blobs(convert),
            },
        }
    }
}

impl<B> PrepareFlow<B> {
    fn map<C>(self, convert: impl Fn(B) -> C) -> PrepareFlow<C> {
        PrepareFlow {
            flow: self.flow,
            epoch: self.epoch,
            static_state: convert(self.static_state),
        }
    }
}

impl<B> StateFlow<B> {
    fn map<C>(self, convert: impl Fn(B) -> C) -> StateFlow<C> {
        StateFlow {
            index: self.index,
            dynamic: convert(self.dynamic),
            application: convert(self.application),
        }
    }
}

/// Reads a list of at most [`ENTRIES_MAX`] entries: an entry may take one byte on the wire and fifty in memory.
pub(crate) fn bounded<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct List<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {ENTRIES_MAX} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
            // The hint is a number the sender wrote: believed up to 1,024 entries, beyond that only what is there.
            let mut list = Vec::with_capacity(entries.size_hint().unwrap_or(0).min(1_024));
            while let Some(entry) = entries.next_element()? {
                if list.len() == ENTRIES_MAX {
                    return Err(serde::de::Error::invalid_length(list.len() + 1, &self));
                }
                list.push(entry);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(List(PhantomData))
}
