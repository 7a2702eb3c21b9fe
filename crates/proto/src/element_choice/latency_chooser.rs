//! Power of two choices over a moving average of latency.

use super::draw_two;
use holdfast_wire::rserpool::ElementId;
use std::collections::BTreeMap;
use std::time::Duration;

/// Observations of an element.
#[derive(Debug, Clone, Copy, Default)]
struct ElementLatency {
    /// Average latency in seconds, as of `as_of`; none if no request has ended.
    average_s: Option<f64>,
    as_of: Duration,
    /// Number of requests in flight.
    in_flight: u32,
}

/// Chooser that takes the faster of two elements drawn at random. The cost of an element is its average latency times
/// its requests in flight, including the new one.
///
/// The average follows peaks: a latency above the average replaces it at once, and decays slowly. An element without
/// requests counts as taking no time, so that it is tried.
#[derive(Debug, Clone)]
pub struct LatencyChooser {
    /// Time without news after which a past average has the weight 1/e.
    decay: Duration,
    observations: BTreeMap<ElementId, ElementLatency>,
}

impl LatencyChooser {
    /// Returns a chooser without observations. After the time `decay` an average has the weight 1/e.
    #[must_use]
    pub fn new(decay: Duration) -> LatencyChooser {
        LatencyChooser {
            decay,
            observations: BTreeMap::new(),
        }
    }

    /// Returns the index in `candidates` of the element to use next. [`LatencyChooser::begin_request`] counts the request.
    pub fn choose(
        &self,
        candidates: &[ElementId],
        below: &mut impl FnMut(usize) -> usize,
    ) -> Option<usize> {
        let (one, other) = draw_two(candidates.len(), below)?;
        let cost = |index: usize| self.cost(candidates[index]);
        Some(if cost(other) < cost(one) { other } else { one })
    }

    fn cost(&self, id: ElementId) -> f64 {
        let observation = self.observations.get(&id).copied().unwrap_or_default();
        observation.average_s.unwrap_or(0.0) * f64::from(observation.in_flight + 1)
    }

    /// Counts a request to an element.
    pub fn begin_request(&mut self, id: ElementId) {
        self.observations.entry(id).or_default().in_flight += 1;
    }

    /// Records the end of a request, with its duration.
    pub fn end_request(&mut self, now: Duration, id: ElementId, duration: Duration) {
        let decay_s = self.decay.as_secs_f64().max(f64::MIN_POSITIVE);
        let observation = self.observations.entry(id).or_default();
        observation.in_flight = observation.in_flight.saturating_sub(1);
        let duration_s = duration.as_secs_f64();
        let decayed_average_s = match observation.average_s {
            Some(average_s) if average_s > duration_s => {
                let age_s = now.saturating_sub(observation.as_of).as_secs_f64();
                let weight = (-age_s / decay_s).exp();
                average_s * weight + duration_s * (1.0 - weight)
            }
            _ => duration_s,
        };
        observation.average_s = Some(decayed_average_s);
        observation.as_of = now;
    }

    /// Records that the requester gave a request up, which says nothing about the element.
    pub fn abandon_request(&mut self, id: ElementId) {
        if let Some(observation) = self.observations.get_mut(&id) {
            observation.in_flight = observation.in_flight.saturating_sub(1);
        }
    }

    /// Records a failed request, with its duration. The request counts as one that took twice as long, or twice the
    /// average if that is more.
    pub fn fail_request(&mut self, now: Duration, id: ElementId, duration: Duration) {
        let average_s = self
            .observations
            .get(&id)
            .and_then(|observation| observation.average_s);
        let before = Duration::try_from_secs_f64(average_s.unwrap_or(0.0)).unwrap_or_default();
        self.end_request(now, id, duration.max(before).saturating_mul(2));
    }

    /// Forgets elements that are not in the pool any more.
    pub fn retain_elements(&mut self, is_in_pool: impl Fn(ElementId) -> bool) {
        self.observations.retain(|id, _| is_in_pool(*id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ElementId = ElementId(1);
    const B: ElementId = ElementId(2);
    const C: ElementId = ElementId(3);

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Returns the choice between the first two candidates.
    fn choice(chooser: &LatencyChooser, candidates: &[ElementId]) -> ElementId {
        candidates[chooser.choose(candidates, &mut |_| 0).unwrap()]
    }

    fn chooser_with_latencies(latencies: &[(ElementId, u64)]) -> LatencyChooser {
        let mut chooser = LatencyChooser::new(secs(10));
        for (id, seconds) in latencies {
            chooser.begin_request(*id);
            chooser.end_request(secs(1), *id, secs(*seconds));
        }
        chooser
    }

    #[test]
    fn faster_element_is_chosen_and_untried_one_first() {
        let chooser = chooser_with_latencies(&[(A, 3), (B, 2)]);
        assert_eq!(choice(&chooser, &[A, B]), B);
        assert_eq!(choice(&chooser, &[B, A]), B);
        assert_eq!(choice(&chooser, &[B, C]), C);
        assert_eq!(chooser.choose(&[], &mut |_| 0), None);
    }

    #[test]
    fn requests_in_flight_raise_cost() {
        let mut chooser = chooser_with_latencies(&[(A, 3), (B, 2)]);
        chooser.begin_request(B);
        assert_eq!(choice(&chooser, &[A, B]), A);
        chooser.end_request(secs(2), B, secs(2));
        assert_eq!(choice(&chooser, &[A, B]), B);
        chooser.begin_request(B);
        chooser.abandon_request(B);
        assert_eq!(choice(&chooser, &[A, B]), B);
    }

    #[test]
    fn latency_peak_counts_at_once_and_decays_slowly() {
        let mut chooser = chooser_with_latencies(&[(A, 3), (B, 2)]);
        chooser.begin_request(B);
        chooser.end_request(secs(2), B, secs(9));
        assert_eq!(choice(&chooser, &[A, B]), A);
        // Shortly after the peak one quick answer changes little, long after it everything.
        chooser.begin_request(B);
        chooser.end_request(secs(3), B, secs(1));
        assert_eq!(choice(&chooser, &[A, B]), A);
        chooser.begin_request(B);
        chooser.end_request(secs(63), B, secs(1));
        assert_eq!(choice(&chooser, &[A, B]), B);
    }

    #[test]
    fn failed_element_is_avoided_and_removed_one_is_forgotten() {
        let mut chooser = chooser_with_latencies(&[(A, 3), (B, 2)]);
        chooser.begin_request(B);
        chooser.fail_request(secs(2), B, secs(0));
        assert_eq!(choice(&chooser, &[A, B]), A);
        chooser.retain_elements(|id| id != B);
        assert_eq!(choice(&chooser, &[A, B]), B);
    }
}
