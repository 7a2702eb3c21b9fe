//! The policies: each has a sorting key or weight, a change of that value by selection, and a selection procedure.
//!
//! Paper 001 section 3.2 gives each element a sequence number, set to the pool's next one when the element registers,
//! changes its policy or is selected, and sorts first by a policy's key and then by that number. So within a key the
//! order is the order of arrival, and the number need not be stored: elements of equal value form a queue. The paper's
//! weights and weight sum serve the random policies.

use holdfast_wire::rserpool::{Policy, PolicyKind};

/// A selection procedure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SelectionProcedure {
    /// Selects the elements of the lowest values, in order of arrival among equal ones. The first selected moves to the
    /// end of its queue.
    First,
    /// Selects like `First`, but the first selected element's value changes: its turn is over.
    FirstInTurn,
    /// Selects like `First`, but the value of every selected element changes (RFC 5356 section 5.2.2: the counter "MUST
    /// be incremented by 1").
    FirstCounted,
    /// Selects at random without repetition, each element in proportion to its value.
    ByWeight,
    /// Selects like `ByWeight`, but the value of every selected element changes.
    ByWeightCounted,
}

/// An element's position in its pool's selection set, and the figures that change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SelectionState {
    /// The sorting key, ascending, or the weight.
    pub(crate) value: u64,
    /// Selections since the last registration; for weighted round robin, turns used in this round.
    pub(crate) count: u32,
    /// Increase of the load by a selection; for weighted round robin, turns per round.
    pub(crate) step: u32,
}

/// The key of an element that must not be selected.
pub(crate) const EXCLUDED_KEY: u64 = u64::MAX;

/// Number of bits below the round number in a weighted round robin key.
const ROUND_BITS: u32 = 16;

/// Returns true if an element's selections are counted until it registers again: then re-registration changes its
/// position even with the same figures.
pub fn counts_selections(kind: PolicyKind) -> bool {
    let procedure = SelectionProcedure::of(kind);
    matches!(
        procedure,
        SelectionProcedure::FirstCounted | SelectionProcedure::ByWeightCounted
    )
}

/// Returns an element's share of its pool's selections, relative to the shares of the others, if the share depends on
/// the element's figures alone: with round robin and with random policies whose weights selections do not change. An
/// element of share 0 is never selected.
pub fn relative_share(policy: &Policy) -> Option<u64> {
    match *policy {
        Policy::RoundRobin => Some(1),
        Policy::WeightedRoundRobin { weight } => Some(u64::from(weight)),
        _ if SelectionProcedure::of(policy.kind()) == SelectionProcedure::ByWeight => {
            Some(initial_value(policy))
        }
        _ => None,
    }
}

impl SelectionProcedure {
    pub(crate) fn of(kind: PolicyKind) -> SelectionProcedure {
        use PolicyKind::*;
        match kind {
            RoundRobin | Priority | LeastUsed | PriorityLeastUsed | LeastUsedDpf
            | PriorityLeastUsedDpf => SelectionProcedure::First,
            WeightedRoundRobin => SelectionProcedure::FirstInTurn,
            LeastUsedDegradation
            | PriorityLeastUsedDegradation
            | LeastUsedDegradationDpf
            | PriorityLeastUsedDegradationDpf => SelectionProcedure::FirstCounted,
            Random
            | WeightedRandom
            | WeightedRandomDpf
            | RandomizedLeastUsed
            | RandomizedPriorityLeastUsed => SelectionProcedure::ByWeight,
            RandomizedLeastUsedDegradation | RandomizedPriorityLeastUsedDegradation => {
                SelectionProcedure::ByWeightCounted
            }
        }
    }

    pub(crate) fn is_by_weight(self) -> bool {
        matches!(
            self,
            SelectionProcedure::ByWeight | SelectionProcedure::ByWeightCounted
        )
    }
}

impl SelectionState {
    /// Returns the standing of an element that registers; `lowest` returns the lowest key in the pool.
    #[inline]
    pub(crate) fn after_registration(
        policy: &Policy,
        lowest: impl FnOnce() -> u64,
    ) -> SelectionState {
        SelectionState {
            value: match *policy {
                Policy::WeightedRoundRobin { weight } => turn_key(lowest(), weight, 0),
                _ => initial_value(policy),
            },
            count: 0,
            step: step_of(policy),
        }
    }

    /// Returns the standing of an element that re-registers with this policy.
    #[inline]
    pub(crate) fn after_reregistration(
        self,
        policy: &Policy,
        lowest: impl FnOnce() -> u64,
    ) -> SelectionState {
        match *policy {
            // Keep the used turns of this round, so that re-registration is not a way to the front.
            Policy::WeightedRoundRobin { weight } => {
                let count = self.count.min(weight.saturating_sub(1));
                let round = if self.value == EXCLUDED_KEY {
                    lowest()
                } else {
                    self.value
                };
                SelectionState {
                    value: turn_key(round, weight, count),
                    count,
                    step: weight,
                }
            }
            _ => SelectionState::after_registration(policy, lowest),
        }
    }

    /// Returns the standing with other figures than the element registered: the effect of selections is kept.
    pub(crate) fn after_adjustment(
        self,
        policy: &Policy,
        procedure: SelectionProcedure,
    ) -> SelectionState {
        let added = u64::from(self.count) * u64::from(self.step);
        let value = match procedure {
            SelectionProcedure::FirstInTurn => self.value,
            SelectionProcedure::ByWeightCounted => {
                initial_value(policy).saturating_sub(added).max(1)
            }
            _ => initial_value(policy).saturating_add(added),
        };
        SelectionState { value, ..self }
    }

    /// Returns the standing after a selection that changes its value.
    #[inline]
    pub(crate) fn after_selection(mut self, procedure: SelectionProcedure) -> SelectionState {
        if procedure == SelectionProcedure::FirstInTurn {
            let round_over = self.count + 1 >= self.step;
            self.count = if round_over { 0 } else { self.count + 1 };
            let round = self
                .value
                .saturating_add(u64::from(round_over) << ROUND_BITS);
            self.value = turn_key(round, self.step, self.count);
        } else if self.count < u32::MAX {
            self.count += 1;
            let step = u64::from(self.step);
            self.value = match procedure {
                SelectionProcedure::ByWeightCounted => self.value.saturating_sub(step).max(1),
                _ => self.value.saturating_add(step),
            };
        }
        self
    }
}

/// Returns the sorting key or weight of an element that has not been selected.
fn initial_value(policy: &Policy) -> u64 {
    let sum = |load: u32, degradation: u32| u64::from(load) + u64::from(degradation);
    match *policy {
        Policy::RoundRobin | Policy::WeightedRoundRobin { .. } => 0,
        Policy::Random => 1,
        Policy::WeightedRandom { weight } => u64::from(weight),
        Policy::Priority { priority } => u64::from(!priority),
        Policy::LeastUsed { load } | Policy::LeastUsedDegradation { load, .. } => u64::from(load),
        Policy::PriorityLeastUsed { load, degradation }
        | Policy::PriorityLeastUsedDegradation { load, degradation } => sum(load, degradation),
        Policy::RandomizedLeastUsed { load }
        | Policy::RandomizedLeastUsedDegradation { load, .. } => unused_load(u64::from(load)),
        Policy::RandomizedPriorityLeastUsed { load, degradation }
        | Policy::RandomizedPriorityLeastUsedDegradation { load, degradation } => {
            unused_load(sum(load, degradation))
        }
        Policy::WeightedRandomDpf {
            weight,
            dpf,
            distance,
        } => penalised_weight(weight, dpf, distance),
        Policy::LeastUsedDpf { dpf, distance, .. }
        | Policy::LeastUsedDegradationDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDegradationDpf { dpf, distance, .. } => {
            initial_value(&without_distance(policy)).saturating_add(distance_penalty(dpf, distance))
        }
    }
}

/// Returns the increase of the load by a selection; for weighted round robin the weight.
#[inline]
fn step_of(policy: &Policy) -> u32 {
    match *policy {
        Policy::WeightedRoundRobin { weight } => weight,
        Policy::LeastUsedDegradation { degradation, .. }
        | Policy::PriorityLeastUsedDegradation { degradation, .. }
        | Policy::RandomizedLeastUsedDegradation { degradation, .. }
        | Policy::RandomizedPriorityLeastUsedDegradation { degradation, .. }
        | Policy::LeastUsedDegradationDpf { degradation, .. }
        | Policy::PriorityLeastUsedDegradationDpf { degradation, .. } => degradation,
        _ => 0,
    }
}

/// Returns the policy without its distance.
fn without_distance(policy: &Policy) -> Policy {
    match *policy {
        Policy::LeastUsedDpf { load, .. } => Policy::LeastUsed { load },
        Policy::LeastUsedDegradationDpf {
            load, degradation, ..
        } => Policy::LeastUsedDegradation { load, degradation },
        Policy::PriorityLeastUsedDpf {
            load, degradation, ..
        } => Policy::PriorityLeastUsed { load, degradation },
        Policy::PriorityLeastUsedDegradationDpf {
            load, degradation, ..
        } => Policy::PriorityLeastUsedDegradation { load, degradation },
        other => other,
    }
}

/// Returns the key of an element's next turn. A round has `weight` turns at equal distances, so the turns of all
/// elements are spread as evenly as their weights allow (RFC 5356 section 4.2.2). A weight of 0 "denotes that the pool
/// element is not capable of providing any service" (section 3.2).
fn turn_key(round: u64, weight: u32, count: u32) -> u64 {
    if weight == 0 {
        return EXCLUDED_KEY;
    }
    // Use the middle of its part of the round, so that elements with few turns are not all at the beginning.
    let within = ((2 * u64::from(count) + 1) << ROUND_BITS) / (2 * u64::from(weight));
    (round >> ROUND_BITS << ROUND_BITS) | within
}

/// Returns the increase of the load by the distance, as fractions of the same whole: load + distance * dpf (paper 004).
fn distance_penalty(dpf: u32, distance: u32) -> u64 {
    u64::from(distance) * u64::from(dpf)
}

/// Returns the weight minus its share distance * dpf, and at least 1 unless it was 0: only a weight of 0 excludes an
/// element.
fn penalised_weight(weight: u32, dpf: u32, distance: u32) -> u64 {
    let whole = u128::from(u32::MAX);
    let share = u128::from(weight) * u128::from(distance_penalty(dpf, distance));
    let taken = (share + whole / 2) / whole;
    let left = u128::from(weight).saturating_sub(taken);
    (left as u64).max(u64::from(weight.min(1)))
}

/// Returns the unused part of the load; at least 1, so that a fully loaded pool still answers.
fn unused_load(load: u64) -> u64 {
    u64::from(u32::MAX).saturating_sub(load).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_known_without_selections_or_not_at_all() {
        let weight = 3;
        assert_eq!(relative_share(&Policy::RoundRobin), Some(1));
        assert_eq!(relative_share(&Policy::Random), Some(1));
        assert_eq!(
            relative_share(&Policy::WeightedRoundRobin { weight }),
            Some(3)
        );
        assert_eq!(relative_share(&Policy::WeightedRandom { weight }), Some(3));
        let load = u32::MAX;
        assert_eq!(
            relative_share(&Policy::RandomizedLeastUsed { load }),
            Some(1)
        );
        assert_eq!(relative_share(&Policy::LeastUsed { load }), None);
    }
}
