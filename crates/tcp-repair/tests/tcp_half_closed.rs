//! Connections in every half-closed state move, and close as they would have without the move.

mod common;

use common::{fill_send_queue, hand_off, tcp_state};
use holdfast_lab::testing::{
    RouteTarget, TestNetwork, at_end, exchange, pattern, service_addresses, wait_for,
};
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;

fn wait_for_state(socket: &TcpStream, wanted: TcpState) {
    wait_for(&format!("{wanted:?}"), || tcp_state(socket) == wanted);
}

#[test]
fn close_wait_connection_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, server) = net.connection(service);
        client.write_all(b"last words").expect("write");
        client.shutdown(Shutdown::Write).expect("shutdown");
        wait_for_state(&server, TcpState::CloseWait);
        let mut moved = hand_off(&net, server);
        assert_eq!(moved.state.state, TcpState::CloseWait);
        assert_eq!(tcp_state(&moved.socket), TcpState::CloseWait);
        let mut words = Vec::new();
        moved.socket.read_to_end(&mut words).expect("read");
        assert_eq!(words, b"last words");
        exchange(&mut moved.socket, &mut client, &pattern(1, 100_000));
        drop(moved);
        assert!(at_end(&mut client));
    }
}

#[test]
fn fin_wait_2_connection_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, server) = net.connection(service);
        server.shutdown(Shutdown::Write).expect("shutdown");
        wait_for_state(&server, TcpState::FinWait2);
        let mut moved = hand_off(&net, server);
        assert_eq!(tcp_state(&moved.socket), TcpState::FinWait2);
        assert!(at_end(&mut client));
        exchange(&mut client, &mut moved.socket, &pattern(2, 100_000));
        drop(client);
        assert!(at_end(&mut moved.socket));
    }
}

#[test]
fn fin_wait_1_connection_with_unsent_fin_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        let outward = pattern(3, 30_000_000);
        let written = fill_send_queue(&mut server, &outward);
        server.shutdown(Shutdown::Write).expect("shutdown");
        let mut moved = hand_off(&net, server);
        assert!(moved.state.fin_unsent);
        assert_eq!(tcp_state(&moved.socket), TcpState::FinWait1);
        let mut arrived = Vec::new();
        client.read_to_end(&mut arrived).expect("read");
        assert!(arrived == outward[..written], "the send queue changed");
        exchange(&mut client, &mut moved.socket, &pattern(4, 1000));
        wait_for_state(&moved.socket, TcpState::FinWait2);
    }
}

#[test]
fn fin_wait_1_connection_with_sent_fin_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        net.block_traffic_to_client(true);
        server.write_all(b"good night").expect("write");
        server.shutdown(Shutdown::Write).expect("shutdown");
        wait_for("the FIN sent", || {
            TcpInfo::read(server.as_fd())
                .expect("TCP_INFO")
                .notsent_bytes
                == 0
        });
        let mut moved = hand_off(&net, server);
        assert_eq!(moved.state.outgoing, b"good night");
        assert!(moved.state.has_sent_fin());
        assert_eq!(tcp_state(&moved.socket), TcpState::FinWait1);
        net.block_traffic_to_client(false);
        let mut words = Vec::new();
        client.read_to_end(&mut words).expect("read");
        assert_eq!(words, b"good night");
        exchange(&mut client, &mut moved.socket, &pattern(5, 1000));
        wait_for_state(&moved.socket, TcpState::FinWait2);
    }
}

#[test]
fn closing_connection_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, server) = net.connection(service);
        net.block_traffic_to_client(true);
        server.shutdown(Shutdown::Write).expect("shutdown");
        client.write_all(b"over").expect("write");
        client.shutdown(Shutdown::Write).expect("shutdown");
        wait_for_state(&server, TcpState::Closing);
        let mut moved = hand_off(&net, server);
        assert_eq!(moved.state.state, TcpState::Closing);
        assert_eq!(tcp_state(&moved.socket), TcpState::Closing);
        net.block_traffic_to_client(false);
        let mut words = Vec::new();
        moved.socket.read_to_end(&mut words).expect("read");
        assert_eq!(words, b"over");
        assert!(at_end(&mut client));
        wait_for_state(&moved.socket, TcpState::Close);
    }
}

#[test]
fn last_ack_connection_moves() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        client.shutdown(Shutdown::Write).expect("shutdown");
        wait_for_state(&server, TcpState::CloseWait);
        net.block_traffic_to_client(true);
        server.write_all(b"finally").expect("write");
        server.shutdown(Shutdown::Write).expect("shutdown");
        wait_for_state(&server, TcpState::LastAck);
        let moved = hand_off(&net, server);
        assert_eq!(moved.state.state, TcpState::LastAck);
        assert_eq!(tcp_state(&moved.socket), TcpState::LastAck);
        net.block_traffic_to_client(false);
        let mut words = Vec::new();
        client.read_to_end(&mut words).expect("read");
        assert_eq!(words, b"finally");
        wait_for_state(&moved.socket, TcpState::Close);
    }
}
