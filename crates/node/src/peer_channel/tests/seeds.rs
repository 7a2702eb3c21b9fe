//! Tests of the names that are believed because of an address: those of the nodes that answered where this node dialled.

use std::collections::BTreeSet;

use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{MembershipFrame, NodeName};
use tokio::sync::mpsc;

use super::group::{Group, Node, TEST_TIMEOUT, run};
use crate::peer_channel::{PeerChannelOptions, ReceivedMembershipFrame};

/// A node of a group that runs itself, and the frames that its membership receives.
struct SelfRunningNode {
    node: Node,
    frames: mpsc::Receiver<ReceivedMembershipFrame>,
}

impl SelfRunningNode {
    fn start(group: &Group, node: u16) -> SelfRunningNode {
        let (sender, frames) = mpsc::channel(64);
        let options = PeerChannelOptions {
            node: NodeId(0),
            peers: Vec::new(),
            membership: Some(sender),
            ..group.options(node, u64::from(node))
        };
        let tls = group.tls(&format!("n{node}"));
        SelfRunningNode {
            node: group.start_as(options, tls),
            frames,
        }
    }

    async fn next_frame(&mut self) -> ReceivedMembershipFrame {
        let next = tokio::time::timeout(TEST_TIMEOUT, self.frames.recv()).await;
        next.expect("a frame in time").expect("the channel runs")
    }
}

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

#[test]
fn guest_does_not_become_a_seed_by_the_address_that_it_claims() {
    run(async {
        let group = Group::new();
        let n1 = SelfRunningNode::start(&group, 1);
        let [mut seed, mut guest] = [2, 3].map(|node| SelfRunningNode::start(&group, node));
        let seeds = n1.node.peers.watch_seeds();
        let (frame, peers) = (MembershipFrame::WhoIsContact, &n1.node.peers);
        // The guest has joined from its own address, so that this node has dialled the guest there.
        peers.send_membership(&name("n3"), Some(group.address(3)), &frame);
        assert_eq!(guest.next_frame().await.from, name("n1"));
        // The guest's next join claims the address of the seed.
        peers.send_membership(&name("n3"), Some(group.address(2)), &frame);
        assert_eq!(guest.next_frame().await.from, name("n1"));
        peers.ask_address(group.address(2), &frame);
        let received = seed.next_frame().await;
        assert_eq!((received.from, received.frame), (name("n1"), frame.clone()));
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let expected: BTreeSet<String> = names(&["n2"]);
        assert_eq!(*seeds.borrow(), expected);
        // The next question uses the connection that exists.
        peers.ask_address(group.address(2), &frame);
        assert_eq!(seed.next_frame().await.from, name("n1"));
        assert_eq!(*seeds.borrow(), expected);
    });
}
