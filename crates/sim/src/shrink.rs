//! Shrinking of a failing plan.

/// Returns the shortest part of a failing plan that still fails: halves of it are omitted, then smaller pieces, and
/// finally single steps. `violation` is the whole plan's violation; `fails` returns a part's violation, if any.
pub(crate) fn shrink_plan<T: Clone, V>(
    mut plan: Vec<T>,
    mut violation: V,
    fails: impl Fn(&[T]) -> Option<V>,
) -> (Vec<T>, V) {
    let mut size = plan.len().div_ceil(2);
    while size > 0 {
        let (mut place, before) = (0, plan.len());
        while place < plan.len() {
            let mut fewer = plan.clone();
            fewer.drain(place..(place + size).min(plan.len()));
            match fails(&fewer) {
                Some(again) => (plan, violation) = (fewer, again),
                None => place += size,
            }
        }
        // Repeat with single steps while the plan gets shorter: a step may have been needed only for another one.
        if size > 1 || plan.len() == before {
            size /= 2;
        }
    }
    (plan, violation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_needed_actions_remain() {
        let fails = |plan: &[u32]| {
            let both = plan.contains(&17) && plan.contains(&60);
            both.then_some(plan.len())
        };
        let whole: Vec<u32> = (0..100).collect();
        assert_eq!(shrink_plan(whole, 100, fails), (vec![17, 60], 2));
        assert_eq!(shrink_plan(vec![1, 2], 2, |_| Some(0)), (vec![], 0));
        assert_eq!(shrink_plan(vec![1, 2], 2, |_| None), (vec![1, 2], 2));
    }
}
