//! Every socket option survives a move, and a socket that cannot move is refused by name before anything is touched.

mod common;

use common::{hand_off, vary};
use holdfast_lab::testing::{
    IPV6_OPTIONS, RouteTarget, SERVICE_V4, TCP_OPTIONS, TestNamespace, TestNetwork, exchange,
    pattern, service_addresses,
};
use holdfast_sys::address::{RawAddress, bind};
use holdfast_sys::sockopt::{get_bytes, get_int, set_bytes, set_int};
use holdfast_tcp_repair::{
    DeferredOptionsOutcome, RepairError, TimeoutUncapCondition, UnconnectedTcpSocket,
    UnmovableReason, extract, extract_all, prepare, read_static, set_deferred_options_and_timeout,
    uncap_timeout,
};
use libc::{IPPROTO_IP, IPPROTO_TCP, SOL_SOCKET};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Options besides [`TCP_OPTIONS`]: level, name, and a value that is not the default.
const OTHER_OPTIONS: &[(i32, i32, i32)] = &[
    (IPPROTO_TCP, libc::TCP_KEEPINTVL, 11),
    (IPPROTO_TCP, libc::TCP_KEEPCNT, 5),
    (IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, 1),
    (IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT),
    (SOL_SOCKET, libc::SO_OOBINLINE, 1),
    (SOL_SOCKET, libc::SO_REUSEPORT, 1),
    (SOL_SOCKET, libc::SO_ZEROCOPY, 1),
];

fn int(socket: &TcpStream, level: i32, name: i32) -> i32 {
    get_int(socket.as_fd(), level, name).expect("getsockopt")
}

#[test]
fn listed_options_survive() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, server) = net.connection(service);
        let mut options = [TCP_OPTIONS, OTHER_OPTIONS].concat();
        if service.is_ipv6() {
            options.extend_from_slice(IPV6_OPTIONS);
        }
        let socket = server.as_fd();
        for (level, name, value) in &options {
            let fresh = get_int(socket, *level, *name).expect("getsockopt");
            let is_inherited = *name == libc::SO_REUSEADDR;
            assert!(
                fresh != *value || is_inherited,
                "{level}/{name} has the test's value already"
            );
            set_int(socket, *level, *name, *value).expect("setsockopt");
        }
        let linger = [1, 0, 0, 0, 42, 0, 0, 0];
        set_bytes(socket, SOL_SOCKET, libc::SO_LINGER, &linger).expect("linger");
        let pace = 12_345_678u64.to_ne_bytes();
        set_bytes(socket, SOL_SOCKET, libc::SO_MAX_PACING_RATE, &pace).expect("pacing");
        set_bytes(socket, IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("reno");
        set_int(socket, SOL_SOCKET, libc::SO_SNDBUF, 100_000).expect("buffer");
        let buffer_sizes =
            [libc::SO_SNDBUF, libc::SO_RCVBUF].map(|name| int(&server, SOL_SOCKET, name));
        server.set_nonblocking(true).expect("nonblocking");
        let mut moved = hand_off(&net, server);
        exchange(&mut moved.socket, &mut client, &pattern(1, 10_000));
        let socket = moved.socket.as_fd();
        holdfast_lab::testing::wait_for("a round trip measured", || {
            set_deferred_options_and_timeout(socket, &moved.fixed).expect("settled")
                == DeferredOptionsOutcome::Done
        });
        for (level, name, value) in &options {
            let now = get_int(socket, *level, *name).expect("getsockopt");
            assert_eq!(now, *value, "{level}/{name} on {service}");
        }
        let mut raw = [0; 8];
        get_bytes(socket, SOL_SOCKET, libc::SO_LINGER, &mut raw).expect("linger");
        assert_eq!(raw, linger);
        get_bytes(socket, SOL_SOCKET, libc::SO_MAX_PACING_RATE, &mut raw).expect("pacing");
        assert_eq!(raw, pace);
        get_bytes(socket, IPPROTO_TCP, libc::TCP_CONGESTION, &mut raw).expect("congestion");
        assert_eq!(&raw[..5], b"reno\0");
        let sizes_after =
            [libc::SO_SNDBUF, libc::SO_RCVBUF].map(|n| int(&moved.socket, SOL_SOCKET, n));
        assert_eq!(sizes_after, buffer_sizes);
        let buffer_lock = int(
            &moved.socket,
            SOL_SOCKET,
            holdfast_sys::sockopt::SO_BUF_LOCK,
        );
        assert_eq!(buffer_lock, 1, "only the send buffer was fixed");
        assert!(moved.nonblocking);
        exchange(&mut client, &mut moved.socket, &pattern(1, 10_000));
        exchange(&mut moved.socket, &mut client, &pattern(2, 10_000));
    }
}

fn option_levels(service: SocketAddr) -> &'static [(i32, i32)] {
    match service.is_ipv4() {
        true => &[vary::SOCKET_LEVEL, vary::IP_LEVEL, vary::TCP_LEVEL],
        false => &[
            vary::SOCKET_LEVEL,
            vary::IP_LEVEL,
            vary::IPV6_LEVEL,
            vary::TCP_LEVEL,
        ],
    }
}

/// Every option of a connection that can be read and set has the same value after a move.
#[test]
fn every_readable_option_survives() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (_client, server) = net.connection(service);
        // The left-out options: the segment size belongs to the connection; the kernel records the CPU that receives
        // the packets; a peek offset is refused; SO_DONTROUTE would block the way to the client; only a listener can
        // defer accepts; the test's own sockets have timeouts.
        let excluded = [
            (IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
            (SOL_SOCKET, libc::SO_RCVTIMEO),
            (SOL_SOCKET, libc::SO_SNDTIMEO),
            (SOL_SOCKET, 66),
            (SOL_SOCKET, 67),
            (SOL_SOCKET, libc::SO_DONTROUTE),
            (IPPROTO_TCP, libc::TCP_MAXSEG),
            (SOL_SOCKET, 49),
            (SOL_SOCKET, libc::SO_PEEK_OFF),
        ];
        let varied = net
            .a
            .run(|| vary::vary_options(server.as_fd(), option_levels(service), &excluded));
        assert!(varied.len() > 50, "only {} were set", varied.len());
        common::attach_filter(server.as_fd(), &common::SHORT_PACKETS_ONLY);
        let moved = hand_off(&net, server);
        let socket = moved.socket.as_fd();
        uncap_timeout(socket, &moved.fixed, TimeoutUncapCondition::Always).expect("settled");
        let lost = net.b.run(|| vary::differences(socket, &varied));
        assert!(lost.is_empty(), "of {service}: {lost:#?}");
        assert_eq!(common::read_filter(socket), common::SHORT_PACKETS_ONLY);
    }
}

/// Every option of listening and of unconnected sockets has the same value after a move.
#[test]
fn every_listener_option_survives() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        for listens in [true, false] {
            let family = match service.is_ipv4() {
                true => libc::AF_INET,
                false => libc::AF_INET6,
            };
            let listener = net.a.run(|| {
                // SAFETY: no pointers are passed; a new descriptor is owned by nothing else.
                let fd = unsafe { libc::socket(family, libc::SOCK_STREAM, 0) };
                assert!(fd >= 0);
                // SAFETY: as above.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                if listens {
                    let address = RawAddress::for_family(service, service.is_ipv6());
                    bind(fd.as_fd(), &address).expect("bind");
                    // SAFETY: no pointers are passed.
                    assert_eq!(unsafe { libc::listen(fd.as_raw_fd(), 7) }, 0);
                }
                fd
            });
            // Options of the listening state apply to listeners only; a peek offset has no meaning without a
            // connection.
            let listener_options = [libc::TCP_DEFER_ACCEPT, libc::TCP_FASTOPEN, 33];
            let mut excluded = vec![(SOL_SOCKET, libc::SO_PEEK_OFF)];
            excluded.extend(
                listener_options
                    .map(|name| (IPPROTO_TCP, name))
                    .iter()
                    .filter(|_| !listens),
            );
            let varied = net
                .a
                .run(|| vary::vary_options(listener.as_fd(), option_levels(service), &excluded));
            assert!(varied.len() > 50, "only {} were set", varied.len());
            common::attach_filter(listener.as_fd(), &common::SHORT_PACKETS_ONLY);
            let fixed = net
                .a
                .run(|| UnconnectedTcpSocket::read(listener.as_fd()).expect("readable"));
            let moved = net.b.run(|| {
                let moved = fixed.prepare().expect("prepared");
                fixed.restore(moved.as_fd()).expect("restored");
                moved
            });
            let lost = net.b.run(|| vary::differences(moved.as_fd(), &varied));
            assert!(
                lost.is_empty(),
                "of {service}, listens: {listens}: {lost:#?}"
            );
            assert_eq!(
                common::read_filter(moved.as_fd()),
                common::SHORT_PACKETS_ONLY
            );
        }
    }
}

#[test]
fn corked_socket_stays_corked_and_keeps_data() {
    let net = TestNetwork::new();
    let (mut client, mut server) = net.connection(service_addresses()[0]);
    set_int(server.as_fd(), IPPROTO_TCP, libc::TCP_CORK, 1).expect("cork");
    let written = Instant::now();
    server.write_all(b"kept back").expect("write");
    let moved = hand_off(&net, server);
    // The kernel sends corked data after 200 ms (less a tick), so after a delay it may be sent and acknowledged.
    let is_cork_expired = written.elapsed() >= Duration::from_millis(190);
    assert_eq!(int(&moved.socket, IPPROTO_TCP, libc::TCP_CORK), 1);
    match (&moved.state.outgoing[..], moved.state.unsent) {
        (b"kept back", 9) => {}
        (b"kept back" | b"", 0) if is_cork_expired => {}
        other => panic!("{other:?}, cork expired: {is_cork_expired}"),
    }
    set_int(moved.socket.as_fd(), IPPROTO_TCP, libc::TCP_CORK, 0).expect("uncork");
    let mut words = [0; 9];
    client.read_exact(&mut words).expect("read");
    assert_eq!(&words, b"kept back");
}

#[test]
fn dual_stack_socket_with_ipv4_flow_moves() {
    let net = TestNetwork::new();
    let listener = net
        .a
        .run(|| TcpListener::bind("[::]:8080").expect("listen"));
    let service: SocketAddr = (SERVICE_V4, 8080).into();
    let mut client = net
        .client
        .run(|| TcpStream::connect(service).expect("connect"));
    let (server, _) = listener.accept().expect("accept");
    let mut moved = hand_off(&net, server);
    assert!(moved.fixed.v6_socket && moved.fixed.local == service);
    exchange(&mut client, &mut moved.socket, &pattern(1, 10_000));
    exchange(&mut moved.socket, &mut client, &pattern(2, 10_000));
}

#[test]
fn shut_receiving_direction_survives() {
    let net = TestNetwork::new();
    let (_client, server) = net.connection(service_addresses()[0]);
    server.shutdown(std::net::Shutdown::Read).expect("shutdown");
    let mut moved = hand_off(&net, server);
    assert!(moved.fixed.receive_shut);
    assert_eq!(moved.socket.read(&mut [0; 1]).expect("read"), 0);
}

fn refusal(socket: impl AsFd) -> UnmovableReason {
    match read_static(socket.as_fd()) {
        Err(RepairError::Unmovable(reason)) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn immovable_sockets_are_refused_with_reason() {
    let net = TestNetwork::new();
    net.a.run(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        assert_eq!(refusal(&listener), UnmovableReason::Listening);
        let udp = UdpSocket::bind("127.0.0.1:0").expect("bind");
        assert_eq!(refusal(&udp), UnmovableReason::NotTcp);
        let file = std::fs::File::open("/dev/null").expect("open");
        assert_eq!(refusal(&file), UnmovableReason::NotTcp);
        let address = listener.local_addr().expect("address");
        let client = TcpStream::connect(address).expect("connect");
        let (mut server, _) = listener.accept().expect("accept");
        let before = read_static(server.as_fd()).expect("movable");
        refuses_urgent_data(&client, &server);
        refuses_ebpf_filter_and_peek_offset(&server);
        server.read_exact(&mut [0; 4]).expect("read");
        assert_eq!(read_static(server.as_fd()).expect("movable again"), before);
        drop(client);
        server.shutdown(std::net::Shutdown::Both).expect("shutdown");
        holdfast_lab::testing::wait_for("closed", || {
            matches!(
                read_static(server.as_fd()),
                Err(RepairError::Unmovable(UnmovableReason::Closed))
            )
        });
    });
    refuses_a_handshake(&net.a);
    refuses_mptcp(&net.a);
    refuses_md5(&net.a);
    refuses_another_namespace(&net);
}

fn refuses_urgent_data(client: &TcpStream, server: &TcpStream) {
    let send = |bytes: &[u8], flags| {
        // SAFETY: the bytes outlive the call.
        let sent = unsafe {
            libc::send(
                client.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                flags,
            )
        };
        assert_eq!(sent, bytes.len() as isize);
    };
    send(b"data", 0);
    send(b"!", libc::MSG_OOB);
    holdfast_lab::testing::wait_for("urgent data", || read_static(server.as_fd()).is_err());
    assert_eq!(refusal(server), UnmovableReason::UrgentData);
    let mut byte = [0u8; 1];
    // SAFETY: the byte is writable and outlives the call.
    let got = unsafe {
        libc::recv(
            server.as_raw_fd(),
            byte.as_mut_ptr().cast(),
            1,
            libc::MSG_OOB,
        )
    };
    assert_eq!((got, byte[0]), (1, b'!'));
}

/// Refuses an eBPF filter and a peek offset; a classic filter moves.
fn refuses_ebpf_filter_and_peek_offset(server: &TcpStream) {
    let socket = server.as_fd();
    common::attach_ebpf(socket);
    assert_eq!(refusal(server), UnmovableReason::EbpfFilter);
    set_int(socket, SOL_SOCKET, libc::SO_DETACH_FILTER, 0).expect("detach");
    set_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF, 1).expect("a place");
    assert_eq!(refusal(server), UnmovableReason::PeekOffset);
    set_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF, -1).expect("none");
}

fn tcp_socket(protocol: i32, flags: i32) -> OwnedFd {
    // SAFETY: no pointers are passed; a new descriptor is owned by nothing else.
    unsafe {
        let fd = libc::socket(
            libc::AF_INET,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags,
            protocol,
        );
        assert!(fd >= 0, "socket: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    }
}

fn refuses_a_handshake(host: &TestNamespace) {
    host.run(|| {
        let socket = tcp_socket(IPPROTO_TCP, libc::SOCK_NONBLOCK);
        assert_eq!(refusal(&socket), UnmovableReason::Closed);
        // The client's network has no host at this address, so the SYN stays unanswered.
        let nobody = RawAddress::for_family((Ipv4Addr::new(10, 77, 2, 99), 1).into(), false);
        let _ = holdfast_sys::address::connect(socket.as_fd(), &nobody);
        assert!(matches!(refusal(&socket), UnmovableReason::Handshake(_)));
    });
}

fn refuses_mptcp(host: &TestNamespace) {
    host.run(|| {
        assert_eq!(
            refusal(tcp_socket(libc::IPPROTO_MPTCP, 0)),
            UnmovableReason::Mptcp
        )
    });
}

/// `struct tcp_md5sig` is a 128-byte address, 8 bytes of flags and lengths, and an 80-byte key.
fn md5_key(peer: Ipv4Addr) -> [u8; 216] {
    let mut raw = [0u8; 216];
    raw[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    raw[4..8].copy_from_slice(&peer.octets());
    raw[130..132].copy_from_slice(&3u16.to_ne_bytes());
    raw[136..139].copy_from_slice(b"key");
    raw
}

fn refuses_md5(host: &TestNamespace) {
    host.run(|| {
        let loopback = Ipv4Addr::LOCALHOST;
        let listening = tcp_socket(IPPROTO_TCP, 0);
        let address = RawAddress::for_family((loopback, 7000).into(), false);
        bind(listening.as_fd(), &address).expect("bind");
        let key = md5_key(loopback);
        set_bytes(listening.as_fd(), IPPROTO_TCP, libc::TCP_MD5SIG, &key).expect("MD5 key");
        // SAFETY: no pointers are passed.
        assert_eq!(unsafe { libc::listen(listening.as_raw_fd(), 1) }, 0);
        let client = tcp_socket(IPPROTO_TCP, 0);
        set_bytes(client.as_fd(), IPPROTO_TCP, libc::TCP_MD5SIG, &key).expect("MD5 key");
        holdfast_sys::address::connect(client.as_fd(), &address).expect("connect");
        let (server, _) = TcpListener::from(listening).accept().expect("accept");
        assert_eq!(refusal(&server), UnmovableReason::Md5);
        assert_eq!(refusal(&client), UnmovableReason::Md5);
    });
}

fn refuses_another_namespace(net: &TestNetwork) {
    let (_client, server) = net.connection(service_addresses()[0]);
    let elsewhere = net.b.run(|| refusal(&server));
    assert_eq!(elsewhere, UnmovableReason::OtherNamespace);
}

#[test]
fn acceptor_refuses_missing_device_and_congestion_control() {
    let net = TestNetwork::new();
    net.a.ip("link add only-here type veth peer name other");
    let (_client, server) = net.connection(service_addresses()[0]);
    let mut fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
    fixed.options.device = "only-here".into();
    let refused = net.b.run(|| prepare(&fixed).expect_err("no such device"));
    assert!(
        matches!(&refused, RepairError::Unmovable(UnmovableReason::DeviceAbsent(name)) if name == "only-here")
    );
    fixed.options.device.clear();
    fixed.options.congestion_control = "carrier-pigeon".into();
    let refused = net
        .b
        .run(|| prepare(&fixed).expect_err("no such algorithm"));
    assert!(matches!(
        refused,
        RepairError::Unmovable(UnmovableReason::CongestionControlAbsent(_))
    ));
}

#[test]
fn late_urgent_data_is_refused_in_the_freeze() {
    let net = TestNetwork::new();
    let (client, mut server) = net.connection(service_addresses()[0]);
    let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
    for (bytes, flags) in [(b"one", 0), (b"two", libc::MSG_OOB), (b"six", 0)] {
        // SAFETY: the bytes outlive the call.
        let sent = unsafe { libc::send(client.as_raw_fd(), bytes.as_ptr().cast(), 3, flags) };
        assert_eq!(sent, 3);
    }
    holdfast_lab::testing::wait_for("all received", || {
        let info = holdfast_sys::tcp_info::TcpInfo::read(server.as_fd());
        info.expect("TCP_INFO").bytes_received == 9
    });
    let refused = extract(server.as_fd(), &fixed).expect_err("urgent data");
    assert!(matches!(
        refused,
        RepairError::Unmovable(UnmovableReason::UrgentData)
    ));
    let connections = [(server.as_fd(), &fixed)];
    let refused = extract_all(&connections, &mut Vec::new(), 1)
        .pop()
        .expect("one outcome");
    assert!(matches!(
        refused,
        Err(RepairError::Unmovable(UnmovableReason::UrgentData))
    ));
    assert_eq!(int(&server, IPPROTO_TCP, libc::TCP_REPAIR), 0);
    let mut rest = [0; 8];
    server.read_exact(&mut rest).expect("read");
    assert_eq!(&rest, b"onetwsix");
}

#[test]
fn closed_connection_is_returned_to_the_program() {
    let net = TestNetwork::new();
    let (client, mut server) = net.connection(service_addresses()[0]);
    let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
    // A reset: SO_LINGER with zero seconds.
    set_bytes(
        client.as_fd(),
        SOL_SOCKET,
        libc::SO_LINGER,
        &[1, 0, 0, 0, 0, 0, 0, 0],
    )
    .expect("linger");
    drop(client);
    holdfast_lab::testing::wait_for("reset", || {
        common::tcp_state(&server) == holdfast_sys::tcp_info::TcpState::Close
    });
    let refused = extract(server.as_fd(), &fixed).expect_err("closed");
    assert!(matches!(
        refused,
        RepairError::Unmovable(UnmovableReason::Closed)
    ));
    assert_eq!(int(&server, IPPROTO_TCP, libc::TCP_REPAIR), 0);
    assert!(server.read(&mut [0; 1]).is_err());
}
