//! Selection among the elements of a registrar's answer: by a sorting order, or at random (RFC 5356, "Pool User
//! Considerations").
//!
//! A selection that is no pool policy, such as one by observed latency, would be one more variant here.

use crate::server_hunt::SecretSeedRng;
use holdfast_wire::rserpool::{Policy, PolicyKind};
use std::collections::BTreeSet;

/// Selects positions in a list of elements. Each operation is at most logarithmic in the list, except a removal from
/// `Random`, which is linear.
#[derive(Debug)]
pub(super) enum PositionSelector {
    /// Selects the first in order; a selection may move an element back.
    Ranked(BTreeSet<SelectionRank>),
    /// "randomly selecting one element from the list of pool elements received from the ENRP server".
    Random(Vec<usize>),
}

/// Sort key, lowest first: the policy's value, then the number of selections, then the registrar's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SelectionRank {
    value: u64,
    chosen: u64,
    position: usize,
}

impl PositionSelector {
    pub(super) fn new(policy: PolicyKind) -> PositionSelector {
        match policy {
            PolicyKind::Random
            | PolicyKind::WeightedRandom
            | PolicyKind::WeightedRandomDpf
            | PolicyKind::RandomizedLeastUsed
            | PolicyKind::RandomizedPriorityLeastUsed
            | PolicyKind::RandomizedLeastUsedDegradation
            | PolicyKind::RandomizedPriorityLeastUsedDegradation => {
                PositionSelector::Random(Vec::new())
            }
            _ => PositionSelector::Ranked(BTreeSet::new()),
        }
    }

    /// Adds the element at `position`, which was selected so many times.
    pub(super) fn insert(&mut self, position: usize, policy: &Policy, chosen: u64) {
        match self {
            PositionSelector::Ranked(ranks) => {
                ranks.insert(rank_of(position, policy, chosen));
            }
            PositionSelector::Random(positions) => positions.push(position),
        }
    }

    /// Removes the element at `position`.
    pub(super) fn remove(&mut self, position: usize, policy: &Policy, chosen: u64) {
        match self {
            PositionSelector::Ranked(ranks) => {
                ranks.remove(&rank_of(position, policy, chosen));
            }
            PositionSelector::Random(positions) => positions.retain(|other| *other != position),
        }
    }

    /// Returns the next position. The caller counts the selection by removing and inserting the element.
    pub(super) fn next_position(&self, random: &mut SecretSeedRng) -> Option<usize> {
        match self {
            PositionSelector::Ranked(ranks) => ranks.first().map(|rank| rank.position),
            PositionSelector::Random(positions) => {
                positions.get(random.below(positions.len())).copied()
            }
        }
    }
}

fn rank_of(position: usize, policy: &Policy, chosen: u64) -> SelectionRank {
    SelectionRank {
        value: sort_value(policy, chosen),
        chosen,
        position,
    }
}

/// Returns the policy's sort value. Loads are as the registrar reported them, and increase with each selection if the
/// policy says by how much; a new answer resets them.
fn sort_value(policy: &Policy, chosen: u64) -> u64 {
    let raised = |load: u32, degradation: u32, times: u64| {
        u64::from(load).saturating_add(times.saturating_mul(u64::from(degradation)))
    };
    let delay = |dpf: u32, distance: u32| u64::from(dpf) * u64::from(distance);
    match *policy {
        Policy::WeightedRoundRobin { weight } => match u64::from(weight) {
            0 => u64::MAX,
            weight => (chosen + 1).saturating_mul(1 << 32) / weight,
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
        // Round robin: "starting with the first". Random policies have no order.
        _ => chosen,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns how often each of the elements, each with its policy, is selected in `rounds` selections.
    fn choose(policies: &[Policy], rounds: usize) -> Vec<u64> {
        let mut selection = PositionSelector::new(policies[0].kind());
        let mut chosen = vec![0; policies.len()];
        for (position, policy) in policies.iter().enumerate() {
            selection.insert(position, policy, 0);
        }
        let mut random = SecretSeedRng::new([2; 32]);
        for _ in 0..rounds {
            let position = selection
                .next_position(&mut random)
                .expect("there are elements");
            selection.remove(position, &policies[position], chosen[position]);
            chosen[position] += 1;
            selection.insert(position, &policies[position], chosen[position]);
        }
        chosen
    }

    #[test]
    fn highest_priority_is_always_selected() {
        let policies = [3, 9, 5].map(|priority| Policy::Priority { priority });
        assert_eq!(choose(&policies, 10), [0, 10, 0]);
    }

    #[test]
    fn least_loaded_is_selected_and_ties_rotate() {
        let policies = [7, 5, 5].map(|load| Policy::LeastUsed { load });
        assert_eq!(choose(&policies, 10), [0, 5, 5]);
    }

    #[test]
    fn degradation_spreads_selections_between_answers() {
        let lud = |load| Policy::LeastUsedDegradation {
            load,
            degradation: 10,
        };
        assert_eq!(choose(&[lud(0), lud(50)], 15), [10, 5]);
        // PLU counts the next session only: RFC 5356's example.
        let plu = |load, degradation| Policy::PriorityLeastUsed { load, degradation };
        assert_eq!(choose(&[plu(50, 50), plu(50, 10)], 5), [0, 5]);
    }

    #[test]
    fn distance_adds_to_load() {
        let far = |load, distance| Policy::LeastUsedDpf {
            load,
            dpf: 2,
            distance,
        };
        assert_eq!(choose(&[far(10, 10), far(20, 4)], 3), [0, 3]);
    }

    #[test]
    fn random_selection_ignores_weights() {
        // The registrar has weighted them already.
        let policies = [1, 1_000].map(|weight| Policy::WeightedRandom { weight });
        let chosen = choose(&policies, 2_000);
        assert!(
            chosen.iter().all(|count| (900..1_100).contains(count)),
            "{chosen:?}"
        );
    }

    proptest! {
        #[test]
        fn weighted_round_robin_is_accurate_to_one_selection(weights in proptest::collection::vec(1u32..20, 1..8)) {
            let total: u32 = weights.iter().sum();
            let policies: Vec<Policy> =
                weights.iter().map(|&weight| Policy::WeightedRoundRobin { weight }).collect();
            let chosen = choose(&policies, total as usize * 3);
            for (weight, chosen) in weights.iter().zip(chosen) {
                prop_assert!(chosen.abs_diff(u64::from(*weight) * 3) <= 1, "{weight}: {chosen}");
            }
        }

        #[test]
        fn sort_value_never_overflows(load: u32, degradation: u32, dpf: u32, distance: u32, chosen: u32) {
            let policies = [
                Policy::WeightedRoundRobin { weight: load },
                Policy::LeastUsedDegradation { load, degradation },
                Policy::PriorityLeastUsedDegradation { load, degradation },
                Policy::LeastUsedDegradationDpf { load, degradation, dpf, distance },
                Policy::PriorityLeastUsedDegradationDpf { load, degradation, dpf, distance },
            ];
            for policy in policies {
                let (before, after) = (sort_value(&policy, chosen.into()), sort_value(&policy, u64::from(chosen) + 1));
                prop_assert!(before <= after);
            }
        }
    }
}
