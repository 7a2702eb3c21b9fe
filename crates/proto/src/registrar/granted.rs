//! Cache of registrations, for re-registrations that repeat the previous one.
//!
//! Most do: an element re-registers only to show that it is alive. Then the response and the announcement repeat the
//! same bytes too. An association therefore keeps its last granted re-registration with both. The next one, if
//! identical to the last byte, has the same effect without being parsed, checked or encoded. Changes that could affect
//! the result clear the cache, or are checked each time: the element may be removed, or belong to another registrar.

use super::refresh::Told;
use super::{AssociationId, Registrar};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, counts_selections};
use std::time::Duration;

/// Most bytes of request, response and update to keep.
const KEPT_MAX: usize = 1024;

/// The last registration granted over an association.
#[derive(Debug, Default)]
pub(super) struct Granted {
    key: Option<ElementKey>,
    /// True if the cached messages may be used again.
    is_kept: bool,
    /// The request, the response, and the update, if there were peers.
    said: Vec<u8>,
    request_len: usize,
    answer_len: usize,
    /// The peers' knowledge of the registration.
    pub(super) told: Told,
}

impl Granted {
    pub(super) fn forget(&mut self) {
        self.is_kept = false;
    }

    /// Returns the element that is still to be announced to peers, even if the cache is cleared.
    pub(super) fn waits(&self) -> Option<ElementKey> {
        self.key.filter(|_| self.told.is_again())
    }

    fn keep(&mut self, key: ElementKey, request: &[u8], answer: &[u8], update: &[u8]) {
        self.said.clear();
        self.key = Some(key);
        if request.len() + answer.len() + update.len() > KEPT_MAX {
            return self.forget();
        }
        for each in [request, answer, update] {
            self.said.extend_from_slice(each);
        }
        (self.request_len, self.answer_len) = (request.len(), answer.len());
        self.is_kept = true;
    }

    /// Returns true if a message repeats this registration.
    #[inline]
    pub(super) fn is_again(&self, message: &[u8]) -> bool {
        self.is_kept && self.said[..self.request_len] == *message
    }

    /// Returns true if there were peers to inform.
    #[inline]
    fn has_update(&self) -> bool {
        self.said.len() > self.request_len + self.answer_len
    }

    /// Returns the response and the update.
    #[inline]
    fn said(&self) -> (&[u8], &[u8]) {
        self.said[self.request_len..].split_at(self.answer_len)
    }
}

impl Registrar {
    /// Caches a granted re-registration. The element's policy must not have a distance, because a distance changes
    /// without a message.
    #[inline]
    pub(super) fn keep_granted(
        &mut self,
        now: Duration,
        from: AssociationId,
        key: ElementKey,
        request: &Bytes,
        update: &Bytes,
    ) {
        let kind = self.space.get(key).map(|element| element.policy().kind());
        let counts = kind.is_none_or(counts_selections);
        let (Some(answer), Some(known)) = (self.out.newest(), self.associations.get_mut(from))
        else {
            return;
        };
        let before = known.granted.waits().filter(|before| *before != key);
        known.granted.keep(key, request, answer, update);
        known.granted.told = Told::new(now, self.out.audience, counts);
        if let Some(before) = before.filter(|before| self.is_held(from, *before)) {
            self.announce_element(before);
        }
    }

    pub(super) fn forget_granted(&mut self, from: AssociationId) {
        if let Some(known) = self.associations.get_mut(from) {
            known.granted.forget();
        }
    }

    /// Handles a repetition of the association's cached registration. Returns false if it must be handled like any
    /// other.
    #[inline]
    pub(super) fn register_again(&mut self, now: Duration, from: AssociationId) -> bool {
        let known = self.associations.get(from).map(|known| &known.granted);
        let Some((key, granted)) = known.and_then(|granted| Some((granted.key?, granted))) else {
            return false;
        };
        let is_told = granted.has_update() || self.out.everybody.is_empty();
        if !is_told || !self.is_held(from, key) || !self.is_ready() {
            return false;
        }
        let settings = &self.config.settings;
        let Some(entry) = self.space.register_again(key) else {
            return false;
        };
        entry.renew(now, settings);
        let life = entry.expires.saturating_sub(now);
        self.counters.reregistrations += 1;
        let is_news = self.is_news(now, from, life);
        if let Some(known) = self.associations.get(from) {
            let (answer, update) = known.granted.said();
            if is_news {
                self.counters.updates_sent += 1;
                self.out.repeat_to_all(update);
            }
            self.out.repeat(from, answer);
        }
        self.arm(key);
        true
    }
}
