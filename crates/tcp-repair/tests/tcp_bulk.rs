//! Many connections move at once, and a move itself sends no packet.

mod common;

use holdfast_lab::testing::{
    RouteTarget, TestNetwork, exchange, pattern, service_addresses, stream, wait_for,
};
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_tcp_repair::{
    RestoredSocket, SocketPreparer, TcpDynamicState, TcpStaticState, WindowProbe, abandon,
    activate, activate_all, extract, extract_all, map_on_threads, prepare, prepare_all,
    read_static, read_static_all, restore, restore_all, set_deferred_options_and_timeout,
};
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsFd;

/// Number of connections moved together.
const CONNECTIONS: usize = 200;

#[test]
fn map_on_threads_keeps_order_on_any_number_of_threads() {
    for count in [0, 1, 31, 32, 33, 1000] {
        for threads in [0, 1, 2, 3, 7] {
            let doubled = map_on_threads((0..count).collect(), threads, |number| number * 2);
            assert_eq!(
                doubled,
                (0..count).map(|number| number * 2).collect::<Vec<_>>()
            );
        }
    }
}

/// Extracts all sockets on two threads and checks the results.
fn freeze(
    net: &TestNetwork,
    servers: &[std::net::TcpStream],
) -> (Vec<TcpStaticState>, Vec<TcpDynamicState>) {
    let sockets: Vec<_> = servers.iter().map(AsFd::as_fd).collect();
    let fixed = net.a.run(|| read_static_all(&sockets).expect("a reader"));
    let fixed: Vec<_> = fixed
        .into_iter()
        .map(|one| one.expect("static state"))
        .collect();
    net.route(RouteTarget::Unreachable);
    let pairs: Vec<_> = sockets.iter().copied().zip(&fixed).collect();
    let mut states = Vec::new();
    for outcome in extract_all(&pairs, &mut states, 2) {
        outcome.expect("dynamic state");
    }
    for (at, state) in states.iter().enumerate() {
        assert_eq!(state.unread, pattern(at as u32, 100));
    }
    (fixed, states)
}

#[test]
fn connections_move_together_on_two_threads() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let listener = net.a.run(|| TcpListener::bind(service).expect("listen"));
        let (mut clients, servers): (Vec<_>, Vec<_>) =
            (0..CONNECTIONS).map(|_| net.connect_to(&listener)).unzip();
        for (at, client) in clients.iter_mut().enumerate() {
            std::io::Write::write_all(client, &pattern(at as u32, 100)).expect("write");
        }
        wait_for("all received", || {
            servers
                .iter()
                .all(|one| TcpInfo::read(one.as_fd()).expect("TCP_INFO").bytes_received >= 100)
        });
        let (fixed, states) = freeze(&net, &servers);
        let moved = net.b.run(|| {
            let prepared = prepare_all(&SocketPreparer::new().expect("a preparer"), &fixed, 2);
            let work = prepared.into_iter().zip(&fixed).zip(&states);
            let work =
                work.map(|((socket, fixed), state)| (socket.expect("prepared"), fixed, state));
            let restored = restore_all(work.collect(), 2);
            let work = restored.into_iter().zip(&fixed).zip(&states);
            let work =
                work.map(|((socket, fixed), state)| (socket.expect("restored"), fixed, state));
            activate_all(work.collect(), WindowProbe::Never, 2)
        });
        net.route(RouteTarget::B);
        for server in &servers {
            abandon(server.as_fd()).expect("abandoned");
        }
        for (at, (client, moved)) in clients.iter_mut().zip(moved).enumerate() {
            let mut moved = stream(moved.expect("active"));
            let mut unread = [0; 100];
            moved.read_exact(&mut unread).expect("read");
            assert!(unread[..] == pattern(at as u32, 100));
            exchange(client, &mut moved, &pattern(1, 500));
            exchange(&mut moved, client, &pattern(2, 500));
        }
    }
}

/// Returns the number of TCP segments that the host has sent, resets included.
fn sent_segments(host: &holdfast_lab::testing::TestNamespace) -> u64 {
    let text =
        host.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp").expect("counters"));
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let value = |wanted| {
        let mut both = names.split_whitespace().zip(values.split_whitespace());
        let (_, value) = both.find(|(name, _)| *name == wanted).expect("a counter");
        value.parse::<u64>().expect("a number")
    };
    value("OutSegs") + value("OutRsts")
}

#[test]
fn drained_connection_moves_without_a_packet() {
    let net = TestNetwork::new();
    for (service, probe) in service_addresses()
        .into_iter()
        .flat_map(|one| [(one, WindowProbe::Never), (one, WindowProbe::Always)])
    {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        exchange(&mut server, &mut client, &pattern(1, 1000));
        wait_for("drained", || {
            TcpInfo::read(server.as_fd()).expect("TCP_INFO").unacked == 0
        });
        let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
        let before = (sent_segments(&net.a), sent_segments(&net.b));
        let prepared = net.b.run(|| prepare(&fixed).expect("prepared"));
        let state = extract(server.as_fd(), &fixed).expect("frozen");
        let restored: RestoredSocket = net
            .b
            .run(|| restore(prepared, &fixed, &state).expect("restored"));
        net.route(RouteTarget::B);
        let active = activate(restored, &fixed, &state, probe).expect("active");
        set_deferred_options_and_timeout(active.as_fd(), &fixed).expect("settled");
        abandon(server.as_fd()).expect("abandoned");
        assert!(
            server.read(&mut [0; 1]).is_err(),
            "the old descriptor is dead"
        );
        drop(server);
        let probes = u64::from(probe == WindowProbe::Always);
        let after = (sent_segments(&net.a), sent_segments(&net.b));
        assert_eq!(after, (before.0, before.1 + probes), "{probe:?}");
        exchange(&mut client, &mut stream(active), &pattern(2, 1000));
    }
}

#[test]
fn connection_moves_back_to_its_first_host() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, first) = net.connection(service);
        // The program at `a` keeps a descriptor of the socket that moved away.
        let donor_duplicate = first.try_clone().expect("clone");
        let mut at_b = common::hand_off(&net, first).socket;
        exchange(&mut client, &mut at_b, &pattern(1, 5000));
        let fixed = net.b.run(|| read_static(at_b.as_fd()).expect("static"));
        let prepared = net.a.run(|| prepare(&fixed).expect("prepared"));
        net.route(RouteTarget::Unreachable);
        let state = extract(at_b.as_fd(), &fixed).expect("frozen");
        let restored = net
            .a
            .run(|| restore(prepared, &fixed, &state).expect("restored"));
        abandon(at_b.as_fd()).expect("abandoned");
        net.route(RouteTarget::A);
        let reactivated = activate(restored, &fixed, &state, WindowProbe::Never).expect("active");
        set_deferred_options_and_timeout(reactivated.as_fd(), &fixed).expect("settled");
        let mut back = stream(reactivated);
        drop(donor_duplicate);
        exchange(&mut client, &mut back, &pattern(2, 50_000));
        exchange(&mut back, &mut client, &pattern(3, 50_000));
    }
}
