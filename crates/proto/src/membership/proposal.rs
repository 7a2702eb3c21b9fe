//! An attempt to decide on the next view.

use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{AcceptedView, Ballot, VotedView};
use std::collections::BTreeSet;
use std::time::Duration;

/// The phase of an attempt to decide on the next view.
#[derive(Debug)]
pub(super) enum Phase {
    /// Voters promise to heed no lower ballot, and name the views that they have accepted.
    Prepare {
        /// The view of the highest ballot among them: the only one that may be proposed.
        newest: Option<AcceptedView>,
    },
    /// Voters accept the view.
    Propose { view: VotedView },
}

/// An attempt of the local node to decide on the view of `epoch`.
#[derive(Debug)]
pub(super) struct Proposal {
    pub epoch: u64,
    pub ballot: Ballot,
    pub phase: Phase,
    /// Voters that have agreed in this phase. The proposer comes first, and only then are the others asked.
    pub agreed: BTreeSet<NodeId>,
    /// Voters that have refused the ballot.
    pub refused: BTreeSet<NodeId>,
    /// Time to ask the silent voters again.
    pub resend_at: Duration,
    /// End of the attempt; none before the others are asked in this phase, because the local disk must have the vote of the
    /// local node first, and a slow disk is no reason to begin again.
    pub give_up_at: Option<Duration>,
}

impl Proposal {
    /// Returns true if a vote in this ballot and phase can count.
    pub fn is_for(&self, epoch: u64, ballot: Ballot) -> bool {
        (self.epoch, self.ballot) == (epoch, ballot)
    }

    /// Begins the second phase of the attempt: voters are asked to accept this view.
    pub fn propose(&mut self, view: VotedView) {
        self.phase = Phase::Propose { view };
        self.agreed.clear();
        self.give_up_at = None;
    }

    /// Remembers the view that a voter has accepted, if its ballot is the highest so far.
    pub fn note_accepted(&mut self, accepted: Option<AcceptedView>) {
        if let (Phase::Prepare { newest }, Some(accepted)) = (&mut self.phase, accepted)
            && newest
                .as_ref()
                .is_none_or(|newest| newest.ballot < accepted.ballot)
        {
            *newest = Some(accepted);
        }
    }
}
