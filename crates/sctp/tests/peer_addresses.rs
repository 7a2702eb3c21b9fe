//! Properties that a peer declares: its addresses, one of which is not its own, and its restart. Each host needs its
//! own SCTP stack, so the peer is this program, started again in another network namespace.

mod common;

use common::{Peer, hosts_with_two_links, is_peer, poll_events, socket_address};
use holdfast_lab::testing::WAIT_LIMIT;
use holdfast_sctp::{
    AssocId, FailureDetection, SctpProvider, TransportConfig, TransportEndpoint, TransportEvent,
    open, provider,
};
use std::net::SocketAddr;
use std::time::Instant;

/// The peer's own addresses.
const PEER_ADDRESSES: [&str; 2] = ["10.1.0.2", "10.2.0.2"];
/// An address that the peer claims; packets to this address do not reach the peer.
const FALSE_ADDRESS: &str = "10.9.0.9";
const LOCAL_ADDRESSES: [&str; 2] = ["10.1.0.1", "10.2.0.1"];

fn open_at(addresses: &[&str]) -> Box<dyn TransportEndpoint> {
    let local = addresses
        .iter()
        .map(|address| socket_address(address))
        .collect();
    let config = TransportConfig {
        failure: FailureDetection {
            // A restarted peer must find the old association alive, however long the restart takes.
            association_retransmissions: 1000,
            init_retransmissions: 100,
            ..FailureDetection::default()
        },
        ..TransportConfig::new(local)
    };
    open(&config).expect("an endpoint")
}

/// The peer's part: begins an association and keeps it until it is killed. A test of this name that does nothing unless
/// started as the peer.
#[test]
fn peer() {
    if !is_peer() {
        return;
    }
    let mut endpoint = open_at(&[PEER_ADDRESSES[0], PEER_ADDRESSES[1], FALSE_ADDRESS]);
    endpoint
        .connect(&LOCAL_ADDRESSES.map(socket_address), None)
        .expect("asked");
    loop {
        poll_events(endpoint.as_mut());
    }
}

/// Runs the endpoint until `find` returns a value for the events.
fn run_until<T>(
    endpoint: &mut dyn TransportEndpoint,
    mut find: impl FnMut(&dyn TransportEndpoint, &[TransportEvent]) -> Option<T>,
) -> T {
    let deadline = Instant::now() + WAIT_LIMIT * 4;
    loop {
        let events = poll_events(endpoint);
        if let Some(found) = find(endpoint, &events) {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "exceeded time: nothing happened in time"
        );
    }
}

fn sorted(mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    addresses.sort();
    addresses
}

fn sorted_confirmed(endpoint: &dyn TransportEndpoint, assoc: AssocId) -> Vec<SocketAddr> {
    let addresses = endpoint.confirmed_addresses(assoc);
    sorted(addresses.expect("an association"))
}

#[test]
fn only_answering_addresses_are_confirmed_and_restart_is_reported() {
    let (local_host, peer_host) = hosts_with_two_links();
    peer_host.ip("link add apart type veth peer name end");
    peer_host.ip(&format!("address add {FALSE_ADDRESS}/32 dev apart"));
    peer_host.ip("link set end up");
    peer_host.ip("link set apart up");
    local_host.run(|| {
        let mut endpoint = open_at(&LOCAL_ADDRESSES);
        let endpoint = endpoint.as_mut();
        let first = Peer::start(&peer_host);
        let assoc = run_until(endpoint, |endpoint, events| {
            let up = events.iter().find_map(|event| match event {
                TransportEvent::Up { assoc, .. } => Some(*assoc),
                _ => None,
            })?;
            let initially_confirmed = sorted_confirmed(endpoint, up);
            assert!(
                !initially_confirmed.is_empty()
                    && !initially_confirmed.contains(&socket_address(FALSE_ADDRESS))
            );
            Some(up)
        });
        run_until(endpoint, |endpoint, _| {
            (sorted_confirmed(endpoint, assoc) == PEER_ADDRESSES.map(socket_address)).then_some(())
        });
        let claimed_addresses = endpoint.remote_addresses(assoc).expect("an association");
        assert_eq!(
            sorted(claimed_addresses),
            [PEER_ADDRESSES[0], PEER_ADDRESSES[1], FALSE_ADDRESS].map(socket_address)
        );

        if provider() == SctpProvider::Kernel {
            // A kernel outlives its programs and shuts their associations down, so no peer restarts here.
            return;
        }
        drop(first);
        let _second = Peer::start(&peer_host);
        run_until(endpoint, |_, events| {
            let down = events
                .iter()
                .find(|e| matches!(e, TransportEvent::Down { .. }));
            assert_eq!(down, None);
            let restarted = TransportEvent::Restarted { assoc };
            events.contains(&restarted).then_some(())
        });
        run_until(endpoint, |endpoint, _| {
            (sorted_confirmed(endpoint, assoc) == PEER_ADDRESSES.map(socket_address)).then_some(())
        });
    });
}
