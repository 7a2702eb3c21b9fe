//! Announces of registrars to elements and users, by multicast (RFC 5352 section 3.6).

use super::Registrar;
use super::timer_queue::RegistrarTimer;
use bytes::Bytes;
use holdfast_wire::rserpool::{RegistrarId, asap};
use std::collections::BTreeMap;
use std::time::Duration;

/// Other registrars that announce themselves, with the times at which they were last heard.
#[derive(Debug, Default)]
pub(super) struct Announcers {
    last_heard: BTreeMap<RegistrarId, Duration>,
}

impl Announcers {
    fn on_heard(&mut self, now: Duration, registrar: RegistrarId) {
        self.last_heard.insert(registrar, now);
    }

    /// Removes registrars that have been silent for two of their periods.
    fn forget_silent(&mut self, now: Duration, cycle: Duration) {
        let remembered = cycle * (2 * self.count_with_own());
        self.last_heard
            .retain(|_, heard| *heard + remembered >= now);
    }

    /// Returns the number of registrars that announce themselves, including this one.
    fn count_with_own(&self) -> u32 {
        self.last_heard.len() as u32 + 1
    }
}

impl Registrar {
    /// Handles a multicast announce; returns false if it does not count.
    pub(super) fn on_multicast_announce(&mut self, now: Duration, bytes: &Bytes) -> bool {
        let Ok(parsed) = asap::Message::parse(bytes) else {
            self.counters.malformed += 1;
            return false;
        };
        let asap::Message::ServerAnnounce { registrar, .. } = parsed.message else {
            return false;
        };
        // A registrar without an association may be made up, and each one makes this registrar's announces rarer.
        let peer = self.peers.get(registrar);
        if peer.is_some_and(|peer| peer.association.is_some()) {
            self.announcers.on_heard(now, registrar);
            return true;
        }
        registrar == self.config.id
    }

    pub(super) fn start_announcing(&mut self, now: Duration) {
        match self.config.settings.announce_cycle {
            Some(_) => self.schedule.set(RegistrarTimer::Announce, now),
            None => self.schedule.stop(RegistrarTimer::Announce),
        }
    }

    /// Announces this registrar to elements and users. RFC 5352 section 3.6: "every (N+1)*T6-Serverannounce", N being
    /// the number of other registrars heard.
    pub(super) fn send_announce(&mut self, now: Duration) {
        let Some(cycle) = self.config.settings.announce_cycle else {
            return;
        };
        self.announcers.forget_silent(now, cycle);
        self.outbox.multicast_asap(&asap::Message::ServerAnnounce {
            registrar: self.config.id,
            transports: self.config.announced_transports.clone(),
        });
        let next = now + cycle * self.announcers.count_with_own();
        self.schedule.set(RegistrarTimer::Announce, next);
    }
}
