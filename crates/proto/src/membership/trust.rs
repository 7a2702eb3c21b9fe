//! Senders whose views count: the voters of the newest view that the local node itself knows to be committed.
//!
//! Every host with a certificate of the group can send frames, also one that never was a member. A frame of a node that
//! is no such voter changes nothing. If the frame names a newer view, the local node asks its own voters for that view.
//!
//! A node that joins knows no view. The node believes the nodes that an operator named to join by, its *seeds*, and the
//! voters of the views that these tell of. A member that has heard none of its voters for
//! [`MembershipConfig::voters_silent_after`] believes its seeds too: the group may have replaced all voters in the meantime.
//!
//! [`MembershipConfig::voters_silent_after`]: super::MembershipConfig::voters_silent_after

#[cfg(test)]
mod tests;

use super::event::{Event, Output, Recipient};
use super::{Membership, Standing};
use holdfast_wire::membership_frames::{Member, MembershipFrame, NodeName};
use std::collections::BTreeSet;
use std::time::Duration;

/// Most seeds whose names are remembered. The names of more come from addresses whose hosts change, and are forgotten.
const SEEDS_MAX: usize = 64;
/// Greatest step from one committed view to the next that a node learns of. Views between the two may be missed, and an
/// operator that forces a takeover makes a step of 2^32; nobody forces hundreds while a node is away.
const EPOCH_STEP_MAX: u64 = 1 << 40;

/// Knowledge of the voters and seeds that the local node believes.
#[derive(Debug)]
pub(super) struct Trust {
    /// Names of the nodes that answer at the addresses that an operator named.
    seeds: BTreeSet<NodeName>,
    /// Time of the last frame of a voter of the newest committed view.
    voter_heard: Duration,
    /// Time before which no frame of another node leads to questions to the voters.
    next_question_at: Duration,
    /// Time of the next attempt to find a group whose known voters are silent.
    search_at: Duration,
    /// True once the silence of the voters was reported.
    is_silence_reported: bool,
}

impl Trust {
    pub fn new(now: Duration) -> Trust {
        Trust {
            seeds: BTreeSet::new(),
            voter_heard: now,
            next_question_at: Duration::ZERO,
            search_at: Duration::ZERO,
            is_silence_reported: false,
        }
    }

    /// Gives the voters time to show a sign of life: the local node itself has slept.
    pub fn excuse_silence(&mut self, now: Duration) {
        self.voter_heard = now;
    }
}

impl Membership {
    /// Learns the name of a node that answers at an address which an operator named to join by.
    pub fn handle_seed(&mut self, name: &NodeName) {
        let seeds = &mut self.trust.seeds;
        if seeds.len() >= SEEDS_MAX && !seeds.contains(name) {
            seeds.clear();
        }
        seeds.insert(name.clone());
    }

    /// Returns true if a node's word on committed views counts.
    pub(super) fn believes(&self, now: Duration, name: &NodeName) -> bool {
        let is_seed = || self.trust.seeds.contains(name) || self.config.seeds.contains(name);
        let joining = self.joining.as_ref();
        self.is_committed_voter(name)
            || joining.is_some_and(|joining| joining.member(name).is_some())
            || (joining.is_some() || self.are_voters_silent(now)) && is_seed()
    }

    /// Handles a frame of a node, if the frame needs a believed sender and `from` is not one. Returns the frame otherwise.
    pub(super) fn refuse_unbelieved(
        &mut self,
        now: Duration,
        from: &NodeName,
        frame: MembershipFrame,
    ) -> Option<MembershipFrame> {
        if self.is_committed_voter(from) {
            self.trust.voter_heard = now;
            self.trust.is_silence_reported = false;
        }
        let is_possible = match &frame {
            MembershipFrame::Removed { view, .. }
            | MembershipFrame::Contact { view, .. }
            | MembershipFrame::NotContact { view } => view.is_valid(),
            _ => true,
        };
        if !is_possible {
            self.ignore(from, frame.name(), "the view is impossible");
            return None;
        }
        if is_request(&frame) || self.believes(now, from) {
            return Some(frame);
        }
        let committed = self.committed_epoch();
        match named_epoch(&frame) {
            // The sender may be a former voter, which must learn of the newer view.
            Some(epoch) if epoch < committed && needs_answer(&frame) => {
                self.inform(now, from, epoch);
            }
            Some(epoch) if epoch > committed => self.ask_for_view(now),
            _ => {}
        }
        self.ignore(
            from,
            frame.name(),
            "the sender is no voter of a view that this node knows",
        );
        None
    }

    /// Returns true if a view of this epoch can follow the newest committed one.
    pub(super) fn is_epoch_in_reach(&self, epoch: u64) -> bool {
        let committed = self.stored.state.committed.as_ref();
        committed.is_none_or(|known| epoch < known.epoch.saturating_add(EPOCH_STEP_MAX))
    }

    /// Asks the voters that the local node believes for a newer view, now and then at most.
    fn ask_for_view(&mut self, now: Duration) {
        if now < self.trust.next_question_at {
            return;
        }
        self.trust.next_question_at = now + 2 * self.config.heartbeat_interval;
        let own_name = &self.config.name;
        let committed = self.stored.state.committed.as_ref();
        let committed = committed.map_or(&[][..], |view| &view.voters[..]);
        let joining = self.joining.as_ref();
        let known = joining.map_or(&[][..], |joining| joining.known_voters());
        let names = committed.iter().chain(known).map(|voter| &voter.name);
        let names: BTreeSet<NodeName> = names.filter(|name| *name != own_name).cloned().collect();
        let epoch = self.committed_epoch();
        for name in names {
            self.send(name, MembershipFrame::ViewRequest { epoch });
        }
    }

    fn is_committed_voter(&self, name: &NodeName) -> bool {
        let committed = self.stored.state.committed.as_ref();
        committed.is_some_and(|view| view.voter(name).is_some())
    }

    /// Returns the time from which the silence of all known voters is conspicuous; none if there are none, or if the node
    /// is outside the group and looks for the voters anyway.
    fn voters_silent_at(&self) -> Option<Duration> {
        let voters = &self.stored.state.committed.as_ref()?.voters;
        let is_other = |voter: &Member| voter.name != self.config.name;
        (self.standing != Standing::Outside && voters.iter().any(is_other))
            .then(|| self.trust.voter_heard + self.config.voters_silent_after)
    }

    fn are_voters_silent(&self, now: Duration) -> bool {
        self.voters_silent_at().is_some_and(|at| at <= now)
    }

    /// Returns the time of the next attempt to find a group whose known voters are silent.
    pub(super) fn search_at(&self) -> Option<Duration> {
        let silent_at = self.voters_silent_at()?;
        Some(silent_at.max(self.trust.search_at))
    }

    /// Asks the seeds for the group when all known voters are silent.
    pub(super) fn on_search_timeout(&mut self, now: Duration) {
        if self.search_at().is_none_or(|due| due > now) {
            return;
        }
        self.trust.search_at = now + self.config.registration_timeout;
        if !std::mem::replace(&mut self.trust.is_silence_reported, true) {
            self.report(Event::VotersSilent);
        }
        let epoch = self.committed_epoch();
        for name in self.config.seeds.clone() {
            if name != self.config.name {
                self.send(name, MembershipFrame::ViewRequest { epoch });
            }
        }
        self.outputs.push_back(Output::Send {
            to: Recipient::ServiceAddress,
            frame: MembershipFrame::WhoIsContact,
        });
    }
}

/// Returns true for frames that any node may send: each handler decides what the sender may have. A lease grant counts
/// only as the answer to a heartbeat that was sent to the sender.
fn is_request(frame: &MembershipFrame) -> bool {
    matches!(
        frame,
        MembershipFrame::Join { .. }
            | MembershipFrame::WhoIsContact
            | MembershipFrame::ViewRequest { .. }
            | MembershipFrame::Register { .. }
            | MembershipFrame::Leave { .. }
            | MembershipFrame::ServerNodesRequest { .. }
            | MembershipFrame::GroupChangeRequest { .. }
            | MembershipFrame::LeaseGrant { .. }
    )
}

/// Returns the epoch of the newest view that the sender claims to be committed, if the frame names one.
fn named_epoch(frame: &MembershipFrame) -> Option<u64> {
    match frame {
        MembershipFrame::Prepare { epoch, .. } => Some(epoch.saturating_sub(1)),
        MembershipFrame::Propose { view, .. } => Some(view.epoch.saturating_sub(1)),
        MembershipFrame::Heartbeat(heartbeat) => Some(heartbeat.epoch),
        MembershipFrame::Commit { view } | MembershipFrame::Joined { view, .. } => Some(view.epoch),
        MembershipFrame::Removed { view, .. }
        | MembershipFrame::Contact { view, .. }
        | MembershipFrame::NotContact { view } => Some(view.epoch),
        _ => None,
    }
}

/// Returns true for frames of a node that acts by its view, and must hear if that is old.
fn needs_answer(frame: &MembershipFrame) -> bool {
    matches!(
        frame,
        MembershipFrame::Prepare { .. }
            | MembershipFrame::Propose { .. }
            | MembershipFrame::Heartbeat(_)
    )
}
