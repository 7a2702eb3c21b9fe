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

use super::schedule::Timer;
use super::{AssociationId, Output, Protocol, Registrar};
use holdfast_handlespace::{Cursor, ElementKey};
use holdfast_wire::rserpool::{Policy, RegistrarId};
use std::time::Duration;

/// Elements with a changed delay that have not been moved yet.
#[derive(Debug)]
pub(super) enum Moving {
    /// Elements registered over the association: so many, from the start of its list.
    Own(usize),
    /// Elements of the registrar at the other side of the association.
    Of(RegistrarId, Cursor),
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
pub(super) fn is_distant(mut policy: Policy) -> bool {
    distance_mut(&mut policy).is_some()
}

/// Rounds by equation 3: "the nearest integer multiple of the constant DistanceStep".
#[inline]
fn nearest(distance: u32, step: u32) -> u32 {
    let step = step.max(1);
    distance.saturating_add(step / 2) / step * step
}

/// Returns the policy with its distance, if it has one, rounded to a multiple of `step`.
#[inline]
pub(super) fn rounded(mut policy: Policy, step: u32) -> Policy {
    if let Some(distance) = distance_mut(&mut policy) {
        *distance = nearest(*distance, step);
    }
    policy
}

/// Returns true if a delay has changed to another step, by more than the fluctuation where two steps meet.
fn is_other(before: u32, now: u32, step: u32) -> bool {
    let steps = nearest(before, step) != nearest(now, step);
    before != now && (before == 0 || steps && before.abs_diff(now) >= step / 8)
}

impl Registrar {
    #[inline]
    pub(super) fn rounded(&self, policy: Policy) -> Policy {
        rounded(policy, self.config.settings.distance_step)
    }

    /// Returns true if an association's round trip is needed: its peer is a registrar, or an element with a distance.
    pub fn measures(&self, association: AssociationId) -> bool {
        let known = self.associations.get(association);
        known.is_some_and(|known| known.protocol == Protocol::Enrp || known.distant > 0)
    }

    /// Handles an association's smoothed round trip, as measured by the transport. The daemon reports it when the
    /// association comes up, if known then, and from time to time after [`Output::Measure`].
    pub fn handle_round_trip(
        &mut self,
        now: Duration,
        association: AssociationId,
        round_trip: Duration,
    ) {
        let way = u32::try_from((round_trip.as_micros() + 1_000) / 2_000).unwrap_or(u32::MAX);
        let step = self.config.settings.distance_step;
        let Some(known) = self.associations.get_mut(association) else {
            return;
        };
        known.delay_ms = way;
        if is_other(known.moved_ms, way, step) {
            known.moved_ms = way;
            self.move_all(now, association);
        }
    }

    /// Moves the elements of a peer once the association is known as the peer's.
    pub(super) fn peer_bound(&mut self, now: Duration, association: AssociationId) {
        let known = self.associations.get(association);
        if known.is_some_and(|known| known.moved_ms > 0) {
            self.move_all(now, association);
        }
    }

    fn move_all(&mut self, now: Duration, association: AssociationId) {
        if self.distant == 0 {
            return;
        }
        if let Some(known) = self.associations.get_mut(association) {
            known.moving = Some(match known.peer {
                Some(peer) => Moving::Of(peer, Cursor::owned_by(peer)),
                None => Moving::Own(known.elements.len()),
            });
            self.move_some(now, association);
        }
    }

    /// Moves some of the elements with a changed delay. Elements and users are served before the rest.
    pub(super) fn move_some(&mut self, now: Duration, association: AssociationId) {
        let max = self.config.settings.turn_elements_max.max(1);
        let Some(known) = self.associations.get_mut(association) else {
            return;
        };
        let delay = known.delay_ms;
        let rest = match known.moving.take() {
            None => None,
            Some(Moving::Own(left)) => {
                // A new element has the current delay already, and the last element replaces a removed one.
                let left = left.min(known.elements.len());
                let begin = left.saturating_sub(max);
                let keys = known.elements[begin..left].to_vec();
                for key in keys {
                    if self.set_way(key, None, delay) {
                        self.announce_element(key);
                    }
                }
                (begin > 0).then_some(Moving::Own(begin))
            }
            Some(Moving::Of(peer, mut cursor)) => {
                let mut keys = Vec::new();
                let shown = self.space.next_block(&mut cursor, max, |element| {
                    let way = element.payload().way_ms;
                    if way != delay && is_distant(*element.policy()) {
                        keys.push((element.key(), way));
                    }
                });
                for (key, way) in keys {
                    self.set_way(key, Some(way), delay);
                }
                (shown == max).then_some(Moving::Of(peer, cursor))
            }
        };
        if rest.is_some()
            && let Some(known) = self.associations.get_mut(association)
        {
            known.moving = rest;
            // The rest follows in a later turn.
            let next = now + Duration::from_nanos(1);
            self.schedule.set(Timer::Way(association), next);
        }
    }

    /// Sets the part of an element's distance that is this registrar's delay, in place of `before`; with none, the
    /// whole distance. Returns false if nothing changes, or the element has no distance.
    pub(super) fn set_way(&mut self, key: ElementKey, before: Option<u32>, delay: u32) -> bool {
        let Some(entry) = self.space.payload_mut(key) else {
            return false;
        };
        let Some(distance) = distance_mut(&mut entry.element_mut().policy) else {
            return false;
        };
        let way = before.map_or(0, |way| distance.saturating_sub(way));
        let way = way.saturating_add(delay);
        let is_other = std::mem::replace(distance, way) != way;
        entry.way_ms = before.map_or(0, |_| delay);
        let policy = entry.element.policy;
        let policy = self.rounded(policy);
        if let Some(view) = self.space.get(key).filter(|view| *view.policy() != policy) {
            self.subscriptions.changed(view.handle());
            self.space.adjust(key, policy);
        }
        is_other
    }

    /// Counts an added or removed element with a distance.
    #[inline]
    pub(super) fn count_distant(&mut self, policy: Policy, has_come: bool) {
        let one = usize::from(is_distant(policy));
        match has_come {
            true => self.distant += one,
            false => self.distant -= one,
        }
    }

    /// Requests measurements when the first element with a distance registers over this association.
    pub(super) fn measure(&mut self, association: AssociationId) {
        let known = self.associations.get(association);
        if known.is_some_and(|known| known.distant == 1) {
            self.out.push(Output::Measure(association));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_other;

    #[test]
    fn a_way_is_another_at_another_step() {
        let other = |before, now| is_other(before, now, 50);
        assert!(other(0, 1), "now it is known");
        assert!(other(20, 30) && other(30, 20) && other(30, 90) && other(90, 10));
        assert!(!other(24, 24) && !other(10, 20) && !other(30, 70));
        assert!(!other(24, 26) && !other(26, 24), "comes and goes");
        assert!(is_other(24, 25, 1));
    }
}
