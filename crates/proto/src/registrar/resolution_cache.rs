//! Cache of resolutions, for requests that repeat the previous one.
//!
//! Most do: a user asks for its pool whenever it needs an element. An association therefore keeps the last resolution
//! answered over it. The next one, if identical to the last byte, is not parsed, and its answer begins with the same
//! bytes; the elements are selected anew. Changes that could affect the beginning clear the cache, or are checked each
//! time.

use super::associations::Associations;
use super::{AssociationId, Registrar};
use holdfast_wire::rserpool::asap::ResolutionResponseEncoder;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

/// Most bytes of a request to keep.
const CACHED_BYTES_MAX: usize = 256;

/// The last resolution answered over an association.
#[derive(Debug, Default)]
pub(super) struct ResolutionCache {
    /// The requested pool, with its policy and the number of elements.
    pool: Option<(PoolHandle, PolicyKind, usize)>,
    /// The request, and the part of its answer before the elements.
    messages: Vec<u8>,
    request_len: usize,
}

impl ResolutionCache {
    pub(super) fn clear(&mut self) {
        self.pool = None;
    }

    /// Returns true if a message repeats this resolution.
    #[inline]
    pub(super) fn is_repeated(&self, message: &[u8]) -> bool {
        self.pool.is_some() && self.messages[..self.request_len] == *message
    }
}

impl Associations {
    /// Makes the next resolution on this association be handled like any other.
    pub(super) fn clear_resolution_cache(&mut self, from: AssociationId) {
        if let Some(known_association) = self.get_mut(from) {
            known_association.resolution_cache.clear();
        }
    }
}

impl Registrar {
    /// Caches a resolution whose answer is the newest output, for a user without subscriptions. `head_len` is the
    /// answer's length without elements.
    pub(super) fn cache_resolution(
        &mut self,
        from: AssociationId,
        request: &[u8],
        (handle, items): (&PoolHandle, Option<u32>),
        head_len: usize,
    ) {
        let items = self.config.settings.answer_elements_max(items);
        let Some(known_association) = self.associations.get_mut(from) else {
            return;
        };
        known_association.resolution_cache.clear();
        let (Some(pool), Some(answer)) = (
            self.elements.space().pool(handle),
            self.outbox.last_message(),
        ) else {
            return;
        };
        if request.len() > CACHED_BYTES_MAX {
            return;
        }
        let cache = &mut known_association.resolution_cache;
        cache.messages.clear();
        cache.messages.extend_from_slice(request);
        cache.messages.extend_from_slice(&answer[..head_len]);
        cache.request_len = request.len();
        // A reference to the pool's own bytes, so that the message is not kept.
        cache.pool = Some((pool.handle.clone(), pool.policy, items));
    }

    /// Handles a repetition of the association's cached resolution. Returns false if it must be handled like any other.
    #[inline]
    pub(super) fn resolve_from_cache(&mut self, from: AssociationId) -> bool {
        let is_ready = self.is_ready();
        let Some(known_association) = self.associations.get(from) else {
            return false;
        };
        let cache = &known_association.resolution_cache;
        let Some((handle, policy, items)) = &cache.pool else {
            return false;
        };
        let pool = self.elements.space().pool(handle);
        let is_same = pool.is_some_and(|pool| pool.policy == *policy);
        if !is_same || !is_ready || !known_association.pools.is_empty() {
            return false;
        }
        let (space, step) = (&mut self.elements, self.config.settings.distance_step);
        let sent = self.outbox.send_asap_with(from, |buffer| {
            let mut answer =
                ResolutionResponseEncoder::from_head(buffer, &cache.messages[cache.request_len..]);
            space.resolve(handle, *items, |element| {
                element.payload().add_to_answer(step, &mut answer);
            });
            answer.finish()
        });
        self.counters.resolutions += u64::from(sent.is_ok());
        sent.is_ok()
    }
}
