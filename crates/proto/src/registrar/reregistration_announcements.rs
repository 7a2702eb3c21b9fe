//! Delayed announcements of re-registrations that change nothing.
//!
//! RFC 5353 section 3.3.1 demands an announcement of each re-registration with everything known about the element, but
//! not at once. A registration identical to the last byte only tells peers that the element still exists. Such a
//! registration therefore waits ([`RegistrarSettings::refresh_delay`](super::RegistrarSettings::refresh_delay)) for
//! later ones, and one announcement covers all of them. A Holdfast registrar has no timer for elements of other
//! registrars, but rsplib's registrars let them expire one registration life after the announcement: the wait is at
//! most a part of that life.
//!
//! There is no wait if the re-registration changes the next selections, because selections were counted since, nor if a
//! registrar has joined the peers meanwhile.

use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Registrar};
use std::collections::BTreeMap;
use std::time::Duration;

/// Number of slots in one delay: announcements of a slot are made together.
const SLOTS: u32 = 8;

/// Least number of announcements in a registration's life.
const ANNOUNCEMENTS_PER_LIFE: u32 = 4;

/// The peers' knowledge of a registration.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct AnnouncementState {
    /// Time of the last announcement.
    announced_at: Duration,
    /// Peers that received it: [`RegistrarOutbox::peers_version`](super::outbox::RegistrarOutbox::peers_version).
    peers_version: u32,
    /// True if a re-registration changes the element's place in selections.
    counts_selections: bool,
    /// True if the element has re-registered since.
    is_pending: bool,
}

impl AnnouncementState {
    pub(super) fn new(at: Duration, audience: u32, counts: bool) -> AnnouncementState {
        AnnouncementState {
            announced_at: at,
            peers_version: audience,
            counts_selections: counts,
            is_pending: false,
        }
    }

    pub(super) fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Returns the time until which the next announcement may wait; none if it may not.
    #[inline]
    fn deferred_until(&self, now: Duration, audience: u32, delay: Duration) -> Option<Duration> {
        let slot = (delay / SLOTS).as_nanos() as u64;
        if self.counts_selections || self.peers_version != audience || slot == 0 {
            return None;
        }
        let end = (self.announced_at + delay).as_nanos() as u64;
        let until = Duration::from_nanos(end - end % slot);
        (until > now).then_some(until)
    }
}

/// Registrations that wait to be announced.
#[derive(Debug, Default)]
pub(super) struct PendingAnnouncements {
    slots: BTreeMap<Duration, Vec<AssociationId>>,
}

impl PendingAnnouncements {
    /// Adds a registration. Returns true if the announcements of its slot are the next ones.
    fn add(&mut self, until: Duration, association: AssociationId) -> bool {
        self.slots.entry(until).or_default().push(association);
        self.next() == Some(until)
    }

    fn next(&self) -> Option<Duration> {
        self.slots.keys().next().copied()
    }

    /// Removes up to `max` registrations that are due.
    fn take_due(&mut self, now: Duration, max: usize) -> Vec<AssociationId> {
        let Some(mut first) = self.slots.first_entry().filter(|slot| *slot.key() <= now) else {
            return Vec::new();
        };
        let associations = first.get_mut();
        let due = associations.split_off(associations.len().saturating_sub(max));
        if associations.is_empty() {
            first.remove();
        }
        due
    }
}

impl Registrar {
    /// Handles a repetition of the association's cached registration, with this life. Returns true if peers must be
    /// informed at once.
    #[inline]
    pub(super) fn must_announce_now(
        &mut self,
        now: Duration,
        from: AssociationId,
        life: Duration,
    ) -> bool {
        let delay = self
            .config
            .settings
            .refresh_delay
            .min(life / ANNOUNCEMENTS_PER_LIFE);
        let Some(known_association) = self.associations.get_mut(from) else {
            return true;
        };
        let announcement = &mut known_association.registration_cache.announcement;
        let Some(until) = announcement.deferred_until(now, self.outbox.peers_version(), delay)
        else {
            *announcement = AnnouncementState::new(
                now,
                self.outbox.peers_version(),
                announcement.counts_selections,
            );
            return true;
        };
        if !std::mem::replace(&mut announcement.is_pending, true) && self.refreshes.add(until, from)
        {
            self.schedule.set(RegistrarTimer::Refresh, until);
        }
        false
    }

    /// Announces some of the waiting registrations. Elements and users are served before the rest.
    pub(super) fn announce_due_reregistrations(&mut self, now: Duration) {
        let max = self.config.settings.batch_elements_max.max(1);
        for association in self.refreshes.take_due(now, max) {
            self.announce_reregistration(now, association);
        }
        if let Some(next) = self.refreshes.next() {
            // The rest follows in a later turn.
            let next = next.max(now + Duration::from_nanos(1));
            self.schedule.set(RegistrarTimer::Refresh, next);
        }
    }

    /// Announces the element that re-registered over this association, if it still belongs there.
    fn announce_reregistration(&mut self, now: Duration, from: AssociationId) {
        let Some(known_association) = self.associations.get_mut(from) else {
            return;
        };
        let Some(key) = known_association.registration_cache.unannounced_element() else {
            return;
        };
        let announcement = &mut known_association.registration_cache.announcement;
        *announcement = AnnouncementState::new(
            now,
            self.outbox.peers_version(),
            announcement.counts_selections,
        );
        if self.elements.is_registered_over(from, key) {
            self.announce_element(key);
        }
    }
}
