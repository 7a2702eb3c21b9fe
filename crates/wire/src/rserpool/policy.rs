//! Pool policies: how a pool chooses among its elements (RFC 5356), and rsplib's private ones.

/// What a pool element says of itself for its pool's policy (RFC 5356 sections 3 to 5).
///
/// Loads, degradations and delay penalty factors are fractions of `u32::MAX`; distances are milliseconds. The policies
/// from [`Policy::PriorityLeastUsedDegradation`] on are rsplib's, in its encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    RoundRobin,
    WeightedRoundRobin {
        weight: u32,
    },
    Random,
    WeightedRandom {
        weight: u32,
    },
    Priority {
        priority: u32,
    },
    LeastUsed {
        load: u32,
    },
    LeastUsedDegradation {
        load: u32,
        degradation: u32,
    },
    PriorityLeastUsed {
        load: u32,
        degradation: u32,
    },
    RandomizedLeastUsed {
        load: u32,
    },
    RandomizedPriorityLeastUsed {
        load: u32,
        degradation: u32,
    },
    RandomizedLeastUsedDegradation {
        load: u32,
        degradation: u32,
    },
    PriorityLeastUsedDegradation {
        load: u32,
        load_degradation: u32,
        degradation: u32,
    },
    RandomizedPriorityLeastUsedDegradation {
        load: u32,
        load_degradation: u32,
        degradation: u32,
    },
    WeightedRandomDpf {
        weight: u32,
        dpf: u32,
        distance: u32,
    },
    LeastUsedDpf {
        load: u32,
        dpf: u32,
        distance: u32,
    },
    LeastUsedDegradationDpf {
        load: u32,
        degradation: u32,
        dpf: u32,
        distance: u32,
    },
    PriorityLeastUsedDpf {
        load: u32,
        degradation: u32,
        dpf: u32,
        distance: u32,
    },
    PriorityLeastUsedDegradationDpf {
        load: u32,
        load_degradation: u32,
        degradation: u32,
        dpf: u32,
        distance: u32,
    },
}

/// A policy without its figures: what all elements of a pool share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum PolicyKind {
    RoundRobin = 0x0000_0001,
    WeightedRoundRobin = 0x0000_0002,
    Random = 0x0000_0003,
    WeightedRandom = 0x0000_0004,
    Priority = 0x0000_0005,
    LeastUsed = 0x4000_0001,
    LeastUsedDegradation = 0x4000_0002,
    PriorityLeastUsed = 0x4000_0003,
    RandomizedLeastUsed = 0x4000_0004,
    RandomizedPriorityLeastUsed = 0xb000_1001,
    RandomizedLeastUsedDegradation = 0xb000_1002,
    PriorityLeastUsedDegradation = 0xb000_1003,
    RandomizedPriorityLeastUsedDegradation = 0xb000_1004,
    WeightedRandomDpf = 0xb000_2001,
    LeastUsedDpf = 0xb000_2002,
    LeastUsedDegradationDpf = 0xb000_2003,
    PriorityLeastUsedDpf = 0xb000_2004,
    PriorityLeastUsedDegradationDpf = 0xb000_2005,
}

impl Policy {
    /// The policy's number in RFC 5356's table or in rsplib's private range.
    pub fn kind(&self) -> PolicyKind {
        match self {
            Policy::RoundRobin => PolicyKind::RoundRobin,
            Policy::WeightedRoundRobin { .. } => PolicyKind::WeightedRoundRobin,
            Policy::Random => PolicyKind::Random,
            Policy::WeightedRandom { .. } => PolicyKind::WeightedRandom,
            Policy::Priority { .. } => PolicyKind::Priority,
            Policy::LeastUsed { .. } => PolicyKind::LeastUsed,
            Policy::LeastUsedDegradation { .. } => PolicyKind::LeastUsedDegradation,
            Policy::PriorityLeastUsed { .. } => PolicyKind::PriorityLeastUsed,
            Policy::RandomizedLeastUsed { .. } => PolicyKind::RandomizedLeastUsed,
            Policy::RandomizedPriorityLeastUsed { .. } => PolicyKind::RandomizedPriorityLeastUsed,
            Policy::RandomizedLeastUsedDegradation { .. } => {
                PolicyKind::RandomizedLeastUsedDegradation
            }
            Policy::PriorityLeastUsedDegradation { .. } => PolicyKind::PriorityLeastUsedDegradation,
            Policy::RandomizedPriorityLeastUsedDegradation { .. } => {
                PolicyKind::RandomizedPriorityLeastUsedDegradation
            }
            Policy::WeightedRandomDpf { .. } => PolicyKind::WeightedRandomDpf,
            Policy::LeastUsedDpf { .. } => PolicyKind::LeastUsedDpf,
            Policy::LeastUsedDegradationDpf { .. } => PolicyKind::LeastUsedDegradationDpf,
            Policy::PriorityLeastUsedDpf { .. } => PolicyKind::PriorityLeastUsedDpf,
            Policy::PriorityLeastUsedDegradationDpf { .. } => {
                PolicyKind::PriorityLeastUsedDegradationDpf
            }
        }
    }
}
