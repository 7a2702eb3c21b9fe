//! The link from the driver's thread to the peer channel, which lives on the thread of the event loop.

use std::net::SocketAddr;
use std::sync::Arc;

use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{Member, MembershipFrame, NodeName};
use tokio::sync::{mpsc, watch};

use crate::peer_channel::Peers;

/// Maximum number of frames that wait for the event loop's thread; further ones are dropped, as the network might do.
const WAITING_FRAMES_MAX: usize = 4_096;

/// A frame for the peer channel.
#[derive(Debug)]
enum OutgoingFrame {
    /// For a node, at an address if the driver knows one.
    ToNode(NodeName, Option<SocketAddr>, MembershipFrame),
    /// For whoever answers at the seeds' addresses.
    ToSeeds(MembershipFrame),
}

/// The nodes of the group, as the peer channel needs them.
#[derive(Debug, Default)]
struct ChannelMembers {
    own: Option<NodeId>,
    members: Vec<Member>,
}

/// The membership driver's end of the link to the peer channel.
#[derive(Debug)]
pub(super) struct ChannelSender {
    frames: mpsc::Sender<OutgoingFrame>,
    members: watch::Sender<Arc<ChannelMembers>>,
}

impl ChannelSender {
    /// Sends a frame to a node.
    pub fn send(&self, to: NodeName, address: Option<SocketAddr>, frame: MembershipFrame) {
        self.push(OutgoingFrame::ToNode(to, address, frame));
    }

    /// Sends a frame to whoever answers at the seeds' addresses.
    pub fn ask_seeds(&self, frame: MembershipFrame) {
        self.push(OutgoingFrame::ToSeeds(frame));
    }

    fn push(&self, frame: OutgoingFrame) {
        if self.frames.try_send(frame).is_err() {
            tracing::debug!("a membership frame was dropped: the event loop is busy");
        }
    }

    /// Replaces the nodes of the group.
    pub fn set_members(&self, own: Option<NodeId>, members: Vec<Member>) {
        self.members
            .send_replace(Arc::new(ChannelMembers { own, members }));
    }
}

/// The peer channel's end: a task on the event loop's thread.
pub(super) struct ChannelLink {
    peers: Peers,
    seeds: Vec<SocketAddr>,
    frames: mpsc::Receiver<OutgoingFrame>,
    members: watch::Receiver<Arc<ChannelMembers>>,
}

impl ChannelLink {
    pub fn new(peers: Peers, seeds: Vec<SocketAddr>) -> (ChannelLink, ChannelSender) {
        let (frame_sender, frames) = mpsc::channel(WAITING_FRAMES_MAX);
        let (member_sender, members) = watch::channel(Arc::default());
        let link = ChannelLink {
            peers,
            seeds,
            frames,
            members,
        };
        let sender = ChannelSender {
            frames: frame_sender,
            members: member_sender,
        };
        (link, sender)
    }

    /// Carries out what the driver wants, until the driver ends.
    pub async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                changed = self.members.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let members = self.members.borrow_and_update().clone();
                    self.peers.set_members(members.own, &members.members);
                }
                frame = self.frames.recv() => match frame {
                    Some(OutgoingFrame::ToNode(to, address, frame)) => {
                        self.peers.send_membership(&to, address, &frame);
                    }
                    Some(OutgoingFrame::ToSeeds(frame)) => {
                        for seed in &self.seeds {
                            self.peers.ask_address(*seed, &frame);
                        }
                    }
                    None => return,
                }
            }
        }
    }
}
