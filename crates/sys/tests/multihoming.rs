//! Two hosts with two links: an association survives the loss of the path in use. Each host needs its own SCTP stack,
//! so the peer is this program, started again in another network namespace.

mod common;
#[path = "common/sctp.rs"]
mod sctp;

use bytes::Bytes;
use common::PATIENCE;
use holdfast_sys::transport::{
    AssocId, Config, ENCAPSULATION_PORT, Endpoint, Event, Failure, Message, PathState, open,
};
use sctp::{Peer, at, is_peer, turn, two_links};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The peer's address on the link that goes down.
const LOST: &str = "10.1.0.2";

fn config(addresses: [&str; 2]) -> Config {
    Config {
        failure: Failure {
            rto_initial: Duration::from_millis(100),
            // The peer takes a moment to start, so many INIT retransmissions are allowed.
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

/// The peer's part: echoes until it is killed. A test of this name that does nothing unless started as the peer.
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

/// The local endpoint, its associations, and the associations for which [`LOST`] is currently unreachable.
struct Ours {
    endpoint: Box<dyn Endpoint>,
    assocs: [AssocId; 2],
    cut_off: BTreeSet<AssocId>,
}

impl Ours {
    /// Runs the endpoint until `done` returns true; `done` sees the events.
    fn until(&mut self, what: &str, mut done: impl FnMut(&Self, &[Event]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let events = turn(self.endpoint.as_mut());
            events.iter().for_each(|event| self.note(event));
            if done(self, &events) {
                return;
            }
            assert!(Instant::now() < deadline, "exceeded time: {what}");
        }
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Down { reason, .. } => panic!("an association is lost: {reason:?}"),
            Event::Path {
                assoc,
                address,
                state,
            } if *address == at(LOST) => match state {
                PathState::Unreachable => {
                    self.cut_off.insert(*assoc);
                }
                PathState::Reachable | PathState::Confirmed => {
                    self.cut_off.remove(assoc);
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// Waits until every association has had an event that `sign` accepts.
    fn each(&mut self, what: &str, sign: impl Fn(&Event) -> Option<AssocId>) {
        let mut missing = BTreeSet::from(self.assocs);
        self.until(what, |_, events| {
            for assoc in events.iter().filter_map(&sign) {
                missing.remove(&assoc);
            }
            missing.is_empty()
        });
    }

    /// Sends `text` on all associations and waits for its echoes.
    fn exchange(&mut self, text: &'static str) {
        let message = Message::new(11, Bytes::from_static(text.as_bytes()));
        let mut taken = Vec::new();
        self.endpoint
            .send_bundles(&self.assocs, &[message], &mut taken);
        assert_eq!(taken, [1; 2]);
        self.each(text, |event| match event {
            Event::Message { assoc, message } if message.data == text => Some(*assoc),
            _ => None,
        });
    }
}

#[test]
fn an_association_outlives_a_path() {
    let (ours, theirs) = two_links();
    let _peer = Peer::start(&theirs);
    ours.run(|| {
        let mut endpoint = open(&config(["10.1.0.1", "10.2.0.1"])).expect("an endpoint");
        let remote = [at(LOST), at("10.2.0.2")];
        let raw = endpoint.connect(&remote, None).expect("asked");
        let inside_udp = endpoint.connect_apart(&remote, Some(ENCAPSULATION_PORT));
        let mut ours = Ours {
            endpoint,
            assocs: [raw, inside_udp.expect("asked")],
            cut_off: BTreeSet::new(),
        };
        ours.each("up", |event| match event {
            Event::Up { assoc, .. } => Some(*assoc),
            _ => None,
        });
        for assoc in ours.assocs {
            let mut known = ours.endpoint.remote_addresses(assoc).expect("known");
            known.sort();
            assert_eq!(known, remote);
        }
        ours.exchange("both paths");
        // A delayed peer must not be mistaken for a lost link, so both links must be up first.
        ours.until("both links", |ours, _| ours.cut_off.is_empty());
        theirs.ip("link set left down");
        ours.exchange("one path");
        ours.until("a lost path", |ours, _| ours.cut_off.len() == 2);
    });
}
