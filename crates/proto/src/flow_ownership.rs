//! Flow ownership: for each flow at most one node is its owner, with an epoch, and every change is one compare-and-set.
//!
//! The holder keeps a [`OwnershipRecord`] per flow and changes it by [`apply_change`] alone. A change names the epoch it starts from,
//! so it takes effect once or not at all; a repeated request gets the first answer again. After a divert exactly one of
//! commit and rollback succeeds; the loser learns the owner from the [`ChangeRefusal`].
//!
//! **Epochs of a flow only grow, also when its addresses and ports are used again.** A removed flow leaves no record,
//! so [`EpochFloors`] keep the next connection with the same name above the last one: 65,536 numbers, each the highest epoch
//! at which a flow of that hash was removed. A new flow starts above its floor. (One number for all flows would grow by
//! one per connection and wrap within hours on a busy holder. Each of 65,536 numbers grows as many times more slowly:
//! at 100,000 connections a second, by about 1.5 a second, so a `u32` lasts 90 years.) Floors live in memory; a
//! restarted daemon starts them all at a number above the old ones, see [`EpochFloors::new`].

mod process_transits;

pub use process_transits::ProcessTransits;

use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord, RecordState,
};
use std::hash::{Hash, Hasher};

/// Applies `change`, requested by `asker`, to the `current` record of its flow. Returns the resulting record, none
/// after a removal.
///
/// | kind | from | to |
/// | --- | --- | --- |
/// | establish `e` | none | owned by the asker, `e` |
/// | divert `e` | owned by the asker, `e` | transit from the asker, `e+1` |
/// | commit `e` | transit to the asker, `e` | owned by the asker, `e+1` |
/// | commit all `e` | as commit; the holder commits the flows of the process as well, see [`ProcessTransits`] | |
/// | rollback `e` | transit from or to the asker, `e` | owned by the donor, `e+1` |
/// | rollback `e` | owned by the asker, `e-1`: before the divert | owned by the asker, `e+1`: fences the divert out |
/// | remove `e` | owned by the asker, `e` | none |
///
/// A change that has taken effect already is granted again, without effect: establish of a flow the asker owns, divert
/// of one in the transit it asks for, commit and rollback of one the asker owns at `e+1`, removal of one that is not
/// there. An acceptor that restarted, asks for a rollback, and cannot know if it committed before must therefore check
/// the owner in the returned record, not only for success: after a commit it gets its own record.
///
/// # Errors
/// Every other change is refused, with the current record.
pub fn apply_change(
    current: Option<OwnershipRecord>,
    change: &OwnershipChange,
    asker: NodeId,
) -> Result<Option<OwnershipRecord>, ChangeRefusal> {
    let next = match current {
        None => apply_to_unrecorded(change, asker),
        Some(record) => match record.state {
            RecordState::Owned { owner } => apply_to_owned(record, owner, change, asker),
            RecordState::Transit { donor, acceptor } => {
                apply_to_transit(record, (donor, acceptor), change, asker)
            }
        },
    };
    next.ok_or(ChangeRefusal { current })
}

/// Applies `change` to a flow without a record. The outer `None` is a refusal.
fn apply_to_unrecorded(change: &OwnershipChange, asker: NodeId) -> Option<Option<OwnershipRecord>> {
    match change.kind {
        ChangeKind::Establish if change.epoch > 0 => {
            Some(Some(OwnershipRecord::owned(asker, change.epoch)))
        }
        ChangeKind::Remove => Some(None),
        _ => None,
    }
}

fn apply_to_owned(
    record: OwnershipRecord,
    owner: NodeId,
    change: &OwnershipChange,
    asker: NodeId,
) -> Option<Option<OwnershipRecord>> {
    if owner != asker {
        return None;
    }
    let (current, requested) = (u64::from(record.epoch), u64::from(change.epoch));
    match change.kind {
        ChangeKind::Establish => Some(Some(record)),
        ChangeKind::Divert { acceptor } if current == requested && acceptor != asker => {
            let epoch = record.epoch.checked_add(1)?;
            Some(Some(OwnershipRecord::transit(asker, acceptor, epoch)))
        }
        ChangeKind::Commit | ChangeKind::CommitAll { .. } | ChangeKind::Rollback
            if current == requested + 1 =>
        {
            Some(Some(record))
        }
        ChangeKind::Rollback if current + 1 == requested => {
            let epoch = change.epoch.checked_add(1)?;
            Some(Some(OwnershipRecord::owned(asker, epoch)))
        }
        ChangeKind::Remove if current == requested => Some(None),
        _ => None,
    }
}

fn apply_to_transit(
    record: OwnershipRecord,
    (donor, acceptor): (NodeId, NodeId),
    change: &OwnershipChange,
    asker: NodeId,
) -> Option<Option<OwnershipRecord>> {
    let (current, requested) = (u64::from(record.epoch), u64::from(change.epoch));
    match change.kind {
        ChangeKind::Divert { acceptor: to } => {
            let is_repeated = donor == asker && acceptor == to && current == requested + 1;
            is_repeated.then_some(Some(record))
        }
        ChangeKind::Commit | ChangeKind::CommitAll { .. }
            if acceptor == asker && current == requested =>
        {
            let epoch = record.epoch.checked_add(1)?;
            Some(Some(OwnershipRecord::owned(acceptor, epoch)))
        }
        ChangeKind::Rollback if (donor == asker || acceptor == asker) && current == requested => {
            let epoch = record.epoch.checked_add(1)?;
            Some(Some(OwnershipRecord::owned(donor, epoch)))
        }
        _ => None,
    }
}

/// Judgement of a holder about a claim, see [`judge_claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimVerdict {
    /// The claim becomes the record.
    Stored,
    /// The table has a record that is as new, or newer.
    Known,
    /// Claim and record name different nodes of the view, and neither node says that it gives the flow to the other.
    Disputed,
}

/// Returns the node that claims a flow by such a record: the owner, or the donor of a transit.
#[must_use]
pub fn claimant(record: OwnershipRecord) -> NodeId {
    match record.state {
        RecordState::Owned { owner } => owner,
        RecordState::Transit { donor, .. } => donor,
    }
}

/// Returns true if a record names a node of which `is_named` is true.
pub(crate) fn names(record: OwnershipRecord, is_named: impl Fn(NodeId) -> bool) -> bool {
    match record.state {
        RecordState::Owned { owner } => is_named(owner),
        RecordState::Transit { donor, acceptor } => is_named(donor) || is_named(acceptor),
    }
}

/// Judges a node's claim about a flow whose record in the table is `current`, the same node's or another node's.
///
/// Each change raises the epoch, so the newest of a node's claims has the highest. The epoch of another node's claim proves
/// nothing, because a node may invent one: a flow follows its donor's claim to the acceptor, and no other claim of a node
/// of the view.
pub fn judge_claim(
    current: Option<OwnershipRecord>,
    claimed: OwnershipRecord,
    is_in_view: impl Fn(NodeId) -> bool,
) -> ClaimVerdict {
    let Some(current) = current else {
        return ClaimVerdict::Stored;
    };
    let (recorded_node, node) = (claimant(current), claimant(claimed));
    let gives_to = |record: OwnershipRecord, to: NodeId| matches!(record.state, RecordState::Transit { acceptor, .. } if acceptor == to);
    let is_newer = claimed.epoch > current.epoch;
    let is_stored = if node == recorded_node {
        is_newer
    } else if is_newer && gives_to(current, node) {
        true
    } else if !is_newer && gives_to(claimed, recorded_node) {
        false
    } else if names(current, &is_in_view) {
        return ClaimVerdict::Disputed;
    } else {
        is_newer || renumbered_record(Some(current), claimed, is_in_view).is_some()
    };
    match is_stored {
        true => ClaimVerdict::Stored,
        false => ClaimVerdict::Known,
    }
}

/// Returns the record of a flow that several nodes claim: a transit from the holder to itself. Packets of the flow end at
/// the holder, and no other node can change the record.
#[must_use]
pub fn disputed_record(holder: NodeId) -> OwnershipRecord {
    OwnershipRecord::transit(holder, holder, 0)
}

/// Returns true for the record of a flow that several nodes claim: nobody has decided about the flow yet.
#[must_use]
pub fn is_disputed(record: OwnershipRecord) -> bool {
    matches!(record.state, RecordState::Transit { donor, acceptor } if donor == acceptor)
}

/// Returns the record that a holder stores when an owner claims `claimed` and the table has `current`, whose owner is
/// outside the view: the claim if its epoch is the same. An epoch of a flow has one owner, so both are the same node,
/// which has joined again with another number.
#[must_use]
pub fn renumbered_record(
    current: Option<OwnershipRecord>,
    claimed: OwnershipRecord,
    is_in_view: impl Fn(NodeId) -> bool,
) -> Option<OwnershipRecord> {
    let owner_of = |record: OwnershipRecord| match record.state {
        RecordState::Owned { owner } => Some(owner),
        RecordState::Transit { .. } => None,
    };
    let current = current.filter(|current| current.epoch == claimed.epoch)?;
    let (former, owner) = (owner_of(current)?, owner_of(claimed)?);
    (!is_in_view(former) && is_in_view(owner)).then_some(claimed)
}

/// Highest epoch at which a node may establish or remove a flow.
///
/// Epochs begin at the seconds of a clock, which reach this value in 2072. The numbers above it are left for floors and
/// moves, so that no node can use epochs up.
pub const REQUESTED_EPOCH_MAX: Epoch = 0xc000_0000;

/// Highest epoch that a node may claim for a flow; a flow cannot be moved often enough to reach the end of the numbers
/// above.
pub const CLAIMED_EPOCH_MAX: Epoch = 0xe000_0000;

/// Highest floor. A claim with a high epoch raises the floor of a later flow no further, so that the later flow can be
/// moved, and claimed from another holder.
const FLOOR_MAX: Epoch = 0xd000_0000;

/// Number of floors; they occupy 256 KiB.
const FLOOR_COUNT: usize = 1 << 16;

/// The least epochs of new flows; see the module documentation.
#[derive(Debug, Clone)]
pub struct EpochFloors {
    floors: Vec<Epoch>,
}

impl EpochFloors {
    /// Returns floors that all start at `least` (at least 1).
    ///
    /// A daemon passes the greater of the seconds since 2020 by its clock and one more than the highest epoch in the
    /// steering table it finds. The new floors are then above the floors from before the restart, as long as none
    /// of these grew by more than one a second on average, and clocks are about right.
    pub fn new(least: Epoch) -> EpochFloors {
        EpochFloors {
            floors: vec![least.max(1); FLOOR_COUNT],
        }
    }

    /// Returns the epoch at which a new `flow` starts when its owner asks for `epoch`.
    ///
    /// A process's record starts at the requested epoch: the name of a process is never used again, and an asker that
    /// establishes and diverts a record in one request must know its epoch.
    pub fn start_epoch(&self, flow: &Flow, epoch: Epoch) -> Epoch {
        if flow.is_process() {
            return epoch;
        }
        self.floors[floor_index(flow)].max(epoch.min(REQUESTED_EPOCH_MAX))
    }

    /// Records that `flow` was removed at `epoch`.
    pub fn raise(&mut self, flow: &Flow, epoch: Epoch) {
        if flow.is_process() {
            return;
        }
        let floor = &mut self.floors[floor_index(flow)];
        *floor = (*floor).max(epoch.saturating_add(1).min(FLOOR_MAX));
    }
}

/// Index of the flow's floor: FNV-1a, folded; the same on every run.
fn floor_index(flow: &Flow) -> usize {
    struct Fnv(u64);
    impl Hasher for Fnv {
        fn finish(&self) -> u64 {
            self.0
        }
        fn write(&mut self, bytes: &[u8]) {
            for byte in bytes {
                self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }
    let mut fnv = Fnv(0xcbf2_9ce4_8422_2325);
    flow.hash(&mut fnv);
    let hash = fnv.finish();
    ((hash ^ (hash >> 32) ^ (hash >> 16)) as usize) % FLOOR_COUNT
}
