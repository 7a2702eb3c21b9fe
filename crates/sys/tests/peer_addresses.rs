//! Properties that a peer declares: its addresses, one of which is not its own, and its restart. Each host needs its
//! own SCTP stack, so the peer is this program, started again in another network namespace.

mod common;
#[path = "common/sctp.rs"]
mod sctp;

use common::PATIENCE;
use holdfast_sys::transport::{
    AssocId, Config, Endpoint, Event, Failure, Provider, open, provider,
};
use sctp::{Peer, at, is_peer, turn, two_links};
use std::net::SocketAddr;
use std::time::Instant;

/// The peer's own addresses.
const OWN: [&str; 2] = ["10.1.0.2", "10.2.0.2"];
/// An address that the peer claims; packets to this address do not reach the peer.
const CLAIMED: &str = "10.9.0.9";
const US: [&str; 2] = ["10.1.0.1", "10.2.0.1"];

fn open_at(addresses: &[&str]) -> Box<dyn Endpoint> {
    let local = addresses.iter().map(|address| at(address)).collect();
    let config = Config {
        failure: Failure {
            // A restarted peer must find the old association alive, however long the restart takes.
            association_retransmissions: 1000,
            init_retransmissions: 100,
            ..Failure::default()
        },
        ..Config::new(local)
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
    let mut endpoint = open_at(&[OWN[0], OWN[1], CLAIMED]);
    endpoint.connect(&US.map(at), None).expect("asked");
    loop {
        turn(endpoint.as_mut());
    }
}

/// Runs the endpoint until `look` returns a value for the events.
fn until<T>(
    endpoint: &mut dyn Endpoint,
    mut look: impl FnMut(&dyn Endpoint, &[Event]) -> Option<T>,
) -> T {
    let deadline = Instant::now() + PATIENCE * 4;
    loop {
        let events = turn(endpoint);
        if let Some(found) = look(endpoint, &events) {
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

fn confirmed(endpoint: &dyn Endpoint, assoc: AssocId) -> Vec<SocketAddr> {
    let addresses = endpoint.confirmed_addresses(assoc);
    sorted(addresses.expect("an association"))
}

#[test]
fn a_peer_is_where_it_answers_and_begins_anew() {
    let (ours, theirs) = two_links();
    theirs.ip("link add apart type veth peer name end");
    theirs.ip(&format!("address add {CLAIMED}/32 dev apart"));
    theirs.ip("link set end up");
    theirs.ip("link set apart up");
    ours.run(|| {
        let mut endpoint = open_at(&US);
        let endpoint = endpoint.as_mut();
        let first = Peer::start(&theirs);
        let assoc = until(endpoint, |endpoint, events| {
            let up = events.iter().find_map(|event| match event {
                Event::Up { assoc, .. } => Some(*assoc),
                _ => None,
            })?;
            let begun_from = confirmed(endpoint, up);
            assert!(!begun_from.is_empty() && !begun_from.contains(&at(CLAIMED)));
            Some(up)
        });
        until(endpoint, |endpoint, _| {
            (confirmed(endpoint, assoc) == OWN.map(at)).then_some(())
        });
        let said = endpoint.remote_addresses(assoc).expect("an association");
        assert_eq!(sorted(said), [OWN[0], OWN[1], CLAIMED].map(at));

        if provider() == Provider::Kernel {
            // A kernel outlives its programs and shuts their associations down, so no peer restarts here.
            return;
        }
        drop(first);
        let _second = Peer::start(&theirs);
        until(endpoint, |_, events| {
            let down = events.iter().find(|e| matches!(e, Event::Down { .. }));
            assert_eq!(down, None);
            let restarted = Event::Restarted { assoc };
            events.contains(&restarted).then_some(())
        });
        until(endpoint, |endpoint, _| {
            (confirmed(endpoint, assoc) == OWN.map(at)).then_some(())
        });
    });
}
