//! Settings that a moved socket gets back after some time at the acceptor.

mod common;

use common::hand_off;
use holdfast_lab::testing::{RouteTarget, TestNetwork, service_addresses};
use holdfast_sys::sockopt::{TCP_RTO_MAX_MS, get_int};
use holdfast_tcp_repair::{
    DeferredOptionsOutcome, TimeoutUncapCondition, set_deferred_options_and_timeout, uncap_timeout,
};
use libc::IPPROTO_TCP;
use std::os::fd::AsFd;

#[test]
fn silent_connection_regains_its_retransmission_timeout() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (_client, server) = net.connection(service);
        let longest = get_int(server.as_fd(), IPPROTO_TCP, TCP_RTO_MAX_MS).expect("getsockopt");
        let moved = hand_off(&net, server);
        let socket = moved.socket.as_fd();
        let capped = get_int(socket, IPPROTO_TCP, TCP_RTO_MAX_MS).expect("getsockopt");
        assert!(
            capped < longest,
            "capped to {capped}, {longest} at the donor"
        );
        let outcome = set_deferred_options_and_timeout(socket, &moved.fixed).expect("settled");
        assert_eq!(
            outcome,
            DeferredOptionsOutcome::TimeoutCapped,
            "no packet was sent"
        );
        uncap_timeout(socket, &moved.fixed, TimeoutUncapCondition::Always).expect("uncapped");
        let now = get_int(socket, IPPROTO_TCP, TCP_RTO_MAX_MS).expect("getsockopt");
        assert_eq!(now, longest, "{service}");
    }
}
