//! Choices outside the pool policies: by a user's own observations of the elements, not by their reports to a
//! registrar.
//!
//! - [`LatencyChooser`]: power of two choices over a moving average of each element's latency;
//! - [`ProbeChooser`]: probes a few elements with each request for their load, and keeps their answers (Prequal: Wydrowski,
//!   Kleinberg, Rumble, Archer, "Load is not what you should balance", NSDI 2024); [`ServerLoad`] is the element's side
//!   of it, and [`ProbeAllowance`] its limit.
//!
//! A chooser may serve one user or all users of a node: more requests give it better estimates. Each choice takes a
//! list of candidates and returns an index in that list. The caller supplies the random numbers: `below(n)` draws a
//! number from 0 to `n`, the latter excluded.

mod latency_chooser;
mod probe_allowance;
mod probe_chooser;
mod server_load;

pub use latency_chooser::LatencyChooser;
pub use probe_allowance::{ProbeAllowance, ProbeVerdict};
pub use probe_chooser::{ProbeChooser, ProbeSettings};
pub use server_load::ServerLoad;

/// Returns two different indices of a list, or the only one twice; none for an empty list.
fn draw_two(length: usize, below: &mut impl FnMut(usize) -> usize) -> Option<(usize, usize)> {
    match length {
        0 => None,
        1 => Some((0, 0)),
        _ => {
            let first = below(length);
            // Each of the others is equally likely.
            let second = below(length - 1);
            Some((first, second + usize::from(second >= first)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::draw_two;

    #[test]
    fn drawn_pair_is_distinct_and_covers_all_pairs() {
        for first in 0..3 {
            let mut pairs = Vec::new();
            for second in 0..2 {
                let mut draws = [first, second].into_iter();
                let pair =
                    draw_two(3, &mut |_| draws.next().unwrap_or(0)).expect("there are three");
                assert_ne!(pair.0, pair.1);
                pairs.push(pair.1);
            }
            assert_ne!(pairs[0], pairs[1]);
        }
        assert_eq!(draw_two(0, &mut |_| 0), None);
        assert_eq!(draw_two(1, &mut |_| 0), Some((0, 0)));
    }
}
