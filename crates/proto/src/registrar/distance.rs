//! How far elements are (paper 004 section 5).
//!
//! A home registrar measures the delay to each of its elements, half of the association's smoothed round trip, and its peers
//! add the delay of their association with it: in whole milliseconds, as the policy's parameter has them, and not
//! rounded further. Equation 3 rounds the sum to multiples of DistanceStep: in what a registrar sorts by, and in what it
//! tells users. Rounded before they are added, two ways of 20 ms in steps of 50 ms would be no distance.
//!
//! rsplib's registrars round before they tell their peers: of its elements the sum is one of rounded delays.
//!
//! The transport measures all the time. When a way comes to another step, or is known for the first time, the elements at its end are
//! moved in the order, and own ones are announced: some thousand in a turn. Who is first heard of from another registrar than its
//! home has that one's way in its distance: the home is asked for its table when it is there.

use super::schedule::Timer;
use super::{AssociationId, Output, Protocol, Registrar};
use holdfast_handlespace::{Cursor, ElementKey};
use holdfast_wire::rserpool::{Policy, RegistrarId};
use std::time::Duration;

/// Elements whose way has changed and that have not been moved yet.
#[derive(Debug)]
pub(super) enum Moving {
    /// Those that registered over the association: the first of its list, so many.
    Own(usize),
    /// Those of the registrar that speaks over it.
    Of(RegistrarId, Cursor),
}

/// The distance in a policy that has one.
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

/// Whether a policy has a distance.
#[inline]
pub(super) fn is_distant(mut policy: Policy) -> bool {
    distance_mut(&mut policy).is_some()
}

/// Equation 3: "the nearest integer multiple of the constant DistanceStep".
#[inline]
fn nearest(distance: u32, step: u32) -> u32 {
    let step = step.max(1);
    distance.saturating_add(step / 2) / step * step
}

/// A policy whose distance, if it has one, is a multiple of `step`.
#[inline]
pub(super) fn rounded(mut policy: Policy, step: u32) -> Policy {
    if let Some(distance) = distance_mut(&mut policy) {
        *distance = nearest(*distance, step);
    }
    policy
}

/// Whether a way that was `before` is another now: at another step, and not only by what comes and goes where two steps meet.
fn is_other(before: u32, now: u32, step: u32) -> bool {
    let steps = nearest(before, step) != nearest(now, step);
    before != now && (before == 0 || steps && before.abs_diff(now) >= step / 8)
}

impl Registrar {
    #[inline]
    pub(super) fn rounded(&self, policy: Policy) -> Policy {
        rounded(policy, self.config.settings.distance_step)
    }

    /// Whether an association's round trip matters: it is a peer's, or that of an element with a distance.
    pub fn measures(&self, association: AssociationId) -> bool {
        let known = self.associations.get(association);
        known.is_some_and(|known| known.protocol == Protocol::Enrp || known.distant > 0)
    }

    /// The transport's smoothed round trip of an association. To be told when it comes up, if it is known then, and now and then
    /// after [`Output::Measure`].
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

    /// An association is a peer's from now on.
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

    /// Moves some of the elements whose way has changed. Elements and users are served before the next.
    pub(super) fn move_some(&mut self, now: Duration, association: AssociationId) {
        let max = self.config.settings.turn_elements_max.max(1);
        let Some(known) = self.associations.get_mut(association) else {
            return;
        };
        let delay = known.delay_ms;
        let rest = match known.moving.take() {
            None => None,
            Some(Moving::Own(left)) => {
                // Who comes is described as it is now, and who leaves is replaced by the last.
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
            // Not in this turn.
            let next = now + Duration::from_nanos(1);
            self.schedule.set(Timer::Way(association), next);
        }
    }

    /// Gives an element its way of `delay`: in place of `before`, of which its distance is a sum with what its home says, or of all.
    /// False: it has it, or no distance.
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

    /// An element has come, or has gone.
    #[inline]
    pub(super) fn count_distant(&mut self, policy: Policy, has_come: bool) {
        let one = usize::from(is_distant(policy));
        match has_come {
            true => self.distant += one,
            false => self.distant -= one,
        }
    }

    /// The first element with a distance has registered over this association.
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
