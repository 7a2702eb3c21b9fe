//! SCTP endpoints of this process, over loopback and inside UDP, on ports chosen by the system. The tests use the
//! kernel's SCTP if it has one (`scripts/guest/transport.sh`), or else libusrsctp.

use bytes::Bytes;
use holdfast_sys::transport::{
    AssocId, Config, DownReason, Endpoint, Event, Message, Provider, open, provider,
};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Longest wait for any condition that must become true.
const PATIENCE: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config {
        encapsulation: Some(0),
        raw: false,
        ..Config::new(vec!["127.0.0.1:0".parse().expect("an address")])
    }
}

/// An endpoint, and its events that no test has consumed yet.
struct Side {
    endpoint: Box<dyn Endpoint>,
    events: Vec<Event>,
}

impl Side {
    fn open(config: &Config) -> Self {
        Self {
            endpoint: open(config).expect("an endpoint"),
            events: Vec::new(),
        }
    }

    fn address(&self) -> SocketAddr {
        self.endpoint.local_addresses().expect("addresses")[0]
    }

    fn connect(&mut self, to: &Side) -> AssocId {
        let port = to.endpoint.encapsulation_port();
        let assoc = self.endpoint.connect(&[to.address()], port);
        assoc.expect("a connection in progress")
    }

    fn send(&mut self, assoc: AssocId, data: &'static [u8]) {
        let message = Message::new(11, Bytes::from_static(data));
        self.endpoint.send(assoc, &message).expect("sent");
    }
}

fn wait(fd: BorrowedFd<'_>) {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the call gets one structure, and the structure outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 5) };
}

/// Runs all sides until `find` returns a value.
fn until<T>(sides: &mut [&mut Side], mut find: impl FnMut(&mut [&mut Side]) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
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
        wait(sides[0].endpoint.fd());
        for side in sides.iter_mut() {
            side.endpoint
                .recv_batch(&mut side.events)
                .expect("received");
        }
    }
}

/// Removes and returns the first event for which `matches` returns a value.
fn take<T>(side: &mut Side, matches: impl Fn(&Event) -> Option<T>) -> Option<T> {
    let (index, found) = side
        .events
        .iter()
        .enumerate()
        .find_map(|(index, event)| matches(event).map(|found| (index, found)))?;
    side.events.remove(index);
    Some(found)
}

fn up(event: &Event) -> Option<AssocId> {
    match event {
        Event::Up { assoc, .. } => Some(*assoc),
        _ => None,
    }
}

fn message(event: &Event) -> Option<(AssocId, Message)> {
    match event {
        Event::Message { assoc, message } => Some((*assoc, message.clone())),
        _ => None,
    }
}

fn down(event: &Event) -> Option<(AssocId, DownReason)> {
    match event {
        Event::Down { assoc, reason } => Some((*assoc, *reason)),
        _ => None,
    }
}

fn failed(event: &Event) -> Option<AssocId> {
    match event {
        Event::SendFailed { assoc, .. } => Some(*assoc),
        _ => None,
    }
}

/// Opens two endpoints with an association between them.
fn pair() -> (Side, AssocId, Side, AssocId) {
    let listen = false;
    pair_of(&config(), &Config { listen, ..config() })
}

fn pair_of(server: &Config, client: &Config) -> (Side, AssocId, Side, AssocId) {
    let (mut server, mut client) = (Side::open(server), Side::open(client));
    let asked = client.connect(&server);
    let at_server = until(&mut [&mut server, &mut client], |s| take(s[0], up));
    let at_client = until(&mut [&mut client, &mut server], |s| take(s[0], up));
    assert_eq!(asked, at_client);
    (server, at_server, client, at_client)
}

#[test]
fn messages_go_both_ways() {
    let (mut server, at_server, mut client, at_client) = pair();
    let question = Message {
        ppid: 11,
        stream: 3,
        unordered: true,
        data: Bytes::from_static(b"question"),
    };
    client.endpoint.send(at_client, &question).expect("sent");
    let came = until(&mut [&mut server, &mut client], |s| take(s[0], message));
    assert_eq!(came, (at_server, question));
    let answer = Message::new(12, Bytes::from(vec![7; 100_000]));
    server.endpoint.send(at_server, &answer).expect("sent");
    let came = until(&mut [&mut client, &mut server], |s| take(s[0], message));
    assert_eq!(came, (at_client, answer));
}

#[test]
fn peers_may_be_at_ipv6_addresses() {
    let at = |address: &str| Config {
        encapsulation: Some(0),
        raw: false,
        ..Config::new(vec![address.parse().expect("an address")])
    };
    let mut server = Side::open(&at("[::1]:0"));
    let mut client = Side::open(&at("[::1]:0"));
    let asked = client.connect(&server);
    let at_server = until(&mut [&mut server, &mut client], |s| take(s[0], up));
    let peer = server.endpoint.confirmed_addresses(at_server);
    assert_eq!(peer.expect("an association"), [client.address()]);
    assert!(client.address().is_ipv6());
    client.send(asked, b"question");
    let came = until(&mut [&mut server, &mut client], |s| take(s[0], message));
    assert_eq!(
        came,
        (at_server, Message::new(11, Bytes::from_static(b"question")))
    );
    let answer = Message::new(11, Bytes::from(vec![6; 100_000]));
    server.endpoint.send(at_server, &answer).expect("sent");
    let came = until(&mut [&mut client, &mut server], |s| take(s[0], message));
    assert_eq!(came, (asked, answer));
}

#[test]
fn an_association_ends_as_it_was_told() {
    let (mut server, at_server, mut client, at_client) = pair();
    client.send(at_client, b"last words");
    client.endpoint.shutdown(at_client).expect("shut down");
    let came = until(&mut [&mut server, &mut client], |s| take(s[0], message));
    assert_eq!(came.1.data, "last words");
    let end = until(&mut [&mut server, &mut client], |s| take(s[0], down));
    assert_eq!(end, (at_server, DownReason::Shutdown));
    let end = until(&mut [&mut client, &mut server], |s| take(s[0], down));
    assert_eq!(end, (at_client, DownReason::Shutdown));
    let late = client
        .endpoint
        .send(at_client, &Message::new(11, "x".into()));
    match late {
        Ok(()) => assert_eq!(until(&mut [&mut client], |s| take(s[0], failed)), at_client),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotConnected),
    }

    let (mut server, at_server, mut client, at_client) = pair();
    client.endpoint.abort(at_client).expect("aborted");
    let end = until(&mut [&mut server, &mut client], |s| take(s[0], down));
    assert_eq!(end, (at_server, DownReason::Lost));
}

#[test]
fn nobody_there_is_said() {
    let mut client = Side::open(&config());
    let nobody = "127.0.0.1:9".parse().expect("an address");
    let port = client.endpoint.encapsulation_port();
    let asked = client.endpoint.connect(&[nobody], port).expect("asked");
    let end = until(&mut [&mut client], |s| take(s[0], down));
    assert_eq!(end, (asked, DownReason::NotStarted));
}

#[test]
fn one_message_goes_to_many() {
    let mut server = Side::open(&config());
    let mut clients: Vec<Side> = (0..5).map(|_| Side::open(&config())).collect();
    let mut assocs = Vec::new();
    for client in &mut clients {
        client.connect(&server);
        assocs.push(until(&mut [&mut server, client], |s| take(s[0], up)));
    }
    let news = ["news", "more", "all"].map(|text| Message::new(12, Bytes::from(text)));
    let mut taken = Vec::new();
    server.endpoint.send_bundles(&assocs, &news, &mut taken);
    assert_eq!(taken, [3; 5]);
    for client in &mut clients {
        for news in &news {
            let came = until(&mut [client, &mut server], |s| take(s[0], message));
            assert_eq!(came.1, *news);
        }
    }
    // An unknown association counts as taking all messages, since an event has reported its end.
    let nobody = [AssocId(u64::MAX)];
    server.endpoint.send_bundles(&nobody, &news, &mut taken);
    assert_eq!(taken, [3; 6]);
}

#[test]
fn the_peer_and_its_distance_are_known() {
    let (mut server, at_server, mut client, at_client) = pair();
    let addresses = server.endpoint.remote_addresses(at_server);
    assert_eq!(addresses.expect("addresses"), [client.address()]);
    client.send(at_client, b"ping");
    until(&mut [&mut server, &mut client], |s| take(s[0], message));
    client
        .endpoint
        .round_trip(at_client)
        .expect("an association");
    assert!(client.endpoint.round_trip(AssocId(u64::MAX)).is_err());
}

/// No data returns with the acknowledgements of these messages, so the peer delays them by 200 ms.
#[test]
fn delayed_acknowledgements_are_no_distance() {
    if provider() == Provider::Kernel {
        // The kernel only reports a smoothed time, which includes the delays.
        return;
    }
    // Heartbeats are measured too, so a long interval keeps the path from being probed during a stall.
    let mut quiet = config();
    quiet.failure.heartbeat = Duration::from_secs(3600);
    let (mut server, _, mut client, at_client) = pair_of(&quiet, &quiet);
    let smoothed = |client: &Side| client.endpoint.round_trip(at_client).expect("a time");
    let first = smoothed(&client);
    for _ in 0..10 {
        client.send(at_client, b"lone");
        until(&mut [&mut server, &mut client], |s| take(s[0], message));
        let acknowledged = Instant::now() + Duration::from_millis(250);
        until(&mut [&mut server, &mut client], |_| {
            (Instant::now() > acknowledged).then_some(())
        });
    }
    assert_eq!(smoothed(&client), first, "but nothing was measured");
    // A requested measurement counts; the value may be unchanged once.
    until(&mut [&mut server, &mut client], |s| {
        s[1].endpoint.measure(at_client);
        (smoothed(s[1]) != first).then_some(())
    });
}

#[test]
fn a_full_buffer_is_said_and_empties() {
    let small = Config {
        send_buffer: 20_000,
        ..config()
    };
    let (mut server, _, mut client, assoc) = pair_of(&config(), &small);
    let piece = Message::new(11, Bytes::from(vec![1; 5_000]));
    let mut count = 0;
    let refused = loop {
        match client.endpoint.send(assoc, &piece) {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
        assert!(count < 1000, "it never fills");
    };
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    for _ in 0..count {
        until(&mut [&mut server, &mut client], |s| take(s[0], message));
    }
    client.endpoint.send(assoc, &piece).expect("room again");
}

#[test]
fn a_bundle_is_taken_as_far_as_there_is_room() {
    let small = Config {
        send_buffer: 20_000,
        ..config()
    };
    let (mut server, _, mut client, assoc) = pair_of(&config(), &small);
    let piece = |id: u8| Message::new(12, Bytes::from(vec![id; 1_000]));
    let pieces: Vec<Message> = (0..100).map(piece).collect();
    let (mut handed_over, mut calls) = (0, 0);
    let mut came = Vec::new();
    let sides = &mut [&mut client, &mut server];
    until(sides, |sides| {
        let mut taken = Vec::new();
        let rest = &pieces[handed_over..];
        sides[0].endpoint.send_bundles(&[assoc], rest, &mut taken);
        handed_over += taken[0];
        calls += 1;
        came.extend(take(sides[1], message).map(|(_, message)| message));
        (came.len() == pieces.len()).then_some(())
    });
    assert!(calls > 1 && came == pieces);
}

#[test]
fn a_message_that_is_too_long_ends_the_association() {
    let strict = Config {
        message_len_max: 1000,
        ..config()
    };
    let (mut server, _, mut client, assoc) = pair_of(&strict, &config());
    let long = Message::new(11, Bytes::from(vec![1; 100_000]));
    client.endpoint.send(assoc, &long).expect("sent");
    let end = until(&mut [&mut client, &mut server], |s| take(s[0], down));
    assert_eq!(end, (assoc, DownReason::Lost));
    assert!(!server.events.iter().any(|event| message(event).is_some()));
}

/// The server has small buffers; one peer reads nothing but stays alive, and another peer is not affected.
#[test]
fn a_peer_that_does_not_read_holds_up_nobody_else() {
    if provider() == Provider::Usrsctp {
        // All endpoints of a process receive when one of them runs, so no endpoint can be deaf.
        return;
    }
    let small = Config {
        send_buffer: 20_000,
        receive_buffer: 20_000,
        ..config()
    };
    let mut server = Side::open(&small);
    let mut deaf = Side::open(&small);
    let mut other = Side::open(&config());
    deaf.connect(&server);
    let to_deaf = until(&mut [&mut server, &mut deaf], |s| take(s[0], up));
    until(&mut [&mut deaf, &mut server], |s| take(s[0], up));
    other.connect(&server);
    let to_other = until(&mut [&mut server, &mut other], |s| take(s[0], up));
    until(&mut [&mut other, &mut server], |s| take(s[0], up));

    let piece = Message::new(11, Bytes::from(vec![1; 1_000]));
    let mut in_vain = 0;
    until(&mut [&mut server, &mut other], |s| {
        let full = s[0].endpoint.send(to_deaf, &piece).is_err();
        in_vain = if full { in_vain + 1 } else { 0 };
        (in_vain > 20).then_some(())
    });
    let mut came = 0;
    for number in 0..200u8 {
        let piece = Message::new(12, Bytes::from(vec![number; 1_000]));
        until(&mut [&mut server, &mut other], |s| {
            s[0].endpoint.send(to_other, &piece).ok()
        });
        while let Some((_, message)) = take(&mut other, message) {
            assert_eq!(message.data[0], came);
            came += 1;
        }
    }
    while came < 200 {
        let (_, message) = until(&mut [&mut server, &mut other], |s| take(s[1], message));
        assert_eq!(message.data[0], came);
        came += 1;
    }
    // An ABORT needs no free buffer space.
    server.endpoint.abort(to_deaf).expect("an association");
    let (_, reason) = until(&mut [&mut deaf, &mut server], |s| take(s[0], down));
    assert_eq!(reason, DownReason::Lost);
}
