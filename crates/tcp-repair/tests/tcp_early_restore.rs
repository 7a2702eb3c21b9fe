//! A connection that was restored at the acceptor while it went on at the donor is taken back and restored again.

mod common;

use holdfast_lab::testing::{
    RouteTarget, TCP_OPTIONS, TestNetwork, exchange, pattern, service_addresses, stream,
};
use holdfast_sys::sockopt::{
    SO_TXREHASH, TCP_DELACK_MAX_US, TCP_RTO_MAX_MS, TCP_RTO_MIN_US, get_int, set_int,
};
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_tcp_repair::{
    SocketPreparer, TcpDynamicState, TcpStaticState, WindowProbe, abandon, activate, extract,
    read_static, restore, resume, set_deferred_options_and_timeout,
};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// Options besides [`TCP_OPTIONS`] that a disconnect may reset.
const OTHER_OPTIONS: &[(i32, i32, i32)] = &[
    (SOL_SOCKET, SO_TXREHASH, 0),
    (SOL_SOCKET, libc::SO_SNDBUF, 100_000),
    (SOL_SOCKET, libc::SO_RCVBUF, 100_000),
    (IPPROTO_TCP, libc::TCP_SYNCNT, 3),
    (IPPROTO_TCP, TCP_RTO_MIN_US, 100_000),
    (IPPROTO_TCP, TCP_DELACK_MAX_US, 20_000),
];

/// Extracts the state of the connection once it is idle, and resumes the connection.
fn snapshot_and_resume(server: &TcpStream, fixed: &TcpStaticState) -> TcpDynamicState {
    holdfast_lab::testing::wait_for("drained", || {
        TcpInfo::read(server.as_fd()).expect("TCP_INFO").unacked == 0
    });
    let state = extract(server.as_fd(), fixed).expect("dynamic state");
    resume(server.as_fd(), fixed).expect("resumed");
    state
}

/// Restores a connection `rounds` times while it goes on, then moves it; `unread` leaves data in its receive queue.
fn move_after_early_restores(
    net: &TestNetwork,
    service: std::net::SocketAddr,
    rounds: u32,
    unread: bool,
) {
    net.route(RouteTarget::A);
    let (mut client, mut server) = net.connection(service);
    for (level, name, value) in [TCP_OPTIONS, OTHER_OPTIONS].concat() {
        set_int(server.as_fd(), level, name, value).expect("setsockopt");
    }
    let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
    let preparer = net.b.run(|| SocketPreparer::new().expect("a preparer"));
    let mut socket = net.b.run(|| preparer.prepare(&fixed).expect("prepared"));
    let number = socket.as_fd().as_raw_fd();
    for round in 0..rounds {
        exchange(&mut client, &mut server, &pattern(round, 3000));
        exchange(&mut server, &mut client, &pattern(round, 700));
        let snapshot = snapshot_and_resume(&server, &fixed);
        let restored = net
            .b
            .run(|| restore(socket, &fixed, &snapshot).expect("restored"));
        socket = net.b.run(|| {
            restored
                .reset_to_prepared(&fixed, &preparer)
                .expect("reset")
        });
    }
    exchange(&mut client, &mut server, &pattern(7, 100));
    if unread {
        std::io::Write::write_all(&mut client, &pattern(8, 500)).expect("write");
        holdfast_lab::testing::wait_for("received", || {
            TcpInfo::read(server.as_fd())
                .expect("TCP_INFO")
                .bytes_received
                >= u64::from(rounds) * 3000 + 600
        });
    }
    net.route(RouteTarget::Unreachable);
    let last = extract(server.as_fd(), &fixed).expect("dynamic state");
    let restored = net
        .b
        .run(|| restore(socket, &fixed, &last).expect("restored"));
    net.route(RouteTarget::B);
    abandon(server.as_fd()).expect("abandoned");
    let activated = activate(restored, &fixed, &last, WindowProbe::Never).expect("active");
    assert_eq!(activated.as_raw_fd(), number, "the open file is the same");
    set_deferred_options_and_timeout(activated.as_fd(), &fixed).expect("settled");
    assert_eq!(
        get_int(activated.as_fd(), SOL_SOCKET, libc::SO_ERROR).expect("SO_ERROR"),
        0
    );
    let after = net
        .b
        .run(|| read_static(activated.as_fd()).expect("static"));
    let mut moved = stream(activated);
    if unread {
        let mut queued = [0; 500];
        std::io::Read::read_exact(&mut moved, &mut queued).expect("read");
        assert!(queued[..] == pattern(8, 500));
    }
    exchange(&mut client, &mut moved, &pattern(1, 100_000));
    exchange(&mut moved, &mut client, &pattern(2, 100_000));
    assert_static_unchanged(&fixed, &after);
}

/// Asserts that negotiated parameters and options are unchanged.
fn assert_static_unchanged(before: &TcpStaticState, after: &TcpStaticState) {
    for (level, name, _) in [TCP_OPTIONS, OTHER_OPTIONS].concat() {
        // The cap on the first timeout is removed once a round trip was measured.
        if (level, name) != (IPPROTO_TCP, TCP_RTO_MAX_MS) {
            let value = |static_state: &TcpStaticState| static_state.options.int(level, name);
            assert_eq!(value(after), value(before), "option {level}/{name}");
        }
    }
    let negotiated = |static_state: &TcpStaticState| {
        let parameters = (
            static_state.window_scale,
            static_state.sack,
            static_state.timestamps,
            static_state.segment_size,
        );
        (static_state.local, static_state.remote, parameters)
    };
    assert_eq!(negotiated(after), negotiated(before));
    assert_eq!(after.options.buffer_lock, before.options.buffer_lock);
    assert_eq!(
        after.options.congestion_control,
        before.options.congestion_control
    );
}

#[test]
fn early_restored_socket_is_restored_again_in_the_same_open_file() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        for (rounds, unread) in [(1, false), (3, true)] {
            move_after_early_restores(&net, service, rounds, unread);
        }
    }
}

#[test]
fn early_restored_socket_follows_the_donors_clock() {
    let net = TestNetwork::new();
    let service = service_addresses()[0];
    net.route(RouteTarget::A);
    let (mut client, mut server) = net.connection(service);
    exchange(&mut client, &mut server, &pattern(1, 100));
    let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
    assert!(fixed.timestamps);
    let taken_at = Instant::now();
    let snapshot = snapshot_and_resume(&server, &fixed);
    // A slow transfer of the state.
    std::thread::sleep(Duration::from_millis(300));
    let socket = net.b.run(|| {
        let prepared = holdfast_tcp_repair::prepare(&fixed).expect("prepared");
        restore(prepared, &fixed, &snapshot).expect("restored")
    });
    let clock = |socket: std::os::fd::BorrowedFd<'_>| {
        get_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP).expect("TCP_TIMESTAMP") as u32
    };
    let donor_clock = || {
        let state = extract(server.as_fd(), &fixed).expect("dynamic state");
        resume(server.as_fd(), &fixed).expect("resumed");
        state.timestamp
    };
    // The donor's clock is read last, so a stall in between only increases the difference.
    let acceptor_clock = clock(socket.as_fd());
    let clock_lag = donor_clock().wrapping_sub(acceptor_clock) as i32;
    assert!(
        clock_lag >= 290,
        "the clock lags by the message's delay: {clock_lag}"
    );
    let elapsed_us = taken_at.elapsed().as_micros() as u64;
    socket
        .sync_clock(&fixed, &snapshot, elapsed_us, false)
        .expect("set");
    let clock_lag = donor_clock().wrapping_sub(clock(socket.as_fd())) as i32;
    // `snapshot_and_resume` waited until the connection was drained before it took the state, so the restored clock may be ahead.
    assert!(clock_lag <= 0, "the clock lags by {clock_lag}");
}
