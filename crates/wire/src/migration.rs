//! What daemons say to each other while a process moves, and how its record is named.

use crate::flow::{Flow, FlowError, Protocol, excerpt};
use crate::frame::{AcceptorTimes, bounded};
use crate::{Epoch, NodeId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// One move of a process. Unique in the life of the group: a donor's restart changes `boot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MoveId {
    /// The node that gives the process.
    pub donor: NodeId,
    /// The donor's daemon's start, in any unit that grows from start to start.
    pub boot: u64,
    /// Counts the donor's moves since then.
    pub seq: u64,
}

impl fmt::Display for MoveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}.{}", self.donor, self.boot, self.seq)
    }
}

impl FromStr for MoveId {
    type Err = FlowError;

    fn from_str(text: &str) -> Result<MoveId, FlowError> {
        let parse = || {
            let (donor, rest) = text.split_once('.')?;
            let (boot, seq) = rest.split_once('.')?;
            let plain = |text: &str| !text.starts_with('+');
            if !(plain(donor) && plain(boot) && plain(seq)) {
                return None;
            }
            Some(MoveId {
                donor: NodeId(donor.parse().ok()?),
                boot: u64::from_str_radix(boot, 16).ok()?,
                seq: seq.parse().ok()?,
            })
        };
        parse().ok_or_else(|| FlowError::Move(excerpt(text)))
    }
}

/// First half of the addresses that a move's numbers are packed into: with it, none is a mapped IPv4 address.
const PREFIX: u64 = 0xfd00 << 48;

impl Flow {
    /// The key of a moving process's record in the steering table: it is arbitrated like a flow, and no packet has it.
    /// Written `process:DONOR.BOOT.SEQ`.
    pub fn of_move(id: MoveId) -> Flow {
        let address = |half: u64, port| {
            let bits = (u128::from(PREFIX) << 64) | u128::from(half);
            SocketAddr::new(Ipv6Addr::from_bits(bits).into(), port)
        };
        Flow {
            protocol: Protocol::Process,
            local: address(id.boot, id.donor.0),
            remote: address(id.seq, 0),
        }
    }

    /// Which move's record it is; none for a flow.
    pub fn move_id(&self) -> Option<MoveId> {
        let half = |address: SocketAddr| match address {
            SocketAddr::V6(address) => {
                let bits = address.ip().to_bits();
                (bits >> 64 == u128::from(PREFIX)).then_some(bits as u64)
            }
            SocketAddr::V4(_) => None,
        };
        if self.protocol != Protocol::Process || self.remote.port() != 0 {
            return None;
        }
        Some(MoveId {
            donor: NodeId(self.local.port()),
            boot: half(self.local)?,
            seq: half(self.remote)?,
        })
    }

    /// Whether it is the record of a moving process and not a flow.
    pub fn is_process(&self) -> bool {
        self.protocol == Protocol::Process
    }

    /// The flow as its other end sees it.
    pub fn mirrored(&self) -> Flow {
        Flow {
            protocol: self.protocol,
            local: self.remote,
            remote: self.local,
        }
    }
}

/// How the sockets of a process move: the three ways of the paper.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum SocketStrategy {
    /// One socket at a time, each with messages of its own.
    Iterative,
    /// All sockets in one message.
    Collective,
    /// Sockets are made before the freeze; in it, one message has what changed.
    #[default]
    Incremental,
}

/// A flow of a moving process, and the epoch at which the donor owns it; its transit has the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FlowAt {
    /// The flow.
    pub flow: Flow,
    /// The donor's epoch.
    pub epoch: Epoch,
}

/// Connections of a moving process to a node of the group, which translates them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerConnections {
    /// Where the other ends are.
    pub node: NodeId,
    /// The connections as the moving process sees them.
    #[serde(deserialize_with = "bounded")]
    pub connections: Vec<Flow>,
}

/// What a donor offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer<B = Bytes> {
    /// A copy is to be made; the original stays.
    pub clone: bool,
    /// How its sockets move.
    pub sockets: SocketStrategy,
    /// Memory may follow the process.
    pub post_copy: bool,
    /// How often the process has moved before.
    pub hops: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Flows.
    pub flows: u32,
    /// What it uses (files, libraries, users, numbers), coded by `sys`.
    pub description: B,
}

impl<B> Offer<B> {
    fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> Offer<C> {
        Offer {
            clone: self.clone,
            sockets: self.sockets,
            post_copy: self.post_copy,
            hops: self.hops,
            memory: self.memory,
            flows: self.flows,
            description: convert(self.description),
        }
    }
}

/// What a peer of a moving process is to do about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TranslateStep {
    /// Take packets from the new node too.
    Prepare,
    /// The process is there: send packets there, and take them from there only.
    Switch,
    /// The process stays: as it was before.
    Undo,
}

/// A step of a freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// What it is called.
    pub name: String,
    /// How long it took, microseconds.
    pub us: u32,
}

/// The frames of one move, with [`Bytes`] for blobs.
pub type MoveFrame = MoveFrameOf<Bytes>;

/// The frames of one move. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(serialize = "B: Serialize", deserialize = "B: Deserialize<'de>"))]
pub enum MoveFrameOf<B> {
    /// Donor to acceptor: would you take it?
    Offer(Offer<B>),
    /// Acceptor to donor: yes, if there are no reasons against it.
    Offered {
        /// Why not.
        #[serde(deserialize_with = "bounded")]
        refusals: Vec<String>,
    },
    /// Acceptor to donor: what the process will be put into is made, or why not.
    Ready(Result<(), String>),
    /// Donor to acceptor: these flows are about to be diverted, hold their packets.
    Arm {
        /// Counts the `Arm`s of the move.
        part: u32,
        /// The flows.
        #[serde(deserialize_with = "bounded")]
        flows: Vec<FlowAt>,
    },
    /// Acceptor to donor: the hold is armed, or why not.
    Armed {
        /// Of the `Arm`.
        part: u32,
        /// What came of it.
        result: Result<(), String>,
    },
    /// Donor to acceptor: the process is frozen, and all of it has been sent: restore it and take it.
    Final {
        /// All its flows, each in transit.
        #[serde(deserialize_with = "bounded")]
        flows: Vec<FlowAt>,
        /// Who translates connections to it.
        #[serde(deserialize_with = "bounded")]
        peers: Vec<PeerConnections>,
        /// Connections whose packets the donor goes on to forward, both ways.
        #[serde(deserialize_with = "bounded")]
        forwarded: Vec<Flow>,
        /// Bytes sent while it was frozen.
        bytes: u64,
    },
    /// Acceptor to donor: the process runs here, from this epoch of its record on; or, at any time, why it never will.
    Done {
        /// How it ended.
        result: Result<Epoch, String>,
        /// How long it took until it ran.
        times: AcceptorTimes,
        /// From there to this frame, in microseconds.
        ran_us: u32,
        /// The same step by step, each since the one before it, from when the process was known to stand still.
        #[serde(deserialize_with = "bounded")]
        steps: Vec<StepTime>,
    },
    /// Donor to acceptor: nothing is left of it here.
    Released,
    /// Donor to acceptor: give it up, unless it is committed. The answer, if it is not, is a `Done` that says so.
    Abort {
        /// Why.
        reason: String,
    },
    /// Donor or acceptor to a peer: the other end of these connections moves. No step depends on one before.
    Translate {
        /// How often the process had moved before this move: an older move changes nothing.
        hops: u32,
        /// What to do.
        step: TranslateStep,
        /// Where the process moves to.
        to: NodeId,
        /// The connections as the moving process sees them.
        #[serde(deserialize_with = "bounded")]
        connections: Vec<Flow>,
    },
    /// The peer's answer.
    Translated {
        /// Of the `Translate`.
        step: TranslateStep,
        /// What came of it.
        result: Result<(), String>,
    },
    /// Donor to acceptor: some of what the process is made of. For the daemon and not for its machine.
    Piece {
        /// What it is a piece of; the daemon's number.
        kind: u8,
        /// More of the same follows.
        more: bool,
        /// The bytes.
        bytes: B,
    },
    /// Acceptor to donor: pieces of so many bytes have been taken. For the daemon too.
    Took {
        /// Bytes since the last one said so.
        bytes: u64,
        /// For how long it worked on them, microseconds: the rest of the time is the way's.
        busy_us: u64,
        /// Why it can take no more.
        problem: Option<String>,
    },
    /// Acceptor to donor, while memory follows a process that runs. For the daemon too.
    Wanted(Wanted),
    /// Acceptor to donor: its verdict on everything of the process that needs no memory pages. For the daemon too.
    Judged {
        /// Why it does not take the process; empty if it would.
        #[serde(deserialize_with = "bounded")]
        refusals: Vec<String>,
    },
    /// Acceptor to donor: the next step of the hand-over of locks on files that both nodes see. For the daemon too.
    Locks {
        /// Which step, of which locks, coded by `sys`.
        bytes: B,
    },
}

/// What is to be sent of memory that follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Nothing else is missing: with no ranges all is there. Else somebody waits for these, and they come first.
    pub all: bool,
    /// The memory, as it lies at the donor.
    #[serde(deserialize_with = "bounded")]
    pub ranges: Vec<WantedRange>,
    /// Why nothing is wanted any more though some was missing.
    pub problem: Option<String>,
}

/// Memory of a process that the acceptor lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WantedRange {
    /// Which process of the tree, in the order of its shape.
    pub process: u32,
    /// First address.
    pub start: u64,
    /// First address beyond.
    pub end: u64,
}

impl<B> MoveFrameOf<B> {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            MoveFrameOf::Offer(_) => "Offer",
            MoveFrameOf::Offered { .. } => "Offered",
            MoveFrameOf::Ready(_) => "Ready",
            MoveFrameOf::Arm { .. } => "Arm",
            MoveFrameOf::Armed { .. } => "Armed",
            MoveFrameOf::Final { .. } => "Final",
            MoveFrameOf::Done { .. } => "MoveDone",
            MoveFrameOf::Released => "Released",
            MoveFrameOf::Abort { .. } => "MoveAbort",
            MoveFrameOf::Translate { .. } => "Translate",
            MoveFrameOf::Translated { .. } => "Translated",
            MoveFrameOf::Piece { .. } => "Piece",
            MoveFrameOf::Took { .. } => "Took",
            MoveFrameOf::Wanted(_) => "Wanted",
            MoveFrameOf::Judged { .. } => "Judged",
            MoveFrameOf::Locks { .. } => "Locks",
        }
    }

    /// The same frame with its blob put through `convert`.
    pub(crate) fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> MoveFrameOf<C> {
        match self {
            MoveFrameOf::Offer(offer) => MoveFrameOf::Offer(offer.map_blobs(convert)),
            MoveFrameOf::Offered { refusals } => MoveFrameOf::Offered { refusals },
            MoveFrameOf::Ready(result) => MoveFrameOf::Ready(result),
            MoveFrameOf::Arm { part, flows } => MoveFrameOf::Arm { part, flows },
            MoveFrameOf::Armed { part, result } => MoveFrameOf::Armed { part, result },
            MoveFrameOf::Final {
                flows,
                peers,
                forwarded,
                bytes,
            } => MoveFrameOf::Final {
                flows,
                peers,
                forwarded,
                bytes,
            },
            MoveFrameOf::Done {
                result,
                times,
                ran_us,
                steps,
            } => MoveFrameOf::Done {
                result,
                times,
                ran_us,
                steps,
            },
            MoveFrameOf::Released => MoveFrameOf::Released,
            MoveFrameOf::Abort { reason } => MoveFrameOf::Abort { reason },
            MoveFrameOf::Translate {
                hops,
                step,
                to,
                connections,
            } => MoveFrameOf::Translate {
                hops,
                step,
                to,
                connections,
            },
            MoveFrameOf::Translated { step, result } => MoveFrameOf::Translated { step, result },
            MoveFrameOf::Piece { kind, more, bytes } => MoveFrameOf::Piece {
                kind,
                more,
                bytes: convert(bytes),
            },
            MoveFrameOf::Took {
                bytes,
                busy_us,
                problem,
            } => MoveFrameOf::Took {
                bytes,
                busy_us,
                problem,
            },
            MoveFrameOf::Wanted(wanted) => MoveFrameOf::Wanted(wanted),
            MoveFrameOf::Judged { refusals } => MoveFrameOf::Judged { refusals },
            MoveFrameOf::Locks { bytes } => MoveFrameOf::Locks {
                bytes: convert(bytes),
            },
        }
    }
}
