//! Settings that a moved socket gets back after some time at the acceptor.

mod common;

use common::{Net, To, hand_off, services};
use holdfast_sys::sockopt::{TCP_RTO_MAX_MS, get_int};
use holdfast_sys::tcp_repair::{Settled, Uncap, settle, uncap_timeout};
use libc::IPPROTO_TCP;
use std::os::fd::AsFd;

#[test]
fn a_silent_connection_gets_its_longest_timeout_back() {
    let net = Net::new();
    for service in services() {
        net.route(To::A);
        let (_client, server) = net.connection(service);
        let longest = get_int(server.as_fd(), IPPROTO_TCP, TCP_RTO_MAX_MS).expect("getsockopt");
        let moved = hand_off(&net, server);
        let socket = moved.socket.as_fd();
        let capped = get_int(socket, IPPROTO_TCP, TCP_RTO_MAX_MS).expect("getsockopt");
        assert!(capped < longest, "{capped} before, {longest} at the donor");
        let outcome = settle(socket, &moved.fixed).expect("settled");
        assert_eq!(outcome, Settled::Later, "nothing was sent");
        uncap_timeout(socket, &moved.fixed, Uncap::Now).expect("uncapped");
        let now = get_int(socket, IPPROTO_TCP, TCP_RTO_MAX_MS).expect("getsockopt");
        assert_eq!(now, longest, "{service}");
    }
}
