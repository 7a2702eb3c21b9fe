//! Outputs of a membership machine: frames, the one command, and events for logs, metrics and the daemon.

use crate::view::View;
use core::time::Duration;
use holdfast_wire::NodeId;
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

/// An action for the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame. A lost, late or repeated frame does no harm.
    Send {
        /// The receiver.
        to: Recipient,
        /// The frame.
        frame: MembershipFrame,
    },
    /// Replace the state on the disk by this one, durably (written, synchronised and renamed), and then call
    /// `handle_saved`. One save is open at a time.
    Save {
        /// Token of the save.
        token: SaveToken,
        /// The whole state.
        state: Box<MembershipState>,
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

/// An event of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A newer view is committed, or the known server nodes have changed.
    View(View),
    /// The local node is contact node until this time of the machine's clock, and serves as such; none if the node must
    /// stop serving at once.
    Lease {
        /// The end of the lease.
        until: Option<Duration>,
    },
    /// The local node is a member with this number.
    Joined {
        /// The node's number.
        id: NodeId,
    },
    /// The local node is outside the group; its role has ended.
    Removed {
        /// The reason.
        cause: RemovalCause,
    },
    /// The contact node refused to take the local node in; the machine asks again.
    JoinRefused {
        /// The reason.
        reason: JoinRefusal,
    },
    /// The contact node is silent, and the backups alone cannot replace it: the operator may force a takeover.
    ContactSilent {
        /// The contact node.
        contact: NodeId,
    },
    /// This backup found the contact node silent, and stands for its place.
    TakeoverStarted {
        /// The silent contact node.
        contact: NodeId,
    },
    /// The contact node removes a backup without signs of life.
    BackupSilent {
        /// The backup.
        backup: NodeId,
    },
    /// The state of the local node cannot be saved: the node takes part in no vote until a later attempt succeeds.
    SaveFailed {
        /// The daemon's explanation.
        error: String,
    },
    /// A frame was ignored: late, repeated, impossible, or of a stranger.
    Ignored {
        /// The sender.
        from: NodeName,
        /// Name of the frame.
        frame: &'static str,
        /// Reason for ignoring the frame.
        reason: &'static str,
    },
}
