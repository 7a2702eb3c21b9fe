//! What each policy is: a value to stand by, what being selected does to it, and a selection procedure.
//!
//! Paper 001 section 3.2 gives each element a sequence number, set to the pool's next one when it registers, changes its
//! policy or is selected, and sorts by a policy's key first and by that number second. So within a key the order is the
//! order of arrival, and the number need not be written down: elements of equal value stand in a queue. The
//! paper's weights and weight sum serve the random policies.

use holdfast_wire::rserpool::{Policy, PolicyKind};

/// How elements are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Procedure {
    /// Those of the lowest values, in order of arrival among equal ones. The first goes to the end of its equals.
    First,
    /// The same, but being first changes its value: its turn is over.
    FirstInTurn,
    /// As `First`, but being returned changes the value of each (RFC 5356 section 5.2.2: the counter "MUST be incremented by 1").
    FirstCounted,
    /// At random without repetition, each with its value's share of the sum.
    ByWeight,
    /// The same; being returned changes the value of each.
    ByWeightCounted,
}

/// Where an element stands in its pool's selection set, and what moves it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Standing {
    /// The sorting key, ascending, or the weight.
    pub(crate) value: u64,
    /// Selections since the last registration; with weighted round robin turns taken in this round.
    pub(crate) count: u32,
    /// What a selection adds to a load; with weighted round robin the turns of a round.
    pub(crate) step: u32,
}

/// The key of an element that is not to be selected.
pub(crate) const OUT: u64 = u64::MAX;

/// Bits of a weighted round robin key below the number of the round.
const ROUND_BITS: u32 = 16;

/// Whether an element's selections are counted until it registers again: then registering again changes where it stands, even if it says
/// nothing new.
pub fn counts_selections(kind: PolicyKind) -> bool {
    let procedure = Procedure::of(kind);
    matches!(
        procedure,
        Procedure::FirstCounted | Procedure::ByWeightCounted
    )
}

impl Procedure {
    pub(crate) fn of(kind: PolicyKind) -> Procedure {
        use PolicyKind::*;
        match kind {
            RoundRobin | Priority | LeastUsed | PriorityLeastUsed | LeastUsedDpf
            | PriorityLeastUsedDpf => Procedure::First,
            WeightedRoundRobin => Procedure::FirstInTurn,
            LeastUsedDegradation
            | PriorityLeastUsedDegradation
            | LeastUsedDegradationDpf
            | PriorityLeastUsedDegradationDpf => Procedure::FirstCounted,
            Random
            | WeightedRandom
            | WeightedRandomDpf
            | RandomizedLeastUsed
            | RandomizedPriorityLeastUsed => Procedure::ByWeight,
            RandomizedLeastUsedDegradation | RandomizedPriorityLeastUsedDegradation => {
                Procedure::ByWeightCounted
            }
        }
    }

    pub(crate) fn is_by_weight(self) -> bool {
        matches!(self, Procedure::ByWeight | Procedure::ByWeightCounted)
    }
}

impl Standing {
    /// Of an element that registers; `lowest` asks for the lowest key in the pool.
    #[inline]
    pub(crate) fn registered(policy: &Policy, lowest: impl FnOnce() -> u64) -> Standing {
        Standing {
            value: match *policy {
                Policy::WeightedRoundRobin { weight } => turn(lowest(), weight, 0),
                _ => value(policy),
            },
            count: 0,
            step: step(policy),
        }
    }

    /// Of an element that registers again with this policy.
    #[inline]
    pub(crate) fn updated(self, policy: &Policy, lowest: impl FnOnce() -> u64) -> Standing {
        match *policy {
            // Its turns of this round stay used, lest registering again be a way to the front.
            Policy::WeightedRoundRobin { weight } => {
                let count = self.count.min(weight.saturating_sub(1));
                let round = if self.value == OUT {
                    lowest()
                } else {
                    self.value
                };
                Standing {
                    value: turn(round, weight, count),
                    count,
                    step: weight,
                }
            }
            _ => Standing::registered(policy, lowest),
        }
    }

    /// With other figures than the element has said: what selections have done to it stays.
    pub(crate) fn adjusted(self, policy: &Policy, procedure: Procedure) -> Standing {
        let added = u64::from(self.count) * u64::from(self.step);
        let value = match procedure {
            Procedure::FirstInTurn => self.value,
            Procedure::ByWeightCounted => value(policy).saturating_sub(added).max(1),
            _ => value(policy).saturating_add(added),
        };
        Standing { value, ..self }
    }

    /// After a selection that changes its value.
    #[inline]
    pub(crate) fn selected(mut self, procedure: Procedure) -> Standing {
        if procedure == Procedure::FirstInTurn {
            let over = self.count + 1 >= self.step;
            self.count = if over { 0 } else { self.count + 1 };
            let round = self.value.saturating_add(u64::from(over) << ROUND_BITS);
            self.value = turn(round, self.step, self.count);
        } else if self.count < u32::MAX {
            self.count += 1;
            let step = u64::from(self.step);
            self.value = match procedure {
                Procedure::ByWeightCounted => self.value.saturating_sub(step).max(1),
                _ => self.value.saturating_add(step),
            };
        }
        self
    }
}

/// The sorting key or weight of an element that has not been selected.
fn value(policy: &Policy) -> u64 {
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
        | Policy::RandomizedLeastUsedDegradation { load, .. } => unused(u64::from(load)),
        Policy::RandomizedPriorityLeastUsed { load, degradation }
        | Policy::RandomizedPriorityLeastUsedDegradation { load, degradation } => {
            unused(sum(load, degradation))
        }
        Policy::WeightedRandomDpf {
            weight,
            dpf,
            distance,
        } => penalised(weight, dpf, distance),
        Policy::LeastUsedDpf { dpf, distance, .. }
        | Policy::LeastUsedDegradationDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDegradationDpf { dpf, distance, .. } => {
            value(&nearby(policy)).saturating_add(penalty(dpf, distance))
        }
    }
}

/// What each selection adds to the load; with weighted round robin the weight.
#[inline]
fn step(policy: &Policy) -> u32 {
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

/// The policy without its distance.
fn nearby(policy: &Policy) -> Policy {
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

/// When an element's next turn is. A round has `weight` turns at equal distances, so the turns of all are spread as evenly as
/// their weights allow (RFC 5356 section 4.2.2). A weight of 0 "denotes that the pool element is not capable of
/// providing any service" (section 3.2).
fn turn(round: u64, weight: u32, count: u32) -> u64 {
    if weight == 0 {
        return OUT;
    }
    // The middle of its part of the round, so that those of few turns do not all come at the beginning.
    let within = ((2 * u64::from(count) + 1) << ROUND_BITS) / (2 * u64::from(weight));
    (round >> ROUND_BITS << ROUND_BITS) | within
}

/// What the distance adds to a load, as both are fractions of the same whole: load + distance * dpf (paper 004).
fn penalty(dpf: u32, distance: u32) -> u64 {
    u64::from(distance) * u64::from(dpf)
}

/// The weight less its share distance * dpf, and 1 at least unless it was 0: never to be chosen is what a weight of 0 says.
fn penalised(weight: u32, dpf: u32, distance: u32) -> u64 {
    let whole = u128::from(u32::MAX);
    let share = u128::from(weight) * u128::from(penalty(dpf, distance));
    let taken = (share + whole / 2) / whole;
    let left = u128::from(weight).saturating_sub(taken);
    (left as u64).max(u64::from(weight.min(1)))
}

/// The part that is not in use; 1 at least, so that a pool in full use still answers.
fn unused(load: u64) -> u64 {
    u64::from(u32::MAX).saturating_sub(load).max(1)
}
