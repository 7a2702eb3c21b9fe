//! The state that is seen of followed connections is what repair mode takes of them, field by field. Needs root.
#![allow(missing_docs)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use holdfast_node::dataplane::{Followed, Look};
use holdfast_sys::sockopt::set_int;
use holdfast_sys::tcp_repair::{TcpDynamic, extract, read_static, resume};
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

/// Looks until the states of these connections are seen: acknowledgements may be on their way.
fn look_for(followed: &mut Followed, ids: &[u32]) -> Look {
    let since = Instant::now();
    loop {
        let look = followed.look().expect("a look");
        if ids.iter().all(|id| look.states.contains_key(id)) {
            return look;
        }
        assert!(since.elapsed() < PATIENCE, "never seen: {look:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn compare(address: &str) {
    let mut pairs = pairs(address, 40);
    let mut followed = Followed::new().expect("this kernel takes it");
    for (id, (server, _)) in (0..).zip(&pairs) {
        followed.follow(id, server.as_fd()).expect("followed");
    }
    for (at, (server, client)) in pairs.iter_mut().enumerate() {
        exchange(client, server, 1 + at * 10);
        exchange(server, client, 1 + at * 700);
    }
    let ids: Vec<u32> = (0..40).collect();
    let since = Instant::now();
    for (id, (server, _)) in (0..).zip(&pairs) {
        let fixed = read_static(server.as_fd()).expect("static state");
        // A delayed acknowledgement may come between the two.
        loop {
            let look = look_for(&mut followed, &ids);
            let seen = look.states[&id].clone();
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
            assert!(since.elapsed() < PATIENCE, "{same_time:?} is not {taken:?}");
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
    let mut followed = Followed::new().expect("this kernel takes it");
    for (id, (server, client)) in (0..).zip(&mut pairs) {
        // An answer or two make the kernel delay acknowledgements, which is no change of an option.
        followed.follow(id, server.as_fd()).expect("followed");
        if id == 4 {
            look_for(&mut followed, &[4]);
            exchange(client, server, 100);
            exchange(server, client, 100);
        }
    }
    look_for(&mut followed, &[0, 1, 2, 3, 4]);
    pairs[0].1.write_all(b"unread").expect("write");
    set_int(pairs[1].0.as_fd(), IPPROTO_TCP, libc::TCP_NODELAY, 1).expect("setsockopt");
    let urgent = rustix::net::SendFlags::OOB;
    rustix::net::send(&pairs[2].1, b"!", urgent).expect("send");
    set_int(pairs[3].0.as_fd(), SOL_SOCKET, libc::SO_KEEPALIVE, 1).expect("setsockopt");
    let since = Instant::now();
    loop {
        let look = followed.look().expect("a look");
        let seen: Vec<u32> = look.states.keys().copied().collect();
        if seen == [4] {
            break;
        }
        assert!(since.elapsed() < PATIENCE, "seen: {seen:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(pairs);
    assert!(followed.look().expect("a look").states.is_empty());
}
