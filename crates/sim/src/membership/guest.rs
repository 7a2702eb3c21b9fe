//! A hostile guest: a host with a certificate of the group that does not admit it as a backup, and that is no member, or a
//! server node at most. The guest sends whatever may make it the contact node, remove nodes, use up numbers, or reveal the group's secrets.

use super::node::node_name;
use super::world::{Event, MembershipWorld};
use crate::time::Time;
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, GroupChangeId};
use holdfast_wire::membership_frames::{
    AcceptedView, Ballot, Heartbeat, JoinNumber, JoinRole, Member, MembershipFrame, NodeName,
    ServerListVersion, VotedView,
};
use std::net::{Ipv4Addr, SocketAddr};

/// Most node numbers that a guest gets: each new contact node gives a name some free ones.
const NUMBERS_MAX: usize = 40;

impl MembershipWorld<'_> {
    /// Returns the index of the guest, which follows the indices of all nodes.
    pub(super) fn guest(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn guest_name(&self) -> NodeName {
        node_name(self.guest())
    }

    /// Returns the role that the guest's certificate admits to: that of a server node, or none as in earlier releases.
    pub(super) fn guest_certified(&self) -> Option<JoinRole> {
        self.seed.is_multiple_of(2).then_some(JoinRole::ServerNode)
    }

    /// Lets the guest send a frame to a node, and another one soon, until the end of all faults.
    pub(super) fn send_guest_frame(&mut self) {
        if !self.is_faulty {
            return;
        }
        let soon = Time::from_micros(self.random.between(2_000, 30_000));
        self.queue.push(self.now + soon, Event::Guest);
        let [to, informant] = [(); 2].map(|()| self.random.below(self.nodes.len()));
        let machine = self.nodes[informant].machine.as_ref();
        let Some(view) = machine.and_then(|machine| machine.voted_view().cloned()) else {
            return;
        };
        let frame = self.draw_guest_frame(&view);
        if let MembershipFrame::Join { join, .. } = frame {
            self.guest_join = join;
        }
        self.count("guest's frame");
        self.transmit(self.guest(), to, frame);
    }

    fn draw_guest_frame(&mut self, view: &VotedView) -> MembershipFrame {
        let number = self.random.number();
        let (join, address) = (
            JoinNumber(number),
            SocketAddr::from((Ipv4Addr::new(10, 0, 9, 9), 7400)),
        );
        let own = Member {
            id: NodeId(view.next_id as u16),
            name: self.guest_name(),
            address,
            join,
        };
        let mut forged = view.clone();
        forged.epoch = match self.random.below(4) {
            0 => view.epoch,
            1 => view.epoch + 1,
            2 => view.epoch + 1 + number % 1_000,
            _ => u64::MAX >> (number % 64),
        };
        forged.next_id += 1;
        forged.group_data.version += 1;
        forged.voters.insert(0, own);
        forged
            .voters
            .truncate(1 + self.random.below(forged.voters.len()));
        let epoch = forged.epoch;
        let round = (number as u32) >> (number % 32);
        let proposer = view.voters[self.random.below(view.voters.len())].id;
        let ballot = Ballot { round, proposer };
        let id = NodeId(1 + self.random.below(view.next_id as usize) as u16);
        match self.random.below(18) {
            0 => MembershipFrame::Commit { view: forged },
            kind @ 1..=2 => MembershipFrame::Removed {
                view: forged.summary(),
                rejoin: kind == 1,
            },
            3 => MembershipFrame::NotContact {
                view: forged.summary(),
            },
            4 => MembershipFrame::Contact {
                view: forged.summary(),
                is_registered: true,
                server_list: ServerListVersion::default(),
            },
            5 => MembershipFrame::Heartbeat(Heartbeat {
                epoch,
                boot: u64::MAX,
                sequence: number,
                has_lease: true,
                server_list: ServerListVersion::default(),
            }),
            6 => MembershipFrame::Prepare { epoch, ballot },
            7 => MembershipFrame::Propose {
                ballot,
                view: forged,
            },
            8 => MembershipFrame::Promise {
                epoch,
                ballot,
                accepted: Some(AcceptedView {
                    ballot,
                    view: forged,
                }),
            },
            9 => MembershipFrame::Reject {
                epoch: view.epoch + 1,
                ballot,
                promised_round: u32::MAX,
            },
            kind @ 10..=11 => MembershipFrame::Join {
                role: match kind {
                    10 => JoinRole::Backup,
                    _ => JoinRole::ServerNode,
                },
                address,
                join,
            },
            12 => MembershipFrame::Joined {
                id,
                join,
                view: forged,
            },
            13 => MembershipFrame::Register { id, address, join },
            14 => MembershipFrame::Leave { join },
            15 => MembershipFrame::ServerNodes {
                version: ServerListVersion::default(),
                base: None,
                changes: Vec::new(),
            },
            16 => MembershipFrame::GroupChangeRequest {
                id: GroupChangeId(number),
                change: GroupChange::SetWeights(Vec::new()),
                uid: None,
            },
            _ => MembershipFrame::ViewRequest { epoch: 0 },
        }
    }

    /// Checks a frame that the guest receives, and answers heartbeats: the group's secrets are for members, and a host gets few numbers.
    pub(super) fn check_frame_to_guest(&mut self, from: usize, frame: &MembershipFrame) {
        let name = self.guest_name();
        let machine = self.nodes[from].machine.as_ref();
        let is_guest = |member: &Member| member.name == name;
        let is_server_node = machine.is_some_and(|machine| machine.server_nodes().any(is_guest));
        let has_secrets = matches!(
            frame,
            MembershipFrame::Commit { .. }
                | MembershipFrame::Joined { .. }
                | MembershipFrame::Propose { .. }
                | MembershipFrame::Promise { .. }
        );
        if has_secrets && !is_server_node {
            let what = format!("{} sends the group's secrets", self.nodes[from].name);
            return self.set_violation(format!("{what} to a host that is no member"));
        }
        if let MembershipFrame::Heartbeat(heartbeat) = frame {
            let grant = MembershipFrame::LeaseGrant {
                epoch: heartbeat.epoch,
                boot: heartbeat.boot,
                sequence: heartbeat.sequence,
                join: self.guest_join,
            };
            self.transmit(self.guest(), from, grant);
        }
        if let MembershipFrame::Joined { id, .. } = frame {
            self.guest_numbers.insert(*id);
            if self.guest_numbers.len() > NUMBERS_MAX {
                self.set_violation("one host uses up the numbers of nodes".to_owned());
            }
        }
    }
}
