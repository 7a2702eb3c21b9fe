//! Registrations that say again what the one before has said.
//!
//! Most do: an element registers anew to say that it is there. Then its answer, and what peers are told, are again the same bytes too. So
//! an association keeps the last registration anew that was granted over it, with both: the next one, if it is the same to the byte, is
//! neither parsed nor checked nor encoded, and does what it would have done. Whatever that could depend on makes it forgotten, or is looked
//! at: the element may be gone, or another's.

use super::{AssociationId, Registrar};
use bytes::Bytes;
use holdfast_handlespace::ElementKey;
use std::time::Duration;

/// Bytes of request, answer and update that are kept at most.
const KEPT_MAX: usize = 1024;

/// The last registration that was granted over an association.
#[derive(Debug, Default)]
pub(super) struct Granted {
    key: Option<ElementKey>,
    /// The request, the answer, and the update, if there were peers.
    said: Vec<u8>,
    request_len: usize,
    answer_len: usize,
}

impl Granted {
    pub(super) fn forget(&mut self) {
        self.key = None;
    }

    fn keep(&mut self, key: ElementKey, request: &[u8], answer: &[u8], update: &[u8]) {
        self.said.clear();
        if request.len() + answer.len() + update.len() > KEPT_MAX {
            return self.forget();
        }
        for each in [request, answer, update] {
            self.said.extend_from_slice(each);
        }
        (self.request_len, self.answer_len) = (request.len(), answer.len());
        self.key = Some(key);
    }

    /// Whether a message is this registration once more.
    #[inline]
    pub(super) fn is_again(&self, message: &[u8]) -> bool {
        self.key.is_some() && self.said[..self.request_len] == *message
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
        from: AssociationId,
        key: ElementKey,
        request: &Bytes,
        update: &Bytes,
    ) {
        if let (Some(answer), Some(known)) = (self.out.newest(), self.associations.get_mut(from)) {
            known.granted.keep(key, request, answer, update);
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
        let Some(known) = self.associations.get(from) else {
            return false;
        };
        let (Some(key), (answer, update)) = (known.granted.key, known.granted.said()) else {
            return false;
        };
        let entry = self.space.get(key).map(|element| element.payload());
        let is_its = entry.is_some_and(|entry| {
            entry.link.is_some_and(|(linked, _)| linked == from) && !entry.adopting
        });
        let is_told = !update.is_empty() || self.out.everybody.is_empty();
        if !is_its || !is_told || !self.is_ready() {
            return false;
        }
        let settings = &self.config.settings;
        let Some(entry) = self.space.register_again(key) else {
            return false;
        };
        entry.renew(now, settings);
        self.counters.reregistrations += 1;
        self.counters.updates_sent += 1;
        self.out.repeat_to_all(update);
        self.out.repeat(from, answer);
        self.arm(key);
        true
    }
}
