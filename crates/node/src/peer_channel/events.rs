//! Events that the channel reports to the engine.

use holdfast_wire::membership_frames::{JoinRole, MembershipFrame, NodeName};
use holdfast_wire::{Frame, NodeId};

use super::PeerConnectionError;

/// An event of the channel. The order for one peer: `Up`, any number of `Frame`, `Lost`, and so on.
#[derive(Debug)]
pub enum PeerEvent {
    /// Frames can be sent to the peer and received from it.
    Up {
        /// Peer that is connected in both directions.
        peer: NodeId,
        /// Boot id of the peer's daemon; changes with a restart.
        boot: u64,
    },
    /// The peer sent a frame (never `Hello`, `Ping`, `Pong` or `Membership`).
    Frame {
        /// Peer that sent the frame.
        from: NodeId,
        /// Frame that the peer sent.
        frame: Frame,
    },
    /// The peer cannot be reached. Frames sent earlier may or may not have arrived.
    Lost {
        /// Peer that cannot be reached.
        peer: NodeId,
        /// Reason why the peer cannot be reached.
        reason: PeerConnectionError,
    },
}

/// A frame of the membership, from the node that the certificate names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMembershipFrame {
    /// Name of the node that sent the frame.
    pub from: NodeName,
    /// The role that the sender's certificate admits to; none if the certificate names none.
    pub certified: Option<JoinRole>,
    /// Received frame of the membership.
    pub frame: MembershipFrame,
}

/// The channel's events, in order.
pub type PeerEvents = crate::engine_queue::EngineQueueReceiver<PeerEvent>;

/// The end of the queue into which the channel's tasks put events.
pub(super) type EventQueue = crate::engine_queue::EngineQueue<PeerEvent>;
