//! The fence: for each flow at most one node is its owner, with an epoch, and every change is one compare-and-set.
//!
//! The holder keeps a [`Record`] per flow and changes it by [`apply`] alone. A change names the epoch it starts from,
//! so it happens once or not at all; asked again, it gives what it gave before. After a divert exactly one of commit
//! and rollback happens, and the loser learns from the [`Refusal`] who owns.
//!
//! **Epochs only grow, for each flow, also when its addresses and ports are used again.** A removed flow leaves no
//! record, so what keeps the next connection of the same name above the last one is [`Floors`]: 65,536 numbers, each the
//! highest epoch at which a flow of that hash was removed. A new flow starts above its floor. (One number for
//! all flows would grow by one per connection and wrap within hours on a busy holder; thousands of numbers grow as
//! many times more slowly: at 100,000 connections a second, by about 1.5 a second, so a `u32` lasts 90 years.) Floors
//! live in memory; a restarted daemon starts them all at a number that has passed the old ones, see [`Floors::new`].

mod together;

pub use together::Together;

use holdfast_wire::{Change, ChangeKind, Epoch, Flow, NodeId, Record, RecordState, Refusal};
use std::hash::{Hash, Hasher};

/// Applies `change`, asked by `asker`, to the `current` record of its flow. Gives the record that stands after it,
/// none after a removal.
///
/// | kind | from | to |
/// | --- | --- | --- |
/// | establish `e` | none | owned by the asker, `e` |
/// | divert `e` | owned by the asker, `e` | transit from the asker, `e+1` |
/// | commit `e` | transit to the asker, `e` | owned by the asker, `e+1` |
/// | commit all `e` | as commit; the flows are the holder's to look after, see [`Together`] | |
/// | rollback `e` | transit from or to the asker, `e` | owned by the donor, `e+1` |
/// | rollback `e` | owned by the asker, `e-1`: the divert has not come yet | owned by the asker, `e+1`: it never will |
/// | remove `e` | owned by the asker, `e` | none |
///
/// What is already so is given without a change: establish of a flow the asker owns, divert of one in the transit it
/// asks for, commit and rollback of one the asker owns at `e+1`, removal of one that is not there. So the one who must
/// look at the record's owner, not only at success, is an acceptor that asks for a rollback and cannot know whether
/// it committed before (it restarted): it gets its own record.
///
/// # Errors
/// Everything else is refused with the record as it stands.
pub fn apply(
    current: Option<Record>,
    change: &Change,
    asker: NodeId,
) -> Result<Option<Record>, Refusal> {
    let next = match current {
        None => from_none(change, asker),
        Some(record) => match record.state {
            RecordState::Owned { owner } => from_owned(record, owner, change, asker),
            RecordState::Transit { donor, acceptor } => {
                from_transit(record, (donor, acceptor), change, asker)
            }
        },
    };
    next.ok_or(Refusal { current })
}

/// What becomes of no record; the outer none is a refusal.
fn from_none(change: &Change, asker: NodeId) -> Option<Option<Record>> {
    match change.kind {
        ChangeKind::Establish if change.epoch > 0 => Some(Some(Record::owned(asker, change.epoch))),
        ChangeKind::Remove => Some(None),
        _ => None,
    }
}

fn from_owned(
    record: Record,
    owner: NodeId,
    change: &Change,
    asker: NodeId,
) -> Option<Option<Record>> {
    if owner != asker {
        return None;
    }
    let (now, asked) = (u64::from(record.epoch), u64::from(change.epoch));
    match change.kind {
        ChangeKind::Establish => Some(Some(record)),
        ChangeKind::Divert { acceptor } if now == asked && acceptor != asker => {
            let epoch = record.epoch.checked_add(1)?;
            Some(Some(Record::transit(asker, acceptor, epoch)))
        }
        ChangeKind::Commit | ChangeKind::CommitAll { .. } | ChangeKind::Rollback
            if now == asked + 1 =>
        {
            Some(Some(record))
        }
        ChangeKind::Rollback if now + 1 == asked => {
            let epoch = change.epoch.checked_add(1)?;
            Some(Some(Record::owned(asker, epoch)))
        }
        ChangeKind::Remove if now == asked => Some(None),
        _ => None,
    }
}

fn from_transit(
    record: Record,
    (donor, acceptor): (NodeId, NodeId),
    change: &Change,
    asker: NodeId,
) -> Option<Option<Record>> {
    let (now, asked) = (u64::from(record.epoch), u64::from(change.epoch));
    match change.kind {
        ChangeKind::Divert { acceptor: to } => {
            let same = donor == asker && acceptor == to && now == asked + 1;
            same.then_some(Some(record))
        }
        ChangeKind::Commit | ChangeKind::CommitAll { .. } if acceptor == asker && now == asked => {
            let epoch = record.epoch.checked_add(1)?;
            Some(Some(Record::owned(acceptor, epoch)))
        }
        ChangeKind::Rollback if (donor == asker || acceptor == asker) && now == asked => {
            let epoch = record.epoch.checked_add(1)?;
            Some(Some(Record::owned(donor, epoch)))
        }
        _ => None,
    }
}

/// The highest epoch at which a node may have a new flow begin, or say that it removed one: epochs begin at the seconds of a clock,
/// which come here in 2072. The numbers above are for floors and moves, so that nobody uses epochs up.
pub const ASKED_EPOCH_MAX: Epoch = 0xc000_0000;

/// How many floors there are: 256 KiB of them.
const FLOORS: usize = 1 << 16;

/// The least epochs of new flows; see the module's text.
#[derive(Debug, Clone)]
pub struct Floors {
    floors: Vec<Epoch>,
}

impl Floors {
    /// Floors that all start at `least` (at least 1).
    ///
    /// A daemon gives the greater of the seconds since 2020 by its clock and one more than the highest epoch in the
    /// steering table it finds. So the floors of its last life are passed as long as none of them grew by more than
    /// one a second on average, and clocks are about right.
    pub fn new(least: Epoch) -> Floors {
        Floors {
            floors: vec![least.max(1); FLOORS],
        }
    }

    /// The epoch at which a new `flow` starts when its owner asks for `epoch`.
    ///
    /// A process's record starts where it is asked to: its name is never used again, and who asks for a divert of a record
    /// that it establishes with the same question knows the epoch.
    pub fn at_least(&self, flow: &Flow, epoch: Epoch) -> Epoch {
        if flow.is_process() {
            return epoch;
        }
        self.floors[bucket(flow)].max(epoch.min(ASKED_EPOCH_MAX))
    }

    /// Notes that `flow` was removed at `epoch`.
    pub fn removed(&mut self, flow: &Flow, epoch: Epoch) {
        if flow.is_process() {
            return;
        }
        let floor = &mut self.floors[bucket(flow)];
        *floor = (*floor).max(epoch.saturating_add(1));
    }
}

/// The floor of a flow: FNV-1a, folded; the same on every run.
fn bucket(flow: &Flow) -> usize {
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
    ((hash ^ (hash >> 32) ^ (hash >> 16)) as usize) % FLOORS
}
