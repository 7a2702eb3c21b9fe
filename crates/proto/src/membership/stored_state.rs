//! The state on the disk, and the effects that wait until the disk has it.

use super::event::SaveToken;
use holdfast_wire::membership_frames::{
    Ballot, MembershipFrame, MembershipState, NodeName, VotedView,
};
use std::collections::VecDeque;
use std::time::Duration;

/// Most effects that wait for the disk; a voter ignores further requests.
const EFFECTS_MAX: usize = 64;

/// An effect that a change of the saved state has once it is on the disk.
#[derive(Debug)]
pub(super) enum Effect {
    /// Send a vote.
    Send {
        to: NodeName,
        /// Epoch of the view to decide on; the vote is dropped once that is decided.
        epoch: u64,
        frame: MembershipFrame,
    },
    /// Ask to be taken in.
    RequestJoin,
    /// Count the own promise.
    OwnPromise { epoch: u64, ballot: Ballot },
    /// Count the own acceptance.
    OwnAccept { epoch: u64, ballot: Ballot },
    /// Obey a committed view; `announce` tells the voters of the view and of the one before.
    Apply { view: VotedView, announce: bool },
}

/// The state in memory, which may be ahead of the disk.
#[derive(Debug)]
pub(super) struct StoredState {
    pub state: MembershipState,
    /// Number of changes in memory, and on the disk.
    version: u64,
    saved_version: u64,
    /// The open save and the version that it writes.
    saving: Option<(SaveToken, u64)>,
    next_token: u64,
    /// Time of the next attempt after a failed save.
    retry_at: Option<Duration>,
    effects: VecDeque<(u64, Effect)>,
}

impl StoredState {
    pub fn new(state: MembershipState) -> StoredState {
        StoredState {
            state,
            version: 0,
            saved_version: 0,
            saving: None,
            next_token: 0,
            retry_at: None,
            effects: VecDeque::new(),
        }
    }

    /// Records that `state` has changed; the next save follows.
    pub fn mark_changed(&mut self) {
        self.version += 1;
    }

    /// Releases an effect when the disk has the state as it is now.
    pub fn defer(&mut self, effect: Effect) {
        self.effects.push_back((self.version, effect));
    }

    /// Returns true if no vote may be added: the disk fails or is far behind.
    pub fn is_blocked(&self) -> bool {
        self.retry_at.is_some() || self.is_full()
    }

    /// Returns true if no view of another node may be added: the disk is far behind.
    pub fn is_full(&self) -> bool {
        self.effects.len() >= EFFECTS_MAX
    }

    /// Returns the save to begin, if any.
    pub fn begin_save(&mut self) -> Option<(SaveToken, Box<MembershipState>)> {
        let is_due = self.saved_version < self.version;
        if !is_due || self.saving.is_some() || self.retry_at.is_some() {
            return None;
        }
        let token = SaveToken(self.next_token);
        self.next_token += 1;
        self.saving = Some((token, self.version));
        Some((token, Box::new(self.state.clone())))
    }

    /// Ends a save; returns false if the token is not that of the open one.
    pub fn end_save(&mut self, token: SaveToken, is_saved: bool, retry_at: Duration) -> bool {
        let Some((open, version)) = self.saving else {
            return false;
        };
        if open != token {
            return false;
        }
        self.saving = None;
        match is_saved {
            true => self.saved_version = version,
            false => self.retry_at = Some(retry_at),
        }
        true
    }

    /// Returns the time of the next attempt after a failed save.
    pub fn retry_at(&self) -> Option<Duration> {
        self.retry_at
    }

    /// Allows the next attempt after a failed save.
    pub fn retry(&mut self) {
        self.retry_at = None;
    }

    /// Drops the views that wait for the disk: the local node was removed since, and is no member by them.
    pub fn drop_views(&mut self) {
        let is_view = |effect: &Effect| matches!(effect, Effect::Apply { .. });
        self.effects.retain(|(_, effect)| !is_view(effect));
    }

    /// Returns the next effect of a state that the disk has.
    pub fn next_effect(&mut self) -> Option<Effect> {
        let (version, _) = self.effects.front()?;
        if *version > self.saved_version {
            return None;
        }
        self.effects.pop_front().map(|(_, effect)| effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_promise(round: u32) -> Effect {
        let proposer = holdfast_wire::NodeId(1);
        Effect::OwnPromise {
            epoch: 2,
            ballot: Ballot { round, proposer },
        }
    }

    #[test]
    fn effect_waits_for_the_save_that_contains_its_change() {
        let mut stored = StoredState::new(MembershipState::default());
        stored.mark_changed();
        stored.defer(own_promise(1));
        let (first, _) = stored.begin_save().expect("changed");
        stored.mark_changed();
        stored.defer(own_promise(2));
        assert!(stored.begin_save().is_none() && stored.next_effect().is_none());
        assert!(!stored.end_save(SaveToken(7), true, Duration::ZERO));
        assert!(stored.end_save(first, true, Duration::ZERO));
        assert!(
            matches!(stored.next_effect(), Some(Effect::OwnPromise { ballot, .. }) if ballot.round == 1)
        );
        assert!(stored.next_effect().is_none());
        let (second, _) = stored.begin_save().expect("changed again");
        assert!(stored.end_save(second, true, Duration::ZERO));
        assert!(stored.next_effect().is_some());
        // Without a change in between, an effect needs no save.
        stored.defer(own_promise(3));
        assert!(stored.begin_save().is_none() && stored.next_effect().is_some());
    }

    #[test]
    fn failed_save_blocks_votes_until_a_retry_succeeds() {
        let mut stored = StoredState::new(MembershipState::default());
        stored.mark_changed();
        stored.defer(own_promise(1));
        let (token, _) = stored.begin_save().expect("changed");
        assert!(stored.end_save(token, false, Duration::from_secs(1)));
        assert!(stored.is_blocked() && stored.begin_save().is_none());
        assert_eq!(stored.retry_at(), Some(Duration::from_secs(1)));
        stored.retry();
        let (token, _) = stored.begin_save().expect("not saved yet");
        assert!(stored.end_save(token, true, Duration::ZERO));
        assert!(!stored.is_blocked() && stored.next_effect().is_some());
    }
}
