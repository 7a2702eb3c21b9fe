//! The registrar's own timers, those of elements apart.

use super::AssociationId;
use holdfast_wire::rserpool::RegistrarId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// Tell the peers that this registrar is there.
    Heartbeat,
    /// Tell elements and users.
    Announce,
    /// Tell the peers of elements that registered again with nothing new.
    Refresh,
    /// Something of the start takes too long, or is due again.
    Start,
    /// A peer may have been silent for too long: what that means depends on its state.
    Peer(RegistrarId),
    /// A peer that was not reached is tried again.
    Dial(RegistrarId),
    /// A peer has not sent its handle table.
    Sync(RegistrarId),
    /// More of a peer's elements are to be looked at, whether they were in its handle table.
    Sweep(RegistrarId),
    /// More elements of an association are to be moved, since their distance has changed.
    Way(AssociationId),
    /// More of a registrar's elements are to get their new home.
    Bequest(RegistrarId),
    /// A peer has not asked for the next block.
    Download(AssociationId),
    /// An association has been silent since it began.
    Silent(AssociationId),
    /// Addresses of an association have not been confirmed.
    Claimed(AssociationId),
}

#[derive(Debug, Default)]
pub(super) struct Schedule {
    times: BTreeMap<Timer, Duration>,
    order: BTreeSet<(Duration, Timer)>,
}

impl Schedule {
    /// Sets a timer, in place of what it was set to.
    pub(super) fn set(&mut self, timer: Timer, at: Duration) {
        self.stop(timer);
        self.times.insert(timer, at);
        self.order.insert((at, timer));
    }

    pub(super) fn stop(&mut self, timer: Timer) {
        if let Some(at) = self.times.remove(&timer) {
            self.order.remove(&(at, timer));
        }
    }

    /// The first timer that has expired; it is no longer set.
    pub(super) fn pop(&mut self, now: Duration) -> Option<Timer> {
        let &(at, timer) = self.order.first().filter(|(at, _)| *at <= now)?;
        self.order.remove(&(at, timer));
        self.times.remove(&timer);
        Some(timer)
    }

    pub(super) fn next(&self) -> Option<Duration> {
        self.order.first().map(|(at, _)| *at)
    }
}
