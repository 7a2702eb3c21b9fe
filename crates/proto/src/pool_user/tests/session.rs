//! Tests of sessions, rule by rule.

use super::*;
use bytes::Bytes;

#[test]
fn a_session_goes_on_at_the_next_element_with_the_latest_cookie() {
    let mut bench = Bench::knowing();
    let (id, link, first) = bench.session();
    for cookie in ["older", "latest"] {
        let cookie = Message::Cookie(Bytes::from(cookie));
        bench.user.handle_message(bench.now, link, cookie);
    }
    bench.user.handle_lost(bench.now, link);
    let sent = bench.sent();
    let (next, to) = bench.connects.pop().expect("another element, at once");
    assert_ne!(port(&to), first);
    let echo = Message::CookieEcho(Bytes::from("latest"));
    assert!(
        sent.contains(&(next, echo)),
        "with the connection: {sent:?}"
    );
    assert!(sent.iter().any(|(_, message)| is_report(message, first)));
    bench.user.handle_connected(bench.now, next);
    bench.sent();
    let up = Event::SessionUp {
        session: id,
        link: next,
        element: ElementId(port(&to)),
        resumed: true,
    };
    assert_eq!(bench.events.last(), Some(&up));
    assert_eq!(bench.user.links.len(), 1);
}

#[test]
fn an_element_that_ends_a_session_in_order_is_not_reported() {
    let mut bench = Bench::knowing();
    let (id, link, first) = bench.session();
    bench.user.handle_ended(bench.now, link);
    let sent = bench.sent();
    assert!(!sent.iter().any(|(_, message)| is_report(message, first)));
    let broken = Event::SessionBroken {
        session: id,
        link,
        element: ElementId(first),
    };
    assert_eq!(bench.events.last(), Some(&broken));
    let (next, to) = bench.connects.pop().expect("another element, at once");
    assert_ne!(port(&to), first, "the same would end it again");
    // The second element is lost without a close: it is reported.
    bench.user.handle_connected(bench.now, next);
    bench.user.handle_lost(bench.now, next);
    let (sent, second) = (bench.sent(), port(&to));
    assert!(sent.iter().any(|(_, message)| is_report(message, second)));
}

#[test]
fn a_business_card_says_whom_to_take_next() {
    let mut bench = Bench::knowing();
    let (_, link, first) = bench.session();
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
    bench.sent();
    let (next, to) = bench.connects.pop().expect("another element");
    assert_eq!(port(&to), 42);
    bench.user.handle_lost(bench.now, next);
    bench.sent();
    assert_eq!(bench.connects.pop().map(|(_, to)| port(&to)), Some(43));
}

#[test]
fn an_element_that_does_not_take_the_link_in_time_is_left() {
    let mut bench = Bench::knowing();
    bench.user.handle_open(bench.now, handle(), None);
    bench.sent();
    assert_eq!(bench.connects.len(), 1);
    bench.pass(bench.user.config.connect_timeout);
    bench.sent();
    assert_eq!(bench.connects.len(), 2);
    assert_ne!(bench.connects[0].1, bench.connects[1].1);
}

#[test]
fn a_session_without_elements_tries_ever_slower_and_ends() {
    let mut bench = Bench::new();
    let id = bench.user.handle_open(bench.now, handle(), None);
    let (mut questions, end) = (0, bench.now + bench.user.config.give_up_after);
    while bench.now < end {
        for (_, message) in bench.sent() {
            assert!(is_question(&message));
            questions += 1;
            bench.refuse();
        }
        bench.pass(Duration::from_millis(50));
    }
    bench.sent();
    assert!(
        (10..30).contains(&questions),
        "{questions} questions in a minute"
    );
    let failed = Event::SessionFailed {
        session: id,
        error: ResolveError::UnknownPool,
    };
    assert_eq!(bench.events.last(), Some(&failed));
    bench.pass(bench.user.config.usable_for);
    assert!(bench.user.sessions.is_empty() && bench.user.pools.is_empty());
    assert_eq!(bench.user.poll_timeout(), None);
}

#[test]
fn data_only_elements_get_no_cookie() {
    let mut bench = Bench::knowing();
    let (_, link, _) = bench.session();
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
    let sent = bench.sent();
    assert_eq!(bench.connects.len(), 1);
    assert!(
        !sent
            .iter()
            .any(|(_, message)| matches!(message, Message::CookieEcho(_)))
    );
}

#[test]
fn a_session_that_chooses_asks_for_all_and_takes_who_answers_sooner() {
    let mut bench = Bench::knowing();
    let open = |bench: &mut Bench| {
        let (user, now) = (&mut bench.user, bench.now);
        let id = user.handle_open_choosing(now, handle(), None, Choose::Latency);
        let sent = bench.sent();
        (id, sent)
    };
    // Three elements are known, but there may be more.
    let (first, sent) = open(&mut bench);
    let [(_, Message::HandleResolution { items, .. })] = sent.as_slice() else {
        panic!("a question: {sent:?}");
    };
    assert_eq!(*items, Some(64));
    bench.answer(vec![element(1), element(2)]);
    bench.sent();
    // Each element is tried once; the link's address shows the chosen one.
    let answers = |bench: &mut Bench, id| {
        let (link, to) = bench.connects.pop().expect("an element");
        bench.user.handle_connected(bench.now, link);
        bench.user.handle_sent(bench.now, id);
        bench.now += Duration::from_millis(if port(&to) == 1 { 400 } else { 20 });
        bench.user.handle_heard(bench.now, id);
        bench.user.handle_close(bench.now, id);
        bench.sent();
        port(&to)
    };
    let mut seen = vec![answers(&mut bench, first)];
    for _ in 0..8 {
        let (id, _) = open(&mut bench);
        seen.push(answers(&mut bench, id));
    }
    assert_eq!(
        seen.iter().filter(|port| **port == 1).count(),
        1,
        "{seen:?}"
    );
    assert_eq!(seen[2..], [2; 7]);
}

#[test]
fn sessions_under_way_count_where_users_choose() {
    let mut bench = Bench::knowing();
    let open = |bench: &mut Bench| {
        let (user, now) = (&mut bench.user, bench.now);
        let id = user.handle_open_choosing(now, handle(), None, Choose::Latency);
        bench.sent();
        if bench.connects.is_empty() {
            bench.answer(vec![element(1), element(2)]);
            bench.sent();
        }
        let (link, to) = bench.connects.pop().expect("an element");
        (id, link, port(&to))
    };
    // Both answer within 100 ms.
    for _ in 0..2 {
        let (id, link, _) = open(&mut bench);
        bench.user.handle_connected(bench.now, link);
        bench.now += Duration::from_millis(100);
        bench.user.handle_heard(bench.now, id);
        bench.user.handle_close(bench.now, id);
        bench.sent();
    }
    let (one, _, first) = open(&mut bench);
    let (_, _, second) = open(&mut bench);
    assert_ne!(first, second, "who is at work is not taken");
    // The first session closes: its element is as good as before, and the other is still busy.
    bench.user.handle_close(bench.now, one);
    bench.sent();
    let (_, _, third) = open(&mut bench);
    assert_eq!(third, first);
}
