//! Sends numbered datagrams over a link, and reads its counters.

use std::{
    net::UdpSocket,
    thread,
    time::{Duration, Instant},
};

use holdfast_lab::{
    Lab,
    link::{DirectionCounters, DuplexCounters},
};
use nix::sys::socket::{setsockopt, sockopt};

use crate::common::{self, output_of};

/// Returns a socket in c1 that sends to one in n1. Afterwards c1 sends nothing else, so the link's counters count
/// only these datagrams.
pub fn socket_pair(lab: &Lab) -> (UdpSocket, UdpSocket) {
    let (target, _) = lab.address("n1").unwrap();
    let mac = lab.host("n1").unwrap().mac;
    output_of(
        lab,
        "c1",
        &format!(
            "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1; ip neigh replace {target} lladdr {mac} dev eth0 nud permanent"
        ),
    );
    let receiver = lab
        .run_in_net_namespace("n1", || UdpSocket::bind((target, 7)))
        .unwrap()
        .unwrap();
    setsockopt(&receiver, sockopt::RcvBufForce, &(64 << 20)).unwrap();
    receiver
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let sender = lab
        .run_in_net_namespace("c1", || UdpSocket::bind("0.0.0.0:0"))
        .unwrap()
        .unwrap();
    sender.connect((target, 7)).unwrap();
    // A link enforced by the kernel has no counters.
    if counters(lab).is_some() {
        counters_when_idle(lab);
    }
    (sender, receiver)
}

pub fn up_counters(lab: &Lab) -> DirectionCounters {
    counters(lab).unwrap().up
}

fn counters(lab: &Lab) -> Option<DuplexCounters> {
    let status = lab.status().unwrap();
    let c1 = status
        .hosts
        .iter()
        .find(|host| host.host.name == "c1")
        .unwrap();
    c1.counters
}

/// Returns the counters of the upward direction when nothing is moving.
pub fn counters_when_idle(lab: &Lab) -> DirectionCounters {
    counters_after(lab, 0)
}

/// Returns the counters when nothing is moving, after this many packets have entered since the lab came up.
pub fn counters_after(lab: &Lab, entered: u64) -> DirectionCounters {
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut last, mut same) = (up_counters(lab), 0);
    // Counters are written within 100 ms of a change, later if the machine stalls; hence 25 equal polls (500 ms).
    while last.link.entered < entered || last.link.in_flight > 0 || same < 25 {
        assert!(
            Instant::now() < deadline,
            "exceeded time: the link does not become idle: {last:?}"
        );
        thread::sleep(Duration::from_millis(20));
        let seen = up_counters(lab);
        same = if seen == last { same + 1 } else { 0 };
        last = seen;
    }
    last
}

/// Receives datagrams until the number is at least `last`: returns the numbers and arrival times.
pub fn receive_until(receiver: &UdpSocket, last: u32) -> Vec<(u32, Instant)> {
    let mut buffer = [0; 2048];
    let mut seen = Vec::new();
    loop {
        common::receive(receiver, &mut buffer).expect("a datagram within the limit");
        let number = u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
        seen.push((number, Instant::now()));
        if number >= last {
            return seen;
        }
    }
}

/// Returns the numbers of this many datagrams that have left the link; checks that there are no more.
pub fn receive_exactly(receiver: &UdpSocket, count: usize) -> Vec<u32> {
    let mut buffer = [0; 2048];
    let mut number = || {
        common::receive(receiver, &mut buffer)?;
        let bytes = [buffer[0], buffer[1], buffer[2], buffer[3]];
        std::io::Result::Ok(u32::from_be_bytes(bytes))
    };
    let numbers = (0..count).map(|_| number().expect("a datagram within the limit"));
    let numbers = numbers.collect();
    receiver.set_nonblocking(true).unwrap();
    assert!(number().is_err(), "more than {count} datagrams arrived");
    numbers
}

/// Waits until this many packets have entered the upward direction since the lab came up.
pub fn wait_for_entered(lab: &Lab, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while up_counters(lab).link.entered < count {
        assert!(
            Instant::now() < deadline,
            "exceeded time: not all datagrams entered the link: {:?}",
            up_counters(lab)
        );
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn numbered_datagram(number: u32, size: usize) -> Vec<u8> {
    let mut datagram = vec![0; size];
    datagram[..4].copy_from_slice(&number.to_be_bytes());
    datagram
}
