//! The network, and the deliberate bugs that change frames.

use super::MembershipBug;
use super::node::node_index;
use super::world::{Event, MembershipWorld};
use crate::time::Time;
use holdfast_proto::membership::Recipient;
use holdfast_wire::membership_frames::{
    Ballot, Heartbeat, JoinRole, MembershipFrame, NodeName, VotedView,
};

impl MembershipWorld<'_> {
    /// Sends a frame of a state machine.
    pub(super) fn send(&mut self, from: usize, to: &Recipient, frame: MembershipFrame) {
        let is_by_address = *to == Recipient::ServiceAddress;
        let to = match to {
            Recipient::Node(name) => node_index(name),
            // The service address is at the node that had the last lease.
            Recipient::ServiceAddress => {
                let nodes = self.nodes.iter().enumerate();
                let last = nodes.max_by_key(|(_, node)| node.lease_until);
                last.map_or(0, |(index, _)| index)
            }
        };
        if to == self.guest() && self.config.guest {
            return self.check_frame_to_guest(from, &frame);
        }
        if to >= self.nodes.len() || to == from {
            return;
        }
        if is_by_address {
            // The address is one that an operator named.
            let name = self.nodes[to].name.clone();
            if let Some(machine) = &mut self.nodes[from].machine {
                machine.handle_seed(&name);
            }
        }
        if let MembershipFrame::Heartbeat(Heartbeat { sequence, .. }) = frame {
            self.nodes[from].last_heartbeat = sequence;
        }
        if self.apply_bug_to_sent_frame(from, to, &frame) {
            self.transmit(from, to, frame);
        }
    }

    /// Counts a frame that a node sends or receives; the guest is no node.
    fn count_frame(&mut self, node: usize) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.frames += 1;
        }
    }

    pub(super) fn transmit(&mut self, from: usize, to: usize, frame: MembershipFrame) {
        self.count_frame(from);
        if self.cuts.contains(&(from, to)) {
            return self.count("lost by a cut");
        }
        let faults = self.config.faults;
        let copies = match self.hostile {
            true if self.random.chance(faults.lost) => 0,
            true if self.random.chance(faults.repeated) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let is_slow = self.is_faulty && self.random.chance(faults.slow_frames);
            let delay = self.random.between(50, if is_slow { 200_000 } else { 600 });
            let frame = Box::new(frame.clone());
            let event = Event::Deliver { from, to, frame };
            self.queue.push(self.now + Time::from_micros(delay), event);
        }
    }

    /// Hands a frame to the receiver's state machine.
    pub(super) fn deliver(&mut self, from: usize, to: usize, frame: MembershipFrame) {
        let Some(frame) = self.frame_with_bug(to, frame) else {
            return;
        };
        if self.config.bug == Some(MembershipBug::AnswersBeforeVote)
            && from < self.nodes.len()
            && let MembershipFrame::GroupChangeRequest { id, .. } = frame
            && self.serving_nodes().contains(&to)
        {
            let result = Ok(0);
            self.transmit(
                to,
                from,
                MembershipFrame::GroupChangeResponse { id, result },
            );
        }
        self.count_frame(to);
        let name = self.sender_name(from, to);
        let is_certified = self.config.bug == Some(MembershipBug::GuestIsCertified);
        let certified = match from == self.guest() && !is_certified {
            true => self.guest_certified(),
            false => Some(JoinRole::Backup),
        };
        self.drive(to, |machine, now| {
            machine.handle_channel_frame(now, &name, certified, frame);
        });
    }

    /// Returns the name that the receiver's channel gives to a sender.
    fn sender_name(&self, from: usize, to: usize) -> NodeName {
        if from != self.guest() {
            return self.nodes[from].name.clone();
        }
        let machine = self.nodes[to].machine.as_ref();
        let view = machine.and_then(|machine| machine.voted_view());
        let contact = view.and_then(VotedView::contact);
        match self.config.bug {
            Some(MembershipBug::GuestPassesForContact) => {
                contact.map_or_else(|| self.guest_name(), |contact| contact.name.clone())
            }
            _ => self.guest_name(),
        }
    }

    /// Returns the frame that a receiver with the deliberate bug sees.
    fn frame_with_bug(&self, to: usize, frame: MembershipFrame) -> Option<MembershipFrame> {
        let receiver = &self.nodes[to];
        Some(match (self.config.bug, frame) {
            (
                Some(MembershipBug::GrantCountsFromArrival),
                MembershipFrame::LeaseGrant {
                    epoch, boot, join, ..
                },
            ) => MembershipFrame::LeaseGrant {
                epoch,
                boot,
                sequence: receiver.last_heartbeat,
                join,
            },
            (
                Some(MembershipBug::HidesAcceptedView),
                MembershipFrame::Promise { epoch, ballot, .. },
            ) => MembershipFrame::Promise {
                epoch,
                ballot,
                accepted: None,
            },
            (Some(MembershipBug::ObeysProposal), MembershipFrame::Propose { view, .. }) => {
                MembershipFrame::Commit { view }
            }
            (Some(MembershipBug::NeverTellsRemoved), MembershipFrame::Removed { .. }) => {
                return None;
            }
            (Some(MembershipBug::NeverTellsRemoved), MembershipFrame::Commit { view })
                if view.voter(&receiver.name).is_none() =>
            {
                return None;
            }
            // A voter learns from the view without itself, too.
            (Some(MembershipBug::NeverTellsRemoved), MembershipFrame::NotContact { .. })
                if receiver.is_voter() =>
            {
                return None;
            }
            (_, frame) => frame,
        })
    }

    /// Applies the deliberate bugs of a sender; returns false if the frame does not leave.
    fn apply_bug_to_sent_frame(&mut self, from: usize, to: usize, frame: &MembershipFrame) -> bool {
        match (self.config.bug, frame) {
            (Some(MembershipBug::JoinsOnce), MembershipFrame::Join { .. }) => {
                let has_joined = &mut self.nodes[from].has_joined_once;
                !std::mem::replace(has_joined, true)
            }
            (Some(MembershipBug::AsksForListOnce), MembershipFrame::ServerNodesRequest { .. }) => {
                let has_requested = &mut self.nodes[from].has_list_request;
                !std::mem::replace(has_requested, true)
            }
            (
                Some(MembershipBug::CountsSilentVoters),
                MembershipFrame::Propose { ballot, view },
            ) => {
                self.forge_accept(from, to, view.epoch, *ballot);
                true
            }
            (
                Some(MembershipBug::MajorityOfNewView),
                MembershipFrame::Prepare { epoch, ballot },
            ) => {
                if self.needs_forged_vote(from, to, *epoch, None) {
                    let (epoch, ballot) = (*epoch, *ballot);
                    let frame = MembershipFrame::Promise {
                        epoch,
                        ballot,
                        accepted: None,
                    };
                    self.transmit(to, from, frame);
                }
                true
            }
            (Some(MembershipBug::MajorityOfNewView), MembershipFrame::Propose { ballot, view }) => {
                if self.needs_forged_vote(from, to, view.epoch, Some(view)) {
                    self.forge_accept(from, to, view.epoch, *ballot);
                }
                true
            }
            _ => true,
        }
    }

    fn forge_accept(&mut self, proposer: usize, voter: usize, epoch: u64, ballot: Ballot) {
        self.transmit(voter, proposer, MembershipFrame::Accept { epoch, ballot });
    }

    /// Returns true if the majority of the next view (by default the view without its contact node) is smaller than that
    /// of the proposer's view. One forged vote, that of the last voter, then makes up for the difference.
    fn needs_forged_vote(
        &self,
        proposer: usize,
        to: usize,
        epoch: u64,
        next: Option<&VotedView>,
    ) -> bool {
        let machine = self.nodes[proposer].machine.as_ref();
        let view = machine.and_then(|machine| machine.voted_view());
        let Some(view) = view.filter(|view| view.epoch + 1 == epoch) else {
            return false;
        };
        let next_count = next.map_or(view.voters.len() - 1, |next| next.voters.len());
        let last = view.voters.last().map(|voter| node_index(&voter.name));
        next_count / 2 + 1 < view.majority() && last == Some(to)
    }
}
