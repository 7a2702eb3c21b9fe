//! Choice and order of the addresses in an answer.

/// Rule by which the addresses of a name take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectionRule {
    /// Each answer begins with the next address.
    Rotate,
    /// Addresses are drawn at random, in proportion to their weights.
    Weighted,
}

/// Pseudo-random numbers (SplitMix64, doi:10.1145/2714064.2660195). They distribute load and protect nothing.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Returns the random sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next random number.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which is not 0. The bias is below 2⁻³² for the sums of weights in use.
    fn below(&mut self, end: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(end);
        (product >> 64) as u64
    }
}

/// Returns at most `count_max` of the candidates, in the order of the answer. `turn` is the number of answers before. A
/// candidate of weight 0 is never chosen.
pub fn select<T: Copy>(
    rule: SelectionRule,
    candidates: &[(T, u32)],
    count_max: usize,
    turn: u64,
    random: &mut Random,
) -> Vec<T> {
    let mut rest: Vec<(T, u32)> = candidates
        .iter()
        .filter(|(_, weight)| *weight > 0)
        .copied()
        .collect();
    match rule {
        SelectionRule::Rotate => {
            if !rest.is_empty() {
                let first = usize::try_from(turn % rest.len() as u64).unwrap_or(0);
                rest.rotate_left(first);
            }
            rest.truncate(count_max);
            rest.into_iter().map(|(candidate, _)| candidate).collect()
        }
        SelectionRule::Weighted => {
            let mut chosen = Vec::with_capacity(rest.len().min(count_max));
            while chosen.len() < count_max && !rest.is_empty() {
                let total = rest.iter().map(|(_, weight)| u64::from(*weight)).sum();
                let mut ticket = random.below(total);
                let drawn = rest.iter().position(|(_, weight)| {
                    let weight = u64::from(*weight);
                    let is_drawn = ticket < weight;
                    ticket = ticket.saturating_sub(weight);
                    is_drawn
                });
                let (candidate, _) = rest.swap_remove(drawn.unwrap_or(0));
                chosen.push(candidate);
            }
            chosen
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rotation_begins_with_each_address_in_turn() {
        let mut random = Random::new(1);
        let mut answer = |turn| {
            select(
                SelectionRule::Rotate,
                &[('a', 1), ('b', 0), ('c', 1)],
                8,
                turn,
                &mut random,
            )
        };
        assert_eq!(answer(0), ['a', 'c']);
        assert_eq!(answer(1), ['c', 'a']);
        assert_eq!(answer(2), ['a', 'c']);
    }

    #[test]
    fn first_address_follows_weights() {
        let mut random = Random::new(7);
        let mut counts = [0_u32; 3];
        for turn in 0..10_000 {
            let chosen = select(
                SelectionRule::Weighted,
                &[(0, 3), (1, 1), (2, 0)],
                1,
                turn,
                &mut random,
            );
            counts[chosen[0]] += 1;
        }
        assert!((7_300..7_700).contains(&counts[0]), "{counts:?}");
        assert_eq!(counts[2], 0);
    }

    proptest! {
        #[test]
        fn chosen_addresses_are_different_and_have_weight(
            weights in prop::collection::vec(prop::sample::select(vec![0, 1, 7, u32::MAX]), 0..20),
            count_max in 0_usize..25,
            (turn, seed) in any::<(u64, u64)>(),
            is_weighted in any::<bool>(),
        ) {
            let candidates: Vec<(usize, u32)> = weights.iter().copied().enumerate().collect();
            let rule = if is_weighted { SelectionRule::Weighted } else { SelectionRule::Rotate };
            let mut chosen = select(rule, &candidates, count_max, turn, &mut Random::new(seed));
            let usable = weights.iter().filter(|weight| **weight > 0).count();
            prop_assert_eq!(chosen.len(), usable.min(count_max));
            prop_assert!(chosen.iter().all(|index| weights[*index] > 0));
            chosen.sort_unstable();
            chosen.dedup();
            prop_assert_eq!(chosen.len(), usable.min(count_max));
        }
    }
}
