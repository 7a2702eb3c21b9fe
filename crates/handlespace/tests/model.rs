//! Random operations on the handlespace and on a naive model: vectors, searched from the front.

mod naive;

use holdfast_handlespace::{Cursor, Handlespace, Registration, TimerKind};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId};
use naive::Naive;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

#[derive(Debug, Clone)]
enum Step {
    Register {
        pool: usize,
        id: u32,
        home: u32,
        figure: u32,
        class: u32,
    },
    Deregister {
        pool: usize,
        id: u32,
    },
    Rehome {
        pool: usize,
        id: u32,
        home: u32,
    },
    Resolve {
        pool: usize,
        items: usize,
    },
    SetTimer {
        pool: usize,
        id: u32,
        in_us: u64,
    },
    StopTimer {
        pool: usize,
        id: u32,
    },
    Wait {
        us: u64,
    },
}

/// Deterministic policies, one for each pool, made of a figure of few values so that keys are often equal.
const POOLS: usize = naive::POLICIES;

fn step() -> impl Strategy<Value = Step> {
    let pool = 0..POOLS;
    let id = 0u32..40;
    let home = 1u32..4;
    prop_oneof![
        6 => (pool.clone(), id.clone(), home.clone(), 0u32..5, prop_oneof![9 => Just(0u32), 1 => Just(1)])
            .prop_map(|(pool, id, home, figure, class)| Step::Register { pool, id, home, figure, class }),
        2 => (pool.clone(), id.clone()).prop_map(|(pool, id)| Step::Deregister { pool, id }),
        1 => (pool.clone(), id.clone(), home).prop_map(|(pool, id, home)| Step::Rehome { pool, id, home }),
        6 => (pool.clone(), 0usize..6).prop_map(|(pool, items)| Step::Resolve { pool, items }),
        4 => (pool.clone(), id.clone(), prop_oneof![0u64..100, 0u64..1_000_000, Just(1 << 40)])
            .prop_map(|(pool, id, in_us)| Step::SetTimer { pool, id, in_us }),
        1 => (pool, id).prop_map(|(pool, id)| Step::StopTimer { pool, id }),
        2 => prop_oneof![0u64..100, 0u64..1_000_000].prop_map(|us| Step::Wait { us }),
    ]
}

fn handle(pool: usize) -> PoolHandle {
    PoolHandle::from(["a", "pool", "another pool", "odd", "x", "y", "z"][pool % 7])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn it_does_what_vectors_do(few in 1..=3usize, first in 0..POOLS, steps in prop::collection::vec(step(), 1..300)) {
        // Few pools at a time, so that they fill up.
        let policy_of = |pool: usize| (first + pool % few) % POOLS;
        let mut space = Handlespace::new(7);
        let mut naive = Naive::default();
        let mut now = 0u64;
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Register { pool, id, home, figure, class } => {
                    let kind = policy_of(pool);
                    let policy = naive::policy(kind, figure);
                    let name = handle(kind);
                    let got = space.register(Registration {
                        handle: &name,
                        id: ElementId(id),
                        home: RegistrarId(home),
                        policy,
                        class,
                        payload: number,
                    });
                    let expected = naive.register(kind, id, home, policy, class, number);
                    prop_assert_eq!(got.map(|registered| registered.previous).ok(), expected);
                }
                Step::Deregister { pool, id } => {
                    let kind = policy_of(pool);
                    let got = space.deregister(&handle(kind), ElementId(id));
                    prop_assert_eq!(got, naive.deregister(kind, id));
                }
                Step::Rehome { pool, id, home } => {
                    let kind = policy_of(pool);
                    if let Some(key) = space.find(&handle(kind), ElementId(id)) {
                        prop_assert!(space.set_home(key, RegistrarId(home)));
                    }
                    naive.rehome(kind, id, home);
                }
                Step::Resolve { pool, items } => {
                    let kind = policy_of(pool);
                    let mut got = Vec::new();
                    let count = space.resolve(&handle(kind), items, |e| got.push(e.id().0));
                    prop_assert_eq!(count.unwrap_or(0), got.len());
                    prop_assert_eq!(count.is_some(), naive.has_pool(kind));
                    prop_assert_eq!(got, naive.resolve(kind, items));
                }
                Step::SetTimer { pool, id, in_us } => {
                    let kind = policy_of(pool);
                    let timer = TimerKind::KeepAliveTimeout;
                    if let Some(key) = space.find(&handle(kind), ElementId(id)) {
                        space.set_timer(key, timer, Duration::from_micros(now + in_us));
                    }
                    naive.set_timer(kind, id, Some(now + in_us));
                }
                Step::StopTimer { pool, id } => {
                    let kind = policy_of(pool);
                    if let Some(key) = space.find(&handle(kind), ElementId(id)) {
                        prop_assert!(space.stop_timer(key));
                        prop_assert_eq!(space.timer(key), None);
                    }
                    naive.set_timer(kind, id, None);
                }
                Step::Wait { us } => {
                    now += us;
                    if let Some(first) = naive.first_timer() {
                        let next = space.next_timer().expect("a timer is set");
                        prop_assert!(next <= Duration::from_micros(first));
                    }
                    let mut last = 0;
                    let mut got = BTreeSet::new();
                    while let Some(expired) = space.pop_expired(Duration::from_micros(now)) {
                        let at = expired.at.as_micros() as u64;
                        prop_assert!(at >= last, "in the order of their times");
                        last = at;
                        let element = space.get(expired.key).expect("it is registered");
                        got.insert((at, element.handle().to_string(), element.id().0));
                    }
                    let expected = naive.expire(now);
                    let expected = expected.into_iter().map(|(at, kind, id)| (at, handle(kind).to_string(), id));
                    prop_assert_eq!(got, expected.collect::<BTreeSet<_>>());
                }
            }
            prop_assert_eq!(space.elements(), naive.elements.len());
        }
        sets_agree(&space, &naive)?;
    }
}

/// Counts, checksums, and walks through all and owned elements.
fn sets_agree(space: &Handlespace<usize>, naive: &Naive) -> Result<(), TestCaseError> {
    let pools: BTreeSet<usize> = naive.elements.iter().map(|e| e.pool).collect();
    prop_assert_eq!(space.pools(), pools.len());
    prop_assert_eq!(space.each_pool().count(), pools.len());
    for &pool in &pools {
        let view = space.pool(&handle(pool)).expect("it exists");
        let expected = naive.elements.iter().filter(|e| e.pool == pool).count();
        prop_assert_eq!(view.elements, expected);
    }
    for home in [None, Some(1), Some(2), Some(3)] {
        let mut cursor = home.map_or(Cursor::all(), |home| Cursor::owned_by(RegistrarId(home)));
        let mut got = Vec::new();
        while space.next_block(&mut cursor, 3, |e| {
            got.push((e.handle().to_string(), e.id().0, *e.payload()))
        }) > 0
        {}
        got.sort();
        let members = naive.elements.iter();
        let members = members.filter(|e| home.is_none_or(|home| e.home == home));
        let mut expected: Vec<_> = members
            .map(|e| (handle(e.pool).to_string(), e.id, e.payload))
            .collect();
        expected.sort();
        if let Some(home) = home {
            prop_assert_eq!(space.elements_owned_by(RegistrarId(home)), expected.len());
            let blocks = expected
                .iter()
                .map(|(handle, id, _)| (handle.as_bytes(), *id));
            prop_assert_eq!(space.checksum(RegistrarId(home)), naive::checksum(blocks));
        }
        prop_assert_eq!(got, expected);
    }
    Ok(())
}
