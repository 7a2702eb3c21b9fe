//! Two hosts with two links: an association survives the loss of the path in use. Each host has a stack of its own, so the peer is this
//! program again, started in another network namespace.

mod common;
#[path = "common/sctp.rs"]
mod sctp;

use bytes::Bytes;
use common::PATIENCE;
use holdfast_sys::transport::{
    AssocId, Config, ENCAPSULATION_PORT, Endpoint, Event, Failure, Message, PathState, open,
};
use sctp::{Peer, at, is_peer, turn, two_links};
use std::time::{Duration, Instant};

/// The peer's address on the link that goes down.
const LOST: &str = "10.1.0.2";

fn config(addresses: [&str; 2]) -> Config {
    Config {
        failure: Failure {
            rto_initial: Duration::from_millis(100),
            // The peer takes a moment to start.
            init_retransmissions: 100,
            association_retransmissions: 100,
            rto_min: Duration::from_millis(50),
            rto_max: Duration::from_millis(200),
            heartbeat: Duration::from_millis(100),
            ..Failure::default()
        },
        ..Config::new(addresses.map(at).to_vec())
    }
}

/// The peer: echoes until it is killed. A test of its own name, that does nothing unless it is started as the peer.
#[test]
fn peer() {
    if !is_peer() {
        return;
    }
    let mut endpoint = open(&config([LOST, "10.2.0.2"])).expect("an endpoint");
    loop {
        for event in turn(endpoint.as_mut()) {
            if let Event::Message { assoc, message } = event {
                endpoint.send(assoc, &message).expect("sent");
            }
        }
    }
}

/// What every association shall tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    Up,
    Answer,
    PathLost,
}

/// Waits until every association has given every sign, in whatever order.
fn each(
    endpoint: &mut dyn Endpoint,
    assocs: &[AssocId],
    signs: &[Sign],
    read: impl Fn(&Event) -> Option<(AssocId, Sign)>,
) {
    let deadline = Instant::now() + PATIENCE;
    let pairs = |&assoc: &AssocId| signs.iter().map(move |&sign| (assoc, sign));
    let mut missing: Vec<_> = assocs.iter().flat_map(pairs).collect();
    while !missing.is_empty() {
        assert!(Instant::now() < deadline, "{missing:?} did not come");
        for event in turn(endpoint) {
            if let Event::Down { reason, .. } = event {
                panic!("an association is lost: {reason:?}");
            }
            let found = read(&event);
            missing.retain(|&pair| Some(pair) != found);
        }
    }
}

/// Sends `text` on all and waits for it to come back, and for the other signs.
fn exchange(endpoint: &mut dyn Endpoint, assocs: &[AssocId], text: &'static str, signs: &[Sign]) {
    let message = Message::new(11, Bytes::from_static(text.as_bytes()));
    let mut taken = Vec::new();
    endpoint.send_bundles(assocs, &[message], &mut taken);
    assert_eq!(taken, vec![1; assocs.len()]);
    each(endpoint, assocs, signs, |event| match event {
        Event::Message { assoc, message } if message.data == text => Some((*assoc, Sign::Answer)),
        Event::Path {
            assoc,
            address,
            state: PathState::Unreachable,
        } if *address == at(LOST) => Some((*assoc, Sign::PathLost)),
        _ => None,
    });
}

#[test]
fn an_association_outlives_a_path() {
    let (ours, theirs) = two_links();
    let _peer = Peer::start(&theirs);
    ours.run(|| {
        let mut endpoint = open(&config(["10.1.0.1", "10.2.0.1"])).expect("an endpoint");
        let endpoint = endpoint.as_mut();
        let remote = [at(LOST), at("10.2.0.2")];
        let raw = endpoint.connect(&remote, None).expect("asked");
        let inside_udp = endpoint.connect_apart(&remote, Some(ENCAPSULATION_PORT));
        let assocs = [raw, inside_udp.expect("asked")];
        each(endpoint, &assocs, &[Sign::Up], |event| match event {
            Event::Up { assoc, .. } => Some((*assoc, Sign::Up)),
            _ => None,
        });
        for assoc in assocs {
            let mut known = endpoint.remote_addresses(assoc).expect("an association");
            known.sort();
            assert_eq!(known, remote);
        }
        exchange(endpoint, &assocs, "both paths", &[Sign::Answer]);
        theirs.ip("link set left down");
        let signs = [Sign::Answer, Sign::PathLost];
        exchange(endpoint, &assocs, "one path", &signs);
    });
}
