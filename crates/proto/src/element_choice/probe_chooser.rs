//! Prequal's choice: probes, a pool of their answers, and the rule of hot and cold elements.

use super::draw_two;
use holdfast_wire::rserpool::ElementId;
use smallvec::SmallVec;
use std::time::Duration;

/// Settings of the probing. The defaults are from the paper's evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeSettings {
    /// Number of probes for each request (3).
    pub probes_per_request: f64,
    /// Number of answers removed from the pool with each request, besides used-up ones (1).
    pub removals_per_request: f64,
    /// Most answers to keep (16).
    pub answers_max: usize,
    /// Longest time to keep an answer (1 s).
    pub age_max: Duration,
    /// Quantile of the recently reported requests in flight above which an element is hot (2^-0.25).
    pub hot_quantile: f64,
    /// Surplus of answers that enter the pool over the ones that leave it (1).
    pub surplus: f64,
}

impl Default for ProbeSettings {
    fn default() -> ProbeSettings {
        ProbeSettings {
            probes_per_request: 3.0,
            removals_per_request: 1.0,
            answers_max: 16,
            age_max: Duration::from_secs(1),
            hot_quantile: 0.84,
            surplus: 1.0,
        }
    }
}

/// An element's answer to a probe.
#[derive(Debug, Clone, Copy)]
struct ProbeAnswer {
    id: ElementId,
    in_flight: u32,
    latency: Option<Duration>,
    answered_at: Duration,
    /// Number of further choices that may use it.
    uses_left: f64,
}

/// Number of recent answers that estimate the distribution of requests in flight among elements.
const RECENT_ANSWERS: usize = 64;
/// Least number of answers; below it the choice is random.
const ANSWERS_MIN: usize = 2;

/// Chooser by the answers to probes: the fastest of the elements that are not hot, or, if all are hot, the one with the
/// fewest requests in flight. An answer without a latency is neither faster nor slower than others, so only the
/// requests in flight count then.
#[derive(Debug, Clone)]
pub struct ProbeChooser {
    settings: ProbeSettings,
    answers: Vec<ProbeAnswer>,
    /// Requests in flight in the recent answers; the oldest is overwritten first.
    recent_in_flight: Vec<u32>,
    oldest_index: usize,
    /// Fractions of probes and removals that are still to be made.
    probes_due: f64,
    removals_due: f64,
    /// True if the next removal takes the worst answer to a probe, false if the oldest.
    removes_worst_next: bool,
}

impl ProbeChooser {
    /// Returns a chooser without answers.
    #[must_use]
    pub fn new(probing: ProbeSettings) -> ProbeChooser {
        ProbeChooser {
            settings: probing,
            answers: Vec::new(),
            recent_in_flight: Vec::new(),
            oldest_index: 0,
            probes_due: 0.0,
            removals_due: 0.0,
            removes_worst_next: false,
        }
    }

    /// Returns the elements to probe with a request: different indices in `candidates`.
    pub fn choose_probe_targets(
        &mut self,
        candidates: &[ElementId],
        below: &mut impl FnMut(usize) -> usize,
    ) -> SmallVec<[usize; 4]> {
        self.probes_due += self.settings.probes_per_request;
        let mut chosen: SmallVec<[usize; 4]> = SmallVec::new();
        while self.probes_due >= 1.0 && chosen.len() < candidates.len() {
            // Index among the elements that are not yet selected.
            let mut index = below(candidates.len() - chosen.len());
            chosen.sort_unstable();
            for other in &chosen {
                index += usize::from(*other <= index);
            }
            chosen.push(index);
            self.probes_due -= 1.0;
        }
        // Probes that a small pool does not allow are not owed for ever.
        self.probes_due = self.probes_due.min(1.0);
        chosen
    }

    /// Records an element's answer to a probe. `latency` is its estimate for a request that arrives at its current
    /// load, if it has one.
    pub fn record_answer(
        &mut self,
        now: Duration,
        id: ElementId,
        (in_flight, latency): (u32, Option<Duration>),
        elements: usize,
    ) {
        match self.recent_in_flight.len() < RECENT_ANSWERS {
            true => self.recent_in_flight.push(in_flight),
            false => self.recent_in_flight[self.oldest_index] = in_flight,
        }
        self.oldest_index = (self.oldest_index + 1) % RECENT_ANSWERS;
        if self.answers.len() >= self.settings.answers_max {
            self.remove_oldest_answer();
        }
        let uses = self.uses_per_answer(elements);
        self.answers.push(ProbeAnswer {
            id,
            in_flight,
            latency,
            answered_at: now,
            uses_left: uses,
        });
    }

    /// Returns how often an answer may be used, so that the pool of answers neither runs dry nor grows stale.
    fn uses_per_answer(&self, elements: usize) -> f64 {
        let ProbeSettings {
            probes_per_request: probes,
            removals_per_request: removals,
            answers_max,
            surplus,
            ..
        } = self.settings;
        let share = answers_max as f64 / elements.max(1) as f64;
        let net = (1.0 - share) * probes - removals;
        match net > 0.0 {
            true => ((1.0 + surplus) / net).max(1.0),
            // With so few elements each has several answers: only age removes them.
            false => f64::INFINITY,
        }
    }

    /// Returns the index in `candidates` of the element to use next. Its answers count the new request from then on.
    pub fn choose(
        &mut self,
        now: Duration,
        candidates: &[ElementId],
        below: &mut impl FnMut(usize) -> usize,
    ) -> Option<usize> {
        self.remove_stale_answers(now, candidates);
        self.remove_due_answers();
        if self.answers.len() < ANSWERS_MIN {
            return draw_two(candidates.len(), below).map(|(place, _)| place);
        }
        let hot = self.hot_threshold();
        let best = (0..self.answers.len()).min_by_key(|place| self.answer_sort_key(*place, hot))?;
        let answer = &mut self.answers[best];
        let id = answer.id;
        answer.uses_left -= 1.0;
        let used_up = answer.uses_left < 1.0;
        for other in self.answers.iter_mut().filter(|other| other.id == id) {
            other.in_flight += 1;
        }
        if used_up {
            self.answers.remove(best);
        }
        candidates.iter().position(|other| *other == id)
    }

    /// Returns true if answers decide among the candidates, and not chance. The caller removes stale answers first.
    pub fn has_enough_answers(&self) -> bool {
        self.answers.len() >= ANSWERS_MIN
    }

    /// Removes old answers, and answers of other elements.
    pub fn remove_stale_answers(&mut self, now: Duration, candidates: &[ElementId]) {
        let age_max = self.settings.age_max;
        self.answers.retain(|answer| {
            now.saturating_sub(answer.answered_at) <= age_max && candidates.contains(&answer.id)
        });
    }

    /// Returns the sort key of an answer: cold before hot; cold ones by latency, hot ones by requests in flight; among
    /// equals the latest first.
    fn answer_sort_key(
        &self,
        index: usize,
        hot: Option<u32>,
    ) -> (bool, u128, std::cmp::Reverse<Duration>) {
        let answer = &self.answers[index];
        let is_hot = hot.is_none_or(|hot| answer.in_flight > hot);
        let value = match answer.latency.filter(|_| !is_hot) {
            Some(latency) => latency.as_nanos(),
            None => u128::from(answer.in_flight),
        };
        (is_hot, value, std::cmp::Reverse(answer.answered_at))
    }

    /// Returns the number of requests in flight beyond which an element is hot; none if all count as hot, because some
    /// answer has no latency.
    fn hot_threshold(&self) -> Option<u32> {
        if self.answers.iter().any(|answer| answer.latency.is_none()) {
            return None;
        }
        let mut sorted = self.recent_in_flight.clone();
        sorted.sort_unstable();
        let place = (self.settings.hot_quantile * sorted.len() as f64) as usize;
        let place = place.min(sorted.len().saturating_sub(1));
        Some(sorted.get(place).copied().unwrap_or(u32::MAX))
    }

    /// Removes "the worst" and the oldest answer in turn.
    fn remove_due_answers(&mut self) {
        self.removals_due += self.settings.removals_per_request;
        while self.removals_due >= 1.0 {
            self.removals_due -= 1.0;
            if self.answers.len() <= ANSWERS_MIN {
                continue;
            }
            match self.removes_worst_next {
                true => self.remove_worst_answer(),
                false => self.remove_oldest_answer(),
            }
            self.removes_worst_next = !self.removes_worst_next;
        }
    }

    fn remove_oldest_answer(&mut self) {
        let oldest = (0..self.answers.len()).min_by_key(|place| self.answers[*place].answered_at);
        oldest.map(|place| self.answers.remove(place));
    }

    fn remove_worst_answer(&mut self) {
        let hot = self.hot_threshold();
        let worst = (0..self.answers.len()).max_by_key(|place| self.answer_sort_key(*place, hot));
        worst.map(|place| self.answers.remove(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [ElementId; 4] = [ElementId(1), ElementId(2), ElementId(3), ElementId(4)];

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Returns a chooser without extra removals, for a pool of so many elements.
    fn chooser_with_answers(elements: usize, answers: &[(usize, u32, u64)]) -> ProbeChooser {
        let mut chooser = ProbeChooser::new(ProbeSettings {
            removals_per_request: 0.0,
            ..ProbeSettings::default()
        });
        for (index, in_flight, latency_ms) in answers {
            let answer = (*in_flight, Some(ms(*latency_ms)));
            chooser.record_answer(ms(0), IDS[*index], answer, elements);
        }
        chooser
    }

    fn draw_first(_: usize) -> usize {
        0
    }

    #[test]
    fn fastest_cold_element_is_chosen_over_hot_one() {
        let answers = [(0, 1, 50), (1, 1, 30), (2, 9, 10), (3, 1, 60), (0, 1, 50)];
        let mut chooser = chooser_with_answers(100, &answers);
        // 0.84 of five answers: the fifth of 1 1 1 1 9 is the limit, and no element is above it.
        assert_eq!(chooser.choose(ms(1), &IDS, &mut draw_first), Some(2));
        let answers = [
            (0, 1, 50),
            (1, 1, 30),
            (3, 1, 60),
            (0, 1, 50),
            (0, 1, 50),
            (0, 1, 50),
            (2, 9, 10),
        ];
        let mut chooser = chooser_with_answers(100, &answers);
        assert_eq!(chooser.choose(ms(1), &IDS, &mut draw_first), Some(1));
    }

    #[test]
    fn fewest_in_flight_wins_if_all_are_hot() {
        // With few elements answers are not used up.
        let mut chooser = chooser_with_answers(4, &[(0, 5, 50), (1, 6, 30)]);
        chooser.recent_in_flight = vec![1; RECENT_ANSWERS];
        let chosen = [(); 4].map(|()| chooser.choose(ms(1), &IDS, &mut draw_first));
        // Each choice counts: 5 6, 6 6, 7 6, 7 7.
        assert_eq!(chosen, [Some(0), Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn fewest_in_flight_wins_if_a_latency_is_unknown() {
        let mut chooser = chooser_with_answers(100, &[(0, 2, 10), (1, 1, 50)]);
        assert_eq!(chooser.choose(ms(1), &IDS, &mut draw_first), Some(0));
        let mut chooser = chooser_with_answers(100, &[(0, 2, 10), (1, 1, 50)]);
        chooser.record_answer(ms(0), IDS[2], (3, None), 100);
        assert_eq!(chooser.choose(ms(1), &IDS, &mut draw_first), Some(1));
    }

    #[test]
    fn choice_is_random_after_answers_expire() {
        let mut chooser = chooser_with_answers(100, &[(0, 5, 50), (1, 1, 30)]);
        assert_eq!(chooser.choose(ms(1_001), &IDS, &mut |_| 2), Some(2));
        assert!(chooser.answers.is_empty());
        assert_eq!(chooser.choose(ms(1_001), &[], &mut draw_first), None);
        let mut chooser = chooser_with_answers(100, &[(0, 5, 50), (1, 1, 30)]);
        chooser.remove_stale_answers(ms(1_000), &IDS);
        assert!(chooser.has_enough_answers());
        chooser.remove_stale_answers(ms(1_000), &IDS[1..]);
        assert!(!chooser.has_enough_answers());
    }

    #[test]
    fn answer_is_removed_after_its_uses() {
        // (1 + 1) / ((1 - 16/100) * 3 - 0) = 0.79, so 1.
        let mut chooser = chooser_with_answers(100, &[(0, 1, 10), (1, 1, 30), (2, 1, 20)]);
        let chosen = [(); 2].map(|()| chooser.choose(ms(1), &IDS, &mut draw_first));
        assert_eq!(chosen, [Some(0), Some(2)]);
    }

    #[test]
    fn removals_alternate_between_oldest_and_worst() {
        let mut chooser = ProbeChooser::new(ProbeSettings::default());
        for (at, place) in [0, 1, 2, 3].into_iter().enumerate() {
            let answer = (1, Some(ms(10 * place as u64 + 10)));
            chooser.record_answer(ms(at as u64), IDS[place], answer, 1_000);
        }
        chooser.remove_due_answers();
        let ids = |chooser: &ProbeChooser| {
            chooser
                .answers
                .iter()
                .map(|one| one.id.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(&chooser), [2, 3, 4]);
        chooser.remove_due_answers();
        assert_eq!(ids(&chooser), [2, 3]);
    }

    #[test]
    fn probes_go_to_distinct_elements_of_the_pool() {
        let mut chooser = ProbeChooser::new(ProbeSettings::default());
        let mut draw = 0;
        let mut below = |end: usize| {
            draw += 7;
            draw % end
        };
        for _ in 0..50 {
            let mut targets = chooser.choose_probe_targets(&IDS, &mut below);
            targets.sort_unstable();
            targets.dedup();
            assert_eq!(targets.len(), 3);
        }
        assert_eq!(chooser.choose_probe_targets(&IDS[..2], &mut below).len(), 2);
        assert_eq!(chooser.choose_probe_targets(&[], &mut below).len(), 0);
        let mut half_probing = ProbeChooser::new(ProbeSettings {
            probes_per_request: 0.5,
            ..ProbeSettings::default()
        });
        let counts = [(); 4].map(|()| half_probing.choose_probe_targets(&IDS, &mut below).len());
        assert_eq!(counts, [0, 1, 0, 1]);
    }
}
