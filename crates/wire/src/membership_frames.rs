//! The messages by which a group runs itself: votes on views, leases, joins, and the list of server nodes (paper 000,
//! section 2.3).
//!
//! Nodes are addressed by [`NodeName`], the name in a node's certificate, since a node has a name before the group gives
//! the node a number.

use crate::NodeId;
use crate::frame::bounded_list_of;
use crate::group_data::{GroupChange, GroupChangeId, GroupChangeRefusal};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// Maximum number of voters of a view: the contact node and its backups.
pub const VOTERS_MAX: usize = 9;
/// Maximum number of server nodes of a group.
pub const SERVER_NODES_MAX: usize = 4_096;
/// Maximum length of a node's name, in bytes.
pub const NODE_NAME_BYTES_MAX: usize = 40;
/// Maximum length of the group data, in bytes.
pub const GROUP_DATA_BYTES_MAX: usize = 1 << 20;
/// Maximum epoch of a view, and maximum version of the group data. No group counts so far, and the number after it can
/// still be written.
pub const EPOCH_MAX: u64 = 1 << 63;

/// The name of a node, as in the node's certificate: 1 to [`NODE_NAME_BYTES_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct NodeName(String);

/// A text that is not the name of a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a node's name has 1 to {NODE_NAME_BYTES_MAX} bytes, and this one has {0}; choose another name"
)]
pub struct NodeNameError(pub usize);

impl NodeName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for NodeName {
    type Error = NodeNameError;

    fn try_from(text: String) -> Result<NodeName, NodeNameError> {
        match text.len() {
            1..=NODE_NAME_BYTES_MAX => Ok(NodeName(text)),
            length => Err(NodeNameError(length)),
        }
    }
}

impl FromStr for NodeName {
    type Err = NodeNameError;

    /// Parses the name of a node.
    ///
    /// # Errors
    /// The text is empty or too long.
    fn from_str(text: &str) -> Result<NodeName, NodeNameError> {
        NodeName::try_from(text.to_owned())
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Number by which a node's join is recognised, chosen by the node at random. The node keeps the number when it joins again
/// because others took it for failed, since they may already count on the node by that number. A node that has left for
/// good, or is without its former disk state, chooses another one, and thus never passes for the voter that it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JoinNumber(pub u64);

/// A node of the group.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// The number that the contact node gave to the node; never given to another node.
    pub id: NodeId,
    /// The node's name.
    pub name: NodeName,
    /// The address of the node's daemon.
    pub address: SocketAddr,
    /// The join by which the node became a member.
    pub join: JoinNumber,
}

/// Number of an attempt to decide on the next view. Ballots are ordered; a ballot has one proposer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ballot {
    /// Round of the vote; round 0 belongs to the contact node alone, and needs no `Prepare`.
    pub round: u32,
    /// The node that makes the ballot's proposal.
    pub proposer: NodeId,
}

/// Data of the group that the voters agree on without reading them: the encoded
/// [`GroupSettings`](crate::group_data::GroupSettings), or no bytes for a new group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupData<B = Bytes> {
    /// Number of changes of the data.
    pub version: u64,
    /// The data, at most [`GROUP_DATA_BYTES_MAX`] bytes.
    pub bytes: B,
}

/// The part of a group's view that is put to the vote: everything but the server nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VotedView<B = Bytes> {
    /// Number of the view, one more than that of the view whose voters decided on this one.
    pub epoch: u64,
    /// The voters: the contact node, then the backups in their order of succession.
    #[serde(deserialize_with = "bounded_list_of::<_, _, VOTERS_MAX>")]
    pub voters: Vec<Member>,
    /// The smallest number that no node has and that is not reserved for server nodes; 65,536 if all are given.
    pub next_id: u32,
    /// Version and encoded settings of the group.
    pub group_data: GroupData<B>,
}

impl VotedView {
    /// Returns the contact node; none in an invalid view without voters.
    pub fn contact(&self) -> Option<&Member> {
        self.voters.first()
    }

    /// Returns the voter of this name.
    pub fn voter(&self, name: &NodeName) -> Option<&Member> {
        self.voters.iter().find(|voter| voter.name == *name)
    }

    /// Returns the number of voters that decide on the next view.
    pub fn majority(&self) -> usize {
        self.voters.len() / 2 + 1
    }

    /// Returns true if a group can have this view: there are voters, their numbers and names are unique, the numbers
    /// were given, and epoch and version of the group data are at most [`EPOCH_MAX`].
    pub fn is_valid(&self) -> bool {
        are_valid_voters(&self.voters, self.next_id)
            && self.epoch <= EPOCH_MAX
            && self.group_data.version <= EPOCH_MAX
            && self.group_data.bytes.len() <= GROUP_DATA_BYTES_MAX
    }

    /// Returns the view without its group data.
    pub fn summary(&self) -> ViewSummary {
        ViewSummary {
            epoch: self.epoch,
            voters: self.voters.clone(),
            next_id: self.next_id,
            group_data_version: self.group_data.version,
        }
    }
}

/// Returns true if there are voters, their numbers and names are unique, and the numbers were given.
fn are_valid_voters(voters: &[Member], next_id: u32) -> bool {
    let is_unique = |(position, voter): (usize, &Member)| {
        let others = &voters[..position];
        let is_given = voter.id.0 != 0 && u32::from(voter.id.0) < next_id;
        is_given && (others.iter()).all(|other| other.id != voter.id && other.name != voter.name)
    };
    (1..=VOTERS_MAX).contains(&voters.len())
        && voters.iter().enumerate().all(is_unique)
        && next_id <= u32::from(u16::MAX) + 1
}

impl<B> VotedView<B> {
    fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> VotedView<C> {
        VotedView {
            epoch: self.epoch,
            voters: self.voters,
            next_id: self.next_id,
            group_data: GroupData {
                version: self.group_data.version,
                bytes: convert(self.group_data.bytes),
            },
        }
    }
}

/// A view without its group data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewSummary {
    /// As in [`VotedView::epoch`].
    pub epoch: u64,
    /// As in [`VotedView::voters`].
    #[serde(deserialize_with = "bounded_list_of::<_, _, VOTERS_MAX>")]
    pub voters: Vec<Member>,
    /// As in [`VotedView::next_id`].
    pub next_id: u32,
    /// As in [`GroupData::version`].
    pub group_data_version: u64,
}

impl ViewSummary {
    /// Returns true if a group can have this view, as [`VotedView::is_valid`] does.
    pub fn is_valid(&self) -> bool {
        are_valid_voters(&self.voters, self.next_id)
            && self.epoch <= EPOCH_MAX
            && self.group_data_version <= EPOCH_MAX
    }

    /// Returns the view with these group data.
    pub fn with_group_data(self, group_data: GroupData) -> VotedView {
        VotedView {
            epoch: self.epoch,
            voters: self.voters,
            next_id: self.next_id,
            group_data,
        }
    }
}

/// A view that a voter accepted, and the ballot in which that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedView<B = Bytes> {
    /// The ballot in which the voter accepted the view.
    pub ballot: Ballot,
    /// The view that the voter accepted.
    pub view: VotedView<B>,
}

impl<B> AcceptedView<B> {
    fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> AcceptedView<C> {
        AcceptedView {
            ballot: self.ballot,
            view: self.view.map_blobs(convert),
        }
    }
}

/// All that a node must find on its disk when its daemon restarts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembershipState {
    /// The join by which the node is a member; none for a node outside the group.
    pub join: Option<JoinNumber>,
    /// The join that the node has asked for. On the disk before the first request, so that a voter that crashes at once
    /// is still the voter whose vote the group counts on.
    pub requested_join: Option<JoinNumber>,
    /// The node's number if the node is a server node.
    pub server_node_id: Option<NodeId>,
    /// The newest view that the node knows to be committed.
    pub committed: Option<VotedView>,
    /// The highest ballot that the node promised to heed in the vote on the view after `committed`.
    pub promised: Option<Ballot>,
    /// The view that the node accepted last in that vote.
    pub accepted: Option<AcceptedView>,
}

/// The bytes on the disk are not a state that this release wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the saved membership of this node cannot be read ({0}); remove the file, and the node joins the group anew"
)]
pub struct MembershipStateError(String);

/// First byte of a saved state.
const STATE_VERSION: u8 = 1;

impl MembershipState {
    /// Returns the bytes to write to the disk.
    ///
    /// # Errors
    /// The state cannot be encoded, which would be a defect of this crate.
    pub fn encode(&self) -> Result<Vec<u8>, MembershipStateError> {
        postcard::to_extend(self, vec![STATE_VERSION])
            .map_err(|error| MembershipStateError(error.to_string()))
    }

    /// Reads the bytes that `encode` returned.
    ///
    /// # Errors
    /// The bytes are no state, or one that no node can have.
    pub fn decode(bytes: &[u8]) -> Result<MembershipState, MembershipStateError> {
        let error = |cause: &str| MembershipStateError(cause.to_owned());
        let Some((&STATE_VERSION, body)) = bytes.split_first() else {
            return Err(error("the version is unknown"));
        };
        let (state, rest) = postcard::take_from_bytes::<MembershipState>(body)
            .map_err(|cause| error(&cause.to_string()))?;
        let accepted = state.accepted.as_ref().map(|accepted| &accepted.view);
        let views = state.committed.iter().chain(accepted);
        match (rest.is_empty(), views.into_iter().all(VotedView::is_valid)) {
            (true, true) => Ok(state),
            (false, _) => Err(error("bytes follow the end")),
            (true, false) => Err(error("a view is impossible")),
        }
    }
}

/// The role that a node joins in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum JoinRole {
    /// A voter that may become contact node.
    Backup,
    /// A node that only serves.
    ServerNode,
}

/// The reason for which a contact node refuses a join.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    thiserror::Error,
)]
pub enum JoinRefusal {
    /// The view has [`VOTERS_MAX`] voters.
    #[error(
        "the group has {VOTERS_MAX} voters, the maximum; join as a server node, or remove a backup first"
    )]
    VotersFull,
    /// The group has [`SERVER_NODES_MAX`] server nodes.
    #[error("the group has {SERVER_NODES_MAX} server nodes, the maximum; remove one first")]
    ServerNodesFull,
    /// All 65,535 numbers of nodes were given.
    #[error("all numbers of nodes were given; create a new group")]
    NodeIdsExhausted,
    /// Too many joins are under way.
    #[error("too many nodes join at once; the node tries again by itself")]
    Busy,
    /// The node was given many numbers of late.
    #[error(
        "this node has joined too often of late; the node tries again by itself, and its log shows why it leaves the group"
    )]
    TooOften,
    /// The node's certificate does not admit it as a backup.
    #[error(
        "the certificate of this node admits it as a server node only; write role = \"server\" into section [group] of its file, or \
         give it a certificate for backups (`holdfast group token --role backup`, `holdfast ca issue --role backup`)"
    )]
    NotAdmittedAsBackup,
}

/// Version of the list of server nodes. Lists of one version are the same; only versions of one term have an order.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ServerListVersion {
    /// Random number of the time in which one daemon keeps the list as contact node.
    pub term: u64,
    /// Number of changes of the list in that time.
    pub changes: u64,
}

/// A change of the list of server nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerNodeChange {
    /// The node is in the list, with this address and join.
    Added(Member),
    /// The node of this number is not in the list.
    Removed(NodeId),
}

/// A heartbeat of the contact node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Epoch of the contact node's view.
    pub epoch: u64,
    /// Start number of the contact node's daemon, so that grants to an earlier daemon do not count.
    pub boot: u64,
    /// Number of the heartbeat since that start.
    pub sequence: u64,
    /// True if the contact node has a lease. If its frames arrive, but never the answers, backups replace it.
    pub has_lease: bool,
    /// Version of the contact node's list of server nodes.
    pub server_list: ServerListVersion,
}

/// The frames of a group's membership, with [`Bytes`] for blobs.
pub type MembershipFrame = GenericMembershipFrame<Bytes>;

/// The frames of a group's membership. The order of the variants is part of the format.
///
/// `Prepare`, `Promise`, `Propose` and `Accept` are the messages 1a, 1b, 2a and 2b of Lamport, "Paxos Made Simple"
/// (2001), section 2.2, with one vote for each epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(serialize = "B: Serialize", deserialize = "B: Deserialize<'de>"))]
pub enum GenericMembershipFrame<B> {
    /// Proposer to voters: heed no lower ballot in the vote on the view of this epoch.
    Prepare {
        /// Epoch of the view to decide on.
        epoch: u64,
        /// The proposer's ballot.
        ballot: Ballot,
    },
    /// Voter to proposer: the answer to `Prepare`, on the voter's disk.
    Promise {
        /// Epoch of the view to decide on.
        epoch: u64,
        /// Ballot of the `Prepare`.
        ballot: Ballot,
        /// The view that the voter accepted last in this vote.
        accepted: Option<AcceptedView<B>>,
    },
    /// Proposer to voters: accept this view.
    Propose {
        /// The proposer's ballot.
        ballot: Ballot,
        /// The proposed view.
        view: VotedView<B>,
    },
    /// Voter to proposer: the view of the `Propose` is accepted, on the voter's disk.
    Accept {
        /// Epoch of the view to decide on.
        epoch: u64,
        /// Ballot of the `Propose`.
        ballot: Ballot,
    },
    /// Voter to proposer: the voter heeds a higher ballot, or has granted a lease to the contact node. Also the answer
    /// to a heartbeat of a contact node to which the voter grants no lease, since it accepted a view with another one.
    Reject {
        /// Epoch of the view to decide on.
        epoch: u64,
        /// Ballot of the `Prepare` or `Propose`.
        ballot: Ballot,
        /// Round of the highest ballot that the voter promised to heed.
        promised_round: u32,
    },
    /// Any member to a member with an older view: this view is committed. Nodes believe voters of the view that they know.
    Commit {
        /// The committed view.
        view: VotedView<B>,
    },
    /// Any member to a node that is not in the view: the group considers the node to have failed (paper 000, section
    /// 2.3.1: "please join again").
    Removed {
        /// The sender's view.
        view: ViewSummary,
        /// False if an operator removed the node, or the node itself has left.
        rejoin: bool,
    },
    /// Contact node to voters and joining backups: a sign of life, and a request for a lease.
    Heartbeat(Heartbeat),
    /// The answer to a heartbeat: the sender takes part in no view with another contact node for a while.
    LeaseGrant {
        /// Epoch of the heartbeat.
        epoch: u64,
        /// Start number in the heartbeat.
        boot: u64,
        /// Number of the heartbeat.
        sequence: u64,
        /// Join of the sender.
        join: JoinNumber,
    },
    /// Any node to a member: send `Commit` if the member has a newer view; a node that is no member gets `NotContact`.
    ViewRequest {
        /// Epoch of the sender's view, 0 for none.
        epoch: u64,
    },
    /// Any node asks for the contact node, at the service address or at a node that an operator named.
    WhoIsContact,
    /// Contact node to a node that asked, registered, or must learn of a new view.
    Contact {
        /// The contact node's view.
        view: ViewSummary,
        /// True if the receiver is in the contact node's list of server nodes.
        is_registered: bool,
        /// Version of the contact node's list of server nodes.
        server_list: ServerListVersion,
    },
    /// The answer of a member without a lease to a request for the contact node, and of any member to a `ViewRequest` of a
    /// node that is no member: the view without the group data, which contain secrets.
    NotContact {
        /// The sender's view.
        view: ViewSummary,
    },
    /// Any node to the contact node: take the sender in.
    Join {
        /// The sender's role.
        role: JoinRole,
        /// The address of the sender's daemon.
        address: SocketAddr,
        /// Number of the join.
        join: JoinNumber,
    },
    /// The answer to `Join`: the sender is a member.
    Joined {
        /// The sender's number.
        id: NodeId,
        /// Number of the join.
        join: JoinNumber,
        /// The committed view.
        view: VotedView<B>,
    },
    /// The answer to `Join`: the sender is not taken in.
    JoinRefused {
        /// Number of the join.
        join: JoinNumber,
        /// The reason for which the contact node refuses the join.
        reason: JoinRefusal,
    },
    /// Server node to contact node: the sender is a server node of the group, and has reason to think that the contact
    /// node does not know.
    Register {
        /// The sender's number.
        id: NodeId,
        /// The address of the sender's daemon.
        address: SocketAddr,
        /// The sender's join.
        join: JoinNumber,
    },
    /// Member to contact node: remove the sender.
    Leave {
        /// The sender's join.
        join: JoinNumber,
    },
    /// Contact node to a backup, or to a node that asked: changes of the list of server nodes.
    ServerNodes {
        /// Version of the list after the changes.
        version: ServerListVersion,
        /// Version of the list that these changes build on; none if they are the whole list.
        base: Option<ServerListVersion>,
        /// Changes of the list of server nodes since `base`, or the whole list.
        #[serde(deserialize_with = "bounded_list_of::<_, _, SERVER_NODES_MAX>")]
        changes: Vec<ServerNodeChange>,
    },
    /// Any member to the contact node: send what has changed in the list of server nodes, or the whole list.
    ServerNodesRequest {
        /// Version of the sender's copy of the list.
        known: ServerListVersion,
    },
    /// Any member to the contact node: change the group's settings. May be repeated.
    GroupChangeRequest {
        /// Number of the change, which the answer repeats.
        id: GroupChangeId,
        /// The change of the group's settings.
        change: GroupChange,
        /// The user at the sender that asked for the change; none for the daemon itself.
        uid: Option<u32>,
    },
    /// The answer to `GroupChangeRequest`.
    GroupChangeResponse {
        /// Number of the requested change of the group's settings.
        id: GroupChangeId,
        /// The version of the group data in the committed view that has the change, or the reason for the refusal.
        result: Result<u64, GroupChangeRefusal>,
    },
}

impl<B> GenericMembershipFrame<B> {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            GenericMembershipFrame::Prepare { .. } => "ViewPrepare",
            GenericMembershipFrame::Promise { .. } => "Promise",
            GenericMembershipFrame::Propose { .. } => "Propose",
            GenericMembershipFrame::Accept { .. } => "Accept",
            GenericMembershipFrame::Reject { .. } => "Reject",
            GenericMembershipFrame::Commit { .. } => "Commit",
            GenericMembershipFrame::Removed { .. } => "Removed",
            GenericMembershipFrame::Heartbeat(_) => "Heartbeat",
            GenericMembershipFrame::LeaseGrant { .. } => "LeaseGrant",
            GenericMembershipFrame::ViewRequest { .. } => "ViewRequest",
            GenericMembershipFrame::WhoIsContact => "WhoIsContact",
            GenericMembershipFrame::Contact { .. } => "Contact",
            GenericMembershipFrame::NotContact { .. } => "NotContact",
            GenericMembershipFrame::Join { .. } => "Join",
            GenericMembershipFrame::Joined { .. } => "Joined",
            GenericMembershipFrame::JoinRefused { .. } => "JoinRefused",
            GenericMembershipFrame::Register { .. } => "Register",
            GenericMembershipFrame::Leave { .. } => "Leave",
            GenericMembershipFrame::ServerNodes { .. } => "ServerNodes",
            GenericMembershipFrame::ServerNodesRequest { .. } => "ServerNodesRequest",
            GenericMembershipFrame::GroupChangeRequest { .. } => "GroupChangeRequest",
            GenericMembershipFrame::GroupChangeResponse { .. } => "GroupChangeResponse",
        }
    }

    /// The same frame with its blob put through `convert`.
    pub(crate) fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> GenericMembershipFrame<C> {
        use GenericMembershipFrame as F;
        match self {
            F::Prepare { epoch, ballot } => F::Prepare { epoch, ballot },
            F::Promise {
                epoch,
                ballot,
                accepted,
            } => F::Promise {
                epoch,
                ballot,
                accepted: accepted.map(|accepted| accepted.map_blobs(convert)),
            },
            F::Propose { ballot, view } => F::Propose {
                ballot,
                view: view.map_blobs(convert),
            },
            F::Accept { epoch, ballot } => F::Accept { epoch, ballot },
            F::Reject {
                epoch,
                ballot,
                promised_round,
            } => F::Reject {
                epoch,
                ballot,
                promised_round,
            },
            F::Commit { view } => F::Commit {
                view: view.map_blobs(convert),
            },
            F::Removed { view, rejoin } => F::Removed { view, rejoin },
            F::Heartbeat(heartbeat) => F::Heartbeat(heartbeat),
            F::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            } => F::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            },
            F::ViewRequest { epoch } => F::ViewRequest { epoch },
            F::WhoIsContact => F::WhoIsContact,
            F::Contact {
                view,
                is_registered,
                server_list,
            } => F::Contact {
                view,
                is_registered,
                server_list,
            },
            F::NotContact { view } => F::NotContact { view },
            F::Join {
                role,
                address,
                join,
            } => F::Join {
                role,
                address,
                join,
            },
            F::Joined { id, join, view } => F::Joined {
                id,
                join,
                view: view.map_blobs(convert),
            },
            F::JoinRefused { join, reason } => F::JoinRefused { join, reason },
            F::Register { id, address, join } => F::Register { id, address, join },
            F::Leave { join } => F::Leave { join },
            F::ServerNodes {
                version,
                base,
                changes,
            } => F::ServerNodes {
                version,
                base,
                changes,
            },
            F::ServerNodesRequest { known } => F::ServerNodesRequest { known },
            F::GroupChangeRequest { id, change, uid } => F::GroupChangeRequest { id, change, uid },
            F::GroupChangeResponse { id, result } => F::GroupChangeResponse { id, result },
        }
    }
}
