//! Callers of the daemon's own endpoint that are not identified yet.
//!
//! Until a path was probed, any host may have claimed its address (RFC 9260 section 5.4). So only addresses that SCTP
//! has confirmed identify a caller as a registrar. A caller that claims a registrar's address waits for the
//! confirmation, and its messages wait too.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::links::AssociationKey;

/// Time limit for the confirmation of an address; the same as at a registrar.
pub(super) const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of waiting callers, and of waiting messages of each.
const CALLERS_MAX: usize = 64;
const HELD_MESSAGES_MAX: usize = 16;

/// Callers whose addresses are not confirmed yet.
#[derive(Default)]
pub(super) struct UnconfirmedCallers(BTreeMap<AssociationKey, Caller>);

struct Caller {
    deadline: Duration,
    held_messages: Vec<Bytes>,
}

impl UnconfirmedCallers {
    /// Returns the earliest deadline of a caller.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.0.values().map(|caller| caller.deadline).min()
    }

    /// Removes a caller whose association has ended.
    pub(super) fn forget(&mut self, assoc_key: AssociationKey) {
        self.0.remove(&assoc_key);
    }

    /// Keeps a message until its caller is identified. Returns false if the caller does not wait.
    pub(super) fn hold_message(&mut self, assoc_key: AssociationKey, bytes: &Bytes) -> bool {
        let Some(caller) = self.0.get_mut(&assoc_key) else {
            return false;
        };
        if caller.held_messages.len() < HELD_MESSAGES_MAX {
            caller.held_messages.push(Bytes::copy_from_slice(bytes));
        }
        true
    }

    /// Adds a new caller, unless too many wait already.
    pub(super) fn add(&mut self, now: Duration, assoc_key: AssociationKey) {
        let deadline = now + CONFIRMATION_TIMEOUT;
        self.0.remove(&assoc_key);
        if self.0.len() < CALLERS_MAX {
            let held_messages = Vec::new();
            self.0.insert(
                assoc_key,
                Caller {
                    deadline,
                    held_messages,
                },
            );
        }
    }

    /// Returns true if the association is known as a caller's.
    pub(super) fn contains(&self, assoc_key: AssociationKey) -> bool {
        self.0.contains_key(&assoc_key)
    }

    /// Returns true if the caller may wait longer.
    pub(super) fn may_wait(&self, now: Duration, assoc_key: AssociationKey) -> bool {
        let is_waiting = self.0.get(&assoc_key);
        is_waiting.is_some_and(|caller| now < caller.deadline)
    }

    /// Removes a caller that is identified. Returns its messages.
    pub(super) fn take_messages(&mut self, assoc_key: AssociationKey) -> Vec<Bytes> {
        let caller = self.0.remove(&assoc_key);
        caller.map_or_else(Vec::new, |caller| caller.held_messages)
    }

    /// Returns the callers whose deadline has passed.
    pub(super) fn expired(&self, now: Duration) -> Vec<AssociationKey> {
        let due = self.0.iter().filter(|(_, who)| who.deadline <= now);
        due.map(|(assoc_key, _)| *assoc_key).collect()
    }
}
