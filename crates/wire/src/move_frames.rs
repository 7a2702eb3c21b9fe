//! The messages between daemons while a process moves, and the key of the process's record.

use crate::failure::Failure;
use crate::flow::{Flow, FlowError, Protocol, excerpt};
use crate::frame::{AcceptorPhaseTimes, bounded_list};
use crate::{Epoch, NodeId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// Identifies one move of a process. Unique in the life of the group: a donor's restart changes `boot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MoveId {
    /// The node that gives the process.
    pub donor: NodeId,
    /// Start number of the donor's daemon, in any unit that grows from start to start.
    pub boot: u64,
    /// Sequence number of the move since that start.
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

/// First half of the addresses that encode a move's numbers; with this prefix none is a mapped IPv4 address.
const MOVE_KEY_PREFIX: u64 = 0xfd00 << 48;

impl Flow {
    /// Returns the key of a moving process's record in the steering table. The record is arbitrated like a flow's, but
    /// no packet has this key. Written `process:DONOR.BOOT.SEQ`.
    pub fn process_key(id: MoveId) -> Flow {
        let address = |half: u64, port| {
            let bits = (u128::from(MOVE_KEY_PREFIX) << 64) | u128::from(half);
            SocketAddr::new(Ipv6Addr::from_bits(bits).into(), port)
        };
        Flow {
            protocol: Protocol::Process,
            local: address(id.boot, id.donor.0),
            remote: address(id.seq, 0),
        }
    }

    /// Returns the move of a process's record; none for a flow.
    pub fn move_id(&self) -> Option<MoveId> {
        let half = |address: SocketAddr| match address {
            SocketAddr::V6(address) => {
                let bits = address.ip().to_bits();
                (bits >> 64 == u128::from(MOVE_KEY_PREFIX)).then_some(bits as u64)
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

    /// Returns true if this is the record of a moving process and not a flow.
    pub fn is_process(&self) -> bool {
        self.protocol == Protocol::Process
    }

    /// Returns the flow as seen from its other end.
    pub fn mirrored(&self) -> Flow {
        Flow {
            protocol: self.protocol,
            local: self.remote,
            remote: self.local,
        }
    }
}

/// Strategy for moving the sockets of a process: the three of paper 002.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum SocketStrategy {
    /// One socket at a time, each with messages of its own.
    Iterative,
    /// All sockets in one message.
    Collective,
    /// Sockets are created before the freeze; one message during the freeze carries the changes.
    #[default]
    Incremental,
}

/// A flow of a moving process, and the epoch at which the donor owns it; the transit has the next epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DonorFlowEpoch {
    /// A flow of the moving process.
    pub flow: Flow,
    /// The epoch at which the donor owns the flow.
    pub epoch: Epoch,
}

/// Connections of a moving process to one node of the group, which translates their addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerConnections {
    /// The node at the other end of the connections.
    pub node: NodeId,
    /// The connections as the moving process sees them.
    #[serde(deserialize_with = "bounded_list")]
    pub connections: Vec<Flow>,
}

/// A donor's request to move a process, with its properties.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveOffer<B = Bytes> {
    /// True for a clone: the original process stays.
    pub clone: bool,
    /// Strategy for moving the sockets.
    pub sockets: SocketStrategy,
    /// True if memory may be sent after the process resumes (post-copy).
    pub post_copy: bool,
    /// Number of earlier moves of the process.
    pub hops: u32,
    /// Size of the process's memory, in bytes.
    pub memory_bytes: u64,
    /// Number of flows.
    pub flow_count: u32,
    /// Resources that the process uses (files, libraries, users, numbers), coded by `checkpoint`.
    pub description: B,
}

impl<B> MoveOffer<B> {
    fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> MoveOffer<C> {
        MoveOffer {
            clone: self.clone,
            sockets: self.sockets,
            post_copy: self.post_copy,
            hops: self.hops,
            memory_bytes: self.memory_bytes,
            flow_count: self.flow_count,
            description: convert(self.description),
        }
    }
}

/// Step of the address translation that a node applies to its end of a connection to a moving process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TranslationStep {
    /// Accept packets from the new node too.
    Prepare,
    /// The process has moved: send packets to the new node, and accept them from there only.
    Switch,
    /// The process stays: restore the previous translation.
    Undo,
}

/// Duration of one step of a freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// Name of the step.
    pub name: String,
    /// Duration, in microseconds.
    pub us: u32,
}

/// The frames of one move, with [`Bytes`] for blobs.
pub type MoveFrame = GenericMoveFrame<Bytes>;

/// The frames of one move. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(serialize = "B: Serialize", deserialize = "B: Deserialize<'de>"))]
pub enum GenericMoveFrame<B> {
    /// Donor to acceptor: asks whether the acceptor would take the process.
    Offer(MoveOffer<B>),
    /// Acceptor to donor: answers `Offer`; accepted if there are no refusals.
    OfferResponse {
        /// Reasons for a refusal.
        #[serde(deserialize_with = "bounded_list")]
        refusals: Vec<Failure>,
    },
    /// Acceptor to donor: the stub process that becomes the restored one exists, or the reason for its failure.
    Ready(Result<(), Failure>),
    /// Donor to acceptor: these flows are about to be diverted; hold their packets.
    Arm {
        /// Sequence number of the `Arm` within the move.
        part: u32,
        /// Flows of the moving process that are about to be diverted.
        #[serde(deserialize_with = "bounded_list")]
        flows: Vec<DonorFlowEpoch>,
    },
    /// Acceptor to donor: the hold is armed, or the reason for its failure.
    ArmResponse {
        /// Number of the `Arm`.
        part: u32,
        /// Result of arming the hold.
        result: Result<(), Failure>,
    },
    /// Donor to acceptor: the process is frozen and completely sent; restore it and take it over.
    Final {
        /// All flows of the process, each in transit.
        #[serde(deserialize_with = "bounded_list")]
        flows: Vec<DonorFlowEpoch>,
        /// Nodes that translate connections to the process.
        #[serde(deserialize_with = "bounded_list")]
        peers: Vec<PeerConnections>,
        /// Connections with packets that the donor continues to forward, in both directions.
        #[serde(deserialize_with = "bounded_list")]
        forwarded: Vec<Flow>,
        /// Bytes sent during the freeze.
        bytes: u64,
    },
    /// Acceptor to donor: the process runs at the acceptor from this epoch of its record on; or, at any time, the
    /// reason of a final failure.
    Done {
        /// The final result.
        result: Result<Epoch, Failure>,
        /// Durations until the process ran.
        times: AcceptorPhaseTimes,
        /// From the process's resume until this frame, in microseconds.
        since_resume_us: u32,
        /// Duration of each step since the one before, beginning when the acceptor learned that the process was
        /// stopped.
        #[serde(deserialize_with = "bounded_list")]
        steps: Vec<StepTime>,
    },
    /// Donor to acceptor: the donor has released everything of the process.
    Released,
    /// Donor to acceptor: abort the move, unless it is committed. If it is not, the acceptor answers with a failed
    /// `Done`.
    Abort {
        /// The reason for which the donor aborts the move.
        reason: Failure,
    },
    /// Donor or acceptor to a peer: the other end of these connections moves. No step depends on an earlier one.
    Translate {
        /// Number of the process's moves before this one: a step of an older move changes nothing.
        hops: u32,
        /// Step of the translation that the peer is to take.
        step: TranslationStep,
        /// The node that the process moves to.
        to: NodeId,
        /// The connections as the moving process sees them.
        #[serde(deserialize_with = "bounded_list")]
        connections: Vec<Flow>,
    },
    /// The peer's answer.
    TranslateResponse {
        /// Step of the `Translate`.
        step: TranslationStep,
        /// Result of the step.
        result: Result<(), Failure>,
    },
    /// Donor to acceptor: a part of the process's state. Handled by the daemon, not by its state machine.
    Piece {
        /// Kind of state; the daemon assigns the numbers.
        kind: u8,
        /// True if more of the same state follows.
        more: bool,
        /// Bytes of this part of the state.
        bytes: B,
    },
    /// Acceptor to donor: pieces of this many bytes have been processed. Handled by the daemon too.
    PiecesProcessed {
        /// Bytes since the last `PiecesProcessed`.
        bytes: u64,
        /// Time spent processing them, in microseconds: the rest of the elapsed time is the network's.
        busy_us: u64,
        /// The reason if the acceptor cannot process any more.
        problem: Option<Failure>,
    },
    /// Acceptor to donor, during the post-copy of a running process. Handled by the daemon too.
    PageRequest(PageRequest),
    /// Acceptor to donor: the result of checking everything of the process that needs no memory pages. Handled by the
    /// daemon too.
    CheckResult {
        /// Reasons for refusing the process; empty if the acceptor would take it.
        #[serde(deserialize_with = "bounded_list")]
        refusals: Vec<Failure>,
    },
    /// Acceptor to donor: the next step of handing over locks on files that both nodes see. Handled by the daemon too.
    LockHandover {
        /// The step and its locks, coded by `checkpoint`.
        bytes: B,
    },
}

/// A request for memory pages during post-copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRequest {
    /// True if the ranges are all that is missing: with no ranges, the post-copy is complete. If false, threads wait for these
    /// ranges, which must be sent first.
    pub is_complete: bool,
    /// The memory ranges, by their addresses at the donor.
    #[serde(deserialize_with = "bounded_list")]
    pub ranges: Vec<PageRange>,
    /// The reason if no memory is requested although some is missing.
    pub problem: Option<Failure>,
}

/// A range of a process's memory that the acceptor lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageRange {
    /// The process, by its position in the shape of the process tree.
    pub process: u32,
    /// First address.
    pub start: u64,
    /// First address after the range.
    pub end: u64,
}

impl<B> GenericMoveFrame<B> {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            GenericMoveFrame::Offer(_) => "Offer",
            GenericMoveFrame::OfferResponse { .. } => "OfferResponse",
            GenericMoveFrame::Ready(_) => "Ready",
            GenericMoveFrame::Arm { .. } => "Arm",
            GenericMoveFrame::ArmResponse { .. } => "ArmResponse",
            GenericMoveFrame::Final { .. } => "Final",
            GenericMoveFrame::Done { .. } => "MoveDone",
            GenericMoveFrame::Released => "Released",
            GenericMoveFrame::Abort { .. } => "MoveAbort",
            GenericMoveFrame::Translate { .. } => "Translate",
            GenericMoveFrame::TranslateResponse { .. } => "TranslateResponse",
            GenericMoveFrame::Piece { .. } => "Piece",
            GenericMoveFrame::PiecesProcessed { .. } => "PiecesProcessed",
            GenericMoveFrame::PageRequest(_) => "PageRequest",
            GenericMoveFrame::CheckResult { .. } => "CheckResult",
            GenericMoveFrame::LockHandover { .. } => "LockHandover",
        }
    }

    /// The same frame with its blob put through `convert`.
    pub(crate) fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> GenericMoveFrame<C> {
        match self {
            GenericMoveFrame::Offer(offer) => GenericMoveFrame::Offer(offer.map_blobs(convert)),
            GenericMoveFrame::OfferResponse { refusals } => {
                GenericMoveFrame::OfferResponse { refusals }
            }
            GenericMoveFrame::Ready(result) => GenericMoveFrame::Ready(result),
            GenericMoveFrame::Arm { part, flows } => GenericMoveFrame::Arm { part, flows },
            GenericMoveFrame::ArmResponse { part, result } => {
                GenericMoveFrame::ArmResponse { part, result }
            }
            GenericMoveFrame::Final {
                flows,
                peers,
                forwarded,
                bytes,
            } => GenericMoveFrame::Final {
                flows,
                peers,
                forwarded,
                bytes,
            },
            GenericMoveFrame::Done {
                result,
                times,
                since_resume_us: ran_us,
                steps,
            } => GenericMoveFrame::Done {
                result,
                times,
                since_resume_us: ran_us,
                steps,
            },
            GenericMoveFrame::Released => GenericMoveFrame::Released,
            GenericMoveFrame::Abort { reason } => GenericMoveFrame::Abort { reason },
            GenericMoveFrame::Translate {
                hops,
                step,
                to,
                connections,
            } => GenericMoveFrame::Translate {
                hops,
                step,
                to,
                connections,
            },
            GenericMoveFrame::TranslateResponse { step, result } => {
                GenericMoveFrame::TranslateResponse { step, result }
            }
            GenericMoveFrame::Piece { kind, more, bytes } => GenericMoveFrame::Piece {
                kind,
                more,
                bytes: convert(bytes),
            },
            GenericMoveFrame::PiecesProcessed {
                bytes,
                busy_us,
                problem,
            } => GenericMoveFrame::PiecesProcessed {
                bytes,
                busy_us,
                problem,
            },
            GenericMoveFrame::PageRequest(request) => GenericMoveFrame::PageRequest(request),
            GenericMoveFrame::CheckResult { refusals } => {
                GenericMoveFrame::CheckResult { refusals }
            }
            GenericMoveFrame::LockHandover { bytes } => GenericMoveFrame::LockHandover {
                bytes: convert(bytes),
            },
        }
    }
}
