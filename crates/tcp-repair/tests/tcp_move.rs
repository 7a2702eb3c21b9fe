//! A TCP connection moves between two hosts without any effect on its client.

mod common;

use common::{MovedConnection, fill_send_queue, hand_off, hand_off_from, tcp_state};
use holdfast_lab::testing::{
    RouteTarget, TestNetwork, at_end, counter, exchange, pattern, service_addresses, wait_for,
};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use holdfast_tcp_repair::{WindowProbe, extract, read_static, resume, shift_timestamp_clock};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

#[test]
fn idle_connection_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        exchange(&mut client, &mut server, &pattern(1, 1000));
        exchange(&mut server, &mut client, &pattern(2, 1000));
        wait_for("drained", || {
            TcpInfo::read(server.as_fd()).expect("TCP_INFO").unacked == 0
        });
        let before = TcpInfo::read(server.as_fd()).expect("TCP_INFO");
        let MovedConnection {
            mut socket,
            fixed,
            state,
            nonblocking,
        } = hand_off(&net, server);
        assert!(!nonblocking);
        assert!(fixed.timestamps && fixed.sack && fixed.window_scale.is_some());
        let after = TcpInfo::read(socket.as_fd()).expect("TCP_INFO");
        assert_eq!(after.options, before.options);
        assert_eq!(after.snd_wscale, before.snd_wscale);
        assert_eq!(after.rcv_wscale, before.rcv_wscale);
        assert_eq!(after.snd_mss, before.snd_mss);
        assert_eq!(after.snd_wnd, before.snd_wnd);
        let coded = postcard::to_stdvec(&state).expect("coded").len();
        assert!(coded < 80, "a drained connection takes {coded} bytes");
        exchange(&mut client, &mut socket, &pattern(3, 300_000));
        exchange(&mut socket, &mut client, &pattern(4, 300_000));
        drop(socket);
        assert!(at_end(&mut client));
    }
    for host in [&net.client, &net.b] {
        assert_eq!(counter(host, "PAWSEstab"), 0);
        assert_eq!(counter(host, "TCPRcvQDrop"), 0);
    }
}

#[test]
fn queue_contents_survive() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        let (inward, outward) = (pattern(5, 50_000), pattern(6, 30_000_000));
        client.write_all(&inward).expect("write");
        let mut first_part = vec![0; 20_000];
        server.read_exact(&mut first_part).expect("read");
        wait_for("the rest received", || {
            TcpInfo::read(server.as_fd())
                .expect("TCP_INFO")
                .bytes_received
                >= 50_000
        });
        let written = fill_send_queue(&mut server, &outward);
        let MovedConnection {
            mut socket, state, ..
        } = hand_off(&net, server);
        assert_eq!(state.unread, inward[20_000..]);
        assert!(state.unsent > 0 && !state.outgoing.is_empty());
        let mut second_part = vec![0; 30_000];
        socket.read_exact(&mut second_part).expect("read");
        assert_eq!(second_part, inward[20_000..]);
        let mut arrived = vec![0; written];
        client.read_exact(&mut arrived).expect("read");
        assert!(arrived == outward[..written], "the send queue changed");
        exchange(&mut client, &mut socket, &pattern(7, 1000));
        exchange(&mut socket, &mut client, &pattern(8, 1000));
    }
}

#[test]
fn lost_data_is_retransmitted() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        exchange(&mut server, &mut client, &pattern(9, 1000));
        net.block_traffic_to_client(true);
        let lost = pattern(10, 9000);
        server.write_all(&lost).expect("write");
        wait_for("sent", || {
            let info = TcpInfo::read(server.as_fd()).expect("TCP_INFO");
            info.unacked > 0 && info.notsent_bytes == 0
        });
        let MovedConnection {
            mut socket, state, ..
        } = hand_off(&net, server);
        assert_eq!((state.outgoing.len(), state.unsent), (9000, 0));
        net.block_traffic_to_client(false);
        let mut arrived = vec![0; 9000];
        client.read_exact(&mut arrived).expect("read");
        assert!(arrived == lost, "the sent part changed");
        exchange(&mut socket, &mut client, &pattern(11, 1000));
    }
}

/// Moves the connection to and fro, four times per second, until `done` returns true. No timeout of a restored socket
/// is this short.
fn move_back_and_forth_until(
    net: &TestNetwork,
    server: TcpStream,
    probe: WindowProbe,
    mut done: impl FnMut() -> bool,
) -> TcpStream {
    let mut socket = server;
    for handoff in 0..40 {
        let hosts = match handoff % 2 {
            0 => (&net.a, &net.b, RouteTarget::B),
            _ => (&net.b, &net.a, RouteTarget::A),
        };
        socket = hand_off_from(net, hosts, socket, probe).socket;
        if handoff == 0 {
            net.block_traffic_to_client(false);
        }
        std::thread::sleep(Duration::from_millis(250));
        if done() {
            return socket;
        }
    }
    panic!("lost data was not retransmitted");
}

#[test]
fn lost_data_arrives_despite_frequent_moves() {
    let net = TestNetwork::new();
    for (service, length) in service_addresses().into_iter().zip([9000, 30_000]) {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        exchange(&mut server, &mut client, &pattern(9, 1000));
        net.block_traffic_to_client(true);
        let lost = pattern(10, length);
        server.write_all(&lost).expect("write");
        wait_for("sent", || {
            TcpInfo::read(server.as_fd()).expect("TCP_INFO").unacked > 0
        });
        let mut arrived = vec![0; length];
        let mut count = 0;
        client.set_nonblocking(true).expect("nonblocking");
        let mut socket =
            move_back_and_forth_until(&net, server, WindowProbe::IfUnacknowledged, || {
                count += client.read(&mut arrived[count..]).unwrap_or(0);
                count == length
            });
        assert!(arrived == lost, "bytes changed in transit");
        client.set_nonblocking(false).expect("blocking");
        exchange(&mut socket, &mut client, &pattern(11, 1000));
    }
}

#[test]
fn lost_fin_arrives_despite_frequent_moves() {
    let net = TestNetwork::new();
    for (service, length) in service_addresses().into_iter().zip([0, 100]) {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        net.block_traffic_to_client(true);
        let lost = pattern(12, length);
        server.write_all(&lost).expect("write");
        server.shutdown(Shutdown::Write).expect("shut");
        let mut arrived = Vec::new();
        client.set_nonblocking(true).expect("nonblocking");
        let mut socket = move_back_and_forth_until(&net, server, WindowProbe::Never, || {
            client.read_to_end(&mut arrived).is_ok()
        });
        assert!(arrived == lost, "bytes changed in transit");
        client.write_all(b"bye").expect("write");
        drop(client);
        assert!(socket.read_to_end(&mut arrived).is_ok() && arrived.ends_with(b"bye"));
    }
}

#[test]
fn timestamps_never_go_back() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        // The donor's timestamp clock is ten days ahead of the acceptor's.
        shift_timestamp_clock(server.as_fd(), 10 * 86_400 * 1000).expect("shifted");
        exchange(&mut server, &mut client, &pattern(9, 1000));
        let mut moved = hand_off(&net, server);
        exchange(&mut moved.socket, &mut client, &pattern(10, 1000));
        exchange(&mut client, &mut moved.socket, &pattern(11, 1000));
    }
    assert_eq!(counter(&net.client, "PAWSEstab"), 0, "timestamps refused");
}

#[test]
fn frozen_socket_continues_after_rollback() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        let (mut client, mut server) = net.connection(service);
        let outward = pattern(12, 30_000_000);
        let written = fill_send_queue(&mut server, &outward);
        let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
        let frozen = extract(server.as_fd(), &fixed).expect("frozen");
        assert!(frozen.unsent > 0);
        resume(server.as_fd(), &fixed).expect("resumed");
        let after_rollback = net.a.run(|| read_static(server.as_fd()).expect("static"));
        assert_eq!(
            after_rollback.options, fixed.options,
            "rollback changed an option"
        );
        server.set_nonblocking(false).expect("blocking");
        let mut arrived = vec![0; written];
        client.read_exact(&mut arrived).expect("read");
        assert!(arrived == outward[..written], "the send queue changed");
        exchange(&mut client, &mut server, &pattern(13, 1000));
        exchange(&mut server, &mut client, &pattern(14, 1000));
        assert_eq!(tcp_state(&server), TcpState::Established);
    }
}

#[test]
fn negotiated_ecn_is_recorded() {
    let net = TestNetwork::new();
    for host in [&net.client, &net.a, &net.b] {
        host.write_sysctl("net/ipv4/tcp_ecn", "1");
    }
    let (mut client, mut server) = net.connection(service_addresses()[0]);
    exchange(&mut client, &mut server, &pattern(1, 1000));
    let mut moved = hand_off(&net, server);
    assert!(moved.fixed.ecn && moved.state.ecn);
    exchange(&mut client, &mut moved.socket, &pattern(2, 1000));
    exchange(&mut moved.socket, &mut client, &pattern(3, 1000));
}
