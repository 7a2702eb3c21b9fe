//! What the channel tells the engine.

use holdfast_wire::{Frame, NodeId};

use super::LinkError;

/// What happened on the channel. For one peer: `Up`, any number of `Frame`, `Lost`, and again.
#[derive(Debug)]
pub enum PeerEvent {
    /// Both directions work.
    Up {
        /// The peer.
        peer: NodeId,
        /// Its daemon's start; another than before if it was restarted.
        boot: u64,
    },
    /// The peer sent a frame (never `Hello`, `Ping` or `Pong`).
    Frame {
        /// The peer.
        from: NodeId,
        /// The frame.
        frame: Frame,
    },
    /// The peer cannot be reached. Frames sent before may or may not have arrived.
    Lost {
        /// The peer.
        peer: NodeId,
        /// Why.
        why: LinkError,
    },
}

/// The channel's events, in order.
pub type PeerEvents = crate::queue::Receiver<PeerEvent>;

/// The end that the channel's tasks put events into.
pub(super) type Queue = crate::queue::Queue<PeerEvent>;
