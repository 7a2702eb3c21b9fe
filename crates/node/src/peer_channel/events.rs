//! Events that the channel reports to the engine.

use holdfast_wire::membership_frames::{JoinRole, MembershipFrame, NodeName};
use holdfast_wire::{Frame, NodeId};

use super::PeerConnectionError;

/// An event of the channel. The order for one peer: `Up`, any number of `Frame`, `Lost`, and so on.
#[derive(Debug)]
pub enum PeerEvent {
    /// Both directions work.
    Up {
        /// The peer.
        peer: NodeId,
        /// Boot id of the peer's daemon; changes with a restart.
        boot: u64,
    },
    /// The peer sent a frame (never `Hello`, `Ping`, `Pong` or `Membership`).
    Frame {
        /// The peer.
        from: NodeId,
        /// The frame.
        frame: Frame,
    },
    /// The peer cannot be reached. Frames sent earlier may or may not have arrived.
    Lost {
        /// The peer.
        peer: NodeId,
        /// The reason.
        reason: PeerConnectionError,
    },
}

/// A frame of the membership, from the node that the certificate names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMembershipFrame {
    /// The sender.
    pub from: NodeName,
    /// The role that the sender's certificate admits to; none if the certificate names none.
    pub certified: Option<JoinRole>,
    /// The frame.
    pub frame: MembershipFrame,
}

/// The channel's events, in order.
pub type PeerEvents = crate::engine_queue::EngineQueueReceiver<PeerEvent>;

/// The end of the queue into which the channel's tasks put events.
pub(super) type EventQueue = crate::engine_queue::EngineQueue<PeerEvent>;
