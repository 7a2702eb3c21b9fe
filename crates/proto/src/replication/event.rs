//! Inputs and outputs of the replication machine. A connection is named by its client's address and port.

use super::config::WatchLimits;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::replication_frames::{
    ConnectionRecord, LEGS_MAX, LegIndex, LegSet, LegTranslation, ReplicationFrame,
    ReplicationRoles,
};
use std::fmt;
use std::net::SocketAddr;

/// An observation of the data plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPlaneEvent {
    /// All live legs have answered the handshake. The client is not shown the answer before [`Output::ShowSynAck`].
    Opened {
        /// Client, numbers and legs of the connection.
        record: ConnectionRecord,
    },
    /// A connection has ended in all live legs, or its client has reset it.
    Closed {
        /// Client whose connection has ended.
        client: SocketAddr,
    },
    /// Some legs refused a handshake. Repeated when further legs answer or refuse.
    HandshakeRefused {
        /// Client whose handshake was refused.
        client: SocketAddr,
        /// Legs that refused the handshake.
        refused: LegSet,
        /// Legs that answered the handshake.
        answered: LegSet,
    },
    /// Some legs have not answered a handshake for the silence limit, and others have.
    HandshakeUnanswered {
        /// Client whose handshake some legs have not answered.
        client: SocketAddr,
        /// Legs that have not answered.
        silent: LegSet,
        /// Legs that have answered.
        answered: LegSet,
        /// Number of SYN segments that the client has sent.
        attempts: u32,
    },
    /// A leg has reset a connection. The segment is not passed on.
    LegReset {
        /// Client whose connection the leg reset.
        client: SocketAddr,
        /// Leg that reset the connection.
        leg: LegIndex,
        /// Number of input bytes that the leg had acknowledged, modulo 2^32.
        acknowledged: u32,
    },
    /// A leg has ended its output. The FIN is not passed on before all live legs have sent theirs.
    LegFinished {
        /// Client whose connection has the ended output.
        client: SocketAddr,
        /// Leg that ended its output.
        leg: LegIndex,
        /// Number of input bytes that the leg had acknowledged, modulo 2^32.
        acknowledged: u32,
    },
    /// Some legs have output after the position at which others ended theirs.
    OutputAfterFin {
        /// Client whose connection has further output.
        client: SocketAddr,
        /// Legs that ended their output earlier.
        finished: LegSet,
    },
    /// A leg owes an answer to input, and nothing has come from it for half of the silence limit. Repeated as long as the
    /// silence lasts.
    LegSilent {
        /// Client whose input the leg should answer.
        client: SocketAddr,
        /// Leg that owes an answer.
        leg: LegIndex,
        /// Duration of the leg's silence.
        silence: Duration,
        /// Smoothed round trip of the connection's legs.
        round_trip: Duration,
        /// Legs that have answered the same input.
        answered: LegSet,
    },
    /// A leg has acknowledged input, and has for the stall limit lacked output that other legs have. For a primary, a
    /// replica's zero-window probe shows that there is more output.
    LegStalled {
        /// Client whose connection lacks the leg's output.
        client: SocketAddr,
        /// Leg that lacks output.
        leg: LegIndex,
        /// Legs that have more output.
        ahead: LegSet,
    },
    /// A leg has held up the client at the lag bound for the lag time.
    LegLagging {
        /// Client that was held up.
        client: SocketAddr,
        /// Leg that held up the client.
        leg: LegIndex,
        /// Number of bytes by which the leg is behind the primary.
        bytes: u32,
    },
    /// Digests of outputs differ at a position. Repeated as further legs reach the position.
    Diverged {
        /// Client whose connection has different outputs.
        client: SocketAddr,
        /// Number of output bytes from the start of the connection: the outputs are equal before the compared stretch that
        /// ends here.
        position: u64,
        /// Digest of each leg's output up to the position; none for a leg that has not reached it.
        digests: [Option<u64>; LEGS_MAX],
    },
    /// Sample of a connection's progress.
    Progress {
        /// Client whose connection was sampled.
        client: SocketAddr,
        /// Number of input bytes that the client was told are acknowledged, modulo 2^32.
        acknowledged: u32,
        /// For each leg the number of bytes that it lacks: of the input, and of the output that the client was sent.
        behind: [u32; LEGS_MAX],
        /// Legs whose output has been compared without a gap.
        compared: LegSet,
    },
    /// A leg has become part of a running connection, as a clone. Precedes
    /// [`Replication::handle_leg_ready`](super::Replication::handle_leg_ready).
    LegJoined {
        /// Client whose connection the leg joined.
        client: SocketAddr,
        /// Leg that joined the connection.
        leg: LegIndex,
        /// Translation between the leg's numbers and the client's.
        translation: LegTranslation,
    },
}

/// Reason for which a leg no longer serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropReason {
    /// The leg refused a connection that others accepted.
    Refused,
    /// The leg answered no handshake that others answered.
    NoAnswer,
    /// Neither the leg nor its node answers.
    Silent,
    /// The node answers, and the leg does not answer on a connection.
    Unresponsive,
    /// The leg's process does not run.
    Stalled,
    /// The leg held up the client.
    Lagging,
    /// The leg's output differs.
    Diverged,
    /// The leg has ended a connection that others continue: it lacks input.
    MissedInput,
    /// No server listens at the leg's node.
    ServerEnded,
    /// The leg's node has left the group.
    NodeRemoved,
    /// The new leg was not level in time, or could not be made.
    NeverCaughtUp,
    /// The operator has stopped replication.
    Stopped,
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DropReason::Refused => "it refused a connection that other legs accepted",
            DropReason::NoAnswer => "it did not answer a handshake that other legs answered",
            DropReason::Silent => "neither it nor its node answers",
            DropReason::Unresponsive => "its node answers, and a connection gets no answer",
            DropReason::Stalled => "it has no output where other legs have",
            DropReason::Lagging => "it is slow, and the client waited for it",
            DropReason::Diverged => "its output differs from the other legs'",
            DropReason::MissedInput => "it ended a connection that other legs continue",
            DropReason::ServerEnded => "no server listens at its node",
            DropReason::NodeRemoved => "its node has left the group",
            DropReason::NeverCaughtUp => "it was not level with the primary in time",
            DropReason::Stopped => "the operator stopped replication",
        })
    }
}

/// Number of legs that a failure would find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// All wanted replicas are sound.
    Full,
    /// Some of the wanted replicas are missing or in doubt.
    Reduced {
        /// Number of sound replicas.
        sound: usize,
    },
    /// The primary serves alone.
    Alone,
    /// No leg serves.
    Dead,
}

/// An event for the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A replica has become the primary.
    Promoted {
        /// Leg that is the primary from now on.
        leg: LegIndex,
        /// Leg that was the primary before.
        former: LegIndex,
        /// True if the new primary is in doubt, since no sound leg lives.
        in_doubt: bool,
    },
    /// A leg no longer serves.
    Dropped {
        /// Leg that no longer serves.
        leg: LegIndex,
        /// Node at which the leg ran.
        node: NodeId,
        /// Reason for dropping the leg.
        reason: DropReason,
    },
    /// A leg no longer serves one connection.
    LeftConnection {
        /// Client whose connection the leg left.
        client: SocketAddr,
        /// Leg that left the connection.
        leg: LegIndex,
    },
    /// A leg's output differs from the primary's.
    Diverged {
        /// Client whose connection has different outputs.
        client: SocketAddr,
        /// Leg whose output differs.
        leg: LegIndex,
        /// Number of output bytes from the start of the connection.
        position: u64,
    },
    /// A leg lags, and the policy is to wait for it.
    Lagging {
        /// Client that waits for the leg.
        client: SocketAddr,
        /// Leg that lags.
        leg: LegIndex,
        /// Number of bytes by which the leg is behind the primary.
        bytes: u32,
    },
    /// A new leg is level with the primary and counts.
    CaughtUp {
        /// Leg that is level with the primary.
        leg: LegIndex,
    },
    /// The number of sound legs has changed.
    Protection(Protection),
    /// A connection was refused because there are too many.
    ConnectionsFull,
    /// The backup does not acknowledge: a loss of this node would now reset the connections.
    BackupLost {
        /// Backup that does not acknowledge.
        node: NodeId,
    },
    /// The backup knows all connections.
    BackupComplete {
        /// Backup that knows all connections.
        node: NodeId,
    },
}

/// An action that the replication machine asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Limit the data plane's watch.
    SetWatchLimits(WatchLimits),
    /// Set the roles of all connections that have no roles of their own.
    SetRoles(ReplicationRoles),
    /// Give a connection roles of its own, which hold until the next ones. With `follows_service_roles`, the connection follows
    /// the roles of the service again.
    SetConnectionRoles {
        /// Client whose connection gets roles.
        client: SocketAddr,
        /// The leg that the client sees.
        primary: LegIndex,
        /// The legs that serve the connection.
        live: LegSet,
        /// True if the connection follows the group's roles again.
        follows_service_roles: bool,
    },
    /// Send window updates and acknowledgements that follow from new roles of one connection.
    SendWindowUpdate {
        /// Client whose connection has new roles.
        client: SocketAddr,
    },
    /// Send window updates and acknowledgements that follow from new roles, in all connections.
    SendAllWindowUpdates,
    /// Complete a client's handshake; without effect on a complete one.
    ShowSynAck {
        /// Client whose handshake is completed.
        client: SocketAddr,
    },
    /// Reset a client's connection and forget it.
    ResetClient {
        /// Client whose connection is reset.
        client: SocketAddr,
    },
    /// Continue a connection of the former contact node.
    Adopt(ConnectionRecord),
    /// Ask a node for a sign of life at once.
    Probe {
        /// Node to ask, never this one.
        node: NodeId,
    },
    /// Ask a node at once whether the leg's server listens.
    CheckServer {
        /// Node at which the leg runs.
        node: NodeId,
    },
    /// Send a frame.
    Send {
        /// Node that receives the frame, never this one.
        to: NodeId,
        /// Frame for the backup's copy of the connections.
        frame: ReplicationFrame,
    },
    /// Report an event to the operator.
    Event(Event),
}

/// A command of the operator that cannot be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// There is no such leg.
    #[error("the service has no {0}; `holdfast replicate status` lists its legs")]
    NoSuchLeg(LegIndex),
    /// The leg is the primary.
    #[error("{0} is the primary already")]
    AlreadyPrimary(LegIndex),
    /// The leg has not caught up.
    #[error(
        "{0} has not caught up with the primary; wait until `holdfast replicate status` shows it as sound"
    )]
    CatchingUp(LegIndex),
    /// The leg is in doubt.
    #[error(
        "{0} is in doubt: it does not answer, or its output differs or was not compared; promote another leg, or replace it"
    )]
    InDoubt(LegIndex),
    /// All positions are taken.
    #[error("the service has {LEGS_MAX} legs already; stop one of them first")]
    Full,
    /// The node has a leg.
    #[error("node {0} has a leg of the service already; choose another node")]
    NodeHasLeg(NodeId),
    /// The service is dead or has no legs.
    #[error("the service has no leg that serves; start its server, and replicate it anew")]
    NoLegs,
    /// The own node is not the contact node.
    #[error("this node is not the contact node, which replicates; give the command there")]
    NotContactNode,
}
