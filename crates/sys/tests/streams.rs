//! Connections over TCP on loopback, without TLS, between an endpoint and plain sockets that follow no rules, or
//! another endpoint.

use bytes::Bytes;
use holdfast_sys::transport::{
    AssocId, DownReason, Endpoint, Event, Failure, Message, Over, Rules, StreamConfig,
    StreamLimits, Streams,
};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Longest wait for any condition that must become true.
const PATIENCE: Duration = Duration::from_secs(60);
const PPID: u32 = 11;

/// Returns the message length from its first two bytes, which count themselves too.
fn length_of(bytes: &[u8]) -> io::Result<Option<usize>> {
    match bytes {
        [0, 0, ..] => Err(io::ErrorKind::InvalidData.into()),
        [high, low, ..] => Ok(Some(usize::from(u16::from_be_bytes([*high, *low])))),
        _ => Ok(None),
    }
}

fn message(content: &[u8]) -> Message {
    let length = u16::try_from(content.len() + 2).expect("a short one");
    let bytes = [&length.to_be_bytes(), content].concat();
    Message::new(PPID, Bytes::from(bytes))
}

struct Side {
    endpoint: Streams,
    events: Vec<Event>,
}

impl Side {
    fn open(listens: bool, handshake: Duration, patience: Duration) -> Side {
        let at = "127.0.0.1:0".parse().expect("an address");
        let config = StreamConfig {
            tcp: Vec::from_iter(listens.then_some(at)),
            tls: Vec::new(),
            source: None,
            rules: Rules {
                ppid: PPID,
                length_of,
                message_len_max: 1000,
                send_buffer: 100_000,
                handshake,
                message: patience,
                security: None,
            },
            limits: StreamLimits {
                connections: 8,
                connections_per_host: 4,
                handshakes_per_host: 2,
            },
            failure: Failure::default(),
        };
        Side {
            endpoint: Streams::open(config).expect("an endpoint"),
            events: Vec::new(),
        }
    }

    fn patient(listens: bool) -> Side {
        Side::open(listens, PATIENCE, PATIENCE)
    }

    fn address(&self) -> SocketAddr {
        self.endpoint.listens_at().0[0]
    }

    fn turn(&mut self) {
        self.endpoint.flush().expect("flushed");
        let mut poll = libc::pollfd {
            fd: self.endpoint.fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the call gets one structure, and the structure outlives the call.
        if unsafe { libc::poll(&raw mut poll, 1, 5) } == 1 {
            self.endpoint
                .recv_batch(&mut self.events)
                .expect("received");
        }
    }

    fn take<T>(&mut self, look: impl Fn(&Event) -> Option<T>) -> Option<T> {
        let found = self.events.iter().enumerate();
        let (index, found) = found
            .into_iter()
            .find_map(|(index, event)| Some((index, look(event)?)))?;
        self.events.remove(index);
        Some(found)
    }
}

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
            side.turn();
        }
    }
}

fn up(event: &Event) -> Option<AssocId> {
    match event {
        Event::Up { assoc, .. } => Some(*assoc),
        _ => None,
    }
}

fn down(event: &Event) -> Option<DownReason> {
    match event {
        Event::Down { reason, .. } => Some(*reason),
        _ => None,
    }
}

fn content(event: &Event) -> Option<Vec<u8>> {
    match event {
        Event::Message { message, .. } if message.ppid == PPID => Some(message.data[2..].to_vec()),
        _ => None,
    }
}

fn refusal(event: &Event) -> Option<String> {
    match event {
        Event::Refused { why, .. } => Some(why.clone()),
        _ => None,
    }
}

/// Opens a connection; returns both sides and the name of the connection at each.
fn connected() -> ([Side; 2], [AssocId; 2]) {
    let (mut server, mut client) = (Side::patient(true), Side::patient(false));
    let begun = client.endpoint.connect_stream(server.address(), &Over::Tcp);
    let begun = begun.expect("a connection in progress");
    assert_eq!(
        until(&mut [&mut client, &mut server], |sides| sides[0].take(up)),
        begun
    );
    let came = until(&mut [&mut server], |sides| sides[0].take(up));
    ([server, client], [came, begun])
}

#[test]
fn messages_go_both_ways_and_an_end_is_told() {
    let ([mut server, mut client], [came, begun]) = connected();
    assert!(came.is_stream() && begun.is_stream());
    let at = client.endpoint.remote_addresses(begun).expect("addresses");
    assert_eq!(at, [server.address()]);
    let of = server
        .endpoint
        .confirmed_addresses(came)
        .expect("addresses");
    assert!(of.len() == 1 && of[0].ip().is_loopback());
    for length in [0, 1, 500, 998] {
        let bytes = vec![length as u8; length];
        client.endpoint.send(begun, &message(&bytes)).expect("sent");
        let got = until(&mut [&mut client, &mut server], |sides| {
            sides[1].take(content)
        });
        server.endpoint.send(came, &message(&got)).expect("sent");
        let back = until(&mut [&mut client, &mut server], |sides| {
            sides[0].take(content)
        });
        assert_eq!(back, bytes);
    }
    assert!(client.endpoint.round_trip(begun).expect("a time") > Duration::ZERO);
    // Data sent before the end arrives.
    client
        .endpoint
        .send(begun, &message(b"last"))
        .expect("sent");
    client.endpoint.shutdown(begun).expect("an association");
    let mut both = [&mut client, &mut server];
    assert_eq!(until(&mut both, |sides| sides[1].take(content)), b"last");
    for side in 0..2 {
        let reason = until(&mut both, |sides| sides[side].take(down));
        assert_eq!(reason, DownReason::Shutdown);
    }
    let gone = client.endpoint.send(begun, &message(b"x"));
    assert_eq!(
        gone.map_err(|error| error.kind()),
        Err(io::ErrorKind::NotConnected)
    );
}

#[test]
fn an_aborted_connection_is_lost_at_both_ends() {
    let ([mut server, mut client], [came, _]) = connected();
    server.endpoint.abort(came).expect("an association");
    for side in [&mut server, &mut client] {
        assert_eq!(
            until(&mut [side], |sides| sides[0].take(down)),
            DownReason::Lost
        );
    }
    let nobody = TcpStream::connect(server.address()).map(drop);
    drop(server);
    assert!(nobody.is_ok());
    let to = "127.0.0.1:1".parse().expect("an address");
    if client.endpoint.connect_stream(to, &Over::Tcp).is_ok() {
        let reason = until(&mut [&mut client], |sides| sides[0].take(down));
        assert_eq!(reason, DownReason::NotStarted);
    }
}

#[test]
fn who_takes_nothing_is_left_after_a_while() {
    let mut server = Side::open(true, PATIENCE, Duration::from_millis(300));
    let _silent = TcpStream::connect(server.address()).expect("a connection");
    let to = until(&mut [&mut server], |sides| sides[0].take(up));
    let long = message(&[7; 900]);
    // First the kernel's buffers fill, then the endpoint's: sending must fail at some point.
    let reason = until(&mut [&mut server], |sides| {
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
        sides[0].take(down)
    });
    assert_eq!(reason, DownReason::Lost);
}

#[test]
fn a_message_that_does_not_end_or_is_none_ends_the_connection() {
    let mut server = Side::open(true, PATIENCE, Duration::from_millis(300));
    // Half a message, a message that is too long, and an invalid length.
    for bytes in [&[0, 9, 1][..], &[4, 0, 1], &[0, 0]] {
        let mut rude = TcpStream::connect(server.address()).expect("a connection");
        rude.write_all(bytes).expect("written");
        until(&mut [&mut server], |sides| sides[0].take(up));
        let reason = until(&mut [&mut server], |sides| sides[0].take(down));
        assert_eq!(reason, DownReason::Lost, "{bytes:?}");
        assert!(rude.read(&mut [0; 9]).map_or(true, |read| read == 0));
    }
}

#[test]
fn a_host_has_so_many_connections_and_the_next_is_let_in_when_one_has_gone() {
    let mut server = Side::patient(true);
    let connect = |server: &Side| TcpStream::connect(server.address()).expect("a connection");
    let mut there: Vec<TcpStream> = Vec::new();
    for _ in 0..4 {
        there.push(connect(&server));
        until(&mut [&mut server], |sides| sides[0].take(up));
    }
    let _fifth = connect(&server);
    let why = until(&mut [&mut server], |sides| sides[0].take(refusal));
    assert!(why.contains("its host has too many"), "{why}");
    there.pop();
    until(&mut [&mut server], |sides| sides[0].take(down));
    let _sixth = connect(&server);
    until(&mut [&mut server], |sides| sides[0].take(up));
}
