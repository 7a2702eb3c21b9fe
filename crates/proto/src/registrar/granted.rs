//! Registrations that say again what the one before has said.
//!
//! Most do: an element registers anew to say that it is there. Then its answer, and what peers are told, are again the same bytes too. So
//! an association keeps the last registration anew that was granted over it, with both: the next one, if it is the same to the byte, is
//! neither parsed nor checked nor encoded, and does what it would have done. Whatever that could depend on makes it forgotten, or is looked
//! at: the element may be gone, or another's.

use super::refresh::Told;
use super::{AssociationId, Registrar};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, counts_selections};
use std::time::Duration;

/// Bytes of request, answer and update that are kept at most.
const KEPT_MAX: usize = 1024;

/// The last registration that was granted over an association.
#[derive(Debug, Default)]
pub(super) struct Granted {
    key: Option<ElementKey>,
    /// It may be done again as it is.
    is_kept: bool,
    /// The request, the answer, and the update, if there were peers.
    said: Vec<u8>,
    request_len: usize,
    answer_len: usize,
    /// What peers know of it.
    pub(super) told: Told,
}

impl Granted {
    pub(super) fn forget(&mut self) {
        self.is_kept = false;
    }

    /// The element that peers are to be told of yet, even when the rest is forgotten.
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

    /// Whether a message is this registration once more.
    #[inline]
    pub(super) fn is_again(&self, message: &[u8]) -> bool {
        self.is_kept && self.said[..self.request_len] == *message
    }

    /// Whether there were peers to be told.
    #[inline]
    fn has_update(&self) -> bool {
        self.said.len() > self.request_len + self.answer_len
    }

    /// The answer and the update.
    #[inline]
    fn said(&self) -> (&[u8], &[u8]) {
        self.said[self.request_len..].split_at(self.answer_len)
    }
}

impl Registrar {
    /// An element that was known registered with this message, and its policy has no distance, which changes by itself.
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

    /// The registration that is kept of this association came again. False: it is to be looked at like any other.
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
