//! The observer reports exactly the sockets that it was asked to follow. Needs root.

use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use holdfast_bpf::observe::{Observed, Observer, flags};
use holdfast_bpf::timeouts::Timeouts;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, sendmsg,
};
use rustix::process::{Resource, getrlimit, setrlimit};

const MANY: usize = 300;

const PATIENCE: Duration = Duration::from_secs(30);

fn pairs(count: usize) -> Vec<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    let pair = |_| {
        let client = TcpStream::connect(address).expect("connect");
        (listener.accept().expect("accept").0, client)
    };
    (0..count).map(pair).collect()
}

fn of(records: &[Observed], id: u64) -> Option<&Observed> {
    records.iter().find(|record| record.id == id)
}

#[test]
fn many_are_read_once_and_in_their_order() {
    let mut observer = Observer::load().expect("load");
    let pairs = pairs(MANY);
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let mut sockets: Vec<BorrowedFd<'_>> = pairs.iter().map(|(server, _)| server.as_fd()).collect();
    sockets.push(datagrams.as_fd());
    for _ in 0..2 {
        let records = observer.read_once(&sockets).expect("read");
        assert_eq!(records.len(), MANY + 1);
        for ((server, _), record) in pairs.iter().zip(&records) {
            let record = record.expect("a TCP socket has a record");
            let remote = server.peer_addr().expect("address").port();
            assert_eq!(u16::from_be_bytes(record.remote_port), remote);
            assert_eq!(record.state, 1, "established");
            assert_ne!(record.flags & flags::PLAIN, 0);
        }
        assert_eq!(records[MANY], None, "a datagram socket has none");
        assert_eq!(changes(&mut observer), [], "all are let go");
    }
}

/// The descriptor used for the order is closed before the timeout is given back.
#[test]
fn a_timeout_is_given_back_without_a_descriptor() {
    const TCP_RTO_MAX_MS: i32 = 44;
    let longest = |socket: &TcpStream| {
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
    let timeouts = Timeouts::load().expect("load");
    let pairs = pairs(3);
    let Some(before) = longest(&pairs[0].0) else {
        eprintln!("skipped: this kernel has no such option");
        return;
    };
    let ordered = pairs[1].0.try_clone().expect("dup");
    timeouts.order(ordered.as_fd(), 7000).expect("ordered");
    drop(ordered);
    assert_eq!(longest(&pairs[1].0), Some(before), "not yet");
    timeouts.give_back().expect("given back");
    let now: Vec<_> = pairs.iter().map(|(server, _)| longest(server)).collect();
    assert_eq!(now, [Some(before), Some(7000), Some(before)]);
}

#[test]
fn one_that_is_followed_is_told_when_it_has_changed() {
    let mut observer = Observer::load().expect("load");
    let pairs = pairs(2);
    for (id, (server, _)) in (1..).zip(&pairs) {
        observer.follow(server.as_fd(), id).expect("follow");
    }
    let before = changes(&mut observer);
    assert_eq!(before.len(), 2, "at first all");
    assert_eq!(changes(&mut observer), [], "nothing has changed");
    let first = *of(&before, 1).expect("the first");
    (&pairs[0].1).write_all(b"12345").expect("send");
    let since = Instant::now();
    let now = loop {
        let told = changes(&mut observer);
        assert_eq!(of(&told, 2), None, "nothing came for the second");
        match of(&told, 1) {
            Some(now) if now.rcv_nxt != first.rcv_nxt => break *now,
            _ => assert!(since.elapsed() < PATIENCE, "exceeded time: it never came"),
        }
    };
    assert_eq!(now.rcv_nxt.wrapping_sub(first.rcv_nxt), 5);
    assert_eq!(now.copied_seq, first.copied_seq, "nothing was read");
    assert_eq!(now.marks, first.marks, "no option changed");
    pairs[1].0.set_nodelay(true).expect("an option");
    let told = changes(&mut observer);
    let second = of(&told, 2).expect("an option is a change, too");
    assert_ne!(second.marks, of(&before, 2).expect("the second").marks);
    observer.let_go(pairs[0].0.as_fd()).expect("let go");
    observer.let_go(pairs[0].0.as_fd()).expect("let go again");
    for (id, (server, _)) in (3..).zip(&pairs) {
        observer.follow(server.as_fd(), id).expect("follow again");
    }
    let again = changes(&mut observer);
    assert_eq!(again.len(), 2, "who is followed anew is told anew");
    drop(pairs);
    assert_eq!(changes(&mut observer), [], "a closed socket is gone");
}

/// One pass has limited capacity and reports whether it was complete. No socket is reported twice, and a socket
/// released meanwhile hides no other.
#[test]
fn more_than_there_is_room_for_are_told_once() {
    const SOCKETS: usize = 8192 + 200;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("the soft limit is one's own");
    let mut observer = Observer::load().expect("load");
    let socket = || {
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        rustix::net::socket(family, kind, None).expect("a socket")
    };
    let sockets: Vec<OwnedFd> = (0..SOCKETS).map(|_| socket()).collect();
    for (id, socket) in (0..).zip(&sockets) {
        observer.follow(socket.as_fd(), id).expect("follow");
    }
    let first = observer.changes(&own()).expect("read");
    assert!(!first.complete, "there was no room for all");
    let second = observer.changes(&own()).expect("read");
    assert!(second.complete);
    let told = first.sockets.iter().chain(&second.sockets);
    let mut ids: Vec<u64> = told.map(|record| record.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..SOCKETS as u64).collect::<Vec<_>>());
    let borrowed: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    let mut once = Observer::load().expect("load");
    let read = once.read_once(&borrowed).expect("read");
    assert!(read.iter().all(Option::is_some), "all are read once");
    assert_eq!(changes(&mut once), [], "all are let go");
}

/// A socket is found if a process has a descriptor of it, once for any number of descriptors; a socket in flight
/// through a Unix socket is not found.
#[test]
fn a_socket_without_a_descriptor_is_not_met() {
    let mut observer = Observer::load().expect("load");
    let pairs = pairs(2);
    for (id, (server, _)) in (1..).zip(&pairs) {
        observer.follow(server.as_fd(), id).expect("follow");
    }
    let again = pairs[0].0.try_clone().expect("dup");
    let met = |observer: &mut Observer| {
        let mut met = observer.changes(&own()).expect("read").met;
        met.sort_unstable();
        met
    };
    assert_eq!(met(&mut observer), [1, 2]);
    assert_eq!(met(&mut observer), [1, 2], "changed or not");
    let (one, other) = std::os::unix::net::UnixStream::pair().expect("pair");
    let [(first, _), (second, _)] = <[_; 2]>::try_from(pairs).expect("two");
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sent = [second.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
    let bytes = [std::io::IoSlice::new(b"x")];
    sendmsg(&one, &bytes, &mut control, SendFlags::empty()).expect("send");
    drop(second);
    assert_eq!(met(&mut observer), [1], "it is under way");
    drop(first);
    assert_eq!(met(&mut observer), [1], "another descriptor is left");
    drop((again, other));
    assert_eq!(met(&mut observer), []);
}

fn own() -> [i32; 1] {
    [std::process::id().cast_signed()]
}

fn changes(observer: &mut Observer) -> Vec<Observed> {
    observer.changes(&own()).expect("read").sockets
}
