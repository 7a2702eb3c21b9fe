//! Tests of sessions that choose by probes.

use super::*;

const ASAP: u16 = 4_000;

/// Returns an element with its ASAP transport at this port.
fn element_at(id: u32, asap: u16) -> PoolElement {
    let Transport::Sctp(asap_transport) = transport(asap) else {
        panic!("it is SCTP");
    };
    PoolElement {
        asap_transport: Some(asap_transport),
        ..element(id)
    }
}

/// Returns a user that has just resolved the pool, by a session that is closed again.
fn resolved(elements: Vec<PoolElement>) -> Bench {
    let mut bench = Bench::new();
    let id = open(&mut bench);
    bench.sent();
    bench.user.handle_watch(bench.now, handle());
    bench.user.handle_close(bench.now, id);
    bench.answer(elements);
    bench.sent();
    bench.events.clear();
    bench.connects.clear();
    bench
}

fn open(bench: &mut Bench) -> SessionId {
    let (user, now) = (&mut bench.user, bench.now);
    user.handle_open_choosing(now, handle(), None, Choose::Probes)
}

/// Returns the probes among sent messages: their links and elements.
fn probes(sent: Vec<(Link, Message)>) -> Vec<(Link, u32)> {
    let probe = |(link, message)| match message {
        Message::Probe { id, .. } => Some((link, id.0)),
        _ => None,
    };
    sent.into_iter().filter_map(probe).collect()
}

fn answer(bench: &mut Bench, link: Link, id: u32, report: (u32, Option<u32>)) {
    let answer = Message::ProbeAnswer {
        handle: handle(),
        id: ElementId(id),
        in_flight: report.0,
        latency_us: report.1,
    };
    bench.user.handle_message(bench.now, link, answer);
}

/// Returns the element just chosen for a session, and closes the session.
fn chosen(bench: &mut Bench, session: SessionId) -> Option<u32> {
    let to = bench.connects.pop().map(|(_, to)| port(&to));
    bench.user.handle_close(bench.now, session);
    bench.sent();
    to
}

#[test]
fn a_session_waits_for_answers_and_goes_where_fewest_are_in_flight() {
    let mut bench = resolved(vec![element_at(1, ASAP), element_at(2, ASAP)]);
    let session = open(&mut bench);
    let asked = probes(bench.sent());
    // Elements at the same address share one link.
    let [(link, one), (same, other)] = asked[..] else {
        panic!("two probes: {asked:?}");
    };
    assert_eq!((link, one + other), (same, 3));
    assert_eq!(bench.connects.pop(), Some((link, transport(ASAP))));
    bench.user.handle_connected(bench.now, link);
    // Answers from another link, or about an element without a probe, are ignored.
    answer(&mut bench, Link::Ours(99), one, (0, None));
    answer(&mut bench, link, 7, (0, None));
    answer(&mut bench, link, 1, (3, None));
    bench.sent();
    assert_eq!(bench.connects, []);
    answer(&mut bench, link, 2, (1, Some(900_000)));
    bench.sent();
    assert_eq!(chosen(&mut bench, session), Some(2));
    // The known answers suffice for the next session, which probes besides its choice: the first choice counts as one
    // request in flight.
    let session = open(&mut bench);
    assert_eq!(probes(bench.sent()).len(), 2);
    assert_eq!(chosen(&mut bench, session), Some(2));
    let session = open(&mut bench);
    // An element has only one probe at a time.
    assert_eq!(probes(bench.sent()), []);
    assert!(matches!(chosen(&mut bench, session), Some(1 | 2)));
}

#[test]
fn the_quicker_one_is_taken_where_all_can_tell() {
    let mut bench = resolved(vec![element_at(1, ASAP), element_at(2, ASAP + 1)]);
    for _ in 0..8 {
        let session = open(&mut bench);
        let asked = probes(bench.sent());
        assert_eq!(asked.len(), 2);
        for (link, id) in asked {
            answer(&mut bench, link, id, (0, Some(10_000 / id)));
        }
        bench.sent();
        assert_eq!(chosen(&mut bench, session), Some(2));
        // The answers expire meanwhile.
        bench.pass(Duration::from_secs(2));
    }
}

#[test]
fn elements_that_never_answer_get_their_share_and_are_not_waited_for_again() {
    let mut bench = resolved((1..5).map(|id| element_at(id, ASAP)).collect());
    let session = open(&mut bench);
    let asked = probes(bench.sent());
    assert_eq!(asked.len(), 3);
    bench.connects.clear();
    bench.pass(Duration::from_millis(999));
    bench.sent();
    assert_eq!(bench.connects, []);
    bench.pass(Duration::from_millis(1));
    bench.sent();
    assert!(chosen(&mut bench, session).is_some());
    // The next session does not wait.
    let session = open(&mut bench);
    bench.sent();
    assert!(chosen(&mut bench, session).is_some());
    // Then one of the elements answers: it gets no more than its share, although it is idle.
    let mut speaks = 0;
    let mut seen = Vec::new();
    for _ in 0..400 {
        let session = open(&mut bench);
        for (link, id) in probes(bench.sent()) {
            if id == 4 {
                speaks += 1;
                answer(&mut bench, link, id, (0, Some(1)));
            }
        }
        bench.sent();
        bench.pass(Duration::from_millis(100));
        seen.extend(chosen(&mut bench, session));
    }
    assert!(speaks > 100, "{speaks}");
    let share = seen.iter().filter(|id| **id == 4).count();
    assert!((60..160).contains(&share), "{share} of {}", seen.len());
}

#[test]
fn a_late_answer_is_one() {
    let mut bench = resolved((1..3).map(|id| element_at(id, ASAP)).collect());
    let session = open(&mut bench);
    let asked = probes(bench.sent());
    bench.pass(Duration::from_secs(5));
    bench.sent();
    chosen(&mut bench, session);
    for (link, id) in asked {
        answer(&mut bench, link, id, (id, None));
    }
    let session = open(&mut bench);
    bench.sent();
    assert_eq!(chosen(&mut bench, session), Some(1));
}

#[test]
fn elements_without_a_place_to_be_asked_at_are_used_at_once() {
    let mut bench = resolved((1..4).map(element).collect());
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..50 {
        let session = open(&mut bench);
        assert_eq!(probes(bench.sent()), []);
        seen.extend(chosen(&mut bench, session));
    }
    assert_eq!(seen.len(), 3);
}

#[test]
fn a_lost_link_ends_the_wait_and_an_idle_one_is_closed() {
    let mut bench = resolved(vec![element_at(1, ASAP), element_at(2, ASAP + 1)]);
    let session = open(&mut bench);
    let asked = probes(bench.sent());
    bench.connects.clear();
    for (link, _) in &asked {
        assert_eq!(bench.connects, []);
        bench.user.handle_lost(bench.now, *link);
        bench.sent();
    }
    assert!(chosen(&mut bench, session).is_some());
    // Both are probed again some time later, over new links.
    bench.pass(Duration::from_secs(1));
    open(&mut bench);
    let again = probes(bench.sent());
    assert_eq!(again.len(), 2);
    for (link, id) in again {
        assert!(asked.iter().all(|(before, _)| *before != link));
        answer(&mut bench, link, id, (0, None));
    }
    bench.sent();
    let mut closed = 0;
    bench.pass(Duration::from_secs(31));
    while let Some(output) = bench.user.poll_output() {
        closed += usize::from(matches!(output, Output::Close { .. }));
    }
    assert!(closed >= 2, "{closed}");
}
