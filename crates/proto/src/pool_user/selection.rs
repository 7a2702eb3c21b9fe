//! The choice among the elements that a registrar named: a sorting order, or chance (RFC 5356, "Pool User Considerations").
//!
//! A choice that is no pool policy, such as one by latencies that the user has seen, is one more variant here.

use crate::hunt::Random;
use holdfast_wire::rserpool::{Policy, PolicyKind};
use std::collections::BTreeSet;

/// Chooses positions in a list of elements. Each operation is at most logarithmic in the list.
#[derive(Debug)]
pub(super) enum Selection {
    /// The first in order; being chosen may move an element back.
    Ranked(BTreeSet<Rank>),
    /// "randomly selecting one element from the list of pool elements received from the ENRP server".
    Random(Vec<usize>),
}

/// The lower, the sooner chosen: by the policy, then the one chosen less often, then the registrar's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    value: u64,
    chosen: u64,
    position: usize,
}

impl Selection {
    pub(super) fn new(policy: PolicyKind) -> Selection {
        match policy {
            PolicyKind::Random
            | PolicyKind::WeightedRandom
            | PolicyKind::WeightedRandomDpf
            | PolicyKind::RandomizedLeastUsed
            | PolicyKind::RandomizedPriorityLeastUsed
            | PolicyKind::RandomizedLeastUsedDegradation
            | PolicyKind::RandomizedPriorityLeastUsedDegradation => Selection::Random(Vec::new()),
            _ => Selection::Ranked(BTreeSet::new()),
        }
    }

    /// The element at `position` may be chosen; it was so many times.
    pub(super) fn insert(&mut self, position: usize, policy: &Policy, chosen: u64) {
        match self {
            Selection::Ranked(ranks) => {
                ranks.insert(rank(position, policy, chosen));
            }
            Selection::Random(positions) => positions.push(position),
        }
    }

    /// It may not be chosen any more.
    pub(super) fn remove(&mut self, position: usize, policy: &Policy, chosen: u64) {
        match self {
            Selection::Ranked(ranks) => {
                ranks.remove(&rank(position, policy, chosen));
            }
            Selection::Random(positions) => positions.retain(|other| *other != position),
        }
    }

    /// Whom to use next. The caller counts the choice by removing and inserting it anew.
    pub(super) fn next(&self, random: &mut Random) -> Option<usize> {
        match self {
            Selection::Ranked(ranks) => ranks.first().map(|rank| rank.position),
            Selection::Random(positions) => positions.get(random.below(positions.len())).copied(),
        }
    }
}

fn rank(position: usize, policy: &Policy, chosen: u64) -> Rank {
    Rank {
        value: value(policy, chosen),
        chosen,
        position,
    }
}

/// What the policy sorts by. Loads are as the registrar said them, and get worse with each choice where the policy says
/// by how much; all starts afresh with the next answer.
fn value(policy: &Policy, chosen: u64) -> u64 {
    let raised = |load: u32, degradation: u32, times: u64| {
        u64::from(load).saturating_add(times.saturating_mul(u64::from(degradation)))
    };
    let delay = |dpf: u32, distance: u32| u64::from(dpf) * u64::from(distance);
    match *policy {
        Policy::WeightedRoundRobin { weight } => match u64::from(weight) {
            0 => u64::MAX,
            weight => ((chosen + 1) << 32) / weight,
        },
        Policy::Priority { priority } => u64::from(u32::MAX - priority),
        Policy::LeastUsed { load } => load.into(),
        Policy::LeastUsedDegradation { load, degradation } => raised(load, degradation, chosen),
        Policy::PriorityLeastUsed { load, degradation } => raised(load, degradation, 1),
        Policy::PriorityLeastUsedDegradation { load, degradation } => {
            raised(load, degradation, chosen + 1)
        }
        Policy::LeastUsedDpf {
            load,
            dpf,
            distance,
        } => u64::from(load).saturating_add(delay(dpf, distance)),
        Policy::LeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            distance,
        } => raised(load, degradation, chosen).saturating_add(delay(dpf, distance)),
        Policy::PriorityLeastUsedDpf {
            load,
            degradation,
            dpf,
            distance,
        } => raised(load, degradation, 1).saturating_add(delay(dpf, distance)),
        Policy::PriorityLeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            distance,
        } => raised(load, degradation, chosen + 1).saturating_add(delay(dpf, distance)),
        // Round robin: "starting with the first". Policies by chance have no order.
        _ => chosen,
    }
}
