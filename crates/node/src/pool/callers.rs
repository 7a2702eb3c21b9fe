//! Callers of the daemon's own endpoint: registrars, and pool users that probe ([`super::probes`]).
//!
//! Until a path was probed, any host may have claimed its address (RFC 9260 section 5.4). So only addresses that SCTP
//! has confirmed identify a caller as a registrar. A caller that claims a registrar's address waits for the
//! confirmation, and its messages wait too.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::event_loop::Daemon;
use super::links::Place;

/// Time limit for the confirmation of an address; the same as at a registrar.
const CONFIRMATION: Duration = Duration::from_secs(2);
/// Maximum number of waiting callers, and of waiting messages of each.
const CALLERS_MAX: usize = 64;
const PARKED_MAX: usize = 16;

/// Callers whose addresses are not confirmed yet.
#[derive(Default)]
pub(super) struct Callers(BTreeMap<Place, Caller>);

struct Caller {
    until: Duration,
    parked: Vec<Bytes>,
}

impl Callers {
    /// Returns the earliest deadline of a caller.
    pub(super) fn next(&self) -> Option<Duration> {
        self.0.values().map(|caller| caller.until).min()
    }

    /// Removes a caller whose association has ended.
    pub(super) fn forget(&mut self, place: Place) {
        self.0.remove(&place);
    }

    /// Keeps a message until its caller is identified. Returns false if the caller does not wait.
    pub(super) fn park(&mut self, place: Place, bytes: &Bytes) -> bool {
        let Some(caller) = self.0.get_mut(&place) else {
            return false;
        };
        if caller.parked.len() < PARKED_MAX {
            caller.parked.push(Bytes::copy_from_slice(bytes));
        }
        true
    }
}

impl Daemon {
    /// Handles a new association with the daemon's own endpoint.
    pub(super) fn called(&mut self, place: Place) {
        let until = self.now() + CONFIRMATION;
        self.callers.0.remove(&place);
        if self.callers.0.len() < CALLERS_MAX {
            let parked = Vec::new();
            self.callers.0.insert(place, Caller { until, parked });
        }
        self.judge(place);
    }

    /// Admits a registrar or a guest, keeps a caller waiting that may become a registrar, and refuses any other.
    fn judge(&mut self, place: Place) {
        if self.config.admits_registrar(self.links.addresses(place)) {
            let caller = self.callers.0.remove(&place);
            for bytes in caller.into_iter().flat_map(|caller| caller.parked) {
                self.control_came(place, &bytes);
            }
            return;
        }
        let now = self.now();
        let waits = self.callers.0.get(&place);
        let waits = waits.is_some_and(|caller| now < caller.until);
        let claims = self.own.remote_addresses(place.assoc).unwrap_or_default();
        if waits && self.config.admits_registrar(&claims) {
            return;
        }
        let caller = self.callers.0.remove(&place);
        if !self.admit_guest(place) {
            tracing::debug!(?claims, "nobody who may be a registrar, or probe");
            self.abort(place);
            // Further messages of the caller, which may be the next event, must not reach any machine.
            self.links.down(place);
            return;
        }
        for bytes in caller.into_iter().flat_map(|caller| caller.parked) {
            self.control_came(place, &bytes);
        }
    }

    /// Handles a change in an association's addresses.
    pub(super) fn readdress(&mut self, place: Place) {
        // An association that is not up yet reports its addresses when it is.
        if !self.links.is_up(place) {
            return;
        }
        let Some(endpoint) = self.endpoint(place.endpoint) else {
            return;
        };
        if let Ok(confirmed) = endpoint.confirmed_addresses(place.assoc) {
            self.links.readdress(place, confirmed);
            if self.callers.0.contains_key(&place) {
                self.judge(place);
            }
        }
    }

    /// Judges the callers whose deadline has passed.
    pub(super) fn end_callers(&mut self) {
        let now = self.now();
        let due = self.callers.0.iter().filter(|(_, who)| who.until <= now);
        let due: Vec<Place> = due.map(|(place, _)| *place).collect();
        for place in due {
            self.judge(place);
        }
    }
}

#[cfg(test)]
#[path = "tests/callers.rs"]
mod tests;
