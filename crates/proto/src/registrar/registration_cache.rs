//! Cache of registrations, for re-registrations that repeat the previous one.
//!
//! Most do: an element re-registers only to show that it is alive. Then the response and the announcement repeat the
//! same bytes too. An association therefore keeps its last granted re-registration with both. The next one, if
//! identical to the last byte, has the same effect without being parsed, checked or encoded. Changes that could affect
//! the result clear the cache, or are checked each time: the element may be removed, or belong to another registrar.

use super::associations::Associations;
use super::reregistration_announcements::AnnouncementState;
use super::{AssociationId, Registrar};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, counts_selections};
use std::time::Duration;

/// Most bytes of request, response and update to keep.
const CACHED_BYTES_MAX: usize = 1024;

/// The last registration granted over an association.
#[derive(Debug, Default)]
pub(super) struct RegistrationCache {
    key: Option<ElementKey>,
    /// True if the cached messages may be used again.
    is_valid: bool,
    /// The request, the response, and the update, if there were peers.
    messages: Vec<u8>,
    request_len: usize,
    answer_len: usize,
    /// The peers' knowledge of the registration.
    pub(super) announcement: AnnouncementState,
}

impl RegistrationCache {
    pub(super) fn invalidate(&mut self) {
        self.is_valid = false;
    }

    /// Returns the element that is still to be announced to peers, even if the cache is cleared.
    pub(super) fn unannounced_element(&self) -> Option<ElementKey> {
        self.key.filter(|_| self.announcement.is_pending())
    }

    fn store(&mut self, key: ElementKey, request: &[u8], answer: &[u8], update: &[u8]) {
        self.messages.clear();
        self.key = Some(key);
        if request.len() + answer.len() + update.len() > CACHED_BYTES_MAX {
            return self.invalidate();
        }
        for each in [request, answer, update] {
            self.messages.extend_from_slice(each);
        }
        (self.request_len, self.answer_len) = (request.len(), answer.len());
        self.is_valid = true;
    }

    /// Returns true if a message repeats this registration.
    #[inline]
    pub(super) fn is_repeated(&self, message: &[u8]) -> bool {
        self.is_valid && self.messages[..self.request_len] == *message
    }

    /// Returns true if there were peers to inform.
    #[inline]
    fn has_update(&self) -> bool {
        self.messages.len() > self.request_len + self.answer_len
    }

    /// Returns the response and the update.
    #[inline]
    fn response_and_update(&self) -> (&[u8], &[u8]) {
        self.messages[self.request_len..].split_at(self.answer_len)
    }
}

impl Associations {
    /// Makes the next registration on this association be handled like any other.
    pub(super) fn invalidate_registration_cache(&mut self, from: AssociationId) {
        if let Some(known_association) = self.get_mut(from) {
            known_association.registration_cache.invalidate();
        }
    }
}

impl Registrar {
    /// Caches a granted re-registration. The element's policy must not have a distance, because a distance changes
    /// without a message.
    #[inline]
    pub(super) fn cache_registration(
        &mut self,
        now: Duration,
        from: AssociationId,
        key: ElementKey,
        request: &Bytes,
        update: &Bytes,
    ) {
        let kind = self
            .elements
            .space()
            .get(key)
            .map(|element| element.policy().kind());
        let counts = kind.is_none_or(counts_selections);
        let (Some(answer), Some(known)) =
            (self.outbox.last_message(), self.associations.get_mut(from))
        else {
            return;
        };
        let before = known
            .registration_cache
            .unannounced_element()
            .filter(|before| *before != key);
        known.registration_cache.store(key, request, answer, update);
        known.registration_cache.announcement =
            AnnouncementState::new(now, self.outbox.peers_version(), counts);
        if let Some(before) =
            before.filter(|before| self.elements.is_registered_over(from, *before))
        {
            self.announce_element(before);
        }
    }

    /// Handles a repetition of the association's cached registration. Returns false if it must be handled like any
    /// other.
    #[inline]
    pub(super) fn register_from_cache(&mut self, now: Duration, from: AssociationId) -> bool {
        let known_association = self
            .associations
            .get(from)
            .map(|known_association| &known_association.registration_cache);
        let Some((key, granted)) =
            known_association.and_then(|granted| Some((granted.key?, granted)))
        else {
            return false;
        };
        let has_announcement = granted.has_update() || !self.outbox.has_peers();
        if !has_announcement || !self.elements.is_registered_over(from, key) || !self.is_ready() {
            return false;
        }
        let settings = &self.config.settings;
        let Some(entry) = self.elements.register_again(key) else {
            return false;
        };
        entry.renew(now, settings);
        let life = entry.expires.saturating_sub(now);
        self.counters.reregistrations += 1;
        let must_announce = self.must_announce_now(now, from, life);
        if let Some(known_association) = self.associations.get(from) {
            let (answer, update) = known_association.registration_cache.response_and_update();
            if must_announce {
                self.counters.updates_sent += 1;
                self.outbox.resend_to_peers(update);
            }
            self.outbox.resend_asap(from, answer);
        }
        self.elements.update_timer(key);
        true
    }
}
