//! Tests of the link with a simulated clock.

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// Sends `(time, size)` packets, numbered in their first bytes, through a link, and returns the time at which each
/// left.
fn send_through(
    config: &LinkConfig,
    packets: &[(Duration, usize)],
) -> (Vec<(usize, Duration)>, LinkCounters) {
    let mut link = EmulatedLink::new(config.clone());
    let mut out = Vec::new();
    let mut drain = |link: &mut EmulatedLink<Vec<u8>>, until: Option<Duration>| {
        while let Some(at) = link
            .poll_timeout()
            .filter(|at| until.is_none_or(|until| *at <= until))
        {
            let packet = link.poll_packet(at).expect("a timeout announces a packet");
            let number = u32::from_be_bytes([packet[0], packet[1], packet[2], packet[3]]);
            out.push((number as usize, at));
        }
    };
    for (number, (at, size)) in packets.iter().enumerate() {
        drain(&mut link, Some(*at));
        let mut packet = vec![0; (*size).max(4)];
        packet[..4].copy_from_slice(&(number as u32).to_be_bytes());
        link.handle_packet(*at, packet);
    }
    drain(&mut link, None);
    (out, link.counters())
}

fn periodic_packets(step: Duration, count: u32, size: usize) -> Vec<(Duration, usize)> {
    (0..count).map(|n| (step * n, size)).collect()
}

#[test]
fn delay_is_exact() {
    let config = LinkConfig {
        delay: 10 * MS,
        ..LinkConfig::default()
    };
    let (out, counters) = send_through(&config, &periodic_packets(3 * MS, 100, 1000));
    let expected: Vec<_> = (0..100).map(|n| (n, 3 * MS * n as u32 + 10 * MS)).collect();
    assert_eq!(out, expected);
    assert_eq!(
        (
            counters.delivered,
            counters.delivered_bytes,
            counters.in_flight
        ),
        (100, 100_000, 0)
    );
}

#[test]
fn packet_does_not_arrive_early() {
    let config = LinkConfig {
        delay: 10 * MS,
        ..LinkConfig::default()
    };
    let mut link = EmulatedLink::new(config);
    link.handle_packet(MS, vec![1]);
    assert_eq!(link.poll_timeout(), Some(11 * MS));
    assert_eq!(link.poll_packet(11 * MS - Duration::from_nanos(1)), None);
    assert_eq!(link.poll_packet(11 * MS), Some(vec![1]));
    assert_eq!(link.poll_timeout(), None);
}

#[test]
fn rate_spaces_packets_by_their_size() {
    // 1250 bytes at 10 Mbit/s take 1 ms.
    let config = LinkConfig {
        rate_bits: Some(10_000_000),
        delay: 5 * MS,
        ..LinkConfig::default()
    };
    let (out, _) = send_through(
        &config,
        &[
            (Duration::ZERO, 1250),
            (Duration::ZERO, 625),
            (Duration::ZERO, 1250),
            (20 * MS, 1250),
        ],
    );
    let times: Vec<_> = out.iter().map(|(_, at)| *at).collect();
    assert_eq!(
        times,
        [
            6 * MS,
            Duration::from_micros(6500),
            Duration::from_micros(7500),
            26 * MS
        ]
    );
}

#[test]
fn full_queue_drops_newest_packets() {
    let config = LinkConfig {
        rate_bits: Some(10_000_000),
        queue_packets: 3,
        ..LinkConfig::default()
    };
    // Of five packets at once, the queue takes three. One has been sent 1 ms later, so one more fits.
    let mut packets = vec![(Duration::ZERO, 1250); 5];
    packets.push((MS, 1250));
    packets.push((MS, 1250));
    let (out, counters) = send_through(&config, &packets);
    assert_eq!(out, [(0, MS), (1, 2 * MS), (2, 3 * MS), (5, 4 * MS)]);
    assert_eq!(
        (
            counters.entered,
            counters.dropped,
            counters.lost,
            counters.delivered
        ),
        (7, 3, 0, 4)
    );
}

#[test]
fn loss_is_reproducible_and_near_configured_rate() {
    let config = |seed| LinkConfig {
        loss: LOSS_ALWAYS / 100,
        seed,
        ..LinkConfig::default()
    };
    let packets = periodic_packets(MS, 100_000, 100);
    let (first, counters) = send_through(&config(1), &packets);
    assert_eq!(send_through(&config(1), &packets).0, first);
    assert_ne!(send_through(&config(2), &packets).0, first);
    // Mean 1000, standard deviation 31.5; the seed is fixed, so the test cannot fail by chance.
    assert!((850..1150).contains(&counters.lost), "{}", counters.lost);
    // The exact losses of this seed, which must never change.
    let arrived: std::collections::BTreeSet<_> = first.iter().map(|(n, _)| *n).collect();
    let lost: Vec<_> = (0..100_000)
        .filter(|n| !arrived.contains(n))
        .take(5)
        .collect();
    assert_eq!(lost, FIRST_LOSSES_OF_SEED_1);
}

const FIRST_LOSSES_OF_SEED_1: [usize; 5] = [49, 80, 170, 421, 661];

#[test]
fn loss_does_not_depend_on_time_size_or_queue() {
    let lossy = LinkConfig {
        loss: LOSS_ALWAYS / 10,
        seed: 9,
        ..LinkConfig::default()
    };
    let slow = LinkConfig {
        rate_bits: Some(1_000_000),
        queue_packets: 2,
        jitter: MS,
        ..lossy.clone()
    };
    let lost = send_through(&lossy, &periodic_packets(MS, 1000, 60)).1.lost;
    let counters = send_through(&slow, &periodic_packets(MS / 100, 1000, 1500)).1;
    assert_eq!(counters.lost, lost);
    assert!(counters.dropped > 0);
}

#[test]
fn loss_of_zero_and_one_is_exact() {
    for (loss, left) in [(0, 1000), (LOSS_ALWAYS, 0)] {
        let config = LinkConfig {
            loss,
            ..LinkConfig::default()
        };
        assert_eq!(
            send_through(&config, &periodic_packets(MS, 1000, 60))
                .1
                .delivered,
            left
        );
    }
}

prop_compose! {
    fn configs()(delay in 0u64..50_000, jitter in 0u64..20_000, rate in proptest::option::of(100_000u64..1_000_000_000),
                 queue_packets in 1usize..50, loss in 0..LOSS_ALWAYS, seed: u64) -> LinkConfig {
        LinkConfig {
            delay: Duration::from_micros(delay),
            jitter: Duration::from_micros(jitter),
            rate_bits: rate,
            queue_packets,
            loss,
            seed,
        }
    }
}

prop_compose! {
    /// Packets with times that do not decrease.
    fn packets_in_order()(steps in proptest::collection::vec((0u64..3000, 4usize..1514), 0..200)) -> Vec<(Duration, usize)> {
        let mut now = Duration::ZERO;
        steps.into_iter().map(|(step, size)| { now += Duration::from_micros(step); (now, size) }).collect()
    }
}

proptest! {
    #[test]
    fn packets_stay_in_order_and_are_all_accounted_for(config in configs(), packets in packets_in_order()) {
        let (out, counters) = send_through(&config, &packets);
        prop_assert!(out.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1));
        prop_assert_eq!(counters.entered, packets.len() as u64);
        prop_assert_eq!(counters.delivered, out.len() as u64);
        prop_assert_eq!(counters.entered, counters.delivered + counters.lost + counters.dropped);
        prop_assert_eq!(counters.in_flight, 0);
        prop_assert_eq!(counters.delivered_bytes, out.iter().map(|(n, _)| packets[*n].1 as u64).sum::<u64>());
    }

    #[test]
    fn packet_takes_at_least_the_link_delay(config in configs(), packets in packets_in_order()) {
        let (out, _) = send_through(&config, &packets);
        for (n, at) in &out {
            let (entered, size) = packets[*n];
            let sending = config.rate_bits.map_or(0, |rate| size as u64 * 8 * 1_000_000_000 / rate);
            prop_assert!(*at >= entered + Duration::from_nanos(sending) + config.delay);
        }
        if config.rate_bits.is_none() {
            // Without a rate only jitter adds to the delay, possibly that of an earlier packet.
            prop_assert!(out.iter().all(|(n, at)| *at <= packets[*n].0 + config.delay + config.jitter));
        }
    }

    #[test]
    fn link_does_not_exceed_its_rate(config in configs(), packets in packets_in_order()) {
        let config = LinkConfig { jitter: Duration::ZERO, ..config };
        let (out, _) = send_through(&config, &packets);
        if let Some(rate) = config.rate_bits {
            for pair in out.windows(2) {
                let gap = pair[1].1 - pair[0].1;
                let sending = packets[pair[1].0].1 as u64 * 8 * 1_000_000_000 / rate;
                prop_assert!(gap >= Duration::from_nanos(sending));
            }
        }
    }

    #[test]
    fn queue_does_not_exceed_its_limit(config in configs(), packets in packets_in_order()) {
        let (out, _) = send_through(&LinkConfig { jitter: Duration::ZERO, ..config.clone() }, &packets);
        for (entered, _) in &packets {
            // Waiting or being sent at that moment, including the new packet.
            let waiting = out.iter().filter(|(n, at)| packets[*n].0 <= *entered && *at - config.delay > *entered).count();
            prop_assert!(waiting <= config.queue_packets);
        }
    }
}
