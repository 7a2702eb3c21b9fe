//! The observer reports exactly the sockets that it was asked to follow. Needs root.

use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use holdfast_bpf::rto_max::RtoMaxSetter;
use holdfast_bpf::socket_snapshots::{SnapshotReader, SocketSnapshot, socket_flags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, sendmsg,
};
use rustix::process::{Resource, getrlimit, setrlimit};

const PAIR_COUNT: usize = 300;

const PATIENCE: Duration = Duration::from_secs(30);

fn connect_pairs(count: usize) -> Vec<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    let pair = |_| {
        let client = TcpStream::connect(address).expect("connect");
        (listener.accept().expect("accept").0, client)
    };
    (0..count).map(pair).collect()
}

fn find_record(records: &[SocketSnapshot], id: u64) -> Option<&SocketSnapshot> {
    records.iter().find(|record| record.id == id)
}

#[test]
fn many_sockets_are_read_once_in_order() {
    let mut observer = SnapshotReader::load().expect("load");
    let pairs = connect_pairs(PAIR_COUNT);
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let mut sockets: Vec<BorrowedFd<'_>> = pairs.iter().map(|(server, _)| server.as_fd()).collect();
    sockets.push(datagrams.as_fd());
    for _ in 0..2 {
        let records = observer.read_once(&sockets).expect("read");
        assert_eq!(records.len(), PAIR_COUNT + 1);
        for ((server, _), record) in pairs.iter().zip(&records) {
            let record = record.expect("a TCP socket has a record");
            let remote = server.peer_addr().expect("address").port();
            assert_eq!(u16::from_be_bytes(record.remote_port), remote);
            assert_eq!(record.state, 1, "established");
            assert_ne!(record.flags & socket_flags::PLAIN, 0);
        }
        assert_eq!(records[PAIR_COUNT], None, "a datagram socket has none");
        assert_eq!(read_changes(&mut observer), [], "no socket is followed");
    }
}

/// The descriptor used for the order is closed before the timeout is given back.
#[test]
fn rto_max_is_restored_without_descriptor() {
    const TCP_RTO_MAX_MS: i32 = 44;
    let rto_max = |socket: &TcpStream| {
        let (mut value, mut length) = (0_i32, size_of::<i32>() as u32);
        // SAFETY: both pointers are writable for what they say and outlive the call.
        let outcome = unsafe {
            let value = (&raw mut value).cast();
            let fd = std::os::fd::AsRawFd::as_raw_fd(socket);
            libc::getsockopt(
                fd,
                libc::IPPROTO_TCP,
                TCP_RTO_MAX_MS,
                value,
                &raw mut length,
            )
        };
        (outcome == 0).then_some(value)
    };
    let timeouts = RtoMaxSetter::load().expect("load");
    let pairs = connect_pairs(3);
    let Some(before) = rto_max(&pairs[0].0) else {
        eprintln!("skipped: this kernel has no such option");
        return;
    };
    let duplicate = pairs[1].0.try_clone().expect("dup");
    timeouts.store(duplicate.as_fd(), 7000).expect("ordered");
    drop(duplicate);
    assert_eq!(rto_max(&pairs[1].0), Some(before), "not yet");
    timeouts.restore().expect("restored");
    let now: Vec<_> = pairs.iter().map(|(server, _)| rto_max(server)).collect();
    assert_eq!(now, [Some(before), Some(7000), Some(before)]);
}

#[test]
fn followed_socket_is_reported_after_change() {
    let mut observer = SnapshotReader::load().expect("load");
    let pairs = connect_pairs(2);
    for (id, (server, _)) in (1..).zip(&pairs) {
        observer.follow(server.as_fd(), id).expect("follow");
    }
    let before = read_changes(&mut observer);
    assert_eq!(before.len(), 2, "all are reported at first");
    assert_eq!(read_changes(&mut observer), [], "nothing has changed");
    let first = *find_record(&before, 1).expect("the first");
    (&pairs[0].1).write_all(b"12345").expect("send");
    let since = Instant::now();
    let now = loop {
        let reported = read_changes(&mut observer);
        assert_eq!(find_record(&reported, 2), None, "no report for the second");
        match find_record(&reported, 1) {
            Some(now) if now.rcv_nxt != first.rcv_nxt => break *now,
            _ => assert!(since.elapsed() < PATIENCE, "exceeded time: no report"),
        }
    };
    assert_eq!(now.rcv_nxt.wrapping_sub(first.rcv_nxt), 5);
    assert_eq!(now.copied_seq, first.copied_seq, "nothing was read");
    assert_eq!(
        now.option_fingerprint, first.option_fingerprint,
        "no option changed"
    );
    pairs[1].0.set_nodelay(true).expect("an option");
    let reported = read_changes(&mut observer);
    let second = find_record(&reported, 2).expect("an option is a change, too");
    assert_ne!(
        second.option_fingerprint,
        find_record(&before, 2)
            .expect("the second")
            .option_fingerprint
    );
    observer.unfollow(pairs[0].0.as_fd()).expect("unfollow");
    observer
        .unfollow(pairs[0].0.as_fd())
        .expect("unfollow again");
    for (id, (server, _)) in (3..).zip(&pairs) {
        observer.follow(server.as_fd(), id).expect("follow again");
    }
    let after_refollow = read_changes(&mut observer);
    assert_eq!(
        after_refollow.len(),
        2,
        "sockets followed again are reported again"
    );
    drop(pairs);
    assert_eq!(read_changes(&mut observer), [], "a closed socket is gone");
}

/// One pass has limited capacity and reports whether it was complete. No socket is reported twice, and a socket
/// released meanwhile hides no other.
#[test]
fn sockets_beyond_capacity_are_reported_once() {
    const SOCKETS: usize = 8192 + 200;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("a process may raise its soft limit");
    let mut observer = SnapshotReader::load().expect("load");
    let socket = || {
        let (family, socket_type) = (AddressFamily::INET, SocketType::STREAM);
        rustix::net::socket(family, socket_type, None).expect("a socket")
    };
    let sockets: Vec<OwnedFd> = (0..SOCKETS).map(|_| socket()).collect();
    for (id, socket) in (0..).zip(&sockets) {
        observer.follow(socket.as_fd(), id).expect("follow");
    }
    let first = observer.changes(&own_pid()).expect("read");
    assert!(!first.complete, "there was no room for all");
    let second = observer.changes(&own_pid()).expect("read");
    assert!(second.complete);
    let reported = first.sockets.iter().chain(&second.sockets);
    let mut ids: Vec<u64> = reported.map(|record| record.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..SOCKETS as u64).collect::<Vec<_>>());
    let borrowed: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    let mut one_time_reader = SnapshotReader::load().expect("load");
    let read = one_time_reader.read_once(&borrowed).expect("read");
    assert!(read.iter().all(Option::is_some), "all are read once");
    assert_eq!(
        read_changes(&mut one_time_reader),
        [],
        "no socket is followed"
    );
}

/// A socket is found if a process has a descriptor of it, once for any number of descriptors; a socket in flight
/// through a Unix socket is not found.
#[test]
fn socket_without_descriptor_is_not_encountered() {
    let mut observer = SnapshotReader::load().expect("load");
    let pairs = connect_pairs(2);
    for (id, (server, _)) in (1..).zip(&pairs) {
        observer.follow(server.as_fd(), id).expect("follow");
    }
    let duplicate = pairs[0].0.try_clone().expect("dup");
    let encountered = |observer: &mut SnapshotReader| {
        let mut encountered = observer.changes(&own_pid()).expect("read").encountered;
        encountered.sort_unstable();
        encountered
    };
    assert_eq!(encountered(&mut observer), [1, 2]);
    assert_eq!(
        encountered(&mut observer),
        [1, 2],
        "unchanged sockets are encountered, too"
    );
    let (one, other) = std::os::unix::net::UnixStream::pair().expect("pair");
    let [(first, _), (second, _)] = <[_; 2]>::try_from(pairs).expect("two");
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sent = [second.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
    let bytes = [std::io::IoSlice::new(b"x")];
    sendmsg(&one, &bytes, &mut control, SendFlags::empty()).expect("send");
    drop(second);
    assert_eq!(encountered(&mut observer), [1], "the socket is in flight");
    drop(first);
    assert_eq!(
        encountered(&mut observer),
        [1],
        "the other descriptor is still open"
    );
    drop((duplicate, other));
    assert_eq!(encountered(&mut observer), []);
}

fn own_pid() -> [i32; 1] {
    [std::process::id().cast_signed()]
}

fn read_changes(observer: &mut SnapshotReader) -> Vec<SocketSnapshot> {
    observer.changes(&own_pid()).expect("read").sockets
}
