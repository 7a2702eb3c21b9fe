//! Distances of elements (paper 004 section 5).
//!
//! A home registrar measures the delay to each of its elements, half of the association's smoothed round trip, and its
//! peers add the delay of their association with it: in whole milliseconds, as in the policy's parameter, and without
//! further rounding. Equation 3 rounds the sum to multiples of DistanceStep, both for sorting and for users. If delays
//! were rounded before they are added, two delays of 20 ms in steps of 50 ms would give no distance.
//!
//! rsplib's registrars round before they inform their peers: for their elements the sum is one of rounded delays.
//!
//! The transport measures all the time. When a delay reaches another step, or is known for the first time, the elements
//! at its end are moved in the order, and own ones are announced: some thousand in a turn. An element first heard of
//! from a registrar other than its home has that registrar's delay in its distance: the home is asked for its table
//! once it is connected.

use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Output, PoolProtocol, Registrar};
use holdfast_handlespace::{ElementCursor, ElementKey};
use holdfast_wire::rserpool::{Policy, RegistrarId};
use std::time::Duration;

/// Elements with a changed delay that have not been moved yet.
#[derive(Debug)]
pub(super) enum DistanceUpdate {
    /// Elements registered over the association: so many, from the start of its list.
    OwnElements(usize),
    /// Elements of the registrar at the other side of the association.
    PeerElements(RegistrarId, ElementCursor),
}

/// Returns the distance of a policy that has one.
#[inline]
pub(super) fn distance_mut(policy: &mut Policy) -> Option<&mut u32> {
    match policy {
        Policy::WeightedRandomDpf { distance, .. }
        | Policy::LeastUsedDpf { distance, .. }
        | Policy::LeastUsedDegradationDpf { distance, .. }
        | Policy::PriorityLeastUsedDpf { distance, .. }
        | Policy::PriorityLeastUsedDegradationDpf { distance, .. } => Some(distance),
        _ => None,
    }
}

/// Returns true if a policy has a distance.
#[inline]
pub(super) fn has_distance(mut policy: Policy) -> bool {
    distance_mut(&mut policy).is_some()
}

/// Rounds by equation 3: "the nearest integer multiple of the constant DistanceStep".
#[inline]
fn round_to_step(distance: u32, step: u32) -> u32 {
    let step = step.max(1);
    distance.saturating_add(step / 2) / step * step
}

/// Returns the policy with its distance, if it has one, rounded to a multiple of `step`.
#[inline]
pub(super) fn rounded(mut policy: Policy, step: u32) -> Policy {
    if let Some(distance) = distance_mut(&mut policy) {
        *distance = round_to_step(*distance, step);
    }
    policy
}

/// Returns true if a delay has changed to another step, by more than the fluctuation where two steps meet.
fn is_significant_change(before: u32, after: u32, step: u32) -> bool {
    let steps = round_to_step(before, step) != round_to_step(after, step);
    before != after && (before == 0 || steps && before.abs_diff(after) >= step / 8)
}

impl Registrar {
    #[inline]
    pub(super) fn rounded(&self, policy: Policy) -> Policy {
        rounded(policy, self.config.settings.distance_step)
    }

    /// Returns true if an association's round trip is needed: its peer is a registrar, or an element with a distance.
    pub fn needs_measurement(&self, association: AssociationId) -> bool {
        let known_association = self.associations.get(association);
        known_association.is_some_and(|known_association| {
            known_association.protocol == PoolProtocol::Enrp
                || known_association.distant_elements > 0
        })
    }

    /// Handles an association's smoothed round trip, as measured by the transport. The daemon reports it when the
    /// association comes up, if known then, and from time to time after [`Output::Measure`].
    pub fn handle_round_trip(
        &mut self,
        now: Duration,
        association: AssociationId,
        round_trip: Duration,
    ) {
        let delay_ms = u32::try_from((round_trip.as_micros() + 1_000) / 2_000).unwrap_or(u32::MAX);
        let step = self.config.settings.distance_step;
        let Some(known_association) = self.associations.get_mut(association) else {
            return;
        };
        known_association.delay_ms = delay_ms;
        if is_significant_change(known_association.applied_delay_ms, delay_ms, step) {
            known_association.applied_delay_ms = delay_ms;
            self.begin_distance_update(now, association);
        }
    }

    /// Moves the elements of a peer once the association is known as the peer's.
    pub(super) fn on_peer_bound(&mut self, now: Duration, association: AssociationId) {
        let known_association = self.associations.get(association);
        if known_association.is_some_and(|known_association| known_association.applied_delay_ms > 0)
        {
            self.begin_distance_update(now, association);
        }
    }

    fn begin_distance_update(&mut self, now: Duration, association: AssociationId) {
        if !self.elements.has_distant() {
            return;
        }
        if let Some(known_association) = self.associations.get_mut(association) {
            known_association.distance_update = Some(match known_association.peer {
                Some(peer) => DistanceUpdate::PeerElements(peer, ElementCursor::owned_by(peer)),
                None => DistanceUpdate::OwnElements(known_association.elements.len()),
            });
            self.update_some_distances(now, association);
        }
    }

    /// Moves some of the elements with a changed delay. Elements and users are served before the rest.
    pub(super) fn update_some_distances(&mut self, now: Duration, association: AssociationId) {
        let max = self.config.settings.batch_elements_max.max(1);
        let Some(known_association) = self.associations.get_mut(association) else {
            return;
        };
        let delay = known_association.delay_ms;
        let unfinished = match known_association.distance_update.take() {
            None => None,
            Some(DistanceUpdate::OwnElements(remaining)) => {
                // A new element has the current delay already, and the last element replaces a removed one.
                let left = remaining.min(known_association.elements.len());
                let start = left.saturating_sub(max);
                let keys = known_association.elements[start..left].to_vec();
                for key in keys {
                    if self.set_delay(key, None, delay) {
                        self.announce_element(key);
                    }
                }
                (start > 0).then_some(DistanceUpdate::OwnElements(start))
            }
            Some(DistanceUpdate::PeerElements(peer, mut cursor)) => {
                let mut keys = Vec::new();
                let visited = self
                    .elements
                    .space()
                    .next_block(&mut cursor, max, |element| {
                        let delay_ms = element.payload().delay_ms;
                        if delay_ms != delay && has_distance(*element.policy()) {
                            keys.push((element.key(), delay_ms));
                        }
                    });
                for (key, delay_ms) in keys {
                    self.set_delay(key, Some(delay_ms), delay);
                }
                (visited == max).then_some(DistanceUpdate::PeerElements(peer, cursor))
            }
        };
        if unfinished.is_some()
            && let Some(known_association) = self.associations.get_mut(association)
        {
            known_association.distance_update = unfinished;
            // The rest follows in a later turn.
            let next = now + Duration::from_nanos(1);
            self.schedule
                .set(RegistrarTimer::DistanceUpdate(association), next);
        }
    }

    /// Sets the part of an element's distance that is this registrar's delay, in place of `before`; with none, the
    /// whole distance. Returns false if nothing changes, or the element has no distance.
    pub(super) fn set_delay(&mut self, key: ElementKey, before: Option<u32>, delay: u32) -> bool {
        let Some(entry) = self.elements.entry_mut(key) else {
            return false;
        };
        let Some(distance) = distance_mut(&mut entry.element_mut().policy) else {
            return false;
        };
        let distance_ms = before.map_or(0, |way| distance.saturating_sub(way));
        let way = distance_ms.saturating_add(delay);
        let is_other = std::mem::replace(distance, way) != way;
        entry.delay_ms = before.map_or(0, |_| delay);
        let policy = entry.element.policy;
        let policy = self.rounded(policy);
        if let Some(view) = self
            .elements
            .space()
            .get(key)
            .filter(|view| *view.policy() != policy)
        {
            self.subscriptions.mark_changed(view.handle());
            self.elements.adjust_policy(key, policy);
        }
        is_other
    }

    /// Requests measurements when the first element with a distance registers over this association.
    pub(super) fn request_measurement(&mut self, association: AssociationId) {
        let known_association = self.associations.get(association);
        if known_association
            .is_some_and(|known_association| known_association.distant_elements == 1)
        {
            self.outbox.push(Output::Measure(association));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_significant_change;

    #[test]
    fn delay_change_counts_only_across_steps() {
        let other = |before, now| is_significant_change(before, now, 50);
        assert!(other(0, 1), "the distance is known");
        assert!(other(20, 30) && other(30, 20) && other(30, 90) && other(90, 10));
        assert!(!other(24, 24) && !other(10, 20) && !other(30, 70));
        assert!(
            !other(24, 26) && !other(26, 24),
            "a small variation is ignored"
        );
        assert!(is_significant_change(24, 25, 1));
    }
}
