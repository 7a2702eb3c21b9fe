//! Re-registrations without a change: peers get one announcement for all those of some time.

use crate::test_bench::*;
use holdfast_proto::registrar::RegistrarMachineConfig;
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{ElementId, Policy, PoolElement, RegistrarId};
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;
const DELAY: Duration = SECOND;
const NONE: [u32; 0] = [];
const QUARTER: Duration = Duration::from_millis(250);

/// Returns a registrar with an element that has re-registered once, at time 0, and a peer that knows it.
fn bench_with_reregistered_element(
    config: RegistrarMachineConfig,
    element: &PoolElement,
) -> (TestBench, u64) {
    let mut bench = TestBench::new(config);
    bench.add_peer(2);
    let from = bench.open_association(9);
    for _ in 0..2 {
        let outputs = bench.register(from, element.clone());
        assert_eq!(announced_ids(&outputs), [1]);
    }
    (bench, from)
}

/// Returns the elements announced to peers.
fn announced_ids(outputs: &[TestOutput]) -> Vec<u32> {
    let ids = outputs.iter().filter_map(|output| match output {
        TestOutput::Enrp(_, message) => match &message.body {
            EnrpBody::HandleUpdate {
                action: UpdateAction::Add,
                element,
                ..
            } => Some(element.id.0),
            _ => None,
        },
        _ => None,
    });
    ids.collect()
}

#[test]
fn frequent_reregistrations_cause_one_announcement_per_second() {
    let same = element(1, 9, RR);
    let (mut bench, from) = bench_with_reregistered_element(config(), &same);
    let mut times = Vec::new();
    for _ in 0..400 {
        let waited = bench.wait(QUARTER / 10);
        let at_once = bench.register(from, same.clone());
        let count = announced_ids(&waited).len() + announced_ids(&at_once).len();
        times.extend((0..count).map(|_| bench.now));
    }
    // Ten seconds. Announcements are made in slots of an eighth of the delay.
    assert!((10..=12).contains(&times.len()), "{times:?}");
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    assert!(gaps.max() <= Some(DELAY + QUARTER / 10), "{times:?}");
    // The last one is announced too; then no announcement is left.
    assert_eq!(announced_ids(&bench.wait(DELAY)), [1]);
    assert_eq!(announced_ids(&bench.wait(DELAY * 5)), NONE);
    let counters = bench.machine.counters();
    assert_eq!(counters.updates_sent, 2 + times.len() as u64 + 1);
    assert_eq!(counters.reregistrations, 401);
}

#[test]
fn single_reregistration_is_announced_at_once() {
    let same = element(1, 9, RR);
    let (mut bench, from) = bench_with_reregistered_element(config(), &same);
    for _ in 0..5 {
        assert_eq!(announced_ids(&bench.wait(DELAY)), NONE);
        assert_eq!(announced_ids(&bench.register(from, same.clone())), [1]);
    }
}

#[test]
fn changed_registration_is_announced_at_once() {
    let used = |load| element(1, 9, Policy::LeastUsed { load });
    let (mut bench, from) = bench_with_reregistered_element(config(), &used(1));
    assert_eq!(announced_ids(&bench.register(from, used(1))), NONE);
    assert_eq!(announced_ids(&bench.register(from, used(2))), [1]);
    // The waiting announcement is dropped.
    assert_eq!(announced_ids(&bench.wait(DELAY * 2)), NONE);
}

/// Peers count selections until they hear of the re-registration.
#[test]
fn selection_counting_policy_is_announced_at_once() {
    let counting = Policy::LeastUsedDegradation {
        load: 7,
        degradation: 100,
    };
    let same = element(1, 9, counting);
    let (mut bench, from) = bench_with_reregistered_element(config(), &same);
    for _ in 0..5 {
        assert_eq!(announced_ids(&bench.register(from, same.clone())), [1]);
    }
}

#[test]
fn new_peer_gets_next_announcement() {
    let same = element(1, 9, RR);
    let (mut bench, from) = bench_with_reregistered_element(config(), &same);
    bench.register(from, same.clone());
    bench.add_peer(3);
    assert_eq!(announced_ids(&bench.register(from, same.clone())), [1]);
    assert_eq!(announced_ids(&bench.register(from, same)), NONE);
}

/// rsplib's registrars let another's element expire one life after its announcement.
#[test]
fn announcement_delay_is_bounded_by_registration_life() {
    let short = PoolElement {
        registration_life: 400,
        ..element(1, 9, RR)
    };
    let (mut bench, from) = bench_with_reregistered_element(config(), &short);
    let step = Duration::from_millis(10);
    let mut last = bench.now;
    for _ in 0..300 {
        let mut all = bench.wait(step);
        all.extend(bench.register(from, short.clone()));
        if !announced_ids(&all).is_empty() {
            last = bench.now;
        }
        assert!(bench.now - last <= Duration::from_millis(100) + step);
    }
}

#[test]
fn removed_element_is_not_announced() {
    let same = element(1, 9, RR);
    let (mut bench, from) = bench_with_reregistered_element(config(), &same);
    bench.register(from, same);
    let (handle, id) = (handle(), ElementId(1));
    bench.send_asap(from, &Asap::Deregistration { handle, id });
    assert_eq!(announced_ids(&bench.wait(DELAY * 2)), NONE);
}

#[test]
fn element_of_other_home_is_not_announced() {
    let mut config = config();
    config.settings.race_window = Duration::ZERO;
    let same = element(1, 9, RR);
    let (mut bench, from) = bench_with_reregistered_element(config, &same);
    bench.register(from, same.clone());
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: PoolElement {
            home: RegistrarId(2),
            ..same
        },
    };
    bench.send_enrp(RegistrarId(2), add);
    assert_eq!(announced_ids(&bench.wait(DELAY * 2)), NONE);
}

#[test]
fn all_elements_of_an_association_are_announced() {
    let (one, two) = (element(1, 9, RR), element(2, 9, RR));
    let (mut bench, from) = bench_with_reregistered_element(config(), &one);
    bench.register(from, two.clone());
    bench.register(from, one.clone());
    assert_eq!(announced_ids(&bench.register(from, one.clone())), NONE);
    // The waiting announcement is made before another takes its place.
    assert_eq!(announced_ids(&bench.register(from, two)), [2, 1]);
    assert_eq!(announced_ids(&bench.wait(DELAY * 2)), NONE);
}

#[test]
fn many_elements_are_announced_in_batches() {
    let mut config = config();
    config.settings.batch_elements_max = 3;
    let mut bench = TestBench::new(config);
    bench.add_peer(2);
    let hosts = 1..=20;
    for host in hosts.clone() {
        let from = bench.open_association(host);
        for _ in 0..3 {
            bench.register(from, element(host.into(), host, RR));
        }
    }
    let mut all = Vec::new();
    while let Some(next) = bench.machine.poll_timeout().filter(|at| *at < DELAY * 2) {
        let turn = announced_ids(&bench.wait(next - bench.now));
        assert!(turn.len() <= 3, "{turn:?}");
        all.extend(turn);
    }
    all.sort_unstable();
    assert_eq!(all, Vec::from_iter(hosts.map(u32::from)));
}
