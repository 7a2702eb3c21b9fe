//! How often an element lets itself be probed.

use std::time::Duration;

/// One question a millisecond: what a user asks with 300 choices a second, all of this host's elements.
const INTERVAL: Duration = Duration::from_millis(1);
/// So far ahead of its time may who asks be: a thousand questions at once.
const AHEAD_MAX: Duration = Duration::from_secs(1);
/// Who is so far ahead means no good.
const PATIENCE: Duration = Duration::from_secs(10);

/// What one who probes may still ask.
#[derive(Debug, Clone, Copy, Default)]
pub struct Allowance {
    /// When what was asked would have been asked at the rate that is allowed.
    used_until: Duration,
}

/// What becomes of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is answered.
    Answered,
    /// It is not: too many were asked.
    Dropped,
    /// It is not, nor any that follows: far too many were asked without rest.
    Enough,
}

impl Allowance {
    /// Counts a question, whatever becomes of it.
    pub fn ask(&mut self, now: Duration) -> Verdict {
        self.used_until = self.used_until.max(now) + INTERVAL;
        match self.used_until - now {
            ahead if ahead > PATIENCE => Verdict::Enough,
            ahead if ahead > AHEAD_MAX => Verdict::Dropped,
            _ => Verdict::Answered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_too_often_is_not_answered_and_who_goes_on_is_left() {
        let mut allowance = Allowance::default();
        let mut now = Duration::from_secs(7);
        let mut ask = |now, times: usize| {
            let verdicts = (0..times).map(|_| allowance.ask(now));
            let verdicts: Vec<Verdict> = verdicts.collect();
            let of = |wanted| verdicts.iter().filter(|one| **one == wanted).count();
            [Verdict::Answered, Verdict::Dropped, Verdict::Enough].map(of)
        };
        assert_eq!(ask(now, 1_500), [1_000, 500, 0]);
        // A second later what is due of 1,500 is 500.
        now += Duration::from_secs(1);
        assert_eq!(ask(now, 1_000), [500, 500, 0]);
        assert_eq!(ask(now, 9_000), [0, 8_500, 500]);
        now += Duration::from_secs(60);
        assert_eq!(ask(now, 1), [1, 0, 0]);
    }
}
