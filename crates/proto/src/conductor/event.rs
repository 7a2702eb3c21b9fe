//! Outputs of a conductor: frames, the one command, and events for logs, metrics and the operator.

use super::audit::AuditRecord;
use super::decision::StayReason;
use super::drain::DrainStatus;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{ConductorFrame, DeclineReason, OfferId, ProcessKey};

/// An action that the conductor asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame. A lost, late or repeated frame does no harm.
    Send {
        /// Node that receives the frame, never this one.
        to: NodeId,
        /// Frame for the receiver's conductor.
        frame: ConductorFrame,
    },
    /// Begin to move a process, and call [`super::Conductor::handle_move_ended`] at its end, or at once if the move cannot
    /// begin.
    BeginMove {
        /// The offer that the acceptor accepted.
        id: OfferId,
        /// Process to move.
        process: ProcessKey,
        /// Node that takes the process.
        to: NodeId,
    },
    /// Report an event.
    Event(Event),
}

/// An event of the conductor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An offer of this node was declined. The audit log has the whole record.
    Declined {
        /// The node that declined.
        by: NodeId,
        /// Process that this node offered.
        process: ProcessKey,
        /// Reason why the other node declined.
        reason: DeclineReason,
    },
    /// The own node declined an offer.
    DeclinedOffer {
        /// Node that offered the process.
        from: NodeId,
        /// Process that was offered to this node.
        process: ProcessKey,
        /// Reason why this node declined.
        reason: DeclineReason,
    },
    /// The load is uneven, and yet no process moves; reported when the reason changes.
    Stays(StayReason),
    /// A decision has ended, and its record is in the audit log.
    Audited(Box<AuditRecord>),
    /// The load of this node has settled after a move: the record in the audit log has the observed load.
    Observed(Box<AuditRecord>),
    /// [`super::Conductor::process_histories`] has changed; the daemon keeps the histories for its next start. The event
    /// stands before the acceptance of an offer that changes them: the daemon saves them before it sends the frame.
    HistoriesChanged,
    /// The drain has no process left to move, or its deadline has passed.
    DrainEnded(DrainStatus),
    /// A frame was ignored: late, repeated, impossible, or of a stranger.
    Ignored {
        /// Node that sent the frame.
        from: NodeId,
        /// Name of the frame.
        frame: &'static str,
        /// Reason for ignoring the frame.
        reason: &'static str,
    },
}
