//! Tests of sessions that choose by probes.

use super::*;

const ASAP_PORT: u16 = 4_000;

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
fn user_with_resolved_pool(elements: Vec<PoolElement>) -> TestBench {
    let mut bench = TestBench::new();
    let id = open_session(&mut bench);
    bench.take_sent();
    bench.user.handle_watch(bench.now, handle());
    bench.user.handle_close(bench.now, id);
    bench.deliver_answer(elements);
    bench.take_sent();
    bench.events.clear();
    bench.connects.clear();
    bench
}

fn open_session(bench: &mut TestBench) -> SessionId {
    let (user, now) = (&mut bench.user, bench.now);
    user.handle_open_with_method(now, handle(), None, ChoiceMethod::Probes)
}

/// Returns the probes among sent messages: their links and elements.
fn probes(sent: Vec<(LinkId, Message)>) -> Vec<(LinkId, u32)> {
    let probe = |(link, message)| match message {
        Message::Probe { id, .. } => Some((link, id.0)),
        _ => None,
    };
    sent.into_iter().filter_map(probe).collect()
}

fn deliver_probe_answer(bench: &mut TestBench, link: LinkId, id: u32, report: (u32, Option<u32>)) {
    let answer = Message::ProbeAnswer {
        handle: handle(),
        id: ElementId(id),
        in_flight: report.0,
        latency_us: report.1,
    };
    bench.user.handle_message(bench.now, link, answer);
}

/// Returns the element just chosen for a session, and closes the session.
fn take_chosen(bench: &mut TestBench, session: SessionId) -> Option<u32> {
    let to = bench.connects.pop().map(|(_, to)| port(&to));
    bench.user.handle_close(bench.now, session);
    bench.take_sent();
    to
}

#[test]
fn session_waits_for_answers_and_chooses_fewest_in_flight() {
    let mut bench =
        user_with_resolved_pool(vec![element_at(1, ASAP_PORT), element_at(2, ASAP_PORT)]);
    let session = open_session(&mut bench);
    let first_probes = probes(bench.take_sent());
    // Elements at the same address share one link.
    let [(link, one), (same, other)] = first_probes[..] else {
        panic!("two probes: {first_probes:?}");
    };
    assert_eq!((link, one + other), (same, 3));
    assert_eq!(bench.connects.pop(), Some((link, transport(ASAP_PORT))));
    bench.user.handle_connected(bench.now, link);
    // Answers from another link, or about an element without a probe, are ignored.
    deliver_probe_answer(&mut bench, LinkId::Initiated(99), one, (0, None));
    deliver_probe_answer(&mut bench, link, 7, (0, None));
    deliver_probe_answer(&mut bench, link, 1, (3, None));
    bench.take_sent();
    assert_eq!(bench.connects, []);
    deliver_probe_answer(&mut bench, link, 2, (1, Some(900_000)));
    bench.take_sent();
    assert_eq!(take_chosen(&mut bench, session), Some(2));
    // The known answers suffice for the next session, which probes besides its choice: the first choice counts as one
    // request in flight.
    let session = open_session(&mut bench);
    assert_eq!(probes(bench.take_sent()).len(), 2);
    assert_eq!(take_chosen(&mut bench, session), Some(2));
    let session = open_session(&mut bench);
    // An element has only one probe at a time.
    assert_eq!(probes(bench.take_sent()), []);
    assert!(matches!(take_chosen(&mut bench, session), Some(1 | 2)));
}

#[test]
fn fastest_element_is_chosen_if_all_report_latency() {
    let mut bench =
        user_with_resolved_pool(vec![element_at(1, ASAP_PORT), element_at(2, ASAP_PORT + 1)]);
    for _ in 0..8 {
        let session = open_session(&mut bench);
        let sent_probes = probes(bench.take_sent());
        assert_eq!(sent_probes.len(), 2);
        for (link, id) in sent_probes {
            deliver_probe_answer(&mut bench, link, id, (0, Some(10_000 / id)));
        }
        bench.take_sent();
        assert_eq!(take_chosen(&mut bench, session), Some(2));
        // The answers expire meanwhile.
        bench.advance_time(Duration::from_secs(2));
    }
}

#[test]
fn silent_elements_get_their_share_without_further_waits() {
    let mut bench = user_with_resolved_pool((1..5).map(|id| element_at(id, ASAP_PORT)).collect());
    let session = open_session(&mut bench);
    let first_probes = probes(bench.take_sent());
    assert_eq!(first_probes.len(), 3);
    bench.connects.clear();
    bench.advance_time(Duration::from_millis(999));
    bench.take_sent();
    assert_eq!(bench.connects, []);
    bench.advance_time(Duration::from_millis(1));
    bench.take_sent();
    assert!(take_chosen(&mut bench, session).is_some());
    // The next session does not wait.
    let session = open_session(&mut bench);
    bench.take_sent();
    assert!(take_chosen(&mut bench, session).is_some());
    // Then one of the elements answers: it gets no more than its share, although it is idle.
    let mut responsive_probes = 0;
    let mut chosen_ids = Vec::new();
    for _ in 0..400 {
        let session = open_session(&mut bench);
        for (link, id) in probes(bench.take_sent()) {
            if id == 4 {
                responsive_probes += 1;
                deliver_probe_answer(&mut bench, link, id, (0, Some(1)));
            }
        }
        bench.take_sent();
        bench.advance_time(Duration::from_millis(100));
        chosen_ids.extend(take_chosen(&mut bench, session));
    }
    assert!(responsive_probes > 100, "{responsive_probes}");
    let share = chosen_ids.iter().filter(|id| **id == 4).count();
    assert!(
        (60..160).contains(&share),
        "{share} of {}",
        chosen_ids.len()
    );
}

#[test]
fn late_answer_is_used() {
    let mut bench = user_with_resolved_pool((1..3).map(|id| element_at(id, ASAP_PORT)).collect());
    let session = open_session(&mut bench);
    let first_probes = probes(bench.take_sent());
    bench.advance_time(Duration::from_secs(5));
    bench.take_sent();
    take_chosen(&mut bench, session);
    for (link, id) in first_probes {
        deliver_probe_answer(&mut bench, link, id, (id, None));
    }
    let session = open_session(&mut bench);
    bench.take_sent();
    assert_eq!(take_chosen(&mut bench, session), Some(1));
}

#[test]
fn elements_without_asap_transport_are_used_at_once() {
    let mut bench = user_with_resolved_pool((1..4).map(element).collect());
    let mut chosen_ids = std::collections::BTreeSet::new();
    for _ in 0..50 {
        let session = open_session(&mut bench);
        assert_eq!(probes(bench.take_sent()), []);
        chosen_ids.extend(take_chosen(&mut bench, session));
    }
    assert_eq!(chosen_ids.len(), 3);
}

#[test]
fn lost_probe_link_ends_wait_and_idle_link_is_closed() {
    let mut bench =
        user_with_resolved_pool(vec![element_at(1, ASAP_PORT), element_at(2, ASAP_PORT + 1)]);
    let session = open_session(&mut bench);
    let first_probes = probes(bench.take_sent());
    bench.connects.clear();
    for (link, _) in &first_probes {
        assert_eq!(bench.connects, []);
        bench.user.handle_lost(bench.now, *link);
        bench.take_sent();
    }
    assert!(take_chosen(&mut bench, session).is_some());
    // Both are probed again some time later, over new links.
    bench.advance_time(Duration::from_secs(1));
    open_session(&mut bench);
    let new_probes = probes(bench.take_sent());
    assert_eq!(new_probes.len(), 2);
    for (link, id) in new_probes {
        assert!(first_probes.iter().all(|(before, _)| *before != link));
        deliver_probe_answer(&mut bench, link, id, (0, None));
    }
    bench.take_sent();
    let mut closed = 0;
    bench.advance_time(Duration::from_secs(31));
    while let Some(output) = bench.user.poll_output() {
        closed += usize::from(matches!(output, Output::Close { .. }));
    }
    assert!(closed >= 2, "{closed}");
}
