//! The messages between daemons.
//!
//! A frame is generic over the type of its blobs. Decoding first borrows blobs from the receive buffer and then takes
//! shares of that buffer, so no blob is copied. All other code uses [`Frame`], with [`Bytes`] as the blob type.

use crate::authenticated_datagram::DatagramAuthenticationKey;
use crate::conductor_frames::ConductorFrame;
use crate::credential_frames::GenericCredentialFrame;
use crate::drain_frames::DrainFrame;
use crate::failure::Failure;
use crate::flow_report_frames::FlowReportFrame;
use crate::greeting::{GreetingRefusal, NodeFacts, greeting_text};
use crate::group_data::{SERVICE_ADDRESSES_MAX, ServiceName, ServiceProtocol};
use crate::health_frames::HealthFrame;
use crate::membership_frames::GenericMembershipFrame;
use crate::move_frames::{GenericMoveFrame, MoveId};
use crate::replication_frames::ReplicationFrame;
use crate::{ChangeRefusal, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord};
use bytes::Bytes;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;

/// Maximum number of entries in a list of a frame; a longer list is malformed.
pub const ENTRIES_MAX: usize = 65_536;

/// Identifies one batch of connections that are handed off together. Unique in the life of the group: a donor's restart
/// changes `boot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BatchId {
    /// The node that gives the connections.
    pub donor: NodeId,
    /// Start number of the donor's daemon, in any unit that grows from start to start.
    pub boot: u64,
    /// Sequence number of the batch since that start.
    pub seq: u64,
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}.{}", self.donor, self.boot, self.seq)
    }
}

/// A flow to prepare a socket for at the acceptor. The position in the list is the flow's index in the batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowToPrepare<B = Bytes> {
    /// The flow that the acceptor makes a socket for.
    pub flow: Flow,
    /// The epoch at which the donor owns the flow; the transit has the next epoch.
    pub epoch: Epoch,
    /// Socket and TCP options, coded by `tcp-repair`.
    pub static_state: B,
}

/// The rest of a flow's state, extracted while the donor was frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenFlowState<B = Bytes> {
    /// The flow's index in the batch: its position in [`GenericFrame::Prepare`].
    pub index: u32,
    /// Sequence numbers and queues, coded by `tcp-repair`.
    pub dynamic: B,
    /// Application state for the server program at the acceptor.
    pub application: B,
}

/// Durations of the acceptor's part of a batch, in microseconds of its own clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptorPhaseTimes {
    /// From the last `State` until the sockets are restored.
    pub restore_us: u32,
    /// From the end of `restore_us` until the last connection is active: the holder's answer and the activation.
    pub commit_us: u32,
}

/// A service of a node's file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ConfiguredService {
    /// Protocol of the service.
    pub protocol: ServiceProtocol,
    /// Address and port.
    pub address: SocketAddr,
    /// Name of the service.
    pub name: ServiceName,
    /// Hash of the settings on which all nodes must agree: weights, placement, policy.
    pub digest: u64,
}

/// A frame with [`Bytes`] for blobs: the only form outside this crate.
pub type Frame = GenericFrame<Bytes>;

/// A message between daemons. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(serialize = "B: Serialize", deserialize = "B: Deserialize<'de>"))]
pub enum GenericFrame<B> {
    /// The first frame on every channel, in both directions.
    Hello {
        /// Number of the node that sends the greeting.
        node: NodeId,
        /// Start number of the sender's daemon, as in [`BatchId::boot`].
        boot: u64,
        /// The name of the group, which must be the same.
        #[serde(deserialize_with = "greeting_text")]
        group: String,
        /// Further facts about the sender.
        facts: NodeFacts,
    },
    /// Donor to acceptor: make sockets for these flows.
    Prepare {
        /// The batch to prepare.
        batch: BatchId,
        /// The flows to make sockets for, in the order of their indices in the batch.
        #[serde(deserialize_with = "bounded_list")]
        flows: Vec<FlowToPrepare<B>>,
    },
    /// Acceptor to donor: the result of `Prepare` per flow, in the same order; a refusal gives the failure.
    PrepareResponse {
        /// The batch that the acceptor has prepared.
        batch: BatchId,
        /// One result per flow.
        #[serde(deserialize_with = "bounded_list")]
        results: Vec<Result<(), Failure>>,
    },
    /// Any node to the holder: change these records.
    ChangeRequest {
        /// Number chosen by the requester and repeated in the answer.
        request: u64,
        /// The changes, each independent of the others.
        #[serde(deserialize_with = "bounded_list")]
        changes: Vec<OwnershipChange>,
    },
    /// The holder's answer, per change in the order of `ChangeRequest`: the record after the change (none after a
    /// removal), or the reason for the refusal.
    ChangeResponse {
        /// Number of the `ChangeRequest`.
        request: u64,
        /// One result per change.
        #[serde(deserialize_with = "bounded_list")]
        results: Vec<Result<Option<OwnershipRecord>, ChangeRefusal>>,
    },
    /// Donor to acceptor: the state of frozen flows. Flows of the batch that no `State` names stay at the donor.
    State {
        /// The batch whose flows are frozen.
        batch: BatchId,
        /// Some or all flows of the batch.
        #[serde(deserialize_with = "bounded_list")]
        flows: Vec<FrozenFlowState<B>>,
        /// True in the last `State` of the batch.
        last: bool,
    },
    /// Acceptor to donor: the final result per flow in the order of `Prepare`: the epoch at which the acceptor owns the
    /// flow, or the reason for the refusal.
    Done {
        /// The batch whose final result this is.
        batch: BatchId,
        /// One result per flow.
        #[serde(deserialize_with = "bounded_list")]
        results: Vec<Result<Epoch, Failure>>,
        /// Durations of the acceptor's steps.
        times: AcceptorPhaseTimes,
    },
    /// Either side of a batch to the other: abort it, unless it is committed.
    Abort {
        /// The batch to abort.
        batch: BatchId,
        /// The reason for which the batch is aborted.
        reason: Failure,
    },
    /// Any node to the holder: request the records of these flows.
    Query {
        /// Number chosen by the requester and repeated in the answer.
        request: u64,
        /// The flows whose records are requested.
        #[serde(deserialize_with = "bounded_list")]
        flows: Vec<Flow>,
    },
    /// The holder's answer, per flow in the order of `Query`.
    QueryResponse {
        /// Number of the `Query`.
        request: u64,
        /// One record per flow; none for a flow that the holder does not know.
        #[serde(deserialize_with = "bounded_list")]
        records: Vec<Option<OwnershipRecord>>,
    },
    /// Asks the peer for a sign of life.
    Ping {
        /// Any number.
        token: u64,
    },
    /// The answer to `Ping`.
    Pong {
        /// Token of the `Ping`.
        token: u64,
    },
    /// A frame of a process migration.
    Move {
        /// The process migration that the frame belongs to.
        id: MoveId,
        /// The migration's frame.
        frame: GenericMoveFrame<B>,
    },
    /// A frame of the group's membership.
    Membership(GenericMembershipFrame<B>),
    /// A frame about the health of servers.
    Health(HealthFrame),
    /// The answer to `Hello` of a node that this node does not talk to: the last frame of the channel.
    Refused {
        /// The reason for which the sender does not talk to the node.
        reason: GreetingRefusal,
    },
    /// A frame about certificates.
    Credentials(GenericCredentialFrame<B>),
    /// A frame about the flows of a node, for a new holder.
    FlowReport(FlowReportFrame),
    /// Any node to any other, in a group whose services are in files: the services of the sender's file. Nothing changes
    /// by this frame; the receiver tells its operator of differences.
    ConfiguredServices {
        /// The services in the sender's configuration file.
        #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
        services: Vec<ConfiguredService>,
    },
    /// Any node to the contact node: the sender's load. Sent at intervals; a lost one does no harm.
    NodeLoad {
        /// The load as a fraction of `u32::MAX`.
        load: u32,
    },
    /// Any node to any other, right after the greeting, in a group that runs itself: the key with which the receiver
    /// authenticates its datagrams to the sender.
    DatagramAuthenticationKey {
        /// Start number of the sender's daemon, as in [`BatchId::boot`].
        boot: u64,
        /// Key for the receiver's datagrams to the sender.
        key: DatagramAuthenticationKey,
    },
    /// A frame about the balance of loads.
    Conductor(ConductorFrame),
    /// A frame about the connections of a replicated service.
    Replication(ReplicationFrame),
    /// A frame about the drain of a node that an operator orders from the contact node.
    Drain(DrainFrame),
}

impl<B> GenericFrame<B> {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            GenericFrame::Hello { .. } => "Hello",
            GenericFrame::Prepare { .. } => "Prepare",
            GenericFrame::PrepareResponse { .. } => "PrepareResponse",
            GenericFrame::ChangeRequest { .. } => "ChangeRequest",
            GenericFrame::ChangeResponse { .. } => "ChangeResponse",
            GenericFrame::State { .. } => "State",
            GenericFrame::Done { .. } => "Done",
            GenericFrame::Abort { .. } => "Abort",
            GenericFrame::Query { .. } => "Query",
            GenericFrame::QueryResponse { .. } => "QueryResponse",
            GenericFrame::Ping { .. } => "Ping",
            GenericFrame::Pong { .. } => "Pong",
            GenericFrame::Move { frame, .. } => frame.name(),
            GenericFrame::Membership(frame) => frame.name(),
            GenericFrame::Health(frame) => frame.name(),
            GenericFrame::Refused { .. } => "Refused",
            GenericFrame::Credentials(frame) => frame.name(),
            GenericFrame::FlowReport(frame) => frame.name(),
            GenericFrame::ConfiguredServices { .. } => "ConfiguredServices",
            GenericFrame::NodeLoad { .. } => "NodeLoad",
            GenericFrame::DatagramAuthenticationKey { .. } => "DatagramAuthenticationKey",
            GenericFrame::Conductor(frame) => frame.name(),
            GenericFrame::Replication(frame) => frame.name(),
            GenericFrame::Drain(frame) => frame.name(),
        }
    }

    /// The same frame with each blob put through `convert`.
    pub(crate) fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> GenericFrame<C> {
        match self {
            GenericFrame::Prepare { batch, flows } => GenericFrame::Prepare {
                batch,
                flows: flows
                    .into_iter()
                    .map(|flow| flow.map_blobs(&convert))
                    .collect(),
            },
            GenericFrame::State { batch, flows, last } => GenericFrame::State {
                batch,
                flows: flows
                    .into_iter()
                    .map(|flow| flow.map_blobs(&convert))
                    .collect(),
                last,
            },
            GenericFrame::Hello {
                node,
                boot,
                group,
                facts,
            } => GenericFrame::Hello {
                node,
                boot,
                group,
                facts,
            },
            GenericFrame::Refused { reason } => GenericFrame::Refused { reason },
            GenericFrame::PrepareResponse { batch, results } => {
                GenericFrame::PrepareResponse { batch, results }
            }
            GenericFrame::ChangeRequest { request, changes } => {
                GenericFrame::ChangeRequest { request, changes }
            }
            GenericFrame::ChangeResponse { request, results } => {
                GenericFrame::ChangeResponse { request, results }
            }
            GenericFrame::Done {
                batch,
                results,
                times,
            } => GenericFrame::Done {
                batch,
                results,
                times,
            },
            GenericFrame::Abort { batch, reason } => GenericFrame::Abort { batch, reason },
            GenericFrame::Query { request, flows } => GenericFrame::Query { request, flows },
            GenericFrame::QueryResponse { request, records } => {
                GenericFrame::QueryResponse { request, records }
            }
            GenericFrame::Ping { token } => GenericFrame::Ping { token },
            GenericFrame::Pong { token } => GenericFrame::Pong { token },
            GenericFrame::Move { id, frame } => GenericFrame::Move {
                id,
                frame: frame.map_blobs(convert),
            },
            GenericFrame::Membership(frame) => GenericFrame::Membership(frame.map_blobs(convert)),
            GenericFrame::Health(frame) => GenericFrame::Health(frame),
            GenericFrame::Credentials(frame) => GenericFrame::Credentials(frame.map_blobs(convert)),
            GenericFrame::FlowReport(frame) => GenericFrame::FlowReport(frame),
            GenericFrame::ConfiguredServices { services } => {
                GenericFrame::ConfiguredServices { services }
            }
            GenericFrame::NodeLoad { load } => GenericFrame::NodeLoad { load },
            GenericFrame::DatagramAuthenticationKey { boot, key } => {
                GenericFrame::DatagramAuthenticationKey { boot, key }
            }
            GenericFrame::Conductor(frame) => GenericFrame::Conductor(frame),
            GenericFrame::Replication(frame) => GenericFrame::Replication(frame),
            GenericFrame::Drain(frame) => GenericFrame::Drain(frame),
        }
    }
}

impl<B> FlowToPrepare<B> {
    fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> FlowToPrepare<C> {
        FlowToPrepare {
            flow: self.flow,
            epoch: self.epoch,
            static_state: convert(self.static_state),
        }
    }
}

impl<B> FrozenFlowState<B> {
    fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> FrozenFlowState<C> {
        FrozenFlowState {
            index: self.index,
            dynamic: convert(self.dynamic),
            application: convert(self.application),
        }
    }
}

/// Reads a list of at most [`ENTRIES_MAX`] entries, because an entry of one byte on the wire may take fifty in memory.
pub(crate) fn bounded_list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    bounded_list_of::<D, T, ENTRIES_MAX>(deserializer)
}

/// Reads a list of at most `MAX` entries.
pub(crate) fn bounded_list_of<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct List<T, const MAX: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
            // The sender wrote the hint: allocate at most 1,024 entries for it, then only as entries arrive.
            let mut list = Vec::with_capacity(entries.size_hint().unwrap_or(0).min(1_024));
            while let Some(entry) = entries.next_element()? {
                if list.len() == MAX {
                    return Err(serde::de::Error::invalid_length(list.len() + 1, &self));
                }
                list.push(entry);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(List::<T, MAX>(PhantomData))
}
