//! SCTP endpoints of this process, over loopback and inside UDP, on ports chosen by the system. The tests use the
//! kernel's SCTP if it has one (`scripts/guest/transport.sh`), or else libusrsctp.

use bytes::Bytes;
use holdfast_sctp::{
    AssocId, DownReason, MessageToSend, SctpProvider, TransportConfig, TransportEndpoint,
    TransportEvent, open, provider,
};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Longest wait for any condition that must become true.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

fn config() -> TransportConfig {
    TransportConfig {
        encapsulation: Some(0),
        raw: false,
        ..TransportConfig::new(vec!["127.0.0.1:0".parse().expect("an address")])
    }
}

/// An endpoint, and its events that no test has consumed yet.
struct TestEndpoint {
    endpoint: Box<dyn TransportEndpoint>,
    events: Vec<TransportEvent>,
}

impl TestEndpoint {
    fn open(config: &TransportConfig) -> Self {
        Self {
            endpoint: open(config).expect("an endpoint"),
            events: Vec::new(),
        }
    }

    fn address(&self) -> SocketAddr {
        self.endpoint.local_addresses().expect("addresses")[0]
    }

    fn connect(&mut self, to: &TestEndpoint) -> AssocId {
        let port = to.endpoint.encapsulation_port();
        let assoc = self.endpoint.connect(&[to.address()], port);
        assoc.expect("a connection in progress")
    }

    fn send(&mut self, assoc: AssocId, data: &'static [u8]) {
        let message = MessageToSend::new(11, Bytes::from_static(data));
        self.endpoint.send(assoc, &message).expect("sent");
    }
}

fn wait_readable(fd: BorrowedFd<'_>) {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the call gets one structure, and the structure outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 5) };
}

/// Runs all sides until `find` returns a value.
fn run_until<T>(
    sides: &mut [&mut TestEndpoint],
    mut find: impl FnMut(&mut [&mut TestEndpoint]) -> Option<T>,
) -> T {
    let deadline = Instant::now() + WAIT_LIMIT;
    loop {
        if let Some(found) = find(sides) {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "exceeded time: nothing happened in time"
        );
        for side in sides.iter_mut() {
            side.endpoint.flush().expect("flushed");
        }
        wait_readable(sides[0].endpoint.fd());
        for side in sides.iter_mut() {
            side.endpoint
                .recv_batch(&mut side.events)
                .expect("received");
        }
    }
}

/// Removes and returns the first event for which `matches` returns a value.
fn take_event<T>(
    side: &mut TestEndpoint,
    matches: impl Fn(&TransportEvent) -> Option<T>,
) -> Option<T> {
    let (index, found) = side
        .events
        .iter()
        .enumerate()
        .find_map(|(index, event)| matches(event).map(|found| (index, found)))?;
    side.events.remove(index);
    Some(found)
}

fn up_assoc(event: &TransportEvent) -> Option<AssocId> {
    match event {
        TransportEvent::Up { assoc, .. } => Some(*assoc),
        _ => None,
    }
}

fn received_message(event: &TransportEvent) -> Option<(AssocId, MessageToSend)> {
    match event {
        TransportEvent::Message { assoc, message } => Some((*assoc, message.clone())),
        _ => None,
    }
}

fn down_event(event: &TransportEvent) -> Option<(AssocId, DownReason)> {
    match event {
        TransportEvent::Down { assoc, reason } => Some((*assoc, *reason)),
        _ => None,
    }
}

fn failed_assoc(event: &TransportEvent) -> Option<AssocId> {
    match event {
        TransportEvent::SendFailed { assoc, .. } => Some(*assoc),
        _ => None,
    }
}

/// Opens two endpoints with an association between them.
fn connected_pair() -> (TestEndpoint, AssocId, TestEndpoint, AssocId) {
    let listen = false;
    connected_pair_with(&config(), &TransportConfig { listen, ..config() })
}

fn connected_pair_with(
    server: &TransportConfig,
    client: &TransportConfig,
) -> (TestEndpoint, AssocId, TestEndpoint, AssocId) {
    let (mut server, mut client) = (TestEndpoint::open(server), TestEndpoint::open(client));
    let started = client.connect(&server);
    let at_server = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], up_assoc)
    });
    let at_client = run_until(&mut [&mut client, &mut server], |s| {
        take_event(s[0], up_assoc)
    });
    assert_eq!(started, at_client);
    (server, at_server, client, at_client)
}

#[test]
fn messages_pass_both_ways() {
    let (mut server, at_server, mut client, at_client) = connected_pair();
    let question = MessageToSend {
        ppid: 11,
        stream: 3,
        unordered: true,
        data: Bytes::from_static(b"question"),
    };
    client.endpoint.send(at_client, &question).expect("sent");
    let received = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], received_message)
    });
    assert_eq!(received, (at_server, question));
    let answer = MessageToSend::new(12, Bytes::from(vec![7; 100_000]));
    server.endpoint.send(at_server, &answer).expect("sent");
    let received = run_until(&mut [&mut client, &mut server], |s| {
        take_event(s[0], received_message)
    });
    assert_eq!(received, (at_client, answer));
}

#[test]
fn ipv6_peers_exchange_messages() {
    let config_at = |address: &str| TransportConfig {
        encapsulation: Some(0),
        raw: false,
        ..TransportConfig::new(vec![address.parse().expect("an address")])
    };
    let mut server = TestEndpoint::open(&config_at("[::1]:0"));
    let mut client = TestEndpoint::open(&config_at("[::1]:0"));
    let started = client.connect(&server);
    let at_server = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], up_assoc)
    });
    let peer = server.endpoint.confirmed_addresses(at_server);
    assert_eq!(peer.expect("an association"), [client.address()]);
    assert!(client.address().is_ipv6());
    client.send(started, b"question");
    let received = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], received_message)
    });
    assert_eq!(
        received,
        (
            at_server,
            MessageToSend::new(11, Bytes::from_static(b"question"))
        )
    );
    let answer = MessageToSend::new(11, Bytes::from(vec![6; 100_000]));
    server.endpoint.send(at_server, &answer).expect("sent");
    let received = run_until(&mut [&mut client, &mut server], |s| {
        take_event(s[0], received_message)
    });
    assert_eq!(received, (started, answer));
}

#[test]
fn shutdown_and_abort_are_reported_to_both_ends() {
    let (mut server, at_server, mut client, at_client) = connected_pair();
    client.send(at_client, b"last words");
    client.endpoint.shutdown(at_client).expect("shut down");
    let received = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], received_message)
    });
    assert_eq!(received.1.data, "last words");
    let end = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], down_event)
    });
    assert_eq!(end, (at_server, DownReason::Shutdown));
    let end = run_until(&mut [&mut client, &mut server], |s| {
        take_event(s[0], down_event)
    });
    assert_eq!(end, (at_client, DownReason::Shutdown));
    let send_after_end = client
        .endpoint
        .send(at_client, &MessageToSend::new(11, "x".into()));
    match send_after_end {
        Ok(()) => assert_eq!(
            run_until(&mut [&mut client], |s| take_event(s[0], failed_assoc)),
            at_client
        ),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotConnected),
    }

    let (mut server, at_server, mut client, at_client) = connected_pair();
    client.endpoint.abort(at_client).expect("aborted");
    let end = run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], down_event)
    });
    assert_eq!(end, (at_server, DownReason::Lost));
}

#[test]
fn failed_connect_is_reported() {
    let mut client = TestEndpoint::open(&config());
    let unused_address = "127.0.0.1:9".parse().expect("an address");
    let port = client.endpoint.encapsulation_port();
    let asked = client
        .endpoint
        .connect(&[unused_address], port)
        .expect("asked");
    let end = run_until(&mut [&mut client], |s| take_event(s[0], down_event));
    assert_eq!(end, (asked, DownReason::NotStarted));
}

#[test]
fn bundle_is_sent_to_many_associations() {
    let mut server = TestEndpoint::open(&config());
    let mut clients: Vec<TestEndpoint> = (0..5).map(|_| TestEndpoint::open(&config())).collect();
    let mut assocs = Vec::new();
    for client in &mut clients {
        client.connect(&server);
        assocs.push(run_until(&mut [&mut server, client], |s| {
            take_event(s[0], up_assoc)
        }));
    }
    let messages = ["news", "more", "all"].map(|text| MessageToSend::new(12, Bytes::from(text)));
    let mut taken = Vec::new();
    server.endpoint.send_bundles(&assocs, &messages, &mut taken);
    assert_eq!(taken, [3; 5]);
    for client in &mut clients {
        for news in &messages {
            let came = run_until(&mut [client, &mut server], |s| {
                take_event(s[0], received_message)
            });
            assert_eq!(came.1, *news);
        }
    }
    // An unknown association counts as taking all messages, since an event has reported its end.
    let unknown = [AssocId(u64::MAX)];
    server
        .endpoint
        .send_bundles(&unknown, &messages, &mut taken);
    assert_eq!(taken, [3; 6]);
}

#[test]
fn remote_addresses_and_round_trip_are_known() {
    let (mut server, at_server, mut client, at_client) = connected_pair();
    let addresses = server.endpoint.remote_addresses(at_server);
    assert_eq!(addresses.expect("addresses"), [client.address()]);
    client.send(at_client, b"ping");
    run_until(&mut [&mut server, &mut client], |s| {
        take_event(s[0], received_message)
    });
    client
        .endpoint
        .round_trip(at_client)
        .expect("an association");
    assert!(client.endpoint.round_trip(AssocId(u64::MAX)).is_err());
}

/// No data returns with the acknowledgements of these messages, so the peer delays them by 200 ms.
#[test]
fn delayed_acknowledgements_do_not_raise_round_trip() {
    if provider() == SctpProvider::Kernel {
        // The kernel only reports a smoothed time, which includes the delays.
        return;
    }
    // Heartbeats are measured too, so a long interval keeps the path from being probed during a stall.
    let mut delaying_config = config();
    delaying_config.failure.heartbeat = Duration::from_secs(3600);
    let (mut server, _, mut client, at_client) =
        connected_pair_with(&delaying_config, &delaying_config);
    let smoothed = |client: &TestEndpoint| client.endpoint.round_trip(at_client).expect("a time");
    let first = smoothed(&client);
    for _ in 0..10 {
        client.send(at_client, b"lone");
        run_until(&mut [&mut server, &mut client], |s| {
            take_event(s[0], received_message)
        });
        let acknowledged = Instant::now() + Duration::from_millis(250);
        run_until(&mut [&mut server, &mut client], |_| {
            (Instant::now() > acknowledged).then_some(())
        });
    }
    assert_eq!(smoothed(&client), first, "no round trip was measured");
    // A requested measurement counts; the value may be unchanged once.
    run_until(&mut [&mut server, &mut client], |s| {
        s[1].endpoint.measure_round_trip(at_client);
        (smoothed(s[1]) != first).then_some(())
    });
}

#[test]
fn full_send_buffer_is_reported_and_drains() {
    let small = TransportConfig {
        send_buffer: 20_000,
        ..config()
    };
    let (mut server, _, mut client, assoc) = connected_pair_with(&config(), &small);
    let piece = MessageToSend::new(11, Bytes::from(vec![1; 5_000]));
    let mut count = 0;
    let refused = loop {
        match client.endpoint.send(assoc, &piece) {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
        assert!(count < 1000, "the send buffer never fills");
    };
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    for _ in 0..count {
        run_until(&mut [&mut server, &mut client], |s| {
            take_event(s[0], received_message)
        });
    }
    client.endpoint.send(assoc, &piece).expect("room again");
}

#[test]
fn bundle_is_accepted_up_to_buffer_space() {
    let small = TransportConfig {
        send_buffer: 20_000,
        ..config()
    };
    let (mut server, _, mut client, assoc) = connected_pair_with(&config(), &small);
    let piece = |id: u8| MessageToSend::new(12, Bytes::from(vec![id; 1_000]));
    let pieces: Vec<MessageToSend> = (0..100).map(piece).collect();
    let (mut accepted, mut calls) = (0, 0);
    let mut received = Vec::new();
    let sides = &mut [&mut client, &mut server];
    run_until(sides, |sides| {
        let mut taken = Vec::new();
        let rest = &pieces[accepted..];
        sides[0].endpoint.send_bundles(&[assoc], rest, &mut taken);
        accepted += taken[0];
        calls += 1;
        received.extend(take_event(sides[1], received_message).map(|(_, message)| message));
        (received.len() == pieces.len()).then_some(())
    });
    assert!(calls > 1 && received == pieces);
}

#[test]
fn oversized_message_ends_the_association() {
    let strict = TransportConfig {
        message_len_max: 1000,
        ..config()
    };
    let (mut server, _, mut client, assoc) = connected_pair_with(&strict, &config());
    let long = MessageToSend::new(11, Bytes::from(vec![1; 100_000]));
    client.endpoint.send(assoc, &long).expect("sent");
    let end = run_until(&mut [&mut client, &mut server], |s| {
        take_event(s[0], down_event)
    });
    assert_eq!(end, (assoc, DownReason::Lost));
    assert!(
        !server
            .events
            .iter()
            .any(|event| received_message(event).is_some())
    );
}

/// The server has small buffers; one peer reads nothing but stays alive, and another peer is not affected.
#[test]
fn peer_that_does_not_read_does_not_block_others() {
    if provider() == SctpProvider::Usrsctp {
        // All endpoints of a process receive when one of them runs, so no endpoint can be deaf.
        return;
    }
    let small = TransportConfig {
        send_buffer: 20_000,
        receive_buffer: 20_000,
        ..config()
    };
    let mut server = TestEndpoint::open(&small);
    let mut not_reading = TestEndpoint::open(&small);
    let mut other = TestEndpoint::open(&config());
    not_reading.connect(&server);
    let to_not_reading = run_until(&mut [&mut server, &mut not_reading], |s| {
        take_event(s[0], up_assoc)
    });
    run_until(&mut [&mut not_reading, &mut server], |s| {
        take_event(s[0], up_assoc)
    });
    other.connect(&server);
    let to_other = run_until(&mut [&mut server, &mut other], |s| {
        take_event(s[0], up_assoc)
    });
    run_until(&mut [&mut other, &mut server], |s| {
        take_event(s[0], up_assoc)
    });

    let piece = MessageToSend::new(11, Bytes::from(vec![1; 1_000]));
    let mut refused_sends = 0;
    run_until(&mut [&mut server, &mut other], |s| {
        let full = s[0].endpoint.send(to_not_reading, &piece).is_err();
        refused_sends = if full { refused_sends + 1 } else { 0 };
        (refused_sends > 20).then_some(())
    });
    let mut received = 0;
    for number in 0..200u8 {
        let piece = MessageToSend::new(12, Bytes::from(vec![number; 1_000]));
        run_until(&mut [&mut server, &mut other], |s| {
            s[0].endpoint.send(to_other, &piece).ok()
        });
        while let Some((_, message)) = take_event(&mut other, received_message) {
            assert_eq!(message.data[0], received);
            received += 1;
        }
    }
    while received < 200 {
        let (_, message) = run_until(&mut [&mut server, &mut other], |s| {
            take_event(s[1], received_message)
        });
        assert_eq!(message.data[0], received);
        received += 1;
    }
    // An ABORT needs no free buffer space.
    server
        .endpoint
        .abort(to_not_reading)
        .expect("an association");
    let (_, reason) = run_until(&mut [&mut not_reading, &mut server], |s| {
        take_event(s[0], down_event)
    });
    assert_eq!(reason, DownReason::Lost);
}
