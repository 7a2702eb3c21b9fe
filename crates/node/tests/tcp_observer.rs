//! The state observed of followed connections equals the state that repair mode extracts, field by field. Needs root.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use holdfast_node::dataplane::{ConnectionSnapshot, TcpObserver};
use holdfast_sys::sockopt::set_int;
use holdfast_tcp_repair::{TcpDynamicState, extract, peek_unread, read_static, resume};
use libc::{IPPROTO_TCP, SOL_SOCKET};

const TIMEOUT: Duration = Duration::from_secs(30);

fn connected_pairs(address: &str, count: usize) -> Vec<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind(address).expect("bind");
    let address = listener.local_addr().expect("address");
    let pair = |_| {
        let client = TcpStream::connect(address).expect("connect");
        (listener.accept().expect("accept").0, client)
    };
    (0..count).map(pair).collect()
}

fn exchange(from: &mut TcpStream, to: &mut TcpStream, length: usize) {
    from.write_all(&vec![7; length]).expect("write");
    to.read_exact(&mut vec![0; length]).expect("read");
}

/// Followed connections, with the last observed state of each.
struct SnapshotWatch {
    tracked: TcpObserver,
    snapshots: BTreeMap<u32, ConnectionSnapshot>,
}

impl SnapshotWatch {
    fn new() -> Self {
        Self {
            tracked: TcpObserver::new().expect("the kernel loads the program"),
            snapshots: BTreeMap::new(),
        }
    }

    fn take_snapshot(&mut self) {
        let own_pid = [std::process::id().cast_signed()];
        let found = self.tracked.snapshot(&own_pid, true).expect("a snapshot");
        self.snapshots.extend(found.changed);
    }

    fn complete_state(&self, id: u32) -> Option<&TcpDynamicState> {
        match self.snapshots.get(&id) {
            Some(ConnectionSnapshot::Complete(state)) => Some(state),
            _ => None,
        }
    }

    /// Observes until `is_reached` returns true: acknowledgements may be in flight.
    fn snapshot_until(&mut self, is_reached: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        loop {
            self.take_snapshot();
            if is_reached(self) {
                return;
            }
            assert!(
                since.elapsed() < TIMEOUT,
                "exceeded time: not yet: {:?}",
                self.snapshots
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn snapshot_until_complete(&mut self, ids: &[u32]) {
        self.snapshot_until(|watch| ids.iter().all(|id| watch.complete_state(*id).is_some()));
    }
}

fn compare_with_repair_mode(address: &str) {
    let mut pairs = connected_pairs(address, 40);
    let mut watch = SnapshotWatch::new();
    for (id, (server, _)) in (0..).zip(&pairs) {
        watch.tracked.add(id, server.as_fd()).expect("followed");
    }
    for (index, (server, client)) in pairs.iter_mut().enumerate() {
        exchange(client, server, 1 + index * 10);
        exchange(server, client, 1 + index * 700);
    }
    let ids: Vec<u32> = (0..40).collect();
    let since = Instant::now();
    for (id, (server, _)) in (0..).zip(&pairs) {
        let fixed = read_static(server.as_fd()).expect("static state");
        // A delayed acknowledgement may arrive between the two readings.
        loop {
            watch.snapshot_until_complete(&ids);
            let snapshot = watch.complete_state(id).expect("seen").clone();
            let extracted = extract(server.as_fd(), &fixed).expect("dynamic state");
            resume(server.as_fd(), &fixed).expect("resumed");
            let elapsed = extracted.timestamp.wrapping_sub(snapshot.timestamp);
            assert_eq!(elapsed & 1, 0, "the same unit");
            let same_time = TcpDynamicState {
                timestamp: extracted.timestamp,
                ..snapshot
            };
            if same_time == extracted {
                assert!(u128::from(elapsed) <= since.elapsed().as_millis() + 2);
                break;
            }
            assert!(
                since.elapsed() < TIMEOUT,
                "exceeded time: {same_time:?} is not {extracted:?}"
            );
        }
    }
}

#[test]
fn snapshot_equals_repair_mode_dump() {
    compare_with_repair_mode("127.0.0.1:0");
    compare_with_repair_mode("[::1]:0");
}

#[test]
fn connection_that_needs_extraction_has_partial_snapshot() {
    let mut pairs = connected_pairs("127.0.0.1:0", 5);
    let mut watch = SnapshotWatch::new();
    for (id, (server, client)) in (0..).zip(&mut pairs) {
        // One or two answers make the kernel delay acknowledgements; the delay is no change of an option.
        watch.tracked.add(id, server.as_fd()).expect("followed");
        if id == 4 {
            watch.snapshot_until_complete(&[4]);
            exchange(client, server, 100);
            exchange(server, client, 100);
        }
    }
    watch.snapshot_until_complete(&[0, 1, 2, 3, 4]);
    pairs[0].1.write_all(b"unread").expect("write");
    set_int(pairs[1].0.as_fd(), IPPROTO_TCP, libc::TCP_NODELAY, 1).expect("setsockopt");
    let urgent = rustix::net::SendFlags::OOB;
    rustix::net::send(&pairs[2].1, b"!", urgent).expect("send");
    set_int(pairs[3].0.as_fd(), SOL_SOCKET, libc::SO_KEEPALIVE, 1).expect("setsockopt");
    watch.snapshot_until(|watch| {
        let is_partial = |id| matches!(watch.snapshots[id], ConnectionSnapshot::Partial);
        [1, 2, 3].iter().all(is_partial)
            && matches!(watch.snapshots[&0], ConnectionSnapshot::WithUnread(_, 6))
            && watch.complete_state(4).is_some()
    });
    let since = Instant::now();
    // An acknowledgement may still be due; after it nothing changes.
    while !std::mem::take(&mut watch.snapshots).is_empty() {
        assert!(
            since.elapsed() < TIMEOUT,
            "exceeded time: snapshots keep coming"
        );
        std::thread::sleep(Duration::from_millis(1));
        watch.take_snapshot();
    }
    drop(pairs);
    watch.take_snapshot();
    assert!(watch.snapshots.is_empty(), "they are closed");
}

#[test]
fn unread_data_is_reported_and_stays_readable() {
    let mut pairs = connected_pairs("127.0.0.1:0", 1);
    let (server, client) = &mut pairs[0];
    let mut watch = SnapshotWatch::new();
    watch.tracked.add(0, server.as_fd()).expect("followed");
    watch.snapshot_until_complete(&[0]);
    client.write_all(b"unread").expect("write");
    watch.snapshot_until(|watch| {
        matches!(watch.snapshots[&0], ConnectionSnapshot::WithUnread(_, 6))
    });
    assert_eq!(
        peek_unread(server.as_fd(), 6).as_deref(),
        Some(&b"unread"[..])
    );
    assert_eq!(
        peek_unread(server.as_fd(), 5),
        None,
        "more bytes are unread"
    );
    assert_eq!(
        peek_unread(server.as_fd(), 7),
        None,
        "fewer bytes are unread"
    );
    let fixed = read_static(server.as_fd()).expect("static state");
    let since = Instant::now();
    // A delayed acknowledgement may arrive between the two readings.
    loop {
        watch.take_snapshot();
        let Some(ConnectionSnapshot::WithUnread(snapshot, _)) = watch.snapshots.get(&0) else {
            panic!("no snapshot with unread data: {:?}", watch.snapshots);
        };
        let extracted = extract(server.as_fd(), &fixed).expect("dynamic state");
        resume(server.as_fd(), &fixed).expect("resumed");
        let with_unread = TcpDynamicState {
            timestamp: extracted.timestamp,
            unread: b"unread".to_vec(),
            ..snapshot.clone()
        };
        if with_unread == extracted {
            break;
        }
        assert!(
            since.elapsed() < TIMEOUT,
            "exceeded time: {with_unread:?} is not {extracted:?}"
        );
    }
    let mut bytes = [0; 6];
    server.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"unread");
    watch.snapshot_until_complete(&[0]);
}

/// A second connection takes over the number of the first: changes of the first are not reported for the second.
#[test]
fn reused_id_refers_to_latest_connection() {
    let mut pairs = connected_pairs("127.0.0.1:0", 2);
    let mut watch = SnapshotWatch::new();
    for (server, _) in &pairs {
        watch.tracked.add(0, server.as_fd()).expect("followed");
    }
    watch.snapshot_until_complete(&[0]);
    let rcv_nxt = watch.complete_state(0).expect("seen").rcv_nxt;
    let (server, client) = &mut pairs[0];
    exchange(client, server, 100);
    watch.snapshots.clear();
    watch.take_snapshot();
    assert!(
        watch.snapshots.is_empty(),
        "the old connection is still followed"
    );
    let (server, client) = &mut pairs[1];
    exchange(client, server, 100);
    watch.snapshot_until(|watch| watch.complete_state(0).is_some());
    let latest_rcv_nxt = watch.complete_state(0).expect("seen").rcv_nxt;
    assert_eq!(latest_rcv_nxt.wrapping_sub(rcv_nxt), 100);
    watch.tracked.remove(0);
    exchange(client, server, 100);
    watch.snapshots.clear();
    watch.take_snapshot();
    assert!(
        watch.snapshots.is_empty(),
        "the removed connection is still followed"
    );
}
