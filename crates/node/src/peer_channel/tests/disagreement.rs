//! Nodes that disagree: said at both ends.

use holdfast_wire::NodeId;
use holdfast_wire::greeting::{ConfiguredSettings, GroupMode};

use super::group::{Group, Node, eventually, run};
use crate::peer_channel::PeerChannelOptions;

fn configured(contact: u16, services: u64) -> Option<GroupMode> {
    Some(GroupMode::Configured(ConfiguredSettings {
        contact: NodeId(contact),
        reach: 1,
        services,
    }))
}

fn start(group: &Group, node: u16, mode: Option<GroupMode>) -> Node {
    group.start_with(PeerChannelOptions {
        mode,
        ..group.options(node, u64::from(node))
    })
}

async fn wait_problem(node: &Node, peer: u16, text: &str) {
    eventually(text, || {
        let problem = node.peers.problem(NodeId(peer)).unwrap_or_default();
        problem.contains(text)
    })
    .await;
}

#[test]
fn different_contact_nodes_keep_nodes_apart() {
    run(async {
        let group = Group::new();
        let n1 = start(&group, 1, configured(1, 1));
        let n2 = start(&group, 2, configured(2, 1));
        wait_problem(&n1, 2, "different contact nodes").await;
        wait_problem(&n2, 1, "different contact nodes").await;
        assert!(!n1.peers.is_up(NodeId(2)) && !n2.peers.is_up(NodeId(1)));
        eventually("counted", || n1.metrics.rejections("disagreement") > 0).await;
    });
}

#[test]
fn configured_node_does_not_talk_to_one_whose_group_runs_itself() {
    run(async {
        let group = Group::new();
        let n1 = start(&group, 1, configured(1, 1));
        let n2 = start(&group, 2, Some(GroupMode::SelfRunning));
        wait_problem(&n1, 2, "group.contact").await;
        wait_problem(&n2, 1, "group.contact").await;
    });
}

#[test]
fn different_services_are_told_and_do_not_keep_nodes_apart() {
    run(async {
        let group = Group::new();
        let mut n1 = start(&group, 1, configured(1, 1));
        let mut n2 = start(&group, 2, configured(1, 2));
        n1.wait_up(2).await;
        n2.wait_up(1).await;
        for (node, peer) in [(&n1, "n2"), (&n2, "n1")] {
            let told = node.peers.disagreements();
            assert_eq!(told.len(), 1, "{told:?}");
            assert!(
                told[0].contains(peer) && told[0].contains("services"),
                "{told:?}"
            );
        }
    });
}

#[test]
fn second_host_with_the_same_certificate_is_refused_and_told() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n2) = (group.start(1), group.start(2));
        n1.wait_up(2).await;
        n2.wait_up(1).await;
        // Another host with the certificate and number of n2.
        let second = group.start_as(
            PeerChannelOptions {
                address: group.address(9),
                ..group.options(2, 22)
            },
            group.tls("n2"),
        );
        wait_problem(&second, 1, "two hosts have the certificate of node `n2`").await;
        eventually("n1 counts", || n1.metrics.rejections("node") > 0).await;
        assert!(n1.peers.is_up(NodeId(2)) && n2.peers.is_up(NodeId(1)));
    });
}
