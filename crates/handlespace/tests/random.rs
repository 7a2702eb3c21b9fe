//! Statistical tests of the random policies, and walks while the handlespace changes.

use holdfast_handlespace::{ElementCursor, Handlespace, RegistrationData, TimerKind};
use holdfast_wire::rserpool::{ElementId, Policy, PoolHandle, RegistrarId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

fn register(space: &mut Handlespace<()>, handle: &PoolHandle, id: u32, policy: Policy) {
    let registration = RegistrationData {
        handle,
        id: ElementId(id),
        home: RegistrarId(1 + id % 2),
        policy,
        class: 0,
        payload: (),
    };
    space.register(registration).expect("it fits");
}

/// Counts for elements of one pool with these policies: how often each is first of `items`, and how often it is
/// selected.
fn count_selections(policies: &[Policy], items: usize, draws: u32) -> Vec<(u32, u32)> {
    let handle = PoolHandle::from("pool");
    let mut space = Handlespace::new(1);
    for (id, &policy) in policies.iter().enumerate() {
        register(&mut space, &handle, id as u32, policy);
    }
    let mut counts = vec![(0, 0); policies.len()];
    for _ in 0..draws {
        let mut chosen = Vec::new();
        space.resolve(&handle, items, |e| chosen.push(e.id().0 as usize));
        assert_eq!(
            chosen.iter().collect::<BTreeSet<_>>().len(),
            chosen.len(),
            "no element twice"
        );
        if let Some(&first) = chosen.first() {
            counts[first].0 += 1;
        }
        for id in chosen {
            counts[id].1 += 1;
        }
    }
    counts
}

/// Checks a binomial count within six standard deviations: one run in half a billion fails by chance, and the seed is
/// fixed.
fn assert_likely(count: u32, draws: u32, share: f64) {
    let mean = f64::from(draws) * share;
    let deviation = (mean * (1.0 - share)).sqrt();
    assert!(
        (f64::from(count) - mean).abs() <= 6.0 * deviation + 1.0,
        "{count} of {draws} draws, expected share {share}"
    );
}

fn assert_first_by_shares(policies: &[Policy], shares: &[f64]) {
    let draws = 20_000;
    let sum: f64 = shares.iter().sum();
    for (&(first, _), share) in count_selections(policies, 2, draws).iter().zip(shares) {
        assert_likely(first, draws, share / sum);
    }
}

#[test]
fn first_selection_is_proportional_to_weight() {
    const HALF: u32 = 1 << 31;
    // Sizes that need more than one and two levels of sums.
    for count in [1usize, 16, 17, 40, 300] {
        assert_first_by_shares(&vec![Policy::Random; count], &vec![1.0; count]);
        let weighted: Vec<_> = (0..count as u32)
            .map(|weight| Policy::WeightedRandom { weight: weight + 1 })
            .collect();
        let shares: Vec<f64> = (0..count).map(|i| i as f64 + 1.0).collect();
        assert_first_by_shares(&weighted, &shares);
    }
    assert_first_by_shares(
        &[
            Policy::WeightedRandom { weight: 0 },
            Policy::WeightedRandom { weight: 3 },
        ],
        &[0.0, 1.0],
    );
    assert_first_by_shares(
        &[
            Policy::RandomizedLeastUsed { load: 0 },
            Policy::RandomizedLeastUsed { load: HALF },
        ],
        &[2.0, 1.0],
    );
    let busy = |degradation| Policy::RandomizedPriorityLeastUsed {
        load: HALF,
        degradation,
    };
    assert_first_by_shares(&[busy(0), busy(HALF / 2)], &[2.0, 1.0]);
    let far = |distance| Policy::WeightedRandomDpf {
        weight: 100,
        dpf: u32::MAX / 100,
        distance,
    };
    assert_first_by_shares(&[far(0), far(50), far(90)], &[100.0, 50.0, 10.0]);
    // At a distance beyond the whole weight, a weight of 1 is left.
    assert_first_by_shares(&[far(99), far(1000)], &[1.0, 1.0]);
}

#[test]
fn fully_loaded_pool_is_resolved() {
    let full = Policy::RandomizedLeastUsed { load: u32::MAX };
    assert_first_by_shares(&[full, full], &[1.0, 1.0]);
}

/// The second is drawn from the rest: P(i first, j second) = w_i / W * w_j / (W - w_i).
#[test]
fn second_selection_is_proportional_to_weight_among_others() {
    let weights = [1.0, 2.0, 3.0, 10.0];
    let policies: Vec<_> = weights
        .iter()
        .map(|&w| Policy::WeightedRandom { weight: w as u32 })
        .collect();
    let draws = 30_000;
    let total: f64 = weights.iter().sum();
    for (i, &(_, selected)) in count_selections(&policies, 2, draws).iter().enumerate() {
        let second = |j: usize| weights[j] / total * weights[i] / (total - weights[j]);
        let others = (0..weights.len()).filter(|&j| j != i);
        assert_likely(
            selected,
            draws,
            weights[i] / total + others.map(second).sum::<f64>(),
        );
    }
}

/// Each selection reduces the weight by the degradation, until the element registers again.
#[test]
fn randomized_degradation_selects_every_element() {
    let handle = PoolHandle::from("pool");
    let mut space = Handlespace::new(2);
    let policy = Policy::RandomizedLeastUsedDegradation {
        load: 0,
        degradation: 1 << 28,
    };
    register(&mut space, &handle, 1, policy);
    let full = Policy::RandomizedLeastUsedDegradation {
        load: u32::MAX,
        degradation: 0,
    };
    register(&mut space, &handle, 2, full);
    // Sixteen selections use up the first element; then both have weight 1.
    let first = |space: &mut Handlespace<()>| {
        let mut id = 0;
        space.resolve(&handle, 1, |e| id = e.id().0);
        id
    };
    for _ in 0..15 {
        assert_eq!(first(&mut space), 1);
    }
    let drawn: BTreeSet<u32> = (0..100).map(|_| first(&mut space)).collect();
    assert_eq!(drawn, BTreeSet::from([1, 2]));
    register(&mut space, &PoolHandle::from("pool"), 1, policy);
    assert_eq!(first(&mut space), 1);
}

/// RFC 5356 section 4.2.2: occurrences in proportion to the weight, as evenly distributed as possible.
#[test]
fn weighted_round_robin_distributes_turns_evenly() {
    let handle = PoolHandle::from("pool");
    let mut space = Handlespace::new(3);
    for (id, weight) in [(1, 1), (2, 2), (3, 5), (4, 0)] {
        register(
            &mut space,
            &handle,
            id,
            Policy::WeightedRoundRobin { weight },
        );
    }
    let mut turns = Vec::new();
    for _ in 0..800 {
        space.resolve(&handle, 1, |e| turns.push(e.id().0));
    }
    let mut counts = BTreeMap::new();
    for window in turns.chunks(8) {
        for id in [1, 2, 3] {
            let count = window.iter().filter(|&&turn| turn == id).count();
            assert!(
                counts
                    .insert(id, count)
                    .is_none_or(|before| before == count)
            );
        }
        // The element with five turns of eight never has more than two in a row, or more than two others between.
        assert!(
            window
                .windows(3)
                .all(|w| w.contains(&3) && w.iter().any(|&id| id != 3)),
            "{window:?}"
        );
    }
    assert_eq!(counts, BTreeMap::from([(1, 1), (2, 2), (3, 5)]));
}

proptest! {
    /// An element registered throughout a walk is visited, even while others register and deregister.
    #[test]
    fn walk_visits_every_element_that_stays(
        pools in 1u32..6,
        elements in 1u32..120,
        items in 1usize..20,
        owned in any::<bool>(),
        changes in prop::collection::vec((any::<bool>(), 0u32..6, 0u32..200), 0..300),
    ) {
        let handles: Vec<_> = (0..pools).map(|p| PoolHandle::from(p.to_string().as_str())).collect();
        let mut space = Handlespace::new(4);
        let mut stay = BTreeSet::new();
        for id in 0..elements {
            register(&mut space, &handles[(id % pools) as usize], id, Policy::RoundRobin);
            if !owned || id % 2 == 1 {
                stay.insert((id % pools, id));
            }
        }
        let mut cursor = if owned { ElementCursor::owned_by(RegistrarId(2)) } else { ElementCursor::all() };
        let mut changes = changes.into_iter();
        let mut seen = BTreeSet::new();
        loop {
            let shown = space.next_block(&mut cursor, items, |e| {
                seen.insert((e.handle().to_string().parse::<u32>().unwrap(), e.id().0));
            });
            if shown == 0 {
                break;
            }
            for (join, pool, id) in changes.by_ref().take(items * 2) {
                let pool = pool % pools;
                let handle = &handles[pool as usize];
                if join {
                    register(&mut space, handle, id, Policy::RoundRobin);
                } else {
                    space.deregister(handle, ElementId(id));
                    stay.remove(&(pool, id));
                }
            }
        }
        prop_assert!(stay.is_subset(&seen), "elements not visited: {:?}", stay.difference(&seen));
    }
}

/// Many timers for a time that the wheel has already reached because of sparse entries: they still expire in order.
#[test]
fn many_timers_in_a_reached_bucket_expire_in_order() {
    let handle = PoolHandle::from("pool");
    let mut space = Handlespace::new(1);
    let start = Duration::from_secs(17);
    let kind = TimerKind::KeepAliveTimeout;
    for id in 0..3000 {
        register(&mut space, &handle, id, Policy::RoundRobin);
    }
    let key =
        |space: &Handlespace<()>, id| space.find(&handle, ElementId(id)).expect("it is there");
    let first = key(&space, 0);
    space.set_timer(first, kind, start);
    assert_eq!(space.pop_expired(start).map(|e| e.at), Some(start));
    for id in 0..3000u32 {
        let later_us = u64::from(id.wrapping_mul(0x9e37_79b1) % 10_000_000);
        let key = key(&space, id);
        space.set_timer(key, kind, start + Duration::from_micros(later_us));
    }
    let times = std::iter::from_fn(|| space.pop_expired(Duration::MAX).map(|e| e.at));
    let times: Vec<Duration> = times.collect();
    assert_eq!(times.len(), 3000);
    assert!(times.is_sorted());
}
