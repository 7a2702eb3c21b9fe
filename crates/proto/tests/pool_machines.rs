//! Pool elements and pool users under any inputs in any order: no machine panics, no timer is stuck, and no input produces outputs without end.

use bytes::Bytes;
use holdfast_proto::pool_element::{
    self, CookieKey, LinkId, PoolElement, ServerHuntConfig, UserSessions, UserSessionsConfig,
};
use holdfast_proto::pool_user::{self, PoolUser, SessionId};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{
    CauseCode, ElementId, ErrorCause, Policy, PolicyKind, PoolElement as Description,
};
use holdfast_wire::rserpool::{PoolHandle, RegistrarId, SctpTransport, Transport, TransportUse};
use proptest::prelude::*;
use std::net::IpAddr;
use std::time::Duration;

/// Returns the transport of 10.0.`network`.1 with a port.
fn transport(network: u8, port: u16) -> Transport {
    Transport::Sctp(SctpTransport {
        port,
        usage: TransportUse::DataAndControl,
        addresses: [IpAddr::from([10, 0, network, 1])].into_iter().collect(),
    })
}

fn registrar_transport(index: u16) -> Transport {
    transport(1, index)
}

fn element_transport(index: u16) -> Transport {
    transport(2, index)
}

fn handle() -> impl Strategy<Value = PoolHandle> {
    prop_oneof![9 => Just(PoolHandle::from("pool")), 1 => Just(PoolHandle::from("other"))]
}

fn link() -> impl Strategy<Value = LinkId> {
    prop_oneof![9 => (1u64..9).prop_map(LinkId::Initiated), 3 => (1u64..4).prop_map(LinkId::Accepted)]
}

fn causes() -> impl Strategy<Value = Vec<ErrorCause>> {
    let code = prop_oneof![
        Just(CauseCode::NON_UNIQUE_ELEMENT_ID),
        Just(CauseCode::UNKNOWN_POOL_HANDLE),
        Just(CauseCode::LACK_OF_RESOURCES)
    ];
    proptest::collection::vec(code.prop_map(ErrorCause::from), 0..2)
}

fn elements() -> impl Strategy<Value = Vec<Description>> {
    let element = |(id, figure)| Description {
        id: ElementId(id),
        home: RegistrarId(1),
        registration_life: 1,
        user_transport: element_transport(id as u16),
        policy: Policy::LeastUsedDegradation {
            load: figure,
            degradation: figure,
        },
        asap_transport: None,
    };
    proptest::collection::vec((0u32..5, any::<u32>()).prop_map(element), 0..5)
}

/// Messages that machines react to; an `id` other than 0 is replaced by the element's own in responses.
fn message() -> impl Strategy<Value = Message> {
    let id = || (0u32..5).prop_map(ElementId);
    let policy = proptest::option::of(
        proptest::sample::select(PolicyKind::ALL).prop_map(PolicyKind::zeroed),
    );
    let card = policy.clone();
    prop_oneof![
        (any::<bool>(), handle(), id(), causes()).prop_map(|(rejected, handle, id, causes)| {
            Message::RegistrationResponse {
                rejected,
                handle,
                id,
                causes,
            }
        }),
        (handle(), id(), causes()).prop_map(|(handle, id, causes)| {
            Message::DeregistrationResponse { handle, id, causes }
        }),
        (any::<bool>(), handle(), policy, elements(), causes()).prop_map(
            |(updates, handle, policy, elements, causes)| Message::HandleResolutionResponse {
                updates,
                handle,
                policy,
                elements,
                causes
            }
        ),
        (any::<bool>(), 0u32..3, handle(), proptest::option::of(id())).prop_map(
            |(home, registrar, handle, id)| {
                Message::EndpointKeepAlive {
                    home,
                    registrar: RegistrarId(registrar),
                    handle,
                    id,
                }
            }
        ),
        (handle(), card, elements()).prop_map(|(handle, policy, elements)| Message::BusinessCard {
            handle,
            policy,
            elements
        }),
        proptest::collection::vec(any::<u8>(), 0..40)
            .prop_map(|bytes| Message::Cookie(bytes.into())),
        proptest::collection::vec(any::<u8>(), 0..40)
            .prop_map(|bytes| Message::CookieEcho(bytes.into())),
        causes().prop_map(Message::Error),
    ]
}

#[derive(Debug, Clone)]
enum Input {
    Connected(LinkId),
    Lost(LinkId),
    Message(LinkId, Message),
    Announce(u16),
    AdvanceTime(Duration),
    /// A request of the program above, by number.
    Request(u8, PoolHandle, u32),
}

fn input() -> impl Strategy<Value = Input> {
    prop_oneof![
        4 => link().prop_map(Input::Connected),
        2 => link().prop_map(Input::Lost),
        8 => (link(), message()).prop_map(|(link, message)| Input::Message(link, message)),
        1 => (0u16..3).prop_map(Input::Announce),
        3 => (0u64..40_000).prop_map(|time| Input::AdvanceTime(Duration::from_millis(time))),
        4 => (any::<u8>(), handle(), 1u32..6).prop_map(|(kind, handle, number)| Input::Request(kind, handle, number)),
    ]
}

fn hunt() -> ServerHuntConfig {
    let known = (0..2).map(registrar_transport);
    let mut config = ServerHuntConfig::new(known.collect());
    config.trust_announces = true;
    config
}

fn feed_user(user: &mut PoolUser, now: Duration, input: Input) {
    match input {
        Input::Connected(link) => user.handle_connected(now, link),
        Input::Lost(link) => user.handle_lost(now, link),
        Input::Message(link, message) => user.handle_message(now, link, message),
        Input::Announce(index) => {
            user.handle_announce(
                now,
                RegistrarId(1),
                Vec::new(),
                Some(registrar_transport(index)),
            );
        }
        Input::AdvanceTime(_) => user.handle_timeout(now),
        Input::Request(kind, handle, number) => match kind % 8 {
            0 => drop(user.handle_select(now, handle)),
            1 => drop(user.handle_resolve(now, handle)),
            2 => user.handle_watch(now, handle),
            3 => user.handle_unwatch(&handle),
            4 => user.handle_unreachable(now, &handle, ElementId(number)),
            5 => user.handle_close(now, SessionId(number.into())),
            6 => user.handle_malfunction(now, SessionId(number.into())),
            _ => drop(user.handle_open(now, handle, None)),
        },
    }
}

fn feed_element(element: &mut PoolElement, now: Duration, input: Input) {
    match input {
        Input::Connected(link) => element.handle_connected(now, link),
        Input::Lost(link) => element.handle_lost(now, link),
        Input::Message(link, mut message) => {
            // Most responses are for this element.
            if let Message::RegistrationResponse { id, .. }
            | Message::DeregistrationResponse { id, .. } = &mut message
                && id.0 > 0
            {
                *id = element.id();
            }
            element.handle_message(now, link, message);
        }
        Input::Announce(index) => {
            let at = registrar_transport(index);
            element.handle_announce(now, RegistrarId(1), vec![at], None);
        }
        Input::AdvanceTime(_) => element.handle_timeout(now),
        Input::Request(kind, _, number) => match kind % 4 {
            0 => element.handle_deregister(now),
            1 => element.handle_register(now),
            _ => {
                let policy = Policy::LeastUsed { load: number };
                element
                    .handle_policy(now, policy)
                    .expect("the same policy type");
            }
        },
    }
}

/// Checks after an input that the outputs end, and that after the timers have run the next one is in the future.
fn check_outputs_end<E>(
    now: Duration,
    poll: impl FnMut() -> Option<pool_element::LinkOutput<E>>,
    due: Option<Duration>,
    timers_ran: bool,
) {
    let outputs = std::iter::from_fn(poll).count();
    assert!(outputs < 300, "{outputs} outputs");
    assert!(
        !timers_ran || due.is_none_or(|due| due > now),
        "an expired timer is still due"
    );
}

proptest! {
    #[test]
    fn users_survive_any_inputs(inputs in proptest::collection::vec(input(), 0..120)) {
        let mut user = PoolUser::new(pool_user::PoolUserConfig::new(hunt(), [1; 32]));
        let mut now = Duration::from_secs(1);
        for input in inputs {
            let woken = if let Input::AdvanceTime(time) = input { now += time; true } else { false };
            feed_user(&mut user, now, input);
            let due = user.poll_timeout();
            check_outputs_end(now, || user.poll_output(), due, woken);
        }
    }

    #[test]
    fn elements_survive_any_inputs(inputs in proptest::collection::vec(input(), 0..120)) {
        let policy = Policy::LeastUsed { load: 0 };
        let at = element_transport(0);
        let config = pool_element::PoolElementConfig::new(PoolHandle::from("pool"), at, policy, hunt(), [1; 32]);
        let mut element = PoolElement::new(config);
        let mut now = Duration::from_secs(1);
        element.handle_register(now);
        for input in inputs {
            let woken = if let Input::AdvanceTime(time) = input { now += time; true } else { false };
            feed_element(&mut element, now, input);
            let due = element.poll_timeout();
            check_outputs_end(now, || element.poll_output(), due, woken);
        }
    }

    #[test]
    fn control_channels_survive_any_inputs(inputs in proptest::collection::vec(input(), 0..60)) {
        let keys = vec![CookieKey([1; 32])];
        let (handle, policy) = (PoolHandle::from("pool"), Policy::Random);
        let mut sessions = UserSessions::new(UserSessionsConfig { handle, policy, keys });
        for input in inputs {
            match input {
                Input::Connected(link) => sessions.handle_connected(link),
                Input::Lost(link) => sessions.handle_lost(link),
                Input::Message(link, Message::Cookie(state)) => sessions.handle_state(link, &state),
                Input::Message(_, Message::BusinessCard { elements, .. }) => sessions.handle_failover_order(elements),
                Input::Message(link, message) => sessions.handle_message(link, message),
                _ => sessions.handle_message(LinkId::Accepted(1), Message::CookieEcho(Bytes::new())),
            }
            check_outputs_end(Duration::ZERO, || sessions.poll_output(), None, false);
        }
    }
}
