//! Tests of an element's control channels, rule by rule.

use super::*;
use bytes::Bytes;
use holdfast_wire::rserpool::PoolElement as Description;
use holdfast_wire::rserpool::PoolHandle;

const USER: LinkId = LinkId::Accepted(1);

fn sessions(keys: &[u8]) -> UserSessions {
    UserSessions::new(UserSessionsConfig {
        handle: PoolHandle::from("pool"),
        policy: Policy::Random,
        keys: keys.iter().map(|key| CookieKey([*key; 32])).collect(),
    })
}

fn outputs(sessions: &mut UserSessions) -> Vec<SessionOutput> {
    std::iter::from_fn(|| sessions.poll_output()).collect()
}

/// Returns the cookie that `sessions` makes for a state.
fn cookie(sessions: &mut UserSessions, state: &[u8]) -> Bytes {
    sessions.handle_connected(USER);
    sessions.handle_state(USER, state);
    match outputs(sessions).pop() {
        Some(LinkOutput::Send {
            message: Message::Cookie(cookie),
            ..
        }) => cookie,
        other => panic!("{other:?}"),
    }
}

#[test]
fn cookie_resumes_session_at_another_element() {
    let cookie = cookie(&mut sessions(&[1]), b"state");
    // The other element has a new key besides the old one.
    let mut other = sessions(&[2, 1]);
    other.handle_connected(USER);
    outputs(&mut other);
    for _ in 0..2 {
        other.handle_message(USER, Message::CookieEcho(cookie.clone()));
    }
    let resumed = UserSessionEvent::Resumed {
        link: USER,
        state: Bytes::from("state"),
    };
    let expected =
        [resumed, UserSessionEvent::UnexpectedCookie { link: USER }].map(LinkOutput::Event);
    assert_eq!(outputs(&mut other), expected);
}

#[test]
fn forged_cookie_is_rejected() {
    let forged = cookie(&mut sessions(&[9]), b"state");
    let mut element = sessions(&[1]);
    element.handle_connected(USER);
    outputs(&mut element);
    element.handle_message(USER, Message::CookieEcho(forged));
    let error = CookieError::Forged;
    let event = UserSessionEvent::CookieRejected { link: USER, error };
    assert_eq!(outputs(&mut element), [LinkOutput::Event(event)]);
}

#[test]
fn users_get_failover_order_on_connect_and_on_change() {
    let mut element = sessions(&[]);
    element.handle_connected(USER);
    let next = Description {
        id: ElementId(2),
        home: RegistrarId(0),
        registration_life: 1,
        user_transport: Transport::Opaque(Bytes::new()),
        policy: Policy::Random,
        asap_transport: None,
    };
    element.handle_failover_order(vec![next.clone()]);
    let orders: Vec<usize> = outputs(&mut element)
        .into_iter()
        .map(|output| match output {
            LinkOutput::Send {
                message: Message::BusinessCard { elements, .. },
                ..
            } => elements.len(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(orders, [0, 1]);
}

#[test]
fn disconnected_user_gets_no_message() {
    let mut element = sessions(&[]);
    element.handle_connected(USER);
    element.handle_lost(USER);
    outputs(&mut element);
    element.handle_state(USER, b"state");
    element.handle_message(USER, Message::CookieEcho(Bytes::from("state")));
    element.handle_failover_order(Vec::new());
    assert!(outputs(&mut element).is_empty());
}

#[test]
fn messages_until_answer_count_as_one_request() {
    let mut element = sessions(&[]);
    let (other, ms) = (LinkId::Accepted(2), Duration::from_millis);
    element.handle_connected(USER);
    element.handle_connected(other);
    assert_eq!(element.probe_report(), (0, None));
    // A message without a request, or from an unknown link, is no request.
    element.handle_sent(ms(0), USER);
    element.handle_received(ms(0), LinkId::Accepted(3));
    // Two messages of one user are one request, and the second answer counts for none.
    element.handle_received(ms(1), USER);
    element.handle_received(ms(2), USER);
    element.handle_received(ms(2), other);
    assert_eq!(element.probe_report(), (2, None));
    element.handle_sent(ms(21), USER);
    element.handle_sent(ms(22), USER);
    assert_eq!(element.probe_report(), (1, Some(ms(20))));
    // A request lost with its user teaches nothing.
    element.handle_lost(other);
    element.handle_lost(USER);
    assert_eq!(element.probe_report(), (0, Some(ms(20))));
}
