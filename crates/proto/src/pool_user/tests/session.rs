//! Sessions, rule by rule.

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
