//! Outputs of a membership machine: frames, the one command, and events for logs, metrics and the daemon.

use super::view_store::{StoreRequest, StoreToken};
use crate::view::View;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{
    GroupChange, GroupChangeId, GroupChangeRefusal, GroupSettingsError,
};
use holdfast_wire::membership_frames::{JoinRefusal, MembershipFrame, MembershipState, NodeName};

/// The receiver of a frame.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recipient {
    /// The node of this name, never the machine's own; [`super::Membership::address_of`] has its address.
    Node(NodeName),
    /// The node that has the service address.
    ServiceAddress,
}

/// Identifies a save, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SaveToken(pub u64);

/// An action that the membership machine asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame. A lost, late or repeated frame does no harm.
    Send {
        /// Node that receives the frame, or the service address.
        to: Recipient,
        /// Frame for the receiver's membership machine.
        frame: MembershipFrame,
    },
    /// Replace the state on the disk by this one, durably (written, synchronised and renamed), and then call
    /// `handle_saved`. One save is open at a time.
    Save {
        /// Token of the save.
        token: SaveToken,
        /// The local node's whole membership state.
        state: Box<MembershipState>,
    },
    /// Pass a request to the store of views ([`super::MembershipConfig::has_view_store`]), and its answer to
    /// `handle_store_answer`. A request that is lost, or carried out late, does no harm.
    Store {
        /// Token of the request.
        token: StoreToken,
        /// Request to the store of views.
        request: Box<StoreRequest>,
    },
    /// Report an event.
    Event(Event),
}

/// Reason for which a node is outside the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RemovalCause {
    /// The group considered the node to have failed; the node joins again by itself.
    Suspected,
    /// An operator removed the node; the node stays outside.
    Operator,
    /// The node left as requested.
    Left,
}

/// The reason for which a requested change of the group's settings is not known to be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupChangeFailure {
    /// The contact node refused the change.
    #[error(transparent)]
    Refused(GroupChangeRefusal),
    /// No contact node answered in time. The change may be made nevertheless; a repetition with the same identity is
    /// harmless.
    #[error(
        "no contact node answered, so the change may or may not be made; check `holdfast status`, then repeat the request"
    )]
    Unanswered,
}

/// An event of the membership machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A newer view is committed, or the known server nodes have changed.
    View(View),
    /// The local node is contact node until this time of the machine's clock, and serves as such; none if the node must
    /// stop serving at once.
    Lease {
        /// End of the local node's lease, by the machine's clock.
        until: Option<Duration>,
    },
    /// The local node is a member with this number.
    Joined {
        /// The node's number.
        id: NodeId,
    },
    /// The local node is outside the group; its role has ended.
    Removed {
        /// Reason why the local node is outside the group.
        cause: RemovalCause,
    },
    /// The contact node refused to take the local node in; the machine asks again.
    JoinRefused {
        /// The contact node's reason for refusing.
        reason: JoinRefusal,
    },
    /// The contact node is silent, and the backups alone cannot replace it: the operator may force a takeover.
    ContactSilent {
        /// The silent contact node.
        contact: NodeId,
    },
    /// None of the voters that the local node knows has sent a frame for a while. The group may have gone on with other
    /// voters, which the local node finds by its seeds only.
    VotersSilent,
    /// This backup found the contact node silent, and stands for its place.
    TakeoverStarted {
        /// The silent contact node.
        contact: NodeId,
    },
    /// The contact node removes a backup without signs of life.
    BackupSilent {
        /// Backup without signs of life.
        backup: NodeId,
    },
    /// The contact node dropped a server node without signs of life. A living one registers again.
    ServerNodeSilent {
        /// Server node without signs of life.
        node: NodeName,
    },
    /// [`super::Membership::settings`] has new settings, as in version `version` of the group data.
    SettingsChanged {
        /// Version of the group data with the new settings.
        version: u64,
    },
    /// This release cannot read the settings of the view that the node obeys; the daemon keeps those it has.
    SettingsUnreadable {
        /// The version of the group data.
        version: u64,
        /// Reason why the settings cannot be read.
        error: GroupSettingsError,
    },
    /// At the contact node: a change of the group's settings is committed or refused.
    GroupChangeDecided {
        /// Change that is committed or refused.
        change: Box<GroupChange>,
        /// The node at which the change was requested.
        from: NodeName,
        /// The user of that node; none for its daemon.
        uid: Option<u32>,
        /// Version of the group data with the change, or the reason for the refusal.
        result: Result<u64, GroupChangeRefusal>,
    },
    /// A request of [`super::Membership::handle_group_change`] has ended.
    GroupChangeEnded {
        /// Identity of the requested change.
        id: GroupChangeId,
        /// Version of the group data with the change, or the reason for the failure.
        result: Result<u64, GroupChangeFailure>,
    },
    /// The store of views has begun to answer this voter, or has not answered for
    /// [`super::MembershipConfig::store_silent_after`].
    StoreAnswers {
        /// True if the store answers.
        is_answering: bool,
    },
    /// The store has a view that is impossible, or cannot follow the known one.
    StoreUnusable,
    /// The state of the local node cannot be saved: the node takes part in no vote until a later attempt succeeds.
    SaveFailed {
        /// The daemon's explanation.
        error: String,
    },
    /// A frame was ignored: late, repeated, impossible, or of a stranger.
    Ignored {
        /// Name of the node that sent the frame.
        from: NodeName,
        /// Name of the frame.
        frame: &'static str,
        /// Reason for ignoring the frame.
        reason: &'static str,
    },
}
