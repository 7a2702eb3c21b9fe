//! Connections over TCP on loopback, without TLS, between an endpoint and plain sockets that follow no rules, or
//! another endpoint.

use bytes::Bytes;
use holdfast_sctp::{
    AssocId, ConnectionRules, DownReason, FailureDetection, MessageToSend, StreamProtocol,
    TcpLimits, TcpTransport, TcpTransportConfig, TransportEndpoint, TransportEvent,
};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest wait for any condition that must become true.
const WAIT_LIMIT: Duration = Duration::from_secs(60);
const PPID: u32 = 11;

/// Returns the message length from its first two bytes, which count themselves too.
fn length_of(bytes: &[u8]) -> io::Result<Option<usize>> {
    match bytes {
        [0, 0, ..] => Err(io::ErrorKind::InvalidData.into()),
        [high, low, ..] => Ok(Some(usize::from(u16::from_be_bytes([*high, *low])))),
        _ => Ok(None),
    }
}

fn message(content: &[u8]) -> MessageToSend {
    let length = u16::try_from(content.len() + 2).expect("a short one");
    let bytes = [&length.to_be_bytes(), content].concat();
    MessageToSend::new(PPID, Bytes::from(bytes))
}

struct TestEndpoint {
    endpoint: TcpTransport,
    events: Vec<TransportEvent>,
}

impl TestEndpoint {
    fn open(listens: bool, handshake: Duration, message_timeout: Duration) -> TestEndpoint {
        let at = "127.0.0.1:0".parse().expect("an address");
        let config = TcpTransportConfig {
            tcp: Vec::from_iter(listens.then_some(at)),
            tls: Vec::new(),
            source: None,
            rules: ConnectionRules {
                ppid: PPID,
                length_of,
                message_len_max: 1000,
                send_buffer: 100_000,
                handshake_timeout: handshake,
                message_timeout,
                security: None,
            },
            limits: TcpLimits {
                connections: 8,
                connections_per_host: 4,
                handshakes_per_host: 2,
            },
            failure: FailureDetection::default(),
        };
        TestEndpoint {
            endpoint: TcpTransport::open(config).expect("an endpoint"),
            events: Vec::new(),
        }
    }

    fn open_with_long_timeouts(listens: bool) -> TestEndpoint {
        TestEndpoint::open(listens, WAIT_LIMIT, WAIT_LIMIT)
    }

    fn address(&self) -> SocketAddr {
        self.endpoint.listen_addresses().0[0]
    }

    fn poll_events(&mut self) {
        self.endpoint
            .wait_for_events(Duration::from_millis(5), &mut self.events)
            .expect("a working transport");
    }

    fn take_event<T>(&mut self, select: impl Fn(&TransportEvent) -> Option<T>) -> Option<T> {
        let found = self.events.iter().enumerate();
        let (index, found) = found
            .into_iter()
            .find_map(|(index, event)| Some((index, select(event)?)))?;
        self.events.remove(index);
        Some(found)
    }
}

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
            side.poll_events();
        }
    }
}

fn up_assoc(event: &TransportEvent) -> Option<AssocId> {
    match event {
        TransportEvent::Up { assoc, .. } => Some(*assoc),
        _ => None,
    }
}

fn down_reason(event: &TransportEvent) -> Option<DownReason> {
    match event {
        TransportEvent::Down { reason, .. } => Some(*reason),
        _ => None,
    }
}

fn message_content(event: &TransportEvent) -> Option<Vec<u8>> {
    match event {
        TransportEvent::Message { message, .. } if message.ppid == PPID => {
            Some(message.data[2..].to_vec())
        }
        _ => None,
    }
}

fn refusal_reason(event: &TransportEvent) -> Option<String> {
    match event {
        TransportEvent::Refused { reason: why, .. } => Some(why.clone()),
        _ => None,
    }
}

/// Opens a connection; returns both sides and the name of the connection at each.
fn connected_pair() -> ([TestEndpoint; 2], [AssocId; 2]) {
    let (mut server, mut client) = (
        TestEndpoint::open_with_long_timeouts(true),
        TestEndpoint::open_with_long_timeouts(false),
    );
    let client_assoc = client
        .endpoint
        .connect_stream(server.address(), &StreamProtocol::Tcp);
    let begun = client_assoc.expect("a connection in progress");
    assert_eq!(
        run_until(&mut [&mut client, &mut server], |sides| sides[0]
            .take_event(up_assoc)),
        begun
    );
    let server_assoc = run_until(&mut [&mut server], |sides| sides[0].take_event(up_assoc));
    ([server, client], [server_assoc, begun])
}

#[test]
fn messages_and_shutdown_reach_both_ends() {
    let ([mut server, mut client], [server_assoc, client_assoc]) = connected_pair();
    assert!(server_assoc.is_stream() && client_assoc.is_stream());
    let at = client
        .endpoint
        .remote_addresses(client_assoc)
        .expect("addresses");
    assert_eq!(at, [server.address()]);
    let server_view = server
        .endpoint
        .confirmed_addresses(server_assoc)
        .expect("addresses");
    assert!(server_view.len() == 1 && server_view[0].ip().is_loopback());
    for length in [0, 1, 500, 998] {
        let bytes = vec![length as u8; length];
        client
            .endpoint
            .send(client_assoc, &message(&bytes))
            .expect("sent");
        let received = run_until(&mut [&mut client, &mut server], |sides| {
            sides[1].take_event(message_content)
        });
        server
            .endpoint
            .send(server_assoc, &message(&received))
            .expect("sent");
        let returned = run_until(&mut [&mut client, &mut server], |sides| {
            sides[0].take_event(message_content)
        });
        assert_eq!(returned, bytes);
    }
    assert!(client.endpoint.round_trip(client_assoc).expect("a time") > Duration::ZERO);
    // Data sent before the end arrives.
    client
        .endpoint
        .send(client_assoc, &message(b"last"))
        .expect("sent");
    client
        .endpoint
        .shutdown(client_assoc)
        .expect("an association");
    let mut both = [&mut client, &mut server];
    assert_eq!(
        run_until(&mut both, |sides| sides[1].take_event(message_content)),
        b"last"
    );
    for side in 0..2 {
        let reason = run_until(&mut both, |sides| sides[side].take_event(down_reason));
        assert_eq!(reason, DownReason::Shutdown);
    }
    let outcome = client.endpoint.send(client_assoc, &message(b"x"));
    assert_eq!(
        outcome.map_err(|error| error.kind()),
        Err(io::ErrorKind::NotConnected)
    );
}

#[test]
fn aborted_connection_is_lost_at_both_ends() {
    let ([mut server, mut client], [server_assoc, _]) = connected_pair();
    server.endpoint.abort(server_assoc).expect("an association");
    for side in [&mut server, &mut client] {
        assert_eq!(
            run_until(&mut [side], |sides| sides[0].take_event(down_reason)),
            DownReason::Lost
        );
    }
    let silent_client = TcpStream::connect(server.address()).map(drop);
    drop(server);
    assert!(silent_client.is_ok());
    let to = "127.0.0.1:1".parse().expect("an address");
    if client
        .endpoint
        .connect_stream(to, &StreamProtocol::Tcp)
        .is_ok()
    {
        let reason = run_until(&mut [&mut client], |sides| sides[0].take_event(down_reason));
        assert_eq!(reason, DownReason::NotStarted);
    }
}

#[test]
fn peer_that_reads_nothing_is_disconnected() {
    let mut server = TestEndpoint::open(true, WAIT_LIMIT, Duration::from_millis(300));
    let _silent = TcpStream::connect(server.address()).expect("a connection");
    let to = run_until(&mut [&mut server], |sides| sides[0].take_event(up_assoc));
    let long = message(&[7; 900]);
    // First the kernel's buffers fill, then the endpoint's: sending must fail at some point.
    let reason = run_until(&mut [&mut server], |sides| {
        for _ in 0..1000 {
            match sides[0].endpoint.send(to, &long) {
                Ok(()) => {}
                Err(error) => {
                    let full = [io::ErrorKind::WouldBlock, io::ErrorKind::NotConnected];
                    assert!(full.contains(&error.kind()), "{error}");
                    break;
                }
            }
        }
        sides[0].take_event(down_reason)
    });
    assert_eq!(reason, DownReason::Lost);
}

#[test]
fn incomplete_or_invalid_message_ends_the_connection() {
    let mut server = TestEndpoint::open(true, WAIT_LIMIT, Duration::from_millis(300));
    // Half a message, a message that is too long, and an invalid length.
    for bytes in [&[0, 9, 1][..], &[4, 0, 1], &[0, 0]] {
        let mut client = TcpStream::connect(server.address()).expect("a connection");
        client.write_all(bytes).expect("written");
        run_until(&mut [&mut server], |sides| sides[0].take_event(up_assoc));
        let reason = run_until(&mut [&mut server], |sides| sides[0].take_event(down_reason));
        assert_eq!(reason, DownReason::Lost, "{bytes:?}");
        assert!(client.read(&mut [0; 9]).map_or(true, |read| read == 0));
    }
}

#[test]
fn connection_limit_per_host_counts_open_connections() {
    let mut server = TestEndpoint::open_with_long_timeouts(true);
    let connect =
        |server: &TestEndpoint| TcpStream::connect(server.address()).expect("a connection");
    let mut clients: Vec<TcpStream> = Vec::new();
    for _ in 0..4 {
        clients.push(connect(&server));
        run_until(&mut [&mut server], |sides| sides[0].take_event(up_assoc));
    }
    let _fifth = connect(&server);
    let reason = run_until(&mut [&mut server], |sides| {
        sides[0].take_event(refusal_reason)
    });
    assert!(reason.contains("its host has too many"), "{reason}");
    clients.pop();
    run_until(&mut [&mut server], |sides| sides[0].take_event(down_reason));
    let _sixth = connect(&server);
    run_until(&mut [&mut server], |sides| sides[0].take_event(up_assoc));
}
