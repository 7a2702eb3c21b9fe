//! Frames about the health of servers.

use holdfast_wire::health_frames::{
    HealthFrame, ReportedServer, SERVICES_MAX, ServerProblem, ServerState, ServiceEndpoint,
    ServiceShares,
};
use holdfast_wire::{Frame, FrameDecoder, FrameError, NodeId, Protocol, encode};
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::{IpAddr, SocketAddr};

fn endpoint() -> impl Strategy<Value = ServiceEndpoint> {
    let ip = prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from)
    ];
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)];
    (protocol, ip, any::<u16>()).prop_map(|(protocol, ip, port)| ServiceEndpoint {
        protocol,
        address: SocketAddr::new(ip, port),
    })
}

fn problem() -> impl Strategy<Value = ServerProblem> {
    use ServerProblem as P;
    prop_oneof![
        Just(P::ListenerClosed),
        any::<u32>().prop_map(|waiting| P::QueueStalled { waiting }),
        any::<u32>().prop_map(|connections| P::RequestsUnread { connections }),
        any::<i32>().prop_map(|os_error| P::ConnectFailed { os_error }),
        Just(P::ConnectTimedOut),
        any::<i32>().prop_map(|exit_code| P::ScriptFailed { exit_code }),
        any::<i32>().prop_map(|signal| P::ScriptKilled { signal }),
        Just(P::ScriptTimedOut),
        any::<i32>().prop_map(|os_error| P::ScriptNotStarted { os_error }),
    ]
}

fn state() -> impl Strategy<Value = ServerState> {
    prop_oneof![
        Just(ServerState::Serving),
        Just(ServerState::Absent),
        problem().prop_map(ServerState::Failing)
    ]
}

/// Any frame about the health of servers.
pub fn health_frame() -> impl Strategy<Value = Frame> {
    let server =
        (endpoint(), state()).prop_map(|(service, state)| ReportedServer { service, state });
    let weights = vec((any::<u16>().prop_map(NodeId), any::<u32>()), 0..20);
    let shares = (endpoint(), weights, any::<bool>()).prop_map(|(service, weights, is_served)| {
        ServiceShares {
            service,
            weights,
            is_served,
        }
    });
    prop_oneof![
        vec(server, 0..20).prop_map(|servers| HealthFrame::Report { servers }),
        vec(shares, 0..5).prop_map(|services| HealthFrame::Placement { services }),
    ]
    .prop_map(Frame::Health)
}

#[test]
fn report_with_too_many_services_is_malformed() {
    let one = ReportedServer {
        service: ServiceEndpoint {
            protocol: Protocol::Tcp,
            address: "10.0.0.1:80".parse().expect("an address"),
        },
        state: ServerState::Serving,
    };
    let decoded = |count| {
        let mut bytes = Vec::new();
        let servers = vec![one.clone(); count];
        encode(&Frame::Health(HealthFrame::Report { servers }), &mut bytes).expect("small");
        let mut decoder = FrameDecoder::new();
        decoder.feed(&bytes);
        decoder.next_frame()
    };
    assert!(matches!(decoded(SERVICES_MAX), Ok(Some(_))));
    assert!(matches!(
        decoded(SERVICES_MAX + 1),
        Err(FrameError::Malformed { .. })
    ));
}

#[test]
fn every_problem_has_a_name_and_words() {
    use ServerProblem as P;
    for problem in [
        P::ListenerClosed,
        P::QueueStalled { waiting: 3 },
        P::RequestsUnread { connections: 3 },
        P::ConnectFailed { os_error: 111 },
        P::ConnectTimedOut,
        P::ScriptFailed { exit_code: 2 },
        P::ScriptKilled { signal: 9 },
        P::ScriptTimedOut,
        P::ScriptNotStarted { os_error: 2 },
    ] {
        assert!(
            problem
                .name()
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        );
        assert!(problem.to_string().len() > problem.name().len());
    }
}
