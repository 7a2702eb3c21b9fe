//! How far elements are (paper 004 section 5).
//!
//! A home registrar measures the delay to each of its elements, half of the association's smoothed round trip, and its peers
//! add the delay of their association with it: in whole milliseconds, as the policy's parameter has them, and not
//! rounded further. Equation 3 rounds the sum to multiples of DistanceStep: in what a registrar sorts by, and in what it
//! tells users. Rounded before they are added, two ways of 20 ms in steps of 50 ms would be no distance.
//!
//! rsplib's registrars round before they tell their peers: of its elements the sum is one of rounded delays.

use super::Registrar;
use holdfast_wire::rserpool::Policy;

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

impl Registrar {
    /// Equation 3: "the nearest integer multiple of the constant DistanceStep".
    #[inline]
    pub(super) fn rounded(&self, mut policy: Policy) -> Policy {
        if let Some(distance) = distance_mut(&mut policy) {
            let step = self.config.settings.distance_step.max(1);
            *distance = distance.saturating_add(step / 2) / step * step;
        }
        policy
    }
}
