//! Who calls the daemon's own endpoint: registrars that may, and users who probe ([`super::probes`]).
//!
//! RFC 9260 section 5.4: until a path was probed, its address may be anybody's. So only addresses that SCTP has confirmed say that a
//! caller is a registrar. One that says it has a registrar's address waits for that, and so does what it says meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::event_loop::Daemon;
use super::links::Place;

/// How long an address may take to be confirmed: as long as at a registrar.
const CONFIRMATION: Duration = Duration::from_secs(2);
/// Callers that may wait at once, and messages of each.
const CALLERS_MAX: usize = 64;
const PARKED_MAX: usize = 16;

/// Callers of whom it is open who they are.
#[derive(Default)]
pub(super) struct Callers(BTreeMap<Place, Caller>);

struct Caller {
    until: Duration,
    parked: Vec<Bytes>,
}

impl Callers {
    /// When the first of them has waited long enough.
    pub(super) fn next(&self) -> Option<Duration> {
        self.0.values().map(|caller| caller.until).min()
    }

    /// It is gone.
    pub(super) fn forget(&mut self, place: Place) {
        self.0.remove(&place);
    }

    /// Keeps what a caller says until it is known who it is. False: that is known.
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
    /// Somebody has made an association with the daemon's own endpoint.
    pub(super) fn called(&mut self, place: Place) {
        let until = self.now() + CONFIRMATION;
        self.callers.0.remove(&place);
        if self.callers.0.len() < CALLERS_MAX {
            let parked = Vec::new();
            self.callers.0.insert(place, Caller { until, parked });
        }
        self.judge(place);
    }

    /// Lets a registrar in, and leaves alone who may yet be one.
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
            // What it has said already, and may be the next event, is nobody's either.
            self.links.down(place);
            return;
        }
        for bytes in caller.into_iter().flat_map(|caller| caller.parked) {
            self.control_came(place, &bytes);
        }
    }

    /// Something has changed in an association's addresses.
    pub(super) fn readdress(&mut self, place: Place) {
        // What is not up yet says all when it is.
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

    /// Who has waited long enough is nobody.
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
