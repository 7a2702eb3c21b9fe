//! Choices that are no pool policy: by what a user sees of the elements, not by what they tell a registrar.
//!
//! - [`ByLatency`]: power of two choices over a moving average of each element's latency;
//! - [`ByProbes`]: asks a few elements beside each request how busy they are, and keeps their answers (Prequal: Wydrowski,
//!   Kleinberg, Rumble, Archer, "Load is not what you should balance", NSDI 2024); [`Served`] is the element's side of it, and
//!   [`Allowance`] its limit.
//!
//! A chooser may serve one user or all users of a node: it learns the more, the more requests it sees. Elements are given as a
//! list of candidates with each choice, and what is chosen is a place in that list. Chance is the caller's: `below(n)`
//! draws a number from 0 to `n`, the latter excluded.

mod allowance;
mod latency;
mod probes;
mod served;

pub use allowance::{Allowance, Verdict};
pub use latency::ByLatency;
pub use probes::{ByProbes, Probing};
pub use served::Served;

/// Two different places in a list, or the only one twice; none of an empty list.
fn two(length: usize, below: &mut impl FnMut(usize) -> usize) -> Option<(usize, usize)> {
    match length {
        0 => None,
        1 => Some((0, 0)),
        _ => {
            let first = below(length);
            // Of the others, each is as likely.
            let second = below(length - 1);
            Some((first, second + usize::from(second >= first)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::two;

    #[test]
    fn two_are_different_and_all_pairs_come() {
        for first in 0..3 {
            let mut seen = Vec::new();
            for second in 0..2 {
                let mut draws = [first, second].into_iter();
                let pair = two(3, &mut |_| draws.next().unwrap_or(0)).expect("there are three");
                assert_ne!(pair.0, pair.1);
                seen.push(pair.1);
            }
            assert_ne!(seen[0], seen[1]);
        }
        assert_eq!(two(0, &mut |_| 0), None);
        assert_eq!(two(1, &mut |_| 0), Some((0, 0)));
    }
}
