//! Reach `broadcast`: every node receives every packet, and exactly one answers.

use std::time::Duration;

use holdfast_bpf::shared_with_c::{
    FlowState, PLACEMENT_SLOTS, REACH_BROADCAST, RECORD_OWNED, Record, Service,
};

use super::support::lab::link_text;
use super::support::pool::SHARED_LINK;
use super::support::raw_peer::{ICMP_V6, SYN, packet};
use super::support::*;

const NODES: [&str; 3] = ["n1", "n2", "n3"];

fn pool() -> Pool {
    let options = Options {
        reach: REACH_BROADCAST,
        xdp_everywhere: false,
        ..Options::default()
    };
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], options);
    pool.set_services(&equal_thirds(), Service::default());
    pool
}

fn equal_thirds() -> [u16; PLACEMENT_SLOTS] {
    std::array::from_fn(|slot| 1 + (slot % 3) as u16)
}

fn sum_counter(pool: &Pool, counter: &str) -> u64 {
    NODES
        .iter()
        .map(|name| pool.node(name).counter(counter))
        .sum()
}

fn new_peer(pool: &Pool, v6: bool) -> RawPeer {
    RawPeer::new(pool, "c1", if v6 { 150 } else { 151 }, v6, SHARED_LINK)
}

#[test]
fn exactly_one_node_answers_a_syn() {
    let pool = pool();
    for v6 in [false, true] {
        let peer = new_peer(&pool, v6);
        let mut answered = [0; 3];
        for port in 5000..5040 {
            let drops_before = sum_counter(&pool, "drop_other_owner");
            peer.send_segment(port, SYN, 0, &[]);
            let answer = peer.next_segment(port, 60_000).expect("a SYN-ACK");
            assert_ne!(
                answer.link, SHARED_LINK,
                "the shared link address is never a source"
            );
            eventually("two nodes drop the SYN", || {
                sum_counter(&pool, "drop_other_owner") >= drops_before + 2
            });
            // A retransmitted SYN is answered by the same node, and by no other.
            peer.send_segment(port, SYN, 0, &[]);
            let second_answer = peer.next_segment(port, 60_000).expect("a SYN-ACK");
            assert_eq!(
                (second_answer.link, second_answer.seq),
                (answer.link, answer.seq)
            );
            eventually("two nodes drop the SYN again", || {
                sum_counter(&pool, "drop_other_owner") >= drops_before + 4
            });
            let has_link = |name: &&str| pool.lab.position(name).link() == answer.link;
            answered[NODES.iter().position(has_link).expect("a node")] += 1;
        }
        assert!(
            answered.iter().all(|count| *count > 0),
            "spread: {answered:?}"
        );
        assert_eq!(sum_counter(&pool, "drop_no_socket"), 0);
    }
}

#[test]
fn connections_and_datagrams_reach_owner_by_hash_and_port() {
    let pool = pool();
    let host = pool.lab.host("c1");
    for v6 in [false, true] {
        let mut owners: Vec<u8> = (0..30)
            .map(|_| {
                let mut client = Client::connect(host, v6);
                client.echo(&pattern(30_000));
                let name = NODES[usize::from(client.owner) - 1];
                assert_eq!(pool.node(name).state(&client.key()), Some(FlowState::Owned));
                client.owner
            })
            .collect();
        owners.extend((0..30).map(|_| DatagramClient::new(host, unspecified(v6)).ask(b"who?")));
        assert!(
            [1, 2, 3].iter().all(|owner| owners.contains(owner)),
            "{owners:?}"
        );
        let fragments = DatagramClient::new(host, unspecified(v6));
        let owner = fragments.ask(&pattern(4000));
        let attempt = fragments.send(&pattern(4000)).expect("send");
        let answer = |ms| fragments.answer(&pattern(4000), attempt, Duration::from_millis(ms));
        assert_eq!(answer(60_000), Some(owner));
        assert_eq!(answer(50), None, "one answer only");
    }
    let by_port = Service {
        by_port: 1,
        port_owner: 2,
        ..Service::default()
    };
    pool.set_services(&equal_thirds(), by_port);
    for v6 in [false, true] {
        for _ in 0..10 {
            let mut client = Client::connect(host, v6);
            client.echo(b"by port");
            assert_eq!(client.owner, 2);
        }
    }
}

/// A node that has a record of a flow uses the record, not the placement table.
#[test]
fn record_overrides_placement_table() {
    let pool = pool();
    pool.place_all_on(2);
    let datagrams = DatagramClient::new(pool.lab.host("c1"), unspecified(false));
    let record = Record {
        epoch: 1,
        owner: 3,
        state: RECORD_OWNED,
        ..Record::default()
    };
    for name in NODES {
        pool.node(name)
            .with_dataplane(|plane| plane.steering.set(&datagrams.key(), &record))
            .expect("steering");
    }
    assert_eq!(datagrams.ask(b"who?"), 3);
    assert_eq!(pool.node("n2").flow_count(), 0);
}

#[test]
fn neighbours_learn_shared_link_address() {
    let pool = pool();
    let client = pool.lab.host("c1");
    for v6 in [false, true] {
        Client::connect(client, v6).echo(b"hello");
        let text = client.ip_output("neigh show");
        let wanted = format!(
            "{} dev eth0 lladdr {}",
            service(v6).ip(),
            link_text(SHARED_LINK)
        );
        assert!(text.contains(&wanted), "{text}");
    }
}

/// Only one node answers, with its own link address as the source of its frames, so that no switch learns a port for
/// the shared address.
#[test]
fn one_node_answers_for_shared_link_address() {
    let pool = pool();
    let contact = pool.lab.position("n1").link();
    let peer = new_peer(&pool, false);
    let client_place = pool.lab.position("c1");
    let (v4, v4_service) = (client_place.v4().octets(), service(false).ip());
    let std::net::IpAddr::V4(target) = v4_service else {
        panic!("IPv4")
    };
    let mut arp = vec![0xff; 6];
    arp.extend(client_place.link());
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    arp.extend(client_place.link());
    arp.extend(v4);
    arp.extend([0; 6]);
    arp.extend(target.octets());
    peer.send_frame(&arp);
    let replies = collect_frames(&peer, |frame| {
        frame[12..14] == [8, 6] && frame[20..22] == [0, 2]
    });
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0][6..12], contact);
    assert_eq!(replies[0][22..28], SHARED_LINK);
    assert_eq!(replies[0][28..32], target.octets());

    let std::net::IpAddr::V6(target) = service(true).ip() else {
        panic!("IPv6")
    };
    let mut solicitation = vec![135, 0, 0, 0, 0, 0, 0, 0];
    solicitation.extend(target.octets());
    solicitation.extend([1, 1]);
    solicitation.extend(client_place.link());
    let mut ip = packet(
        client_place.v6().into(),
        target.into(),
        ICMP_V6,
        &solicitation,
    );
    ip[7] = 255;
    peer.send(&ip);
    let replies = collect_frames(&peer, |frame| {
        frame[12..14] == [0x86, 0xdd] && frame[54] == 136
    });
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0][6..12], contact);
    assert_eq!(replies[0][78..80], [2, 1]);
    assert_eq!(replies[0][80..86], SHARED_LINK);
}

/// Returns the frames to the peer that satisfy `wanted`, up to a silence of 100 ms after the first.
fn collect_frames(peer: &RawPeer, is_wanted: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
    let peer_place = HostPosition {
        number: 14,
        ..peer.position
    }
    .link();
    let mut found = Vec::new();
    loop {
        match peer.receive(if found.is_empty() { 60_000 } else { 100 }) {
            Some(frame) if frame.len() >= 42 && frame[..6] == peer_place && is_wanted(&frame) => {
                found.push(frame)
            }
            Some(_) => {}
            None => return found,
        }
    }
}

/// Every node receives its own copy of each packet, so a donor does not forward stragglers.
#[test]
fn stragglers_are_not_forwarded() {
    let pool = pool();
    pool.place_all_on(2);
    let donor = pool.node("n2");
    let mut client = Client::connect(pool.lab.host("c1"), false);
    donor.server.wait_until_acknowledged(client.address());
    let acceptor = pool.node("n3");
    acceptor.set_state(&client.key(), FlowState::TransitIn, 2, 5);
    donor.set_state(&client.key(), FlowState::TransitOut, 3, 0);
    client.send(b"held");
    let packet = acceptor.tun.read(60_000).expect("held at the acceptor");
    assert!(packet.ends_with(b"held"));
    eventually("dropped at the donor", || {
        donor.counter("drop_transit_elsewhere") > 0
    });
    assert_eq!(donor.counter("forwarded_straggler"), 0);
}
