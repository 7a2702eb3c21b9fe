//! Users that subscribe to changes of a pool (RFC 5352 section 2.2.5).
//!
//! Changes within a short time are sent together. Since a message may be lost if a buffer is full, each heartbeat also
//! sends all of them.

use super::{AssociationId, Registrar};
use holdfast_wire::rserpool::{CauseCode, PoolHandle};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// Most pools that one association may subscribe to.
const POOLS_MAX: usize = 64;
/// Least time between two rounds of updates.
const UPDATE_INTERVAL: Duration = Duration::from_millis(250);
/// Most messages in one turn, before others are served.
const MESSAGES_PER_BATCH: usize = 256;

/// Subscribers of a pool, each with the requested number of elements.
#[derive(Debug, Default)]
struct Subscribers {
    users: BTreeMap<AssociationId, Option<u32>>,
    /// True if a change is still to be sent.
    has_pending_update: bool,
}

#[derive(Debug, Default)]
pub(super) struct Subscriptions {
    pools: BTreeMap<PoolHandle, Subscribers>,
    /// Changed pools, each with the last user that was informed.
    changed_pools: VecDeque<(PoolHandle, Option<AssociationId>)>,
    /// Time of the next round of updates.
    due: Duration,
}

impl Subscriptions {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Returns the time at which updates are due, if any.
    pub(super) fn next_update(&self) -> Option<Duration> {
        (!self.changed_pools.is_empty()).then_some(self.due)
    }

    /// Marks a pool as changed.
    pub(super) fn mark_changed(&mut self, handle: &PoolHandle) {
        if let Some((handle, audience)) = self.pools.get_key_value(handle)
            && !audience.has_pending_update
        {
            let handle = handle.clone();
            if let Some(audience) = self.pools.get_mut(&handle) {
                audience.has_pending_update = true;
            }
            self.changed_pools.push_back((handle, None));
        }
    }

    /// Marks all pools as changed, so that every subscriber gets an update.
    pub(super) fn mark_all_changed(&mut self) {
        for (handle, audience) in &mut self.pools {
            if !audience.has_pending_update {
                audience.has_pending_update = true;
                self.changed_pools.push_back((handle.clone(), None));
            }
        }
    }

    /// Ends a user's subscription to a pool.
    pub(super) fn unsubscribe(&mut self, user: AssociationId, handle: &PoolHandle) {
        if let Some(audience) = self.pools.get_mut(handle) {
            audience.users.remove(&user);
            if audience.users.is_empty() {
                self.pools.remove(handle);
            }
        }
    }
}

impl Registrar {
    /// Starts, keeps or ends a user's subscription to an existing pool; returns true if the user is subscribed.
    pub(super) fn subscribe(
        &mut self,
        user: AssociationId,
        handle: &PoolHandle,
        items: Option<u32>,
        wanted: bool,
    ) -> bool {
        let Some(association) = self.associations.get_mut(user) else {
            return false;
        };
        let known = association.pools.iter().position(|pool| pool == handle);
        match (known, wanted) {
            (None, false) => return false,
            (Some(index), false) => {
                association.pools.swap_remove(index);
                self.subscriptions.unsubscribe(user, handle);
                return false;
            }
            (None, true) if association.pools.len() >= POOLS_MAX => return false,
            (None, true) => {
                let copy = PoolHandle(bytes::Bytes::copy_from_slice(&handle.0));
                association.pools.push(copy.clone());
                self.subscriptions.pools.entry(copy).or_default()
            }
            (Some(_), true) => self.subscriptions.pools.entry(handle.clone()).or_default(),
        }
        .users
        .insert(user, items);
        true
    }

    /// Sends the updates that are due.
    pub(super) fn send_updates(&mut self, now: Duration) {
        if self.subscriptions.next_update().is_none_or(|due| due > now) {
            return;
        }
        let mut remaining = MESSAGES_PER_BATCH;
        while remaining > 0
            && let Some((handle, last)) = self.subscriptions.changed_pools.pop_front()
        {
            let from = last.map_or(Bound::Unbounded, Bound::Excluded);
            let Some(audience) = self.subscriptions.pools.get_mut(&handle) else {
                continue;
            };
            let users = audience.users.range((from, Bound::Unbounded));
            let users: Vec<_> = users
                .map(|(user, items)| (*user, *items))
                .take(remaining)
                .collect();
            remaining -= users.len();
            match users.last() {
                Some((last, _)) if remaining == 0 => {
                    let unfinished = (handle.clone(), Some(*last));
                    self.subscriptions.changed_pools.push_front(unfinished);
                }
                _ => audience.has_pending_update = false,
            }
            for (user, items) in users {
                self.send_update(user, &handle, items);
            }
        }
        // The rest follows in the next turn; later changes wait for the pause.
        let pause = if remaining == 0 {
            Duration::from_nanos(1)
        } else {
            UPDATE_INTERVAL
        };
        self.subscriptions.due = now + pause;
    }

    fn send_update(&mut self, user: AssociationId, handle: &PoolHandle, items: Option<u32>) {
        let allowed = self.associations.get(user).is_some_and(|a| a.may_resolve);
        let answered = match allowed {
            true => self.send_resolution(user, handle, items, true),
            false => Err(CauseCode::REJECTED_FOR_SECURITY),
        };
        let Err(cause) = answered else { return };
        // "If a negative response is returned, no further updates to the Pool (when it is created) will occur."
        self.subscribe(user, handle, None, false);
        self.outbox.refuse_resolution(user, handle.clone(), cause);
    }
}
