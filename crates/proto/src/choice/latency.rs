//! Power of two choices over a moving average of latency.

use super::two;
use holdfast_wire::rserpool::ElementId;
use std::collections::BTreeMap;
use std::time::Duration;

/// Observations of an element.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// Average latency in seconds, as of `at`; none if no request has ended.
    average_s: Option<f64>,
    at: Duration,
    /// Number of requests in flight.
    open: u32,
}

/// Chooser that takes the faster of two elements drawn at random. The cost of an element is its average latency times
/// its requests in flight, including the new one.
///
/// The average follows peaks: a latency above the average replaces it at once, and decays slowly. An element without
/// requests counts as taking no time, so that it is tried.
#[derive(Debug, Clone)]
pub struct ByLatency {
    /// Time without news after which a past average has the weight 1/e.
    decay: Duration,
    seen: BTreeMap<ElementId, Seen>,
}

impl ByLatency {
    /// Returns a chooser without observations. After the time `decay` an average has the weight 1/e.
    #[must_use]
    pub fn new(decay: Duration) -> ByLatency {
        ByLatency {
            decay,
            seen: BTreeMap::new(),
        }
    }

    /// Returns the index in `candidates` of the element to use next. [`ByLatency::begin`] counts the request.
    pub fn choose(
        &self,
        candidates: &[ElementId],
        below: &mut impl FnMut(usize) -> usize,
    ) -> Option<usize> {
        let (one, other) = two(candidates.len(), below)?;
        let cost = |place: usize| self.cost(candidates[place]);
        Some(if cost(other) < cost(one) { other } else { one })
    }

    fn cost(&self, id: ElementId) -> f64 {
        let seen = self.seen.get(&id).copied().unwrap_or_default();
        seen.average_s.unwrap_or(0.0) * f64::from(seen.open + 1)
    }

    /// Counts a request to an element.
    pub fn begin(&mut self, id: ElementId) {
        self.seen.entry(id).or_default().open += 1;
    }

    /// Records the end of a request, with its duration.
    pub fn end(&mut self, now: Duration, id: ElementId, took: Duration) {
        let decay_s = self.decay.as_secs_f64().max(f64::MIN_POSITIVE);
        let seen = self.seen.entry(id).or_default();
        seen.open = seen.open.saturating_sub(1);
        let took_s = took.as_secs_f64();
        let kept = match seen.average_s {
            Some(average_s) if average_s > took_s => {
                let age_s = now.saturating_sub(seen.at).as_secs_f64();
                let weight = (-age_s / decay_s).exp();
                average_s * weight + took_s * (1.0 - weight)
            }
            _ => took_s,
        };
        seen.average_s = Some(kept);
        seen.at = now;
    }

    /// Records that the requester gave a request up, which says nothing about the element.
    pub fn abandon(&mut self, id: ElementId) {
        if let Some(seen) = self.seen.get_mut(&id) {
            seen.open = seen.open.saturating_sub(1);
        }
    }

    /// Records a failed request, with its duration. The request counts as one that took twice as long, or twice the
    /// average if that is more.
    pub fn failed(&mut self, now: Duration, id: ElementId, took: Duration) {
        let average_s = self.seen.get(&id).and_then(|seen| seen.average_s);
        let before = Duration::try_from_secs_f64(average_s.unwrap_or(0.0)).unwrap_or_default();
        self.end(now, id, took.max(before).saturating_mul(2));
    }

    /// Forgets elements that are not in the pool any more.
    pub fn retain(&mut self, is_there: impl Fn(ElementId) -> bool) {
        self.seen.retain(|id, _| is_there(*id));
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
    fn choice(chooser: &ByLatency, candidates: &[ElementId]) -> ElementId {
        candidates[chooser.choose(candidates, &mut |_| 0).unwrap()]
    }

    fn with(latencies: &[(ElementId, u64)]) -> ByLatency {
        let mut chooser = ByLatency::new(secs(10));
        for (id, seconds) in latencies {
            chooser.begin(*id);
            chooser.end(secs(1), *id, secs(*seconds));
        }
        chooser
    }

    #[test]
    fn the_faster_of_two_is_chosen_and_the_untried_first() {
        let chooser = with(&[(A, 3), (B, 2)]);
        assert_eq!(choice(&chooser, &[A, B]), B);
        assert_eq!(choice(&chooser, &[B, A]), B);
        assert_eq!(choice(&chooser, &[B, C]), C);
        assert_eq!(chooser.choose(&[], &mut |_| 0), None);
    }

    #[test]
    fn requests_under_way_count() {
        let mut chooser = with(&[(A, 3), (B, 2)]);
        chooser.begin(B);
        assert_eq!(choice(&chooser, &[A, B]), A);
        chooser.end(secs(2), B, secs(2));
        assert_eq!(choice(&chooser, &[A, B]), B);
        chooser.begin(B);
        chooser.abandon(B);
        assert_eq!(choice(&chooser, &[A, B]), B);
    }

    #[test]
    fn a_peak_is_believed_at_once_and_forgotten_slowly() {
        let mut chooser = with(&[(A, 3), (B, 2)]);
        chooser.begin(B);
        chooser.end(secs(2), B, secs(9));
        assert_eq!(choice(&chooser, &[A, B]), A);
        // Shortly after the peak one quick answer changes little, long after it everything.
        chooser.begin(B);
        chooser.end(secs(3), B, secs(1));
        assert_eq!(choice(&chooser, &[A, B]), A);
        chooser.begin(B);
        chooser.end(secs(63), B, secs(1));
        assert_eq!(choice(&chooser, &[A, B]), B);
    }

    #[test]
    fn what_fails_is_avoided_and_what_is_gone_forgotten() {
        let mut chooser = with(&[(A, 3), (B, 2)]);
        chooser.begin(B);
        chooser.failed(secs(2), B, secs(0));
        assert_eq!(choice(&chooser, &[A, B]), A);
        chooser.retain(|id| id != B);
        assert_eq!(choice(&chooser, &[A, B]), B);
    }
}
