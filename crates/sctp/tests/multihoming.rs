//! Two hosts with two links: an association survives the loss of the path in use. Each host needs its own SCTP stack,
//! so the peer is this program, started again in another network namespace.

mod common;

use bytes::Bytes;
use common::{Peer, hosts_with_two_links, is_peer, poll_events, socket_address};
use holdfast_lab::testing::WAIT_LIMIT;
use holdfast_sctp::{
    AssocId, ENCAPSULATION_PORT, FailureDetection, MessageToSend, PathState, TransportConfig,
    TransportEndpoint, TransportEvent, open,
};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The peer's address on the link that goes down.
const FAILING_ADDRESS: &str = "10.1.0.2";

fn config(addresses: [&str; 2]) -> TransportConfig {
    TransportConfig {
        failure: FailureDetection {
            rto_initial: Duration::from_millis(100),
            // The peer takes a moment to start, so many INIT retransmissions are allowed.
            init_retransmissions: 100,
            association_retransmissions: 100,
            rto_min: Duration::from_millis(50),
            rto_max: Duration::from_millis(200),
            heartbeat: Duration::from_millis(100),
            ..FailureDetection::default()
        },
        ..TransportConfig::new(addresses.map(socket_address).to_vec())
    }
}

/// The peer's part: echoes until it is killed. A test of this name that does nothing unless started as the peer.
#[test]
fn peer() {
    if !is_peer() {
        return;
    }
    let mut endpoint = open(&config([FAILING_ADDRESS, "10.2.0.2"])).expect("an endpoint");
    loop {
        for event in poll_events(endpoint.as_mut()) {
            if let TransportEvent::Message { assoc, message } = event {
                endpoint.send(assoc, &message).expect("sent");
            }
        }
    }
}

/// The local endpoint, its associations, and the associations for which [`FAILING_ADDRESS`] is currently unreachable.
struct LocalEnd {
    endpoint: Box<dyn TransportEndpoint>,
    assocs: [AssocId; 2],
    cut_off: BTreeSet<AssocId>,
}

impl LocalEnd {
    /// Runs the endpoint until `done` returns true; `done` sees the events.
    fn run_until(&mut self, what: &str, mut done: impl FnMut(&Self, &[TransportEvent]) -> bool) {
        let deadline = Instant::now() + WAIT_LIMIT;
        loop {
            let events = poll_events(self.endpoint.as_mut());
            events.iter().for_each(|event| self.record(event));
            if done(self, &events) {
                return;
            }
            assert!(Instant::now() < deadline, "exceeded time: {what}");
        }
    }

    fn record(&mut self, event: &TransportEvent) {
        match event {
            TransportEvent::Down { reason, .. } => panic!("an association is lost: {reason:?}"),
            TransportEvent::Path {
                assoc,
                address,
                state,
            } if *address == socket_address(FAILING_ADDRESS) => match state {
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

    /// Waits until every association has had an event that `select` accepts.
    fn wait_for_each(&mut self, what: &str, select: impl Fn(&TransportEvent) -> Option<AssocId>) {
        let mut missing = BTreeSet::from(self.assocs);
        self.run_until(what, |_, events| {
            for assoc in events.iter().filter_map(&select) {
                missing.remove(&assoc);
            }
            missing.is_empty()
        });
    }

    /// Sends `text` on all associations and waits for its echoes.
    fn exchange(&mut self, text: &'static str) {
        let message = MessageToSend::new(11, Bytes::from_static(text.as_bytes()));
        let mut taken = Vec::new();
        self.endpoint
            .send_bundles(&self.assocs, &[message], &mut taken);
        assert_eq!(taken, [1; 2]);
        self.wait_for_each(text, |event| match event {
            TransportEvent::Message { assoc, message } if message.data == text => Some(*assoc),
            _ => None,
        });
    }
}

#[test]
fn association_survives_path_failure() {
    let (local_host, peer_host) = hosts_with_two_links();
    let _peer = Peer::start(&peer_host);
    local_host.run(|| {
        let mut endpoint = open(&config(["10.1.0.1", "10.2.0.1"])).expect("an endpoint");
        let remote = [socket_address(FAILING_ADDRESS), socket_address("10.2.0.2")];
        let raw = endpoint.connect(&remote, None).expect("asked");
        let encapsulated = endpoint.connect_from_new_port(&remote, Some(ENCAPSULATION_PORT));
        let mut local_host = LocalEnd {
            endpoint,
            assocs: [raw, encapsulated.expect("asked")],
            cut_off: BTreeSet::new(),
        };
        local_host.wait_for_each("up", |event| match event {
            TransportEvent::Up { assoc, .. } => Some(*assoc),
            _ => None,
        });
        for assoc in local_host.assocs {
            let mut known = local_host.endpoint.remote_addresses(assoc).expect("known");
            known.sort();
            assert_eq!(known, remote);
        }
        local_host.exchange("both paths");
        // A delayed peer must not be mistaken for a lost link, so both links must be up first.
        local_host.run_until("both links", |local_host, _| local_host.cut_off.is_empty());
        peer_host.ip("link set left down");
        local_host.exchange("one path");
        local_host.run_until("a lost path", |local_host, _| local_host.cut_off.len() == 2);
    });
}
