//! Deliberate bugs, each of which breaks one rule of the state machine, its data plane or its daemon: the oracles must detect
//! every one.

/// A deliberate bug: the rule of the replication that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicationBug {
    /// The client is shown the primary's acknowledgement, not the lowest one.
    NoAckClamp,
    /// The primary's FIN is passed on before the other legs have sent theirs.
    PassesFinAtOnce,
    /// The primary's RST is passed on.
    PassesReset,
    /// The client is not reset when the last leg dies.
    SwallowsLastReset,
    /// The client is shown a SYN-ACK that the backup does not know.
    ShowsBeforeBackup,
    /// Outputs are not compared.
    NoComparison,
    /// The first live leg is promoted, whatever is known of it.
    PromotesFirstLeg,
    /// Answers to probes and heartbeats are not passed on.
    IgnoresSignsOfLife,
    /// A leg that lacks input of a connection goes on serving others.
    IgnoresProgress,
    /// Changed roles of the service do not reach the data plane.
    LosesRoles,
    /// The state machine's timers do not fire.
    NoTimers,
}

impl ReplicationBug {
    /// The bugs that some hundred seeds find. [`ReplicationBug::ShowsBeforeBackup`] and [`ReplicationBug::PromotesFirstLeg`] are
    /// not among them: 1,400 seeds of the default do not find them, since a contact node is seldom lost just when a client
    /// connects, and a primary seldom dies just after a replica's wrong byte.
    pub const ALL: [ReplicationBug; 9] = [
        ReplicationBug::NoAckClamp,
        ReplicationBug::PassesFinAtOnce,
        ReplicationBug::PassesReset,
        ReplicationBug::SwallowsLastReset,
        ReplicationBug::NoComparison,
        ReplicationBug::IgnoresSignsOfLife,
        ReplicationBug::IgnoresProgress,
        ReplicationBug::LosesRoles,
        ReplicationBug::NoTimers,
    ];
}
