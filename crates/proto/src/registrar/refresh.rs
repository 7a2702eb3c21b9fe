//! Delayed announcements of re-registrations that change nothing.
//!
//! RFC 5353 section 3.3.1 demands an announcement of each re-registration with everything known about the element, but
//! not at once. A registration identical to the last byte only tells peers that the element still exists. Such a
//! registration therefore waits ([`Settings::refresh_delay`](super::Settings::refresh_delay)) for later ones, and one
//! announcement covers all of them. A Holdfast registrar has no timer for elements of other registrars, but rsplib's
//! registrars let them expire one registration life after the announcement: the wait is at most a part of that life.
//!
//! There is no wait if the re-registration changes the next selections, because selections were counted since, nor if a
//! registrar has joined the peers meanwhile.

use super::schedule::Timer;
use super::{AssociationId, Registrar};
use holdfast_handlespace::ElementKey;
use std::collections::BTreeMap;
use std::time::Duration;

/// Number of slots in one delay: announcements of a slot are made together.
const SLOTS: u32 = 8;

/// Least number of announcements in a registration's life.
const IN_A_LIFE: u32 = 4;

/// The peers' knowledge of a registration.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Told {
    /// Time of the last announcement.
    at: Duration,
    /// Peers that received it: [`Outbox::audience`](super::outbox::Outbox::audience).
    audience: u32,
    /// True if a re-registration changes the element's place in selections.
    counts: bool,
    /// True if the element has re-registered since.
    again: bool,
}

impl Told {
    pub(super) fn new(at: Duration, audience: u32, counts: bool) -> Told {
        Told {
            at,
            audience,
            counts,
            again: false,
        }
    }

    pub(super) fn is_again(&self) -> bool {
        self.again
    }

    /// Returns the time until which the next announcement may wait; none if it may not.
    #[inline]
    fn until(&self, now: Duration, audience: u32, delay: Duration) -> Option<Duration> {
        let slot = (delay / SLOTS).as_nanos() as u64;
        if self.counts || self.audience != audience || slot == 0 {
            return None;
        }
        let end = (self.at + delay).as_nanos() as u64;
        let until = Duration::from_nanos(end - end % slot);
        (until > now).then_some(until)
    }
}

/// Registrations that wait to be announced.
#[derive(Debug, Default)]
pub(super) struct Refreshes {
    slots: BTreeMap<Duration, Vec<AssociationId>>,
}

impl Refreshes {
    fn next(&self) -> Option<Duration> {
        self.slots.keys().next().copied()
    }

    /// Removes up to `max` registrations that are due.
    fn take(&mut self, now: Duration, max: usize) -> Vec<AssociationId> {
        let Some(mut first) = self.slots.first_entry().filter(|slot| *slot.key() <= now) else {
            return Vec::new();
        };
        let waiting = first.get_mut();
        let taken = waiting.split_off(waiting.len().saturating_sub(max));
        if waiting.is_empty() {
            first.remove();
        }
        taken
    }
}

impl Registrar {
    /// Handles a repetition of the association's cached registration, with this life. Returns true if peers must be
    /// informed at once.
    #[inline]
    pub(super) fn is_news(&mut self, now: Duration, from: AssociationId, life: Duration) -> bool {
        let delay = self.config.settings.refresh_delay.min(life / IN_A_LIFE);
        let Some(known) = self.associations.get_mut(from) else {
            return true;
        };
        let told = &mut known.granted.told;
        let Some(until) = told.until(now, self.out.audience, delay) else {
            *told = Told::new(now, self.out.audience, told.counts);
            return true;
        };
        if !std::mem::replace(&mut told.again, true) {
            self.refreshes.slots.entry(until).or_default().push(from);
            if self.refreshes.next() == Some(until) {
                self.schedule.set(Timer::Refresh, until);
            }
        }
        false
    }

    /// Announces some of the waiting registrations. Elements and users are served before the rest.
    pub(super) fn refresh_some(&mut self, now: Duration) {
        let max = self.config.settings.turn_elements_max.max(1);
        for association in self.refreshes.take(now, max) {
            self.refresh(now, association);
        }
        if let Some(next) = self.refreshes.next() {
            // The rest follows in a later turn.
            let next = next.max(now + Duration::from_nanos(1));
            self.schedule.set(Timer::Refresh, next);
        }
    }

    /// Announces the element that re-registered over this association, if it still belongs there.
    fn refresh(&mut self, now: Duration, from: AssociationId) {
        let Some(known) = self.associations.get_mut(from) else {
            return;
        };
        let Some(key) = known.granted.waits() else {
            return;
        };
        let told = &mut known.granted.told;
        *told = Told::new(now, self.out.audience, told.counts);
        if self.is_held(from, key) {
            self.announce_element(key);
        }
    }

    /// Returns true if the element's last registration came over this association, and this registrar is its home
    /// since.
    #[inline]
    pub(super) fn is_held(&self, from: AssociationId, key: ElementKey) -> bool {
        let entry = self.space.get(key).map(|element| element.payload());
        entry.is_some_and(|entry| {
            entry.link.is_some_and(|(linked, _)| linked == from) && !entry.adopting
        })
    }
}
