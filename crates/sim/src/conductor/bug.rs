//! Deliberate bugs, each of which breaks one rule of the state machine or its daemon: the oracles must detect every
//! one.

/// A deliberate bug: the rule of the conductors that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConductorBug {
    /// The limit of moves a minute is ten times as high.
    NoMoveLimit,
    /// Nodes do not calm down after a move.
    NoCalmDown,
    /// The loads after a move are not predicted.
    NoPrediction,
    /// A restarted daemon believes that it has moved nothing of late.
    RestartForgetsMoves,
    /// A restarted daemon does not know which processes have moved of late.
    ForgetsHistories,
    /// The daemon does not tell the machine of pins.
    IgnoresPins,
    /// The daemon tells the machine that memory is plentiful.
    OverstatesMemory,
    /// An offer does not tell the anti-affinity label.
    HidesLabels,
    /// The channel takes the guest's word for its number.
    GuestPassesForMember,
    /// A node accepts every offer.
    AcceptsEverything,
    /// An acceptor in doubt never asks.
    NeverInquires,
    /// A drained node is not told.
    DrainIsLost,
    /// The state machines' timers do not fire.
    NoTimers,
}

impl ConductorBug {
    /// All deliberate bugs of the conductors.
    pub const ALL: [ConductorBug; 13] = [
        ConductorBug::NoMoveLimit,
        ConductorBug::NoCalmDown,
        ConductorBug::NoPrediction,
        ConductorBug::RestartForgetsMoves,
        ConductorBug::ForgetsHistories,
        ConductorBug::IgnoresPins,
        ConductorBug::OverstatesMemory,
        ConductorBug::HidesLabels,
        ConductorBug::GuestPassesForMember,
        ConductorBug::AcceptsEverything,
        ConductorBug::NeverInquires,
        ConductorBug::DrainIsLost,
        ConductorBug::NoTimers,
    ];
}
