//! Tests of the link program's accuracy. Bounds that depend on scheduling are wide; the others are exact.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use holdfast_lab::{Direction, Lab, LinkEntry, Topology, link::EmulatedLink};

#[path = "../common/mod.rs"]
mod common;
mod datagrams;

use common::{is_root, output_of, spec};
use datagrams::{
    counters_after, counters_when_idle, numbered_datagram, receive_exactly, receive_until,
    socket_pair, wait_for_entered,
};

/// Number of datagrams that fit every queue of the kernel.
const BATCH: u32 = 200;

/// Size of the Ethernet, IPv4 and UDP headers of a datagram, in bytes.
const HEADER_BYTES: usize = 42;

/// Returns a lab with n1 and c1, and one entry about c1.
fn lab(test: &str, entry: LinkEntry) -> Lab {
    Lab::up(&spec(test).topology(Topology::default().with_entry(entry))).unwrap()
}

#[test]
fn delay_is_never_short_and_rarely_long() {
    if !is_root() {
        return;
    }
    let configured_delay = Duration::from_millis(20);
    let lab = lab(
        "delay",
        LinkEntry {
            delay_ms: Some(20.0),
            direction: Direction::Up,
            ..LinkEntry::for_host("c1")
        },
    );
    let (sender, receiver) = socket_pair(&lab);
    let count = 300;
    let sent: Vec<_> = thread::scope(|scope| {
        let received = scope.spawn(|| receive_until(&receiver, count - 1));
        let sent: Vec<_> = (0..count)
            .map(|number| {
                let at = Instant::now();
                sender.send(&numbered_datagram(number, 100)).unwrap();
                thread::sleep(Duration::from_millis(3));
                at
            })
            .collect();
        received
            .join()
            .unwrap()
            .into_iter()
            .map(|(number, at)| at - sent[number as usize])
            .collect()
    });
    assert_eq!(sent.len(), count as usize);
    let mut delays = sent;
    delays.sort();
    let (least, median, most) = (
        delays[0],
        delays[delays.len() / 2],
        delays[delays.len() - 1],
    );
    eprintln!(
        "configured delay {configured_delay:?}: lowest {least:?}, median {median:?}, highest {most:?}"
    );
    assert!(least >= configured_delay, "{least:?}");
    assert!(
        median < configured_delay + Duration::from_millis(5),
        "{median:?}"
    );
}

#[test]
fn link_program_meets_rate() {
    if !is_root() {
        return;
    }
    for rate_mbit in [10.0, 100.0] {
        let lab = lab(
            "rate",
            LinkEntry {
                rate_mbit: Some(rate_mbit),
                queue_packets: Some(100_000),
                direction: Direction::Up,
                ..LinkEntry::for_host("c1")
            },
        );
        let count = datagrams_in_three_seconds(rate_mbit);
        let before = counters_when_idle(&lab).link;
        measure_rate(&lab, rate_mbit, 0);
        let after = counters_after(&lab, before.entered + u64::from(count)).link;
        assert!(
            after.delivered - before.delivered >= u64::from(count),
            "{after:?}"
        );
    }
}

#[test]
fn kernel_link_meets_rate() {
    if !is_root() {
        return;
    }
    for host in ["c1", "n1"] {
        let lab = lab(
            "kernel",
            LinkEntry {
                rate_mbit: Some(100.0),
                queue_packets: Some(100_000),
                kernel: Some(true),
                ..LinkEntry::for_host(host)
            },
        );
        // The bucket lets its size in bytes pass at once.
        measure_rate(&lab, 100.0, 16_384 + 1514);
        lab.cut("c1").unwrap();
        lab.heal("c1").unwrap();
        measure_rate(&lab, 100.0, 16_384 + 1514);
    }
}

/// Payload size of a datagram, in bytes.
const PAYLOAD_BYTES: usize = 1400;

/// Returns the number of datagrams that pass in three seconds.
fn datagrams_in_three_seconds(rate_mbit: f64) -> u32 {
    (rate_mbit * 1e6 * 3.0 / 8.0 / (PAYLOAD_BYTES + HEADER_BYTES) as f64) as u32
}

/// Sends datagrams at full speed and checks that none arrives earlier than the rate allows, except for `at_once` bytes.
fn measure_rate(lab: &Lab, rate_mbit: f64, at_once: usize) {
    let (sender, receiver) = socket_pair(lab);
    let count = datagrams_in_three_seconds(rate_mbit);
    let began = Instant::now();
    let received = thread::scope(|scope| {
        let received = scope.spawn(|| receive_until(&receiver, count));
        for number in 0..count {
            sender
                .send(&numbered_datagram(number, PAYLOAD_BYTES))
                .unwrap();
        }
        // The kernel may drop a part of a burst after the link: one of these arrives.
        for number in count.. {
            if received.is_finished() {
                break;
            }
            sender
                .send(&numbered_datagram(number, PAYLOAD_BYTES))
                .unwrap();
            thread::sleep(Duration::from_millis(20));
        }
        received.join().unwrap()
    });
    let bits = |bytes: usize| (bytes * 8) as f64 / (rate_mbit * 1e6);
    let each = bits(PAYLOAD_BYTES + HEADER_BYTES);
    for (number, at) in &received {
        let took = (*at - began).as_secs_f64();
        let least = f64::from(number + 1) * each - bits(at_once);
        assert!(
            took > least * 0.9999,
            "datagram {number} arrived after {took} s, expected after {least} s"
        );
    }
    // Other processes delay some datagrams, not all.
    let span = |some: &[(u32, Instant)]| {
        let (first, last) = (some[0], some[some.len() - 1]);
        (last.1 - first.1).as_secs_f64() / f64::from(last.0 - first.0)
    };
    let tenths = received.chunks_exact(received.len() / 10).map(span);
    let fastest = tenths.fold(f64::INFINITY, f64::min);
    let measured = rate_mbit * each / fastest;
    eprintln!("configured rate {rate_mbit} Mbit/s: {measured:.3} in the fastest tenth");
    assert!(
        measured > rate_mbit * 0.95,
        "{measured} instead of {rate_mbit} Mbit/s"
    );
}

#[test]
fn losses_follow_the_seed() {
    if !is_root() {
        return;
    }
    let mut losses = Vec::new();
    for seed in [11, 11, 12] {
        let entry = LinkEntry {
            loss_pct: Some(10.0),
            seed: Some(seed),
            ..LinkEntry::for_host("c1")
        };
        let lab = lab("loss", entry);
        let (sender, receiver) = socket_pair(&lab);
        let before = counters_when_idle(&lab).link;
        let count = 2000;
        // Send in lots, because a queue in the kernel may be too short for all.
        for lot in 0..count / BATCH {
            for number in lot * BATCH..(lot + 1) * BATCH {
                sender.send(&numbered_datagram(number, 60)).unwrap();
            }
            wait_for_entered(&lab, before.entered + u64::from((lot + 1) * BATCH));
        }
        let after = counters_when_idle(&lab);
        assert_eq!(after.link.entered - before.entered, u64::from(count));
        assert_eq!((after.refused, after.link.dropped), (0, 0));
        // Compare with the model of the link, given the same number of earlier packets.
        let config = lab.status().unwrap().hosts[1].link.clone().unwrap().up;
        let mut model = EmulatedLink::new(config);
        for _ in 0..before.entered {
            model.handle_packet(Duration::ZERO, Vec::new());
        }
        while model.poll_packet(Duration::MAX).is_some() {}
        for number in 0..count {
            model.handle_packet(Duration::ZERO, numbered_datagram(number, 4));
        }
        let expected: BTreeSet<_> = std::iter::from_fn(|| model.poll_packet(Duration::MAX))
            .map(|packet| u32::from_be_bytes([packet[0], packet[1], packet[2], packet[3]]))
            .collect();
        let arrived = receive_exactly(&receiver, expected.len());
        let arrived: BTreeSet<_> = arrived.into_iter().collect();
        assert_eq!(arrived, expected, "seed {seed}");
        losses.push((before.entered, arrived));
    }
    assert!(
        losses[0] != losses[2],
        "another seed must lose other datagrams"
    );
}

#[test]
fn full_queue_drops_are_counted() {
    if !is_root() {
        return;
    }
    let lab = lab(
        "queue",
        LinkEntry {
            rate_mbit: Some(1.0),
            queue_packets: Some(10),
            direction: Direction::Up,
            ..LinkEntry::for_host("c1")
        },
    );
    let (sender, receiver) = socket_pair(&lab);
    let before = counters_when_idle(&lab).link;
    // Each datagram takes 10 ms; all are sent within a few milliseconds.
    for number in 0..100 {
        sender
            .send(&numbered_datagram(number, 1250 - HEADER_BYTES))
            .unwrap();
    }
    let after = counters_after(&lab, before.entered + 100).link;
    let (dropped, left) = (
        after.dropped - before.dropped,
        after.delivered - before.delivered,
    );
    assert_eq!(dropped + left, 100);
    assert!(
        left >= 10 && dropped > 0,
        "{left} passed, {dropped} dropped"
    );
    receive_exactly(&receiver, left as usize);
}

/// Returns bytes that differ at every position over a long distance.
fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

#[test]
fn stream_is_intact_in_both_directions_and_families() {
    if !is_root() {
        return;
    }
    // Both ends are behind the link program, which must never receive an incomplete packet.
    let entry = LinkEntry {
        delay_ms: Some(2.0),
        rate_mbit: Some(200.0),
        loss_pct: Some(0.2),
        ..LinkEntry::for_host("all")
    };
    let lab = lab("stream", entry);
    let (v4, v6) = lab.address("n1").unwrap();
    let data = pattern(3 << 20);
    for address in [std::net::IpAddr::from(v4), v6.into()] {
        let listener = lab
            .run_in_net_namespace("n1", || TcpListener::bind((address, 80)))
            .unwrap()
            .unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut received = vec![0; data.len()];
                stream.read_exact(&mut received).unwrap();
                assert!(
                    received == data,
                    "the received data differ from the sent data"
                );
                stream.write_all(&received).unwrap();
            });
            let mut stream = lab
                .run_in_net_namespace("c1", || TcpStream::connect((address, 80)))
                .unwrap()
                .unwrap();
            stream
                .set_read_timeout(Some(Duration::from_secs(120)))
                .unwrap();
            stream.write_all(&data).unwrap();
            let mut back = vec![0; data.len()];
            stream.read_exact(&mut back).unwrap();
            assert!(back == data, "the returned data differ from the sent data");
        });
    }
    let counters = counters_when_idle(&lab);
    // A packet above the MTU would be refused at the end of the link.
    assert_eq!(counters.refused, 0);
    assert!(counters.link.lost > 0);
}

#[test]
fn every_packet_has_a_full_checksum() {
    if !is_root() {
        return;
    }
    // Packets from c1 must be complete on the wire even without a link program: n1 sees them as if from a network card.
    for topology in [
        Topology::default(),
        Topology::default().with_entry(LinkEntry::for_host("all")),
    ] {
        let lab = Lab::up(&spec("checksum").topology(topology)).unwrap();
        let (v4, _) = lab.address("n1").unwrap();
        let mut watcher = lab.command("sw").unwrap();
        watcher.args([
            "timeout",
            "60",
            "tcpdump",
            "-i",
            "n1",
            "-n",
            "-vv",
            "-c",
            "20",
            "--immediate-mode",
            "udp",
            "and",
            "src",
            "net",
            "10.0.0.0/8",
        ]);
        let watcher = watcher
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let sender = lab
            .run_in_net_namespace("c1", || UdpSocket::bind("0.0.0.0:0"))
            .unwrap()
            .unwrap();
        let seen = thread::scope(|scope| {
            let watch = scope.spawn(|| watcher.wait_with_output().unwrap());
            while !watch.is_finished() {
                sender.send_to(&pattern(500), (v4, 7)).unwrap();
                thread::sleep(Duration::from_millis(10));
            }
            String::from_utf8(watch.join().unwrap().stdout).unwrap()
        });
        assert_eq!(seen.matches("[udp sum ok]").count(), 20, "{seen}");
    }
}

#[test]
fn links_steer_each_connection_to_one_cpu() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("order").nodes(1).clients(1)).unwrap();
    for host in ["n1", "c1", "sw"] {
        let masks = output_of(&lab, host, "cat /sys/class/net/*/queues/rx-*/rps_cpus");
        assert!(!masks.is_empty(), "{host} has no receive queue");
        let steered = |mask: &str| mask.chars().any(|digit| digit != '0' && digit != ',');
        assert!(masks.lines().all(steered), "{host}: {masks}");
    }
}
