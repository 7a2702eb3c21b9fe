//! The kernel observer reads the same values of a socket as calls on the socket itself, field by field. Needs root.
#![allow(missing_docs)]

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use holdfast_lab::testing::{IPV6_OPTIONS, TCP_OPTIONS, wait_for};
use holdfast_node::dataplane::SocketObserver;
use holdfast_sys::sockopt::{SO_TXREHASH, TCP_DELACK_MAX_US, TCP_RTO_MIN_US, set_bytes, set_int};
use holdfast_tcp_repair::{TcpStaticReader, queue_levels};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};

/// Options besides [`TCP_OPTIONS`]: level, name, and a value that is not the default.
const OTHER_OPTIONS: &[(i32, i32, i32)] = &[
    (IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT),
    (IPPROTO_IP, 21, 3), // IP_MINTTL
    (IPPROTO_IP, libc::IP_FREEBIND, 1),
    (IPPROTO_IP, libc::IP_TRANSPARENT, 1),
    (SOL_SOCKET, libc::SO_OOBINLINE, 1),
    (SOL_SOCKET, libc::SO_DONTROUTE, 1),
    (SOL_SOCKET, libc::SO_BUSY_POLL, 5),
    (SOL_SOCKET, libc::SO_TIMESTAMP, 1),
    (SOL_SOCKET, libc::SO_TIMESTAMPNS, 1),
    (SOL_SOCKET, libc::SO_ZEROCOPY, 1),
    (SOL_SOCKET, SO_TXREHASH, 0),
    (SOL_SOCKET, libc::SO_REUSEPORT, 1),
    (SOL_SOCKET, libc::SO_SNDBUF, 100_000),
    (SOL_SOCKET, libc::SO_RCVBUF, 100_000),
    (IPPROTO_TCP, libc::TCP_KEEPINTVL, 11),
    (IPPROTO_TCP, libc::TCP_KEEPCNT, 5),
    (IPPROTO_TCP, libc::TCP_CORK, 1),
    (IPPROTO_TCP, libc::TCP_QUICKACK, 0),
    (IPPROTO_TCP, libc::TCP_QUICKACK, 1),
    (IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, 1),
    (IPPROTO_TCP, 36, 1),   // TCP_INQ
    (IPPROTO_TCP, 37, 500), // TCP_TX_DELAY
    (IPPROTO_TCP, libc::TCP_SYNCNT, 3),
    (IPPROTO_TCP, TCP_RTO_MIN_US, 100_000),
    (IPPROTO_TCP, TCP_DELACK_MAX_US, 20_000),
];

/// Options of an IPv6 socket besides [`IPV6_OPTIONS`].
const OTHER_IPV6_OPTIONS: &[(i32, i32, i32)] = &[
    (IPPROTO_IPV6, 70, 0), // IPV6_AUTOFLOWLABEL
    (IPPROTO_IPV6, 73, 3), // IPV6_MINHOPCOUNT
];

/// Returns the server's and the client's end of a connection.
fn connected_pair(listen: &str, connect: &str) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(listen).expect("bind");
    let port = listener.local_addr().expect("address").port();
    let address: SocketAddr = format!("{connect}:{port}").parse().expect("an address");
    let client = TcpStream::connect(address).expect("connect");
    (listener.accept().expect("accept").0, client)
}

/// Compares the results of both ways for all sockets. Options of the first socket serve as the reference from which the
/// others differ.
fn compare_readers(server: &[(String, TcpStream)], expected_sufficient: usize) {
    let mut sockets = SocketObserver::new();
    let fds: Vec<BorrowedFd<'_>> = server.iter().map(|(_, stream)| stream.as_fd()).collect();
    let snapshots = sockets.snapshot(&fds);
    let mut sufficient = 0;
    let (mut by_getsockopt, mut by_snapshot) = (
        TcpStaticReader::new().expect("netlink"),
        TcpStaticReader::new().expect("netlink"),
    );
    for ((name, stream), snapshot) in server.iter().zip(&snapshots) {
        let snapshot = snapshot.as_ref().expect("a snapshot of a TCP socket");
        let snapshot = sockets
            .to_static_snapshot(snapshot)
            .expect("its state has a name");
        sufficient += usize::from(snapshot.is_sufficient());
        let expected = by_getsockopt
            .read(stream.as_fd())
            .map_err(|e| e.to_string());
        let actual = by_snapshot.read_snapshot(stream.as_fd(), &snapshot);
        assert_eq!(actual.map_err(|e| e.to_string()), expected, "{name}");
        let queue = queue_levels(stream.as_fd()).expect("its queues");
        assert!(
            !snapshot.is_sufficient() || snapshot.queue == queue,
            "{name}"
        );
    }
    assert_eq!(
        sufficient, expected_sufficient,
        "sockets with a sufficient snapshot"
    );
}

fn compare_with_options(listen: &str, connect: &str, v6: bool) {
    let mut server = Vec::new();
    let mut clients = Vec::new();
    let mut add = |name: String, change: &dyn Fn(BorrowedFd<'_>)| {
        let (stream, client) = connected_pair(listen, connect);
        change(stream.as_fd());
        server.push((name, stream));
        clients.push(client);
    };
    add("unchanged".into(), &|_| {});
    let mut options = [TCP_OPTIONS, OTHER_OPTIONS].concat();
    if v6 {
        options.extend_from_slice(IPV6_OPTIONS);
        options.extend_from_slice(OTHER_IPV6_OPTIONS);
    }
    for (level, name, value) in options {
        add(format!("{level}/{name}"), &|fd| {
            set_int(fd, level, name, value).expect("setsockopt");
        });
    }
    let structures: [(i32, i32, &[u8]); 5] = [
        (SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 42, 0, 0, 0]),
        (
            SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            &12_345_678u64.to_ne_bytes(),
        ),
        (SOL_SOCKET, libc::SO_BINDTODEVICE, b"lo"),
        (SOL_SOCKET, libc::SO_RCVTIMEO, &timeval(3)),
        (SOL_SOCKET, libc::SO_SNDTIMEO, &timeval(4)),
    ];
    for (level, name, value) in structures {
        add(format!("{level}/{name}"), &|fd| {
            set_bytes(fd, level, name, value).expect("setsockopt");
        });
    }
    add("congestion control".into(), &|fd| {
        set_bytes(fd, IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("reno");
    });
    server[0].1.set_nonblocking(false).expect("blocking");
    let (stream, _client) = connected_pair(listen, connect);
    stream.set_nonblocking(true).expect("nonblocking");
    server.push(("nonblocking".into(), stream));
    let all = server.len();
    compare_readers(&server, all);
}

fn timeval(seconds: u64) -> [u8; 16] {
    let mut raw = [0; 16];
    raw[..8].copy_from_slice(&seconds.to_ne_bytes());
    raw
}

#[test]
fn snapshot_detects_every_option() {
    compare_with_options("127.0.0.1:0", "127.0.0.1", false);
    compare_with_options("[::1]:0", "[::1]", true);
    // An IPv6 socket with an IPv4 flow.
    compare_with_options("[::]:0", "127.0.0.1", true);
}

#[test]
fn snapshot_and_getsockopt_agree_on_queues_and_refusals() {
    let (mut server, mut clients) = (Vec::new(), Vec::new());
    for name in [
        "unread", "unsent", "urgent", "filter", "key", "shut", "finished",
    ] {
        let (stream, client) = connected_pair("127.0.0.1:0", "127.0.0.1");
        server.push((name.to_owned(), stream));
        clients.push(client);
    }
    clients[0].write_all(b"unread").expect("send");
    wait_for("unread data", || {
        queue_levels(server[0].1.as_fd())
            .expect("its queues")
            .unread
            == 6
    });
    fill_queues(&server[1].1);
    set_int(server[2].1.as_fd(), SOL_SOCKET, libc::SO_RCVLOWAT, 2).expect("setsockopt");
    rustix::net::send(&clients[2], b"!", rustix::net::SendFlags::OOB).expect("send");
    wait_for("urgent data", || {
        TcpStaticReader::new()
            .expect("netlink")
            .read(server[2].1.as_fd())
            .is_err()
    });
    // One instruction that accepts every packet (`struct sock_fprog`).
    let instruction = [6u64 | 0xffff_u64 << 32];
    let mut program = [0u8; 16];
    program[..2].copy_from_slice(&1u16.to_ne_bytes());
    program[8..].copy_from_slice(&(instruction.as_ptr() as u64).to_ne_bytes());
    set_bytes(
        server[3].1.as_fd(),
        SOL_SOCKET,
        libc::SO_ATTACH_FILTER,
        &program,
    )
    .expect("filter");
    // `struct tcp_md5sig`: the peer's address, the key's length, and the key.
    let mut key = [0u8; 216];
    key[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    key[4..8].copy_from_slice(&[127, 0, 0, 1]);
    key[130] = 3;
    key[136..139].copy_from_slice(b"key");
    set_bytes(server[4].1.as_fd(), IPPROTO_TCP, libc::TCP_MD5SIG, &key).expect("key");
    server[5]
        .1
        .shutdown(std::net::Shutdown::Read)
        .expect("shut");
    drop(clients.pop());
    wait_for("the end of the stream", || {
        let mut peeked = [0];
        server[6].1.peek(&mut peeked).is_ok_and(|count| count == 0)
    });
    // All sockets except the ones with urgent data, a filter or a key, and the one with a closed peer.
    compare_readers(&server, 3);
}

/// Writes until the peer accepts no more and its queues stay unchanged. The first probe of a closed window, after 200
/// ms, still carries a little data.
fn fill_queues(mut stream: &TcpStream) {
    stream.set_nonblocking(true).expect("nonblocking");
    let (mut last, mut since) = (None, Instant::now());
    wait_for("full queues", || {
        while stream.write(&[7; 4096]).is_ok() {}
        let queue = queue_levels(stream.as_fd()).expect("its queues");
        let is_full = queue.unacknowledged == 0 && queue.unsent > 0;
        if last != Some(queue) {
            (last, since) = (Some(queue), Instant::now());
        }
        is_full && since.elapsed() > Duration::from_secs(1)
    });
}
