//! Callers of the daemon's own endpoint: registrars, and pool users that probe ([`super::probes`]).
//!
//! Until a path was probed, any host may have claimed its address (RFC 9260 section 5.4). So only addresses that SCTP
//! has confirmed identify a caller as a registrar. A caller that claims a registrar's address waits for the
//! confirmation, and its messages wait too.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::event_loop::PoolEventLoop;
use super::links::AssociationKey;

/// Time limit for the confirmation of an address; the same as at a registrar.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(2);
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
}

impl PoolEventLoop {
    /// Handles a new association with the daemon's own endpoint.
    pub(super) fn on_incoming_association(&mut self, assoc_key: AssociationKey) {
        let deadline = self.now() + CONFIRMATION_TIMEOUT;
        self.pending_callers.0.remove(&assoc_key);
        if self.pending_callers.0.len() < CALLERS_MAX {
            let held_messages = Vec::new();
            self.pending_callers.0.insert(
                assoc_key,
                Caller {
                    deadline,
                    held_messages,
                },
            );
        }
        self.classify_caller(assoc_key);
    }

    /// Admits a registrar or a guest, keeps a caller waiting that may become a registrar, and refuses any other.
    fn classify_caller(&mut self, assoc_key: AssociationKey) {
        if self
            .config
            .admits_registrar(self.links.addresses(assoc_key))
        {
            let caller = self.pending_callers.0.remove(&assoc_key);
            for bytes in caller.into_iter().flat_map(|caller| caller.held_messages) {
                self.on_asap_message(assoc_key, &bytes);
            }
            return;
        }
        let now = self.now();
        let is_waiting = self.pending_callers.0.get(&assoc_key);
        let waits = is_waiting.is_some_and(|caller| now < caller.deadline);
        let claimed_addresses = self
            .own_endpoint
            .remote_addresses(assoc_key.assoc)
            .unwrap_or_default();
        if waits && self.config.admits_registrar(&claimed_addresses) {
            return;
        }
        let caller = self.pending_callers.0.remove(&assoc_key);
        if !self.admit_guest(assoc_key) {
            tracing::debug!(
                ?claimed_addresses,
                "refused a caller that may neither be a registrar nor probe"
            );
            self.abort(assoc_key);
            // Further messages of the caller, which may be the next event, must not reach any machine.
            self.links.remove(assoc_key);
            return;
        }
        for bytes in caller.into_iter().flat_map(|caller| caller.held_messages) {
            self.on_asap_message(assoc_key, &bytes);
        }
    }

    /// Handles a change in an association's addresses.
    pub(super) fn on_addresses_changed(&mut self, assoc_key: AssociationKey) {
        // An association that is not up yet reports its addresses when it is.
        if !self.links.is_up(assoc_key) {
            return;
        }
        let Some(endpoint) = self.endpoint(assoc_key.endpoint) else {
            return;
        };
        if let Ok(confirmed) = endpoint.confirmed_addresses(assoc_key.assoc) {
            self.links.set_addresses(assoc_key, confirmed);
            if self.pending_callers.0.contains_key(&assoc_key) {
                self.classify_caller(assoc_key);
            }
        }
    }

    /// Judges the callers whose deadline has passed.
    pub(super) fn expire_callers(&mut self) {
        let now = self.now();
        let due = self
            .pending_callers
            .0
            .iter()
            .filter(|(_, who)| who.deadline <= now);
        let due: Vec<AssociationKey> = due.map(|(assoc_key, _)| *assoc_key).collect();
        for assoc_key in due {
            self.classify_caller(assoc_key);
        }
    }
}

#[cfg(test)]
#[path = "tests/callers.rs"]
mod tests;
