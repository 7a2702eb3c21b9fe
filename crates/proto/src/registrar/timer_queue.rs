//! Timers of the registrar, apart from the elements' timers.

use super::AssociationId;
use holdfast_wire::rserpool::RegistrarId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Action of the registrar when a timer expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RegistrarTimer {
    /// Send the heartbeat to peers.
    Heartbeat,
    /// Announce this registrar to elements and users.
    Announce,
    /// Announce to peers the elements that re-registered without a change.
    Refresh,
    /// Time out or retry a step of the start.
    StartupStep,
    /// Check a peer for silence, according to its state.
    PeerState(RegistrarId),
    /// Retry a connection to a peer.
    DialPeer(RegistrarId),
    /// Time out a peer's handle table.
    SyncTimeout(RegistrarId),
    /// Check more of a peer's elements for being in its handle table.
    Sweep(RegistrarId),
    /// Move more elements of an association, since their distance has changed.
    DistanceUpdate(AssociationId),
    /// Move more of a dead registrar's elements to their new home.
    HomeTransfer(RegistrarId),
    /// Time out a peer's request for the next block.
    DownloadTimeout(AssociationId),
    /// Abort an association that has been silent since it began.
    SilentAssociation(AssociationId),
    /// End the wait for the confirmation of an association's addresses.
    AddressConfirmation(AssociationId),
}

#[derive(Debug, Default)]
pub(super) struct TimerQueue {
    times: BTreeMap<RegistrarTimer, Duration>,
    order: BTreeSet<(Duration, RegistrarTimer)>,
}

impl TimerQueue {
    /// Sets a timer, in place of an earlier setting.
    pub(super) fn set(&mut self, timer: RegistrarTimer, at: Duration) {
        self.stop(timer);
        self.times.insert(timer, at);
        self.order.insert((at, timer));
    }

    pub(super) fn stop(&mut self, timer: RegistrarTimer) {
        if let Some(at) = self.times.remove(&timer) {
            self.order.remove(&(at, timer));
        }
    }

    /// Removes and returns the first expired timer.
    pub(super) fn pop(&mut self, now: Duration) -> Option<RegistrarTimer> {
        let &(at, timer) = self.order.first().filter(|(at, _)| *at <= now)?;
        self.order.remove(&(at, timer));
        self.times.remove(&timer);
        Some(timer)
    }

    pub(super) fn next(&self) -> Option<Duration> {
        self.order.first().map(|(at, _)| *at)
    }
}
