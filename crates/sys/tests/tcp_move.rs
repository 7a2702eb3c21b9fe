//! A TCP connection moves between two hosts and its client notices nothing.

mod common;

use common::{Net, SERVICE_V4, SERVICE_V6, To, exchange, pattern, stream, wait_for};
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_sys::tcp_repair::{
    TcpDynamic, TcpStatic, WindowProbe, abandon, activate, extract, prepare, read_static, restore,
    settle, shift_timestamp_clock,
};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;

/// The service's addresses, both families.
fn services() -> [SocketAddr; 2] {
    [(SERVICE_V4, 8080).into(), (SERVICE_V6, 8080).into()]
}

/// Moves the connection of `server` from `a` to `b`, every step and both codings.
fn hand_off(net: &Net, server: TcpStream) -> (TcpStream, TcpStatic, TcpDynamic) {
    let fixed = net
        .a
        .run(|| read_static(server.as_fd()).expect("static state"));
    let fixed: TcpStatic =
        postcard::from_bytes(&postcard::to_stdvec(&fixed).expect("coded")).expect("decoded");
    let prepared = net.b.run(|| prepare(&fixed).expect("prepared"));
    net.route(To::Nowhere);
    let state = extract(server.as_fd(), &fixed).expect("dynamic state");
    let state: TcpDynamic =
        postcard::from_bytes(&postcard::to_stdvec(&state).expect("coded")).expect("decoded");
    let restored = net
        .b
        .run(|| restore(prepared, &fixed, &state).expect("restored"));
    net.route(To::B);
    abandon(server.as_fd()).expect("abandoned");
    let fd = activate(restored, &fixed, &state, WindowProbe::No).expect("active");
    settle(fd.as_fd(), &fixed).expect("settled");
    (stream(fd), fixed, state)
}

/// Segments the client has retransmitted.
fn retransmitted(socket: &TcpStream) -> u32 {
    TcpInfo::read(socket.as_fd())
        .expect("TCP_INFO")
        .total_retrans
}

#[test]
fn idle_connection_moves() {
    let net = Net::new();
    for service in services() {
        net.route(To::A);
        let (mut client, mut server) = net.connection(service);
        exchange(&mut client, &mut server, &pattern(1, 1000));
        exchange(&mut server, &mut client, &pattern(2, 1000));
        wait_for("drained", || {
            TcpInfo::read(server.as_fd()).expect("TCP_INFO").unacked == 0
        });
        let (mut moved, fixed, state) = hand_off(&net, server);
        assert!(fixed.timestamps && fixed.sack && fixed.window_scale.is_some());
        let coded = postcard::to_stdvec(&state).expect("coded").len();
        assert!(coded < 80, "a drained connection takes {coded} bytes");
        exchange(&mut client, &mut moved, &pattern(3, 300_000));
        exchange(&mut moved, &mut client, &pattern(4, 300_000));
        assert_eq!(retransmitted(&client), 0);
        assert_eq!(retransmitted(&moved), 0);
        drop(moved);
        assert_eq!(client.read(&mut [0; 1]).expect("end of stream"), 0);
    }
}

/// Writes until the client's window and the send buffer are full; tells how much.
fn fill(server: &mut TcpStream, bytes: &[u8]) -> usize {
    server.set_nonblocking(true).expect("nonblocking");
    let mut written = 0;
    wait_for("a full queue", || match server.write(&bytes[written..]) {
        Ok(count) => {
            written += count;
            assert!(written < bytes.len(), "the queue takes everything");
            false
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
            let info = TcpInfo::read(server.as_fd()).expect("TCP_INFO");
            info.unacked == 0 && info.notsent_bytes > 0
        }
    });
    written
}

#[test]
fn queues_survive_byte_exact() {
    let net = Net::new();
    for service in services() {
        net.route(To::A);
        let (mut client, mut server) = net.connection(service);
        let (inward, outward) = (pattern(5, 50_000), pattern(6, 30_000_000));
        client.write_all(&inward).expect("write");
        let mut early = vec![0; 20_000];
        server.read_exact(&mut early).expect("read");
        wait_for("the rest received", || {
            TcpInfo::read(server.as_fd())
                .expect("TCP_INFO")
                .bytes_received
                >= 50_000
        });
        let written = fill(&mut server, &outward);
        let (mut moved, _, state) = hand_off(&net, server);
        assert_eq!(state.unread, inward[20_000..]);
        assert!(state.unsent > 0 && !state.outgoing.is_empty());
        let mut late = vec![0; 30_000];
        moved.read_exact(&mut late).expect("read");
        assert_eq!(late, inward[20_000..]);
        let mut arrived = vec![0; written];
        client.read_exact(&mut arrived).expect("read");
        assert!(arrived == outward[..written], "the send queue changed");
        exchange(&mut client, &mut moved, &pattern(7, 1000));
        exchange(&mut moved, &mut client, &pattern(8, 1000));
    }
}

#[test]
fn timestamps_never_go_back() {
    let net = Net::new();
    for service in services() {
        net.route(To::A);
        let (mut client, mut server) = net.connection(service);
        // The donor's clock runs ten days ahead of the acceptor's.
        shift_timestamp_clock(server.as_fd(), 10 * 86_400 * 1000).expect("shifted");
        exchange(&mut server, &mut client, &pattern(9, 1000));
        let (mut moved, _, state) = hand_off(&net, server);
        exchange(&mut moved, &mut client, &pattern(10, 1000));
        let repeated = retransmitted(&moved);
        assert_eq!(
            repeated, 0,
            "the client refused timestamps after {}",
            state.timestamp
        );
    }
}
