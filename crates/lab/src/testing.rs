//! Network namespaces without processes, for tests of single sockets.
//!
//! All functions panic where the machine refuses something or a limit is exceeded, as a test cannot go on.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::libc::{self, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use nix::sched::{CloneFlags, setns, unshare};

use crate::namespace::run_on_thread;

/// Longest wait for any condition that must become true.
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Options of a TCP socket that must survive a move: level, name, and a value that is not the default. `IP_TOS` stands
/// before `SO_PRIORITY`, which it changes.
pub const TCP_OPTIONS: &[(i32, i32, i32)] = &[
    (SOL_SOCKET, libc::SO_KEEPALIVE, 1),
    (IPPROTO_TCP, libc::TCP_KEEPIDLE, 77),
    (IPPROTO_TCP, libc::TCP_NODELAY, 1),
    (IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 123_456),
    (IPPROTO_TCP, libc::TCP_LINGER2, 33),
    (IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4321),
    (IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, 50_000),
    (IPPROTO_TCP, 44, 60_000), // TCP_RTO_MAX_MS
    (IPPROTO_IP, libc::IP_TOS, 0x48),
    (IPPROTO_IP, libc::IP_TTL, 99),
    (SOL_SOCKET, libc::SO_PRIORITY, 4),
    (SOL_SOCKET, libc::SO_MARK, 0xbeef),
    (SOL_SOCKET, libc::SO_RCVLOWAT, 17),
    (SOL_SOCKET, libc::SO_REUSEADDR, 1),
];

/// Further options of an IPv6 socket, in the form of [`TCP_OPTIONS`].
pub const IPV6_OPTIONS: &[(i32, i32, i32)] = &[
    (IPPROTO_IPV6, libc::IPV6_TCLASS, 0x28),
    (IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 88),
    (
        IPPROTO_IPV6,
        libc::IPV6_MTU_DISCOVER,
        libc::IPV6_PMTUDISC_DONT,
    ),
    (IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1),
];

/// A network namespace that exists only as long as this value: nothing is left behind, however the test ends.
#[derive(Debug)]
pub struct TestNamespace {
    handle: File,
}

impl TestNamespace {
    /// Creates a namespace with a loopback device.
    #[must_use]
    pub fn new() -> Self {
        let handle = run_on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("root may make a namespace");
            File::open("/proc/thread-self/ns/net").expect("own namespace")
        });
        let namespace = Self { handle };
        namespace.ip("link set lo up");
        namespace
    }

    /// Runs `work` on a thread inside the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        run_on_thread(|| {
            setns(&self.handle, CloneFlags::CLONE_NEWNET).expect("root may enter a namespace");
            work()
        })
    }

    /// Runs `ip` with `arguments` inside the namespace.
    pub fn ip(&self, arguments: &str) {
        self.run(|| {
            let status = Command::new("ip")
                .args(arguments.split_whitespace())
                .status()
                .expect("ip starts");
            assert!(status.success(), "ip {arguments}");
        });
    }

    /// Writes a setting below `/proc/sys`.
    pub fn write_sysctl(&self, path: &str, value: &str) {
        self.run(|| {
            std::fs::write(format!("/proc/sys/{path}"), value).expect("the value is valid")
        });
    }

    /// Creates a link to `other`, called `name` on both sides.
    pub fn link_to(&self, other: &Self, name: &str) {
        let path = other.path();
        self.ip(&format!(
            "link add {name} type veth peer name {name} netns {path}"
        ));
    }

    /// Returns a path that names the namespace while this value exists.
    #[must_use]
    pub fn path(&self) -> String {
        let process = std::process::id();
        format!("/proc/{process}/fd/{}", self.handle.as_raw_fd())
    }
}

impl Default for TestNamespace {
    fn default() -> Self {
        Self::new()
    }
}

/// A client, a router and two servers, each in its own network namespace. Both servers have the service addresses, and
/// the router forwards packets to one of them.
#[derive(Debug)]
pub struct TestNetwork {
    /// Namespace of the client.
    pub client: TestNamespace,
    /// The router between all others.
    pub router: TestNamespace,
    /// Namespace of the first server, to which packets go at first.
    pub a: TestNamespace,
    /// Namespace of the second server.
    pub b: TestNamespace,
}

/// Returns the service's addresses of both families.
#[must_use]
pub fn service_addresses() -> [SocketAddr; 2] {
    [(SERVICE_V4, 8080).into(), (SERVICE_V6, 8080).into()]
}

/// The service's IPv4 address.
pub const SERVICE_V4: Ipv4Addr = Ipv4Addr::new(10, 77, 9, 9);
/// The service's IPv6 address.
pub const SERVICE_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 9, 0, 0, 0, 0, 0, 9);

/// The host to which the router forwards packets for the service address.
#[derive(Clone, Copy, Debug)]
pub enum RouteTarget {
    /// The first server.
    A,
    /// The second server.
    B,
    /// None: the router drops the packets.
    Unreachable,
}

impl Default for TestNetwork {
    fn default() -> Self {
        Self::new()
    }
}

impl TestNetwork {
    /// Creates the hosts and their links.
    #[must_use]
    pub fn new() -> Self {
        let net = Self {
            client: TestNamespace::new(),
            router: TestNamespace::new(),
            a: TestNamespace::new(),
            b: TestNamespace::new(),
        };
        for (number, host) in [(1, &net.client), (2, &net.a), (3, &net.b)] {
            link_to_router(&net.router, host, number);
        }
        net.router.write_sysctl("net/ipv4/ip_forward", "1");
        net.router.write_sysctl("net/ipv6/conf/all/forwarding", "1");
        for host in [&net.a, &net.b] {
            host.ip("addr add 10.77.9.9/32 dev lo");
            host.ip("-6 addr add fd77:9::9/128 dev lo nodad");
        }
        net.route(RouteTarget::A);
        net
    }

    /// Makes the router forward packets for the service addresses to another host.
    pub fn route(&self, target: RouteTarget) {
        for (family, service, net) in [
            ("-4", "10.77.9.9/32", "10.77."),
            ("-6", "fd77:9::9/128", "fd77:"),
        ] {
            let host = if family == "-4" { ".2" } else { "::2" };
            let next_hop = match target {
                RouteTarget::A => format!("{service} via {net}2{host}"),
                RouteTarget::B => format!("{service} via {net}3{host}"),
                RouteTarget::Unreachable => format!("blackhole {service}"),
            };
            // `ip route replace` keeps a route of another type, so the old route is removed first.
            let _ = self.router.run(|| {
                Command::new("ip")
                    .args([family, "route", "flush", service])
                    .status()
            });
            self.router.ip(&format!("{family} route add {next_hop}"));
        }
    }

    /// Drops everything that the servers send to the client, or stops dropping.
    pub fn block_traffic_to_client(&self, blocked: bool) {
        let verb = if blocked { "add" } else { "del" };
        for (family, address) in [("-4", "10.77.1.2/32"), ("-6", "fd77:1::2/128")] {
            self.router
                .ip(&format!("{family} route {verb} blackhole {address}"));
        }
    }

    /// Opens a listener at `a` and a connection from the client: client's end, server's end.
    #[must_use]
    pub fn connection(&self, service: SocketAddr) -> (TcpStream, TcpStream) {
        let listener = self.a.run(|| TcpListener::bind(service).expect("listen"));
        self.connect_to(&listener)
    }

    /// Opens a connection from the client to a listener: client's end, server's end.
    #[must_use]
    pub fn connect_to(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let address = listener.local_addr().expect("address");
        let client = self
            .client
            .run(|| TcpStream::connect(address).expect("connect"));
        let (server, _) = listener.accept().expect("accept");
        for end in [&client, &server] {
            end.set_read_timeout(Some(WAIT_LIMIT)).expect("timeout");
            end.set_write_timeout(Some(WAIT_LIMIT)).expect("timeout");
        }
        (client, server)
    }
}

/// Links a host with the router in the networks 10.77.`number`.0/24 and fd77:`number`::/64.
fn link_to_router(router: &TestNamespace, host: &TestNamespace, number: u8) {
    let mac = |side: u8| format!("02:77:00:00:0{number}:0{side}");
    let device = format!("r{number}");
    let peer = host.path();
    router.ip(&format!(
        "link add {device} type veth peer name eth0 netns {peer}"
    ));
    for (namespace, device, own) in [(router, device.as_str(), 1), (host, "eth0", 2)] {
        namespace.ip(&format!("link set {device} address {} up", mac(own)));
        namespace.ip(&format!("addr add 10.77.{number}.{own}/24 dev {device}"));
        namespace.ip(&format!(
            "-6 addr add fd77:{number}::{own}/64 dev {device} nodad"
        ));
    }
    for (namespace, device, other) in [(router, device.as_str(), 2), (host, "eth0", 1)] {
        let mac = mac(other);
        namespace.ip(&format!(
            "neigh replace 10.77.{number}.{other} lladdr {mac} dev {device}"
        ));
        namespace.ip(&format!(
            "neigh replace fd77:{number}::{other} lladdr {mac} dev {device}"
        ));
    }
    host.ip(&format!("route add default via 10.77.{number}.1"));
    host.ip(&format!("-6 route add default via fd77:{number}::1"));
}

/// Returns bytes that differ from position to position.
#[must_use]
pub fn pattern(seed: u32, length: usize) -> Vec<u8> {
    (0..length as u32)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(7) ^ seed) as u8)
        .collect()
}

/// Sends `bytes` from one end to the other and compares the received bytes.
pub fn exchange(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    let mut arrived = vec![0; bytes.len()];
    let mut sender = from.try_clone().expect("clone");
    std::thread::scope(|scope| {
        scope.spawn(move || sender.write_all(bytes).expect("write"));
        to.read_exact(&mut arrived).expect("read");
    });
    assert!(arrived == bytes, "bytes changed in transit");
}

/// Waits until `condition` returns true.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_LIMIT, "exceeded time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns a descriptor as a blocking stream with timeouts of [`WAIT_LIMIT`].
#[must_use]
pub fn stream(fd: OwnedFd) -> TcpStream {
    let stream = TcpStream::from(fd);
    stream.set_nonblocking(false).expect("blocking");
    stream.set_read_timeout(Some(WAIT_LIMIT)).expect("timeout");
    stream.set_write_timeout(Some(WAIT_LIMIT)).expect("timeout");
    stream
}

/// Returns a counter of `/proc/net/netstat` of the namespace, such as `PAWSEstab`.
#[must_use]
pub fn counter(namespace: &TestNamespace, name: &str) -> u64 {
    let text = namespace
        .run(|| std::fs::read_to_string("/proc/thread-self/net/netstat").expect("counters"));
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.chunks_exact(2) {
        let names = pair[0].split_whitespace();
        let mut values = names.zip(pair[1].split_whitespace());
        if let Some((_, value)) = values.find(|(key, _)| *key == name) {
            return value.parse().expect("a number");
        }
    }
    panic!("no counter {name}");
}

/// Returns true if the stream ends here. Interrupted reads are retried, as the standard library does.
pub fn at_end(socket: &mut TcpStream) -> bool {
    socket.read_to_end(&mut Vec::new()).expect("end of stream") == 0
}
