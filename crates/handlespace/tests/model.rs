//! Compares random operations on the handlespace with a naive model: vectors, searched from the front.

mod reference_model;

use holdfast_handlespace::{
    AnnouncedOperation, ElementCursor, Handlespace, RegistrationData, TimerKind,
};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId};
use proptest::prelude::*;
use reference_model::ReferenceModel;
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
    RegisterAgain {
        pool: usize,
        id: u32,
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
    Adjust {
        pool: usize,
        id: u32,
        distance: u32,
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

/// Deterministic policies, one per pool, with a figure of few values so that keys are often equal.
const POOLS: usize = reference_model::POLICIES;

fn step() -> impl Strategy<Value = Step> {
    let pool = 0..POOLS;
    let id = 0u32..40;
    let home = 1u32..4;
    prop_oneof![
        6 => (pool.clone(), id.clone(), home.clone(), 0u32..5, prop_oneof![9 => Just(0u32), 1 => Just(1)])
            .prop_map(|(pool, id, home, figure, class)| Step::Register { pool, id, home, figure, class }),
        2 => (pool.clone(), id.clone()).prop_map(|(pool, id)| Step::RegisterAgain { pool, id }),
        2 => (pool.clone(), id.clone()).prop_map(|(pool, id)| Step::Deregister { pool, id }),
        1 => (pool.clone(), id.clone(), home).prop_map(|(pool, id, home)| Step::Rehome { pool, id, home }),
        1 => (pool.clone(), id.clone(), 0u32..4)
            .prop_map(|(pool, id, distance)| Step::Adjust { pool, id, distance }),
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

/// The handlespace and the model, and the time.
struct Comparison {
    space: Handlespace<usize>,
    model: ReferenceModel,
    now: u64,
}

type CheckResult = Result<(), TestCaseError>;

impl Comparison {
    /// Announces the operation that a step performs.
    fn announce(&mut self, kind_of: impl Fn(usize) -> usize, step: Option<&Step>) {
        let handle = |pool: usize| handle(kind_of(pool));
        let (handle, id, kind): (_, _, fn(_, _) -> _) = match *step.unwrap_or(&Step::Wait { us: 0 })
        {
            Step::Register { pool, id, .. } => (handle(pool), id, AnnouncedOperation::Registration),
            Step::RegisterAgain { pool, id } => {
                (handle(pool), id, AnnouncedOperation::Registration)
            }
            Step::Deregister { pool, id }
            | Step::Rehome { pool, id, .. }
            | Step::Adjust { pool, id, .. } => {
                (handle(pool), id, AnnouncedOperation::Deregistration)
            }
            Step::SetTimer { pool, id, .. } | Step::StopTimer { pool, id } => {
                (handle(pool), id, AnnouncedOperation::Timer)
            }
            Step::Resolve { pool, items } => {
                let coming = AnnouncedOperation::Resolution(&handle(pool).0, items);
                return self.space.announce_operation(Some(coming));
            }
            Step::Wait { .. } => return self.space.announce_operation(None),
        };
        self.space
            .announce_operation(Some(kind(&handle.0, ElementId(id))));
    }

    fn step(&mut self, kind_of: impl Fn(usize) -> usize, number: usize, step: Step) -> CheckResult {
        match step {
            Step::Register {
                pool,
                id,
                home,
                figure,
                class,
            } => self.register(kind_of(pool), id, home, figure, class, number),
            Step::RegisterAgain { pool, id } => self.register_again(kind_of(pool), id),
            Step::Deregister { pool, id } => {
                let kind = kind_of(pool);
                let got = self.space.deregister(&handle(kind), ElementId(id));
                prop_assert_eq!(got, self.model.deregister(kind, id));
                Ok(())
            }
            Step::Rehome { pool, id, home } => {
                let kind = kind_of(pool);
                if let Some(key) = self.space.find(&handle(kind), ElementId(id)) {
                    prop_assert!(self.space.set_home(key, RegistrarId(home)));
                }
                self.model.rehome(kind, id, home);
                Ok(())
            }
            Step::Adjust { pool, id, distance } => {
                let kind = kind_of(pool);
                if let Some(policy) = self.model.set_distance(kind, id, distance) {
                    let key = self.space.find(&handle(kind), ElementId(id));
                    prop_assert!(
                        self.space
                            .adjust_policy(key.expect("a registered element"), policy)
                    );
                }
                Ok(())
            }
            Step::Resolve { pool, items } => self.resolve(kind_of(pool), items),
            Step::SetTimer { pool, id, in_us } => {
                let (kind, at) = (kind_of(pool), self.now + in_us);
                if let Some(key) = self.space.find(&handle(kind), ElementId(id)) {
                    let (timer, at) = (TimerKind::KeepAliveTimeout, Duration::from_micros(at));
                    self.space.set_timer(key, timer, at);
                    prop_assert_eq!(self.space.timer(key), Some((timer, at)));
                }
                self.model.set_timer(kind, id, Some(at));
                Ok(())
            }
            Step::StopTimer { pool, id } => {
                let kind = kind_of(pool);
                if let Some(key) = self.space.find(&handle(kind), ElementId(id)) {
                    prop_assert!(self.space.stop_timer(key));
                    prop_assert_eq!(self.space.timer(key), None);
                }
                self.model.set_timer(kind, id, None);
                Ok(())
            }
            Step::Wait { us } => self.wait(us),
        }
    }

    fn register(
        &mut self,
        kind: usize,
        id: u32,
        home: u32,
        figure: u32,
        class: u32,
        payload: usize,
    ) -> CheckResult {
        let policy = reference_model::policy(kind, figure);
        let got = self.space.register(RegistrationData {
            handle: &handle(kind),
            id: ElementId(id),
            home: RegistrarId(home),
            policy,
            class,
            payload,
        });
        let expected = self.model.register(kind, id, home, policy, class, payload);
        prop_assert_eq!(got.map(|registered| registered.previous).ok(), expected);
        Ok(())
    }

    /// Re-registers an element with unchanged data.
    fn register_again(&mut self, kind: usize, id: u32) -> CheckResult {
        let mut elements = self.model.elements.iter();
        let known = elements.find(|e| e.pool == kind && e.id == id);
        let known = known.map(|e| (e.home, e.policy, e.class, e.payload));
        let key = self.space.find(&handle(kind), ElementId(id));
        let got = key.and_then(|key| self.space.register_again(key).copied());
        prop_assert_eq!(got, known.map(|(.., payload)| payload));
        if let Some((home, policy, class, payload)) = known {
            self.model.register(kind, id, home, policy, class, payload);
        }
        Ok(())
    }

    fn resolve(&mut self, kind: usize, items: usize) -> CheckResult {
        let mut got = Vec::new();
        let resolved = self
            .space
            .resolve(&handle(kind), items, |e| got.push(e.id().0));
        prop_assert_eq!(resolved.unwrap_or(0), got.len());
        prop_assert_eq!(resolved.is_some(), self.model.has_pool(kind));
        prop_assert_eq!(got, self.model.resolve(kind, items));
        Ok(())
    }

    fn wait(&mut self, us: u64) -> CheckResult {
        self.now += us;
        if let Some(first) = self.model.first_timer() {
            let next = self.space.next_timer().expect("a timer is set");
            prop_assert!(next <= Duration::from_micros(first));
        }
        let mut last = 0;
        let mut got = BTreeSet::new();
        while let Some(expired) = self.space.pop_expired(Duration::from_micros(self.now)) {
            let at = expired.at.as_micros() as u64;
            prop_assert!(at >= last, "in the order of their times");
            last = at;
            let element = self.space.get(expired.key).expect("it is registered");
            got.insert((at, element.handle().to_string(), element.id().0));
        }
        let expected = self.model.expire(self.now).into_iter();
        let expected = expected.map(|(at, kind, id)| (at, handle(kind).to_string(), id));
        prop_assert_eq!(got, expected.collect::<BTreeSet<_>>());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn handlespace_agrees_with_model(few in 1..=3usize, first in 0..POOLS, steps in prop::collection::vec(step(), 1..300)) {
        let mut run = Comparison { space: Handlespace::new(7), model: ReferenceModel::default(), now: 0 };
        // Use few pools at a time, so that they fill up.
        let kind_of = |pool| (first + pool % few) % POOLS;
        for ahead in 0..Handlespace::<usize>::ANNOUNCE_DISTANCE {
            run.announce(kind_of, steps.get(ahead));
        }
        for (number, step) in steps.iter().enumerate() {
            // Announce the coming steps, and sometimes wrong ones: a wrong announcement must be harmless.
            let apart = Handlespace::<usize>::ANNOUNCE_DISTANCE + number % 40 / 30;
            run.announce(kind_of, steps.get(number + apart));
            run.step(kind_of, number, step.clone())?;
            prop_assert_eq!(run.space.elements(), run.model.elements.len());
        }
        check_sets_agree(&run.space, &run.model)?;
    }
}

/// Compares counts, checksums, and walks through all and owned elements.
fn check_sets_agree(
    space: &Handlespace<usize>,
    naive: &ReferenceModel,
) -> Result<(), TestCaseError> {
    let pools: BTreeSet<usize> = naive.elements.iter().map(|e| e.pool).collect();
    prop_assert_eq!(space.pools(), pools.len());
    prop_assert_eq!(space.iter_pools().count(), pools.len());
    for &pool in &pools {
        let view = space.pool(&handle(pool)).expect("a pool");
        let expected = naive.elements.iter().filter(|e| e.pool == pool).count();
        prop_assert_eq!(view.elements, expected);
        let (mut of_pool, mut few) = (BTreeSet::new(), 0);
        space.visit_elements(&handle(pool), usize::MAX, |e| {
            of_pool.insert(e.id().0);
        });
        let members = naive.elements.iter().filter(|e| e.pool == pool);
        prop_assert_eq!(of_pool, members.map(|e| e.id).collect());
        space.visit_elements(&handle(pool), 2, |_| few += 1);
        prop_assert_eq!(few, expected.min(2));
    }
    let (mut visited, mut cursor) = (Vec::new(), Some(0));
    while let Some(from) = cursor {
        let before = visited.len();
        cursor = space.visit_pools(from, 2, |pool| visited.push(pool.handle.to_string()));
        prop_assert!(visited.len() - before <= 2);
    }
    visited.sort();
    let mut handles: Vec<_> = pools.iter().map(|pool| handle(*pool).to_string()).collect();
    handles.sort();
    prop_assert_eq!(visited, handles);
    for home in [None, Some(1), Some(2), Some(3)] {
        let mut cursor = home.map_or(ElementCursor::all(), |home| {
            ElementCursor::owned_by(RegistrarId(home))
        });
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
            prop_assert_eq!(
                space.checksum(RegistrarId(home)),
                reference_model::checksum(blocks)
            );
        }
        prop_assert_eq!(got, expected);
    }
    Ok(())
}
