//! A client, a router and two servers, each in its own network namespace. A namespace exists only as long as the test's
//! descriptor of it, so nothing is left behind, however the test ends.
#![allow(dead_code, missing_docs)]

pub mod vary;

use holdfast_sys::socket_filter::{FilterInstruction, SocketFilter};
use holdfast_sys::sockopt::set_int;
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use holdfast_sys::tcp_repair::{
    TcpDynamicState, TcpStaticState, WindowProbe, abandon, activate, extract, prepare, read_static,
    restore, set_deferred_options_and_timeout, state_injection,
};
use holdfast_sys::tun::{Tun, VnetHeader};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait for any condition that must become true.
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A network namespace.
pub struct Namespace {
    handle: File,
}

impl Namespace {
    pub fn new() -> Self {
        let handle = std::thread::spawn(|| {
            // SAFETY: no pointers are passed; only this thread changes namespace.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            File::open("/proc/thread-self/ns/net").expect("own namespace")
        })
        .join()
        .expect("a thread");
        let namespace = Self { handle };
        namespace.ip("link set lo up");
        namespace
    }

    /// Runs `work` on a thread inside the namespace.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let inside = || {
                let fd = self.handle.as_raw_fd();
                // SAFETY: no pointers are passed; only this thread changes namespace.
                assert_eq!(unsafe { libc::setns(fd, libc::CLONE_NEWNET) }, 0);
                work()
            };
            match scope.spawn(inside).join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Runs `ip` with `arguments` inside the namespace.
    pub fn ip(&self, arguments: &str) {
        self.run(|| {
            let status = Command::new("ip")
                .args(arguments.split_whitespace())
                .status()
                .expect("ip");
            assert!(status.success(), "ip {arguments}");
        });
    }

    pub fn write_sysctl(&self, path: &str, value: &str) {
        self.run(|| std::fs::write(format!("/proc/sys/{path}"), value).expect("sysctl"));
    }

    /// Creates a link to `other`, called `name` on both sides.
    pub fn link_to(&self, other: &Namespace, name: &str) {
        let path = other.path();
        self.ip(&format!(
            "link add {name} type veth peer name {name} netns {path}"
        ));
    }

    fn path(&self) -> String {
        format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.handle.as_raw_fd()
        )
    }
}

/// The hosts. Both `a` and `b` have the service addresses, and the router forwards packets to one of them.
pub struct TestNetwork {
    pub client: Namespace,
    pub router: Namespace,
    pub a: Namespace,
    pub b: Namespace,
}

/// Returns the service's addresses of both families.
pub fn service_addresses() -> [SocketAddr; 2] {
    [(SERVICE_V4, 8080).into(), (SERVICE_V6, 8080).into()]
}

pub const SERVICE_V4: Ipv4Addr = Ipv4Addr::new(10, 77, 9, 9);
pub const SERVICE_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 9, 0, 0, 0, 0, 0, 9);

/// The host to which the router forwards packets for the service address.
#[derive(Clone, Copy)]
pub enum RouteTarget {
    A,
    B,
    Unreachable,
}

impl TestNetwork {
    pub fn new() -> Self {
        let net = Self {
            client: Namespace::new(),
            router: Namespace::new(),
            a: Namespace::new(),
            b: Namespace::new(),
        };
        for (number, host) in [(1, &net.client), (2, &net.a), (3, &net.b)] {
            link(&net.router, host, number);
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
    pub fn connection(&self, service: SocketAddr) -> (TcpStream, TcpStream) {
        let listener = self.a.run(|| TcpListener::bind(service).expect("listen"));
        self.connect_to(&listener)
    }

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

fn link(router: &Namespace, host: &Namespace, number: u8) {
    let mac = |side: u8| format!("02:77:00:00:0{number}:0{side}");
    let device = format!("r{number}");
    let peer = host.path();
    router.ip(&format!(
        "link add {device} type veth peer name eth0 netns {peer}"
    ));
    for (namespace, device, own, other) in [(router, device.as_str(), 1, 2), (host, "eth0", 2, 1)] {
        namespace.ip(&format!("link set {device} address {} up", mac(own)));
        namespace.ip(&format!("addr add 10.77.{number}.{own}/24 dev {device}"));
        namespace.ip(&format!(
            "-6 addr add fd77:{number}::{own}/64 dev {device} nodad"
        ));
        let _ = other;
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
pub fn stream(fd: OwnedFd) -> TcpStream {
    let stream = TcpStream::from(fd);
    stream.set_nonblocking(false).expect("blocking");
    stream.set_read_timeout(Some(WAIT_LIMIT)).expect("timeout");
    stream.set_write_timeout(Some(WAIT_LIMIT)).expect("timeout");
    stream
}

/// Returns a counter of `/proc/net/netstat` of the namespace, such as `PAWSEstab`.
pub fn counter(namespace: &Namespace, name: &str) -> u64 {
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

/// Returns the connection's TCP state.
pub fn tcp_state(socket: impl AsFd) -> TcpState {
    TcpInfo::read(socket.as_fd()).expect("TCP_INFO").state
}

/// A connection that has moved.
pub struct MovedConnection {
    pub socket: TcpStream,
    /// True if the descriptor was non-blocking when it was activated.
    pub nonblocking: bool,
    pub fixed: TcpStaticState,
    pub state: TcpDynamicState,
}

/// Moves the connection of `server` from `a` to `b` by [`hand_off_from`], without a window probe.
pub fn hand_off(net: &TestNetwork, server: TcpStream) -> MovedConnection {
    hand_off_from(
        net,
        (&net.a, &net.b, RouteTarget::B),
        server,
        WindowProbe::Never,
    )
}

/// Moves the connection of `server` from one host to another, with every step, and encodes and decodes both states. The
/// client's packets are dropped in between.
pub fn hand_off_from(
    net: &TestNetwork,
    (donor, acceptor, to): (&Namespace, &Namespace, RouteTarget),
    server: TcpStream,
    probe: WindowProbe,
) -> MovedConnection {
    let fixed = donor.run(|| read_static(server.as_fd()).expect("static state"));
    let fixed: TcpStaticState =
        postcard::from_bytes(&postcard::to_stdvec(&fixed).expect("coded")).expect("decoded");
    let prepared = acceptor.run(|| prepare(&fixed).expect("prepared"));
    net.route(RouteTarget::Unreachable);
    let frozen = extract(server.as_fd(), &fixed).expect("dynamic state");
    let frozen: TcpDynamicState =
        postcard::from_bytes(&postcard::to_stdvec(&frozen).expect("coded")).expect("decoded");
    let restored = acceptor.run(|| restore(prepared, &fixed, &frozen).expect("restored"));
    if let Some(packet) = state_injection(&fixed, &frozen) {
        let before = tcp_state(&restored);
        acceptor.run(|| {
            let tun = Tun::open("hold").expect("a TUN");
            tun.write(VnetHeader::default(), &packet).expect("injected");
        });
        assert_ne!(
            tcp_state(&restored),
            before,
            "the injected packet had no effect"
        );
    }
    net.route(to);
    abandon(server.as_fd()).expect("abandoned");
    let fd = acceptor.run(|| activate(restored, &fixed, &frozen, probe).expect("active"));
    // The acceptor's program may use the socket from here on.
    // SAFETY: F_GETFL takes no argument and touches no memory.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    set_deferred_options_and_timeout(fd.as_fd(), &fixed).expect("settled");
    MovedConnection {
        socket: stream(fd),
        nonblocking: flags & libc::O_NONBLOCK != 0,
        fixed,
        state: frozen,
    }
}

/// A classic filter: code, both jumps, operand.
pub type Filter = [(u16, u8, u8, u32)];

/// A filter that accepts only packets shorter than 9,000 bytes, and accepts them whole.
pub const SHORT_PACKETS_ONLY: [(u16, u8, u8, u32); 4] = [
    // `ld #len`, `jge #9000, 0, 1`, `ret #0`, `ret #-1`.
    (0x80, 0, 0, 0),
    (0x35, 0, 1, 9000),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, u32::MAX),
];

pub fn attach_filter(socket: BorrowedFd<'_>, filter: &Filter) {
    let filter = SocketFilter {
        program: filter.iter().map(instruction).collect(),
        locked: false,
    };
    filter.attach(socket).expect("attached");
}

fn instruction(&(code, jump_true, jump_false, operand): &(u16, u8, u8, u32)) -> FilterInstruction {
    FilterInstruction {
        code,
        jump_true,
        jump_false,
        operand,
    }
}

/// Returns the filter of a socket.
pub fn read_filter(socket: BorrowedFd<'_>) -> Vec<(u16, u8, u8, u32)> {
    let program = SocketFilter::read(socket).expect("a filter").program;
    let tuple = |one: &FilterInstruction| (one.code, one.jump_true, one.jump_false, one.operand);
    program.iter().map(tuple).collect()
}

/// Attaches an eBPF program that accepts every packet.
pub fn attach_ebpf(socket: BorrowedFd<'_>) {
    // `r0 = -1`, `exit`.
    let program = [0xffff_ffff_0000_00b7_u64, 0x95];
    // `union bpf_attr`: a socket filter of two instructions.
    let mut attributes = [0u64; 16];
    attributes[0] = 1 | 2 << 32;
    attributes[1] = program.as_ptr() as u64;
    attributes[2] = c"GPL".as_ptr() as u64;
    let size = size_of_val(&attributes);
    // SAFETY: `BPF_PROG_LOAD` reads the attributes and the memory they point to, which outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, 5, attributes.as_ptr(), size) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    let program = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let number = program.as_raw_fd();
    set_int(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, number).expect("attached");
}

/// Writes until the client's window and the send buffer are full; returns the number of bytes written.
pub fn fill_send_queue(server: &mut TcpStream, bytes: &[u8]) -> usize {
    server.set_nonblocking(true).expect("nonblocking");
    let mut written = 0;
    wait_for("a full queue", || match server.write(&bytes[written..]) {
        Ok(count) => {
            written += count;
            assert!(written < bytes.len(), "the queue never fills");
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

/// Returns true if the stream ends here. Interrupted reads are retried, as the standard library does.
pub fn at_end(socket: &mut TcpStream) -> bool {
    socket.read_to_end(&mut Vec::new()).expect("end of stream") == 0
}
