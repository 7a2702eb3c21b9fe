//! Tests of sessions, rule by rule.

use super::*;
use bytes::Bytes;

#[test]
fn session_resumes_at_next_element_with_latest_cookie() {
    let mut bench = TestBench::with_known_pool();
    let (id, link, first) = bench.open_session();
    for cookie in ["older", "latest"] {
        let cookie = Message::Cookie(Bytes::from(cookie));
        bench.user.handle_message(bench.now, link, cookie);
    }
    bench.user.handle_lost(bench.now, link);
    let sent = bench.take_sent();
    let (next, to) = bench.connects.pop().expect("another element, at once");
    assert_ne!(port(&to), first);
    let echo = Message::CookieEcho(Bytes::from("latest"));
    assert!(
        sent.contains(&(next, echo)),
        "with the connection: {sent:?}"
    );
    assert!(sent.iter().any(|(_, message)| is_report(message, first)));
    bench.user.handle_connected(bench.now, next);
    bench.take_sent();
    let up = Event::SessionUp {
        session: id,
        link: next,
        element: ElementId(port(&to)),
        resumed: true,
    };
    assert_eq!(bench.events.last(), Some(&up));
    assert_eq!(bench.user.session_links.len(), 1);
}

#[test]
fn orderly_close_causes_no_report() {
    let mut bench = TestBench::with_known_pool();
    let (id, link, first) = bench.open_session();
    bench.user.handle_closed(bench.now, link);
    let sent = bench.take_sent();
    assert!(!sent.iter().any(|(_, message)| is_report(message, first)));
    let broken = Event::SessionBroken {
        session: id,
        link,
        element: ElementId(first),
    };
    assert_eq!(bench.events.last(), Some(&broken));
    let (next, to) = bench.connects.pop().expect("another element, at once");
    assert_ne!(
        port(&to),
        first,
        "the element that ended the session is not chosen again"
    );
    // The second element is lost without a close: it is reported.
    bench.user.handle_connected(bench.now, next);
    bench.user.handle_lost(bench.now, next);
    let (sent, second) = (bench.take_sent(), port(&to));
    assert!(sent.iter().any(|(_, message)| is_report(message, second)));
}

#[test]
fn business_card_sets_failover_order() {
    let mut bench = TestBench::with_known_pool();
    let (_, link, first) = bench.open_session();
    let card = |handle, elements| Message::BusinessCard {
        handle,
        policy: None,
        elements,
    };
    let order = vec![element(first), element(42), element(43)];
    bench
        .user
        .handle_message(bench.now, link, card(handle(), order));
    let foreign = card(PoolHandle::from("other"), vec![element(66)]);
    bench.user.handle_message(bench.now, link, foreign);
    bench.user.handle_lost(bench.now, link);
    bench.take_sent();
    let (next, to) = bench.connects.pop().expect("another element");
    assert_eq!(port(&to), 42);
    bench.user.handle_lost(bench.now, next);
    bench.take_sent();
    assert_eq!(bench.connects.pop().map(|(_, to)| port(&to)), Some(43));
}

#[test]
fn connect_timeout_leaves_element() {
    let mut bench = TestBench::with_known_pool();
    bench.user.handle_open(bench.now, handle(), None);
    bench.take_sent();
    assert_eq!(bench.connects.len(), 1);
    bench.advance_time(bench.user.config.connect_timeout);
    bench.take_sent();
    assert_eq!(bench.connects.len(), 2);
    assert_ne!(bench.connects[0].1, bench.connects[1].1);
}

#[test]
fn session_without_elements_backs_off_and_fails() {
    let mut bench = TestBench::new();
    let id = bench.user.handle_open(bench.now, handle(), None);
    let (mut questions, end) = (0, bench.now + bench.user.config.give_up_after);
    while bench.now < end {
        for (_, message) in bench.take_sent() {
            assert!(is_resolution(&message));
            questions += 1;
            bench.deliver_refusal();
        }
        bench.advance_time(Duration::from_millis(50));
    }
    bench.take_sent();
    assert!(
        (10..30).contains(&questions),
        "{questions} questions in a minute"
    );
    let failed = Event::SessionFailed {
        session: id,
        error: ResolveError::UnknownPool,
    };
    assert_eq!(bench.events.last(), Some(&failed));
    bench.advance_time(bench.user.config.cache_usable_for);
    assert!(bench.user.sessions.is_empty() && bench.user.pools.is_empty());
    assert_eq!(bench.user.poll_timeout(), None);
}

#[test]
fn data_only_element_gets_no_cookie() {
    let mut bench = TestBench::with_known_pool();
    let (_, link, _) = bench.open_session();
    bench
        .user
        .handle_message(bench.now, link, Message::Cookie(Bytes::from("state")));
    let mut plain = element(7);
    plain.user_transport = Transport::Udp {
        port: 7,
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let card = Message::BusinessCard {
        handle: handle(),
        policy: None,
        elements: vec![plain],
    };
    bench.user.handle_message(bench.now, link, card);
    bench.user.handle_lost(bench.now, link);
    let sent = bench.take_sent();
    assert_eq!(bench.connects.len(), 1);
    assert!(
        !sent
            .iter()
            .any(|(_, message)| matches!(message, Message::CookieEcho(_)))
    );
}

#[test]
fn latency_session_requests_all_elements_and_prefers_fastest() {
    let mut bench = TestBench::with_known_pool();
    let open = |bench: &mut TestBench| {
        let (user, now) = (&mut bench.user, bench.now);
        let id = user.handle_open_with_method(now, handle(), None, ChoiceMethod::Latency);
        let sent = bench.take_sent();
        (id, sent)
    };
    // Three elements are known, but there may be more.
    let (first, sent) = open(&mut bench);
    let [
        (
            _,
            Message::HandleResolution {
                items_max: items, ..
            },
        ),
    ] = sent.as_slice()
    else {
        panic!("a question: {sent:?}");
    };
    assert_eq!(*items, Some(64));
    bench.deliver_answer(vec![element(1), element(2)]);
    bench.take_sent();
    // Each element is tried once; the link's address shows the chosen one.
    let respond = |bench: &mut TestBench, id| {
        let (link, to) = bench.connects.pop().expect("an element");
        bench.user.handle_connected(bench.now, link);
        bench.user.handle_sent(bench.now, id);
        bench.now += Duration::from_millis(if port(&to) == 1 { 400 } else { 20 });
        bench.user.handle_received(bench.now, id);
        bench.user.handle_close(bench.now, id);
        bench.take_sent();
        port(&to)
    };
    let mut chosen_ports = vec![respond(&mut bench, first)];
    for _ in 0..8 {
        let (id, _) = open(&mut bench);
        chosen_ports.push(respond(&mut bench, id));
    }
    assert_eq!(
        chosen_ports.iter().filter(|port| **port == 1).count(),
        1,
        "{chosen_ports:?}"
    );
    assert_eq!(chosen_ports[2..], [2; 7]);
}

#[test]
fn open_sessions_raise_cost_in_latency_choice() {
    let mut bench = TestBench::with_known_pool();
    let open = |bench: &mut TestBench| {
        let (user, now) = (&mut bench.user, bench.now);
        let id = user.handle_open_with_method(now, handle(), None, ChoiceMethod::Latency);
        bench.take_sent();
        if bench.connects.is_empty() {
            bench.deliver_answer(vec![element(1), element(2)]);
            bench.take_sent();
        }
        let (link, to) = bench.connects.pop().expect("an element");
        (id, link, port(&to))
    };
    // Both answer within 100 ms.
    for _ in 0..2 {
        let (id, link, _) = open(&mut bench);
        bench.user.handle_connected(bench.now, link);
        bench.now += Duration::from_millis(100);
        bench.user.handle_received(bench.now, id);
        bench.user.handle_close(bench.now, id);
        bench.take_sent();
    }
    let (one, _, first) = open(&mut bench);
    let (_, _, second) = open(&mut bench);
    assert_ne!(first, second, "a busy element is not chosen");
    // The first session closes: its element is as good as before, and the other is still busy.
    bench.user.handle_close(bench.now, one);
    bench.take_sent();
    let (_, _, third) = open(&mut bench);
    assert_eq!(third, first);
}
