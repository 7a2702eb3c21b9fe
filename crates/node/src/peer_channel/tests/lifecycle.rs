use std::time::Duration;

use holdfast_wire::NodeId;

use super::group::{Group, Node, Rogue, eventually, run, run_blocking, second_connection};
use crate::config::ChannelConfig;
use crate::peer_channel::{PeerChannelOptions, PeerConnectionError};

#[test]
fn three_nodes_come_up_in_any_order() {
    run(async {
        let group = Group::new();
        let mut n3 = group.start(3);
        eventually("n3 tried", || n3.peers.problem(NodeId(1)).is_some()).await;
        let mut n1 = group.start(1);
        n1.wait_up(3).await;
        assert_eq!(n3.wait_up(1).await, 1);
        let mut n2 = group.start(2);
        for peer in [1, 3] {
            eventually("n2 up", || n2.peers.is_up(NodeId(peer))).await;
        }
        assert_eq!(n1.wait_up(2).await, 2);
        assert_eq!(n3.wait_up(2).await, 2);
        n2.next_event().await;
        n2.next_event().await;
        assert!(n2.events.try_recv().is_none());
        assert_eq!(n1.peers.problem(NodeId(3)), None);
        assert_eq!(n1.peers.ids().collect::<Vec<_>>(), [NodeId(2), NodeId(3)]);
        assert_eq!(n1.peers.address(), group.address(1));
    });
}

#[test]
fn restarted_peer_has_a_new_boot_id() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n2) = (group.start(1), group.start(2));
        assert_eq!(n1.wait_up(2).await, 2);
        n2.wait_up(1).await;
        n2.peers.shutdown();
        assert!(matches!(
            n2.wait_lost(1).await,
            PeerConnectionError::Shutdown
        ));
        n1.wait_lost(2).await;
        assert!(!n1.peers.is_up(NodeId(2)));
        assert!(
            n1.metrics
                .encode()
                .contains("peer_connected{peer=\"n2\"} 0")
        );
        drop(n2);
        let mut n2 = group.start_with(group.options(2, 22));
        assert_eq!(n1.wait_up(2).await, 22);
        assert_eq!(n2.wait_up(1).await, 1);
        assert!(
            n1.metrics
                .encode()
                .contains("peer_connected{peer=\"n2\"} 1")
        );
    });
}

#[test]
fn connected_nodes_agree_on_keys_of_datagrams_until_one_restarts() {
    run(async {
        let group = Group::new();
        let start = |node, boot| {
            // The test receives no frames of the membership.
            let (membership, _) = tokio::sync::mpsc::channel(8);
            group.start_with(PeerChannelOptions {
                membership: Some(membership),
                ..group.options(node, boot)
            })
        };
        let keys_of = |node: &Node, name: &str| {
            let table = node.peers.watch_datagram_keys();
            table.borrow().get(&name.parse().unwrap())
        };
        let (n1, mut n2) = (start(1, 1), start(2, 2));
        let has_keys_of = |boot| {
            let keys = keys_of(&n1, "n2");
            keys.is_some_and(|keys| keys.boot == boot && keys.outbound.is_some())
        };
        eventually("keys", || has_keys_of(2) && keys_of(&n2, "n1").is_some()).await;
        let (at_n1, at_n2) = (keys_of(&n1, "n2").unwrap(), keys_of(&n2, "n1").unwrap());
        assert_eq!(at_n1.outbound, Some(at_n2.inbound));
        assert_ne!(at_n1.inbound, at_n2.inbound);
        assert_eq!(at_n2.boot, 1);
        n2.peers.shutdown();
        n2.wait_lost(1).await;
        eventually("lost", || !n1.peers.is_up(NodeId(2))).await;
        assert_eq!(
            keys_of(&n1, "n2"),
            Some(at_n1),
            "datagrams pass without a channel"
        );
        drop(n2);
        let _n2 = start(2, 22);
        eventually("new keys", || has_keys_of(22)).await;
        assert_ne!(keys_of(&n1, "n2").unwrap().inbound, at_n1.inbound);
    });
}

#[test]
fn a_silent_peer_is_lost() {
    run(async {
        let mut group = Group::new();
        group.timing = ChannelConfig {
            ping_interval: Duration::from_millis(20),
            // The rogue's first link is silent while it waits for n1's connection, which may be delayed.
            dead_after: Duration::from_secs(5),
            silent_after: Duration::from_millis(200),
            ..group.timing
        };
        let mut n1 = group.start(1);
        // The rogue keeps its sockets open, but neither pings nor answers.
        let rogue = run_blocking(Rogue::connect(&group, 2)).await;
        n1.wait_up(2).await;
        let reason = n1.wait_lost(2).await;
        assert!(
            matches!(reason, PeerConnectionError::IdleTimeout(_)),
            "{reason}"
        );
        assert_eq!(reason.rejection_reason(), None);
        drop(rogue);
    });
}

#[test]
fn delayed_daemon_does_not_declare_peers_lost() {
    run(async {
        let mut group = Group::new();
        group.timing = ChannelConfig {
            ping_interval: Duration::from_millis(50),
            dead_after: Duration::from_millis(200),
            silent_after: Duration::from_millis(200),
            ..group.timing
        };
        // Both nodes share a thread: blocking it delays both, like a busy daemon with a busy peer.
        let (mut n1, mut n2) = (group.start(1), group.start(2));
        n1.wait_up(2).await;
        n2.wait_up(1).await;
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(500));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(n1.peers.is_up(NodeId(2)) && n2.peers.is_up(NodeId(1)));
        assert!(n1.events.try_recv().is_none() && n2.events.try_recv().is_none());
    });
}

#[test]
fn a_second_connection_of_a_peer_replaces_the_first() {
    run(async {
        let group = Group::new();
        let mut n1 = group.start(1);
        let rogue = run_blocking(Rogue::connect(&group, 2)).await;
        n1.wait_up(2).await;
        let second = run_blocking(second_connection(&group, 2)).await;
        assert!(matches!(
            n1.wait_lost(2).await,
            PeerConnectionError::Replaced
        ));
        n1.wait_up(2).await;
        assert!(n1.peers.is_up(NodeId(2)));
        drop((rogue, second));
    });
}

#[test]
fn an_address_in_use_is_an_error() {
    run(async {
        let group = Group::new();
        let _n1 = group.start(1);
        let second_start = crate::peer_channel::PeerChannel::start(
            group.options(1, 5),
            group.tls("n1"),
            crate::metrics::Metrics::new(),
        );
        assert_eq!(
            second_start.err().unwrap().kind(),
            std::io::ErrorKind::AddrInUse
        );
    });
}
