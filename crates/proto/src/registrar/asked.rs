//! Cache of resolutions, for requests that repeat the previous one.
//!
//! Most do: a user asks for its pool whenever it needs an element. An association therefore keeps the last resolution
//! answered over it. The next one, if identical to the last byte, is not parsed, and its answer begins with the same
//! bytes; the elements are selected anew. Changes that could affect the beginning clear the cache, or are checked each
//! time.

use super::{AssociationId, Registrar};
use holdfast_wire::rserpool::asap::ResolutionResponse;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

/// Most bytes of a request to keep.
const KEPT_MAX: usize = 256;

/// The last resolution answered over an association.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// The requested pool, with its policy and the number of elements.
    pool: Option<(PoolHandle, PolicyKind, usize)>,
    /// The request, and the part of its answer before the elements.
    said: Vec<u8>,
    request_len: usize,
}

impl Asked {
    pub(super) fn forget(&mut self) {
        self.pool = None;
    }

    /// Returns true if a message repeats this resolution.
    #[inline]
    pub(super) fn is_again(&self, message: &[u8]) -> bool {
        self.pool.is_some() && self.said[..self.request_len] == *message
    }
}

impl Registrar {
    /// Caches a resolution whose answer is the newest output, for a user without subscriptions. `head_len` is the
    /// answer's length without elements.
    pub(super) fn keep_asked(
        &mut self,
        from: AssociationId,
        request: &[u8],
        (handle, items): (&PoolHandle, Option<u32>),
        head_len: usize,
    ) {
        let items = self.items(items);
        let Some(known) = self.associations.get_mut(from) else {
            return;
        };
        known.asked.forget();
        let (Some(pool), Some(answer)) = (self.space.pool(handle), self.out.newest()) else {
            return;
        };
        if request.len() > KEPT_MAX {
            return;
        }
        let asked = &mut known.asked;
        asked.said.clear();
        asked.said.extend_from_slice(request);
        asked.said.extend_from_slice(&answer[..head_len]);
        asked.request_len = request.len();
        // A reference to the pool's own bytes, so that the message is not kept.
        asked.pool = Some((pool.handle.clone(), pool.policy, items));
    }

    pub(super) fn forget_asked(&mut self, from: AssociationId) {
        if let Some(known) = self.associations.get_mut(from) {
            known.asked.forget();
        }
    }

    /// Handles a repetition of the association's cached resolution. Returns false if it must be handled like any other.
    #[inline]
    pub(super) fn resolve_again(&mut self, from: AssociationId) -> bool {
        let is_ready = self.is_ready();
        let Some(known) = self.associations.get(from) else {
            return false;
        };
        let asked = &known.asked;
        let Some((handle, policy, items)) = &asked.pool else {
            return false;
        };
        let pool = self.space.pool(handle);
        let is_same = pool.is_some_and(|pool| pool.policy == *policy);
        if !is_same || !is_ready || !known.pools.is_empty() {
            return false;
        }
        let (space, step) = (&mut self.space, self.config.settings.distance_step);
        let sent = self.out.asap_with(from, |buffer| {
            let mut answer = ResolutionResponse::again(buffer, &asked.said[asked.request_len..]);
            space.resolve(handle, *items, |element| {
                element.payload().tell(step, &mut answer);
            });
            answer.finish()
        });
        self.counters.resolutions += u64::from(sent.is_ok());
        sent.is_ok()
    }
}
