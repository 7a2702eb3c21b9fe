//! When peers hear of registrations that say nothing new.
//!
//! RFC 5353 section 3.3.1 has each re-registration announced with all that is known of the element, but does not say how soon. One that is
//! the same to the byte tells peers only that the element is still there. So it waits
//! ([`Settings::refresh_delay`](super::Settings::refresh_delay)) for those that follow it, and one announcement stands for all of them. Ours have no
//! timer for another registrar's elements, but rsplib's let them expire a registration's life after they were announced: the wait is a
//! part of that life at most.
//! Where registering again changes what is selected next, because selections were counted since, it does not wait; nor where somebody
//! has joined the peers meanwhile.

use super::schedule::Timer;
use super::{AssociationId, Registrar};
use holdfast_handlespace::ElementKey;
use std::collections::BTreeMap;
use std::time::Duration;

/// Announcements are made together, so many times in one delay.
const SLOTS: u32 = 8;

/// So many announcements fit into a registration's life at least.
const IN_A_LIFE: u32 = 4;

/// What peers know of a registration.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Told {
    /// When they were told last.
    at: Duration,
    /// Who they were: [`Outbox::audience`](super::outbox::Outbox::audience).
    audience: u32,
    /// To register again changes where it stands.
    counts: bool,
    /// It has registered again since.
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

    /// Until when the same may wait to be told again; none: it may not.
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

    /// So many of those whose time has come.
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
    /// What is kept of this association was granted again, for so long a life. True: peers are to be told at once.
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

    /// Announces what has waited: some of it. Elements and users are served before the next.
    pub(super) fn refresh_some(&mut self, now: Duration) {
        let max = self.config.settings.turn_elements_max.max(1);
        for association in self.refreshes.take(now, max) {
            self.refresh(now, association);
        }
        if let Some(next) = self.refreshes.next() {
            // Not in this turn.
            let next = next.max(now + Duration::from_nanos(1));
            self.schedule.set(Timer::Refresh, next);
        }
    }

    /// Announces an element that registered again over this association, if it has and still is its.
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

    /// Whether an element registered over this association last, and is this registrar's since.
    #[inline]
    pub(super) fn is_held(&self, from: AssociationId, key: ElementKey) -> bool {
        let entry = self.space.get(key).map(|element| element.payload());
        entry.is_some_and(|entry| {
            entry.link.is_some_and(|(linked, _)| linked == from) && !entry.adopting
        })
    }
}
