//! UDP sockets move: options, addresses, memberships and the receive queue.

mod common;

use common::vary;
use holdfast_lab::testing::{TestNetwork, service_addresses};
use holdfast_sys::netlink::Netlink;
use holdfast_sys::sock_diag::udp_shutdowns;
use holdfast_sys::sockopt::{get_bytes, get_int, set_int};
use holdfast_sys::tun::{Tun, VnetHeader};
use holdfast_tcp_repair::udp::{
    Datagram, HostMulticastGroups, MulticastMembership, UdpError, UdpStaticState, drain, join,
    memberships, peek, prepare, read_static, replay_packet,
};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_UDP, SOL_SOCKET};
use rustix::net::Shutdown;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

const OPTIONS: &[(i32, i32, i32)] = &[
    (SOL_SOCKET, libc::SO_BROADCAST, 1),
    (SOL_SOCKET, libc::SO_REUSEADDR, 1),
    (SOL_SOCKET, libc::SO_REUSEPORT, 1),
    (SOL_SOCKET, libc::SO_MARK, 77),
    (SOL_SOCKET, libc::SO_RXQ_OVFL, 1),
    (IPPROTO_IP, libc::IP_TOS, 0x20),
    (SOL_SOCKET, libc::SO_PRIORITY, 5),
    (IPPROTO_IP, libc::IP_TTL, 33),
    (IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
    (IPPROTO_IP, libc::IP_PKTINFO, 1),
    (IPPROTO_IP, libc::IP_RECVERR, 1),
    (IPPROTO_IP, libc::IP_RECVTTL, 1),
    (IPPROTO_UDP, 104, 1),
    (IPPROTO_UDP, 103, 1200),
];
const V4_OPTIONS: &[(i32, i32, i32)] = &[
    (IPPROTO_IP, libc::IP_MULTICAST_TTL, 9),
    (IPPROTO_IP, libc::IP_MULTICAST_LOOP, 0),
    (IPPROTO_IP, libc::IP_MULTICAST_ALL, 0),
];
const V6_OPTIONS: &[(i32, i32, i32)] = &[
    (IPPROTO_IPV6, libc::IPV6_TCLASS, 0x40),
    (IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 44),
    (IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVERR, 1),
    (IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, 8),
    (IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, 0),
];

/// Returns a different port for each use. A child that another test starts holds this test's descriptors for a moment,
/// so a port that was just closed may still be in use.
fn unique_port(at: usize) -> u16 {
    9000 + at as u16
}

fn round_trip_encoded(fixed: &UdpStaticState) -> UdpStaticState {
    postcard::from_bytes(&postcard::to_stdvec(fixed).expect("coded")).expect("decoded")
}

#[test]
fn options_and_addresses_survive() {
    let net = TestNetwork::new();
    for (at, mut service) in service_addresses().into_iter().enumerate() {
        for connected in [false, true] {
            service.set_port(unique_port(at * 2 + usize::from(connected)));
            let socket = net.a.run(|| UdpSocket::bind(service).expect("bind"));
            let mut options = OPTIONS.to_vec();
            options.extend_from_slice(if service.is_ipv4() {
                V4_OPTIONS
            } else {
                V6_OPTIONS
            });
            for (level, name, value) in &options {
                set_int(socket.as_fd(), *level, *name, *value).expect("setsockopt");
            }
            set_int(socket.as_fd(), SOL_SOCKET, libc::SO_RCVBUF, 300_000).expect("buffer");
            let far = SocketAddr::new(
                if service.is_ipv4() {
                    "10.77.1.2"
                } else {
                    "fd77:1::2"
                }
                .parse()
                .expect("address"),
                99,
            );
            if connected {
                net.a.run(|| socket.connect(far).expect("connect"));
            }
            let fixed =
                round_trip_encoded(&read_static(socket.as_fd(), Vec::new()).expect("readable"));
            let moved = UdpSocket::from(net.b.run(|| prepare(&fixed).expect("prepared")));
            for (level, name, value) in &options {
                let now = get_int(moved.as_fd(), *level, *name).expect("getsockopt");
                assert_eq!(now, *value, "{level}/{name} on {service}");
            }
            assert_eq!(moved.local_addr().expect("bound"), service);
            assert_eq!(moved.peer_addr().ok(), connected.then_some(far));
            let again = read_static(moved.as_fd(), Vec::new()).expect("readable");
            assert_eq!(again, fixed);
        }
    }
}

/// Every option that can be read and set has the same value after a move.
#[test]
fn every_readable_option_survives() {
    let net = TestNetwork::new();
    for (at, mut service) in service_addresses().into_iter().enumerate() {
        service.set_port(unique_port(20 + at));
        let socket = net.a.run(|| UdpSocket::bind(service).expect("bind"));
        let levels: &[(i32, i32)] = match service.is_ipv4() {
            true => &[vary::SOCKET_LEVEL, vary::IP_LEVEL, vary::UDP_LEVEL],
            false => &[
                vary::SOCKET_LEVEL,
                vary::IP_LEVEL,
                vary::IPV6_LEVEL,
                vary::UDP_LEVEL,
            ],
        };
        let varied = net
            .a
            .run(|| vary::vary_options(socket.as_fd(), levels, &[]));
        assert!(varied.len() > 50, "only {} were set", varied.len());
        let fixed = net
            .a
            .run(|| read_static(socket.as_fd(), Vec::new()).expect("readable"));
        let moved = UdpSocket::from(
            net.b
                .run(|| prepare(&round_trip_encoded(&fixed)).expect("prepared")),
        );
        let lost = net.b.run(|| vary::differences(moved.as_fd(), &varied));
        assert!(lost.is_empty(), "of {service}: {lost:#?}");
    }
}

/// Timeouts, filters and shut-down halves survive, although no integer option represents them.
#[test]
fn timeouts_filters_and_shut_halves_survive() {
    let net = TestNetwork::new();
    for (at, service) in service_addresses().into_iter().enumerate() {
        for (half, how) in [Shutdown::Read, Shutdown::Write, Shutdown::Both]
            .into_iter()
            .enumerate()
        {
            let at = SocketAddr::new(service.ip(), unique_port(30 + at * 3 + half));
            let socket = net.a.run(|| UdpSocket::bind(at).expect("bind"));
            // Whole ticks of the kernel's clock, at any rate.
            let (long, short) = (Duration::from_millis(7200), Duration::from_millis(320));
            socket.set_read_timeout(Some(long)).expect("set");
            socket.set_write_timeout(Some(short)).expect("set");
            common::attach_filter(socket.as_fd(), &common::SHORT_PACKETS_ONLY);
            set_int(socket.as_fd(), SOL_SOCKET, libc::SO_LOCK_FILTER, 1).expect("locked");
            // Without a peer the kernel shuts the socket down, but returns ENOTCONN.
            let _ = rustix::net::shutdown(&socket, how);
            let fixed = net.a.run(|| read_with_shut_halves(&socket));
            let moved = UdpSocket::from(
                net.b
                    .run(|| prepare(&round_trip_encoded(&fixed)).expect("prepared")),
            );
            assert_eq!(moved.read_timeout().expect("asked"), Some(long));
            assert_eq!(moved.write_timeout().expect("asked"), Some(short));
            assert_eq!(
                common::read_filter(moved.as_fd()),
                common::SHORT_PACKETS_ONLY
            );
            let locked = get_int(moved.as_fd(), SOL_SOCKET, libc::SO_LOCK_FILTER);
            assert_eq!(locked.expect("asked"), 1);
            let again = net.b.run(|| read_with_shut_halves(&moved));
            assert_eq!(
                (again.shutdown, fixed.shutdown),
                (half as u8 + 1, half as u8 + 1)
            );
        }
    }
}

/// Reads a socket, and from sock_diag the halves that are shut down: the socket itself does not report `SHUT_WR`.
fn read_with_shut_halves(socket: &UdpSocket) -> UdpStaticState {
    let mut netlink = Netlink::new(libc::NETLINK_SOCK_DIAG).expect("a netlink socket");
    let shutdowns = udp_shutdowns(&mut netlink).expect("listed");
    let mut cookie = [0; 8];
    get_bytes(socket.as_fd(), SOL_SOCKET, libc::SO_COOKIE, &mut cookie).expect("a cookie");
    let mut state = read_static(socket.as_fd(), Vec::new()).expect("readable");
    state.shutdown |= shutdowns.get(&cookie).copied().unwrap_or(0);
    state
}

/// Returns the datagrams with a payload: the kernel shows an empty datagram to the first peek only.
fn without_empty(datagrams: Vec<Datagram>) -> Vec<Datagram> {
    let has_payload = |one: &Datagram| !one.payload.is_empty();
    datagrams.into_iter().filter(has_payload).collect()
}

#[test]
fn the_receive_queue_survives() {
    let net = TestNetwork::new();
    let kinds = service_addresses()
        .into_iter()
        .flat_map(|one| [(one, false), (one, true)]);
    for (at, (mut service, wildcard)) in kinds.enumerate() {
        service.set_port(unique_port(at));
        net.route(holdfast_lab::testing::RouteTarget::A);
        let any: IpAddr = if service.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            "::".parse().expect("any")
        };
        let bound = SocketAddr::new(if wildcard { any } else { service.ip() }, service.port());
        let socket = net.a.run(|| UdpSocket::bind(bound).expect("bind"));
        if wildcard {
            let (level, name) = if service.is_ipv4() {
                (IPPROTO_IP, libc::IP_PKTINFO)
            } else {
                (IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
            };
            set_int(socket.as_fd(), level, name, 1).expect("pktinfo");
        }
        let clients: Vec<_> = (0..3)
            .map(|_| net.client.run(|| UdpSocket::bind((any, 0)).expect("bind")))
            .collect();
        let payloads = [&b""[..], b"odd", &[7u8; 1400]];
        for (client, payload) in clients.iter().zip(payloads) {
            net.client
                .run(|| client.send_to(payload, service).expect("sent"));
        }
        holdfast_lab::testing::wait_for("all received", || {
            without_empty(peek(socket.as_fd()).expect("peeked")).len() == 2
        });
        let copies = without_empty(peek(socket.as_fd()).expect("peeked"));
        let fixed = round_trip_encoded(&read_static(socket.as_fd(), Vec::new()).expect("readable"));
        let queue = drain(socket.as_fd()).expect("drained");
        assert_eq!(without_empty(queue.clone()), copies);
        assert_eq!(queue.len(), 3);
        for (datagram, (client, payload)) in queue.iter().zip(clients.iter().zip(payloads)) {
            assert_eq!(datagram.payload, payload);
            assert_eq!(
                datagram.source.port(),
                client.local_addr().expect("bound").port()
            );
            assert_eq!(datagram.destination, wildcard.then_some(service.ip()));
        }
        drop(socket);
        let moved = replay_at_b(&net, &fixed, &queue);
        net.b
            .run(|| moved.send_to(b"answer", queue[1].source).expect("sent"));
        let mut buffer = [0; 16];
        clients[1]
            .set_read_timeout(Some(holdfast_lab::testing::WAIT_LIMIT))
            .expect("timeout");
        let (length, from) = clients[1].recv_from(&mut buffer).expect("an answer");
        assert_eq!(&buffer[..length], b"answer");
        assert!(wildcard || from == service);
    }
}

/// Restores a socket at `b` and replays the datagrams of `queue` to it; the test receives them all.
fn replay_at_b(net: &TestNetwork, fixed: &UdpStaticState, queue: &[Datagram]) -> UdpSocket {
    net.route(holdfast_lab::testing::RouteTarget::B);
    let moved = UdpSocket::from(net.b.run(|| prepare(fixed).expect("prepared")));
    moved.set_nonblocking(false).expect("blocking");
    moved
        .set_read_timeout(Some(holdfast_lab::testing::WAIT_LIMIT))
        .expect("timeout");
    net.b.run(|| {
        let tun = Tun::open("hold").expect("a TUN");
        for datagram in queue {
            let packet = replay_packet(datagram, fixed.local).expect("a packet");
            tun.write(VnetHeader::default(), &packet).expect("written");
        }
    });
    for datagram in queue {
        let mut buffer = [0; 2000];
        let (length, source) = moved.recv_from(&mut buffer).expect("a datagram");
        assert_eq!(buffer[..length], datagram.payload);
        assert_eq!(source, datagram.source);
    }
    moved
}

#[test]
fn coalesced_datagrams_are_split() {
    let net = TestNetwork::new();
    let (receiver, sender) = net.a.run(|| {
        let receiver = UdpSocket::bind("127.0.0.1:0").expect("bind");
        set_int(receiver.as_fd(), IPPROTO_UDP, 104, 1).expect("UDP_GRO");
        let sender = UdpSocket::bind("127.0.0.1:0").expect("bind");
        set_int(sender.as_fd(), IPPROTO_UDP, 103, 100).expect("UDP_SEGMENT");
        (receiver, sender)
    });
    let payload = holdfast_lab::testing::pattern(1, 350);
    sender
        .send_to(&payload, receiver.local_addr().expect("bound"))
        .expect("sent");
    let mut queue: Vec<Datagram> = Vec::new();
    holdfast_lab::testing::wait_for("350 bytes", || {
        queue.extend(drain(receiver.as_fd()).expect("drained"));
        queue.iter().map(|one| one.payload.len()).sum::<usize>() == 350
    });
    let sizes: Vec<_> = queue.iter().map(|one| one.payload.len()).collect();
    assert_eq!(sizes, [100, 100, 100, 50]);
    let concatenated: Vec<u8> = queue.into_iter().flat_map(|one| one.payload).collect();
    assert_eq!(concatenated, payload);
}

#[test]
fn multicast_memberships_survive() {
    let net = TestNetwork::new();
    for (at, (group, any)) in [("239.7.7.7", "0.0.0.0"), ("ff15::77", "::")]
        .into_iter()
        .enumerate()
    {
        let group: IpAddr = group.parse().expect("a group");
        let bound = SocketAddr::new(any.parse().expect("any"), unique_port(at * 2));
        let member = MulticastMembership {
            group,
            interface: "eth0".into(),
            source: None,
            blocked: Vec::new(),
        };
        let old = net.a.run(|| UdpSocket::bind(bound).expect("bind"));
        let fixed =
            round_trip_encoded(&read_static(old.as_fd(), vec![member.clone()]).expect("readable"));
        let moved = UdpSocket::from(net.b.run(|| prepare(&fixed).expect("prepared")));
        let listed = net.b.run(|| {
            let file = if group.is_ipv4() { "igmp" } else { "igmp6" };
            std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).expect("memberships")
        });
        let wanted = if group.is_ipv4() {
            "070707EF"
        } else {
            "ff150000000000000000000000000077"
        };
        assert!(listed.contains(wanted), "{listed}");
        drop(moved);
        let mut absent = fixed.clone();
        absent.local.set_port(unique_port(at * 2 + 1));
        absent.memberships[0].interface = "no-such".into();
        let refused = net.b.run(|| prepare(&absent).expect_err("no such device"));
        assert!(matches!(refused, UdpError::DeviceAbsent(name) if name == "no-such"));
    }
}

/// The memberships of each socket are found, with their included and excluded sources.
#[test]
fn memberships_of_each_socket_are_found() {
    let net = TestNetwork::new();
    net.a.run(|| {
        let member = |group: &str, source: Option<&str>, blocked: &[&str]| {
            let address = |text: &str| text.parse::<IpAddr>().expect("an address");
            MulticastMembership {
                group: address(group),
                interface: "eth0".into(),
                source: source.map(address),
                blocked: blocked.iter().map(|text| address(text)).collect(),
            }
        };
        let wanted = [
            member("239.7.7.8", None, &[]),
            member("232.7.7.9", Some("10.9.9.8"), &[]),
            member("232.7.7.9", Some("10.9.9.9"), &[]),
            member("239.7.7.10", None, &["10.9.9.7"]),
            member("ff15::78", None, &[]),
            member("ff35::79", Some("fd77::9"), &[]),
            member("ff15::80", None, &["fd77::8"]),
        ];
        let socket = UdpSocket::bind("[::]:0").expect("bind");
        let other = UdpSocket::bind("[::]:0").expect("bind");
        let old = UdpSocket::bind("0.0.0.0:0").expect("bind");
        wanted
            .iter()
            .for_each(|of| join(socket.as_fd(), of).expect("joined"));
        join(old.as_fd(), &wanted[0]).expect("joined");
        let groups = HostMulticastGroups::read();
        let mut found = memberships(socket.as_fd(), true, &groups).expect("found");
        let position_of = |of: &MulticastMembership| wanted.iter().position(|one| one == of);
        found.sort_by_key(position_of);
        assert_eq!(found, wanted);
        assert_eq!(
            memberships(other.as_fd(), true, &groups).expect("found"),
            []
        );
        let found = memberships(old.as_fd(), false, &groups).expect("found");
        assert_eq!(found, wanted[..1]);
    });
}

#[test]
fn immovable_sockets_are_refused() {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
    set_int(socket.as_fd(), IPPROTO_UDP, 1, 1).expect("UDP_CORK");
    assert!(matches!(
        read_static(socket.as_fd(), Vec::new()),
        Err(UdpError::Corked)
    ));
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    assert!(matches!(
        read_static(tcp.as_fd(), Vec::new()),
        Err(UdpError::NotUdp)
    ));
    let numbered = UdpSocket::bind("127.0.0.1:0").expect("bind");
    // `SOF_TIMESTAMPING_OPT_ID`, with transmit timestamps.
    let name = 37;
    set_int(numbered.as_fd(), SOL_SOCKET, name, 1 << 7 | 1 << 1).expect("SO_TIMESTAMPING");
    assert!(matches!(
        read_static(numbered.as_fd(), Vec::new()),
        Err(UdpError::NumberedTimestamps)
    ));
    let filtered = UdpSocket::bind("127.0.0.1:0").expect("bind");
    common::attach_ebpf(filtered.as_fd());
    assert!(matches!(
        read_static(filtered.as_fd(), Vec::new()),
        Err(UdpError::EbpfFilter)
    ));
}
