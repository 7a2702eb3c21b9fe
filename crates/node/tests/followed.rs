//! The state observed of followed connections equals the state that repair mode extracts, field by field. Needs root.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use holdfast_node::dataplane::{Followed, Sight};
use holdfast_sys::sockopt::set_int;
use holdfast_sys::tcp_repair::{TcpDynamic, extract, read_static, resume, unread};
use libc::{IPPROTO_TCP, SOL_SOCKET};

const PATIENCE: Duration = Duration::from_secs(30);

fn pairs(address: &str, count: usize) -> Vec<(TcpStream, TcpStream)> {
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
struct Watch {
    followed: Followed,
    sights: BTreeMap<u32, Sight>,
}

impl Watch {
    fn new() -> Self {
        Self {
            followed: Followed::new().expect("this kernel takes it"),
            sights: BTreeMap::new(),
        }
    }

    fn look(&mut self) {
        let own = [std::process::id().cast_signed()];
        let look = self.followed.look(&own, true).expect("a look");
        self.sights.extend(look.changed);
    }

    fn whole(&self, id: u32) -> Option<&TcpDynamic> {
        match self.sights.get(&id) {
            Some(Sight::Whole(state)) => Some(state),
            _ => None,
        }
    }

    /// Observes until `is_so` returns true: acknowledgements may be in flight.
    fn look_until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        loop {
            self.look();
            if is_so(self) {
                return;
            }
            assert!(
                since.elapsed() < PATIENCE,
                "exceeded time: not yet: {:?}",
                self.sights
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn look_for(&mut self, ids: &[u32]) {
        self.look_until(|watch| ids.iter().all(|id| watch.whole(*id).is_some()));
    }
}

fn compare(address: &str) {
    let mut pairs = pairs(address, 40);
    let mut watch = Watch::new();
    for (id, (server, _)) in (0..).zip(&pairs) {
        watch.followed.follow(id, server.as_fd()).expect("followed");
    }
    for (at, (server, client)) in pairs.iter_mut().enumerate() {
        exchange(client, server, 1 + at * 10);
        exchange(server, client, 1 + at * 700);
    }
    let ids: Vec<u32> = (0..40).collect();
    let since = Instant::now();
    for (id, (server, _)) in (0..).zip(&pairs) {
        let fixed = read_static(server.as_fd()).expect("static state");
        // A delayed acknowledgement may arrive between the two readings.
        loop {
            watch.look_for(&ids);
            let seen = watch.whole(id).expect("seen").clone();
            let taken = extract(server.as_fd(), &fixed).expect("dynamic state");
            resume(server.as_fd(), &fixed).expect("resumed");
            let elapsed = taken.timestamp.wrapping_sub(seen.timestamp);
            assert_eq!(elapsed & 1, 0, "the same unit");
            let same_time = TcpDynamic {
                timestamp: taken.timestamp,
                ..seen
            };
            if same_time == taken {
                assert!(u128::from(elapsed) <= since.elapsed().as_millis() + 2);
                break;
            }
            assert!(
                since.elapsed() < PATIENCE,
                "exceeded time: {same_time:?} is not {taken:?}"
            );
        }
    }
}

#[test]
fn what_is_seen_is_what_repair_mode_takes() {
    compare("127.0.0.1:0");
    compare("[::1]:0");
}

#[test]
fn what_has_to_be_asked_is_not_seen() {
    let mut pairs = pairs("127.0.0.1:0", 5);
    let mut watch = Watch::new();
    for (id, (server, client)) in (0..).zip(&mut pairs) {
        // One or two answers make the kernel delay acknowledgements; the delay is no change of an option.
        watch.followed.follow(id, server.as_fd()).expect("followed");
        if id == 4 {
            watch.look_for(&[4]);
            exchange(client, server, 100);
            exchange(server, client, 100);
        }
    }
    watch.look_for(&[0, 1, 2, 3, 4]);
    pairs[0].1.write_all(b"unread").expect("write");
    set_int(pairs[1].0.as_fd(), IPPROTO_TCP, libc::TCP_NODELAY, 1).expect("setsockopt");
    let urgent = rustix::net::SendFlags::OOB;
    rustix::net::send(&pairs[2].1, b"!", urgent).expect("send");
    set_int(pairs[3].0.as_fd(), SOL_SOCKET, libc::SO_KEEPALIVE, 1).expect("setsockopt");
    watch.look_until(|watch| {
        let little = |id| matches!(watch.sights[id], Sight::Little);
        [1, 2, 3].iter().all(little)
            && matches!(watch.sights[&0], Sight::Unread(_, 6))
            && watch.whole(4).is_some()
    });
    let since = Instant::now();
    // An acknowledgement may still be due; after it nothing changes.
    while !std::mem::take(&mut watch.sights).is_empty() {
        assert!(
            since.elapsed() < PATIENCE,
            "exceeded time: told again and again"
        );
        std::thread::sleep(Duration::from_millis(1));
        watch.look();
    }
    drop(pairs);
    watch.look();
    assert!(watch.sights.is_empty(), "they are closed");
}

#[test]
fn what_was_not_read_is_there_to_be_read() {
    let mut pairs = pairs("127.0.0.1:0", 1);
    let (server, client) = &mut pairs[0];
    let mut watch = Watch::new();
    watch.followed.follow(0, server.as_fd()).expect("followed");
    watch.look_for(&[0]);
    client.write_all(b"unread").expect("write");
    watch.look_until(|watch| matches!(watch.sights[&0], Sight::Unread(_, 6)));
    assert_eq!(unread(server.as_fd(), 6).as_deref(), Some(&b"unread"[..]));
    assert_eq!(unread(server.as_fd(), 5), None, "there is more");
    assert_eq!(unread(server.as_fd(), 7), None, "there is less");
    let fixed = read_static(server.as_fd()).expect("static state");
    let since = Instant::now();
    // A delayed acknowledgement may arrive between the two readings.
    loop {
        watch.look();
        let Some(Sight::Unread(seen, _)) = watch.sights.get(&0) else {
            panic!("it is not seen any more: {:?}", watch.sights);
        };
        let taken = extract(server.as_fd(), &fixed).expect("dynamic state");
        resume(server.as_fd(), &fixed).expect("resumed");
        let with_bytes = TcpDynamic {
            timestamp: taken.timestamp,
            unread: b"unread".to_vec(),
            ..seen.clone()
        };
        if with_bytes == taken {
            break;
        }
        assert!(
            since.elapsed() < PATIENCE,
            "exceeded time: {with_bytes:?} is not {taken:?}"
        );
    }
    let mut bytes = [0; 6];
    server.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"unread");
    watch.look_for(&[0]);
}

/// A second connection takes over the number of the first: changes of the first are not reported for the second.
#[test]
fn a_number_stands_for_who_got_it_last() {
    let mut pairs = pairs("127.0.0.1:0", 2);
    let mut watch = Watch::new();
    for (server, _) in &pairs {
        watch.followed.follow(0, server.as_fd()).expect("followed");
    }
    watch.look_for(&[0]);
    let rcv_nxt = watch.whole(0).expect("seen").rcv_nxt;
    let (server, client) = &mut pairs[0];
    exchange(client, server, 100);
    watch.sights.clear();
    watch.look();
    assert!(watch.sights.is_empty(), "the old one is followed no more");
    let (server, client) = &mut pairs[1];
    exchange(client, server, 100);
    watch.look_until(|watch| watch.whole(0).is_some());
    let now = watch.whole(0).expect("seen").rcv_nxt;
    assert_eq!(now.wrapping_sub(rcv_nxt), 100);
    watch.followed.forget(0);
    exchange(client, server, 100);
    watch.sights.clear();
    watch.look();
    assert!(watch.sights.is_empty(), "it is forgotten");
}
