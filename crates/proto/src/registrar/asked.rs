//! Resolutions that ask again what the one before has asked.
//!
//! Most do: a user asks for its pool whenever it needs an element. So an association keeps the last resolution that was answered over it:
//! the next one, if it is the same to the byte, is not parsed, and its answer begins as that one's did. Whom it names is chosen anew.
//! Whatever the beginning depends on is looked at, or makes it forgotten.

use super::{AssociationId, Registrar};
use holdfast_wire::rserpool::asap::ResolutionResponse;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

/// Bytes of a request that are kept at most.
const KEPT_MAX: usize = 256;

/// The last resolution that was answered over an association.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Its pool and how many elements it wanted.
    pool: Option<(PoolHandle, PolicyKind, usize)>,
    /// The request, and what comes before the elements in its answer.
    said: Vec<u8>,
    request_len: usize,
}

impl Asked {
    pub(super) fn forget(&mut self) {
        self.pool = None;
    }

    /// Whether a message is this resolution once more.
    #[inline]
    pub(super) fn is_again(&self, message: &[u8]) -> bool {
        self.pool.is_some() && self.said[..self.request_len] == *message
    }
}

impl Registrar {
    /// A resolution was answered, the last that was said, to who does not want to hear of the pool. `head_len` is the answer's length
    /// without elements.
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
        // The pool's own bytes, not the message's.
        asked.pool = Some((pool.handle.clone(), pool.policy, items));
    }

    pub(super) fn forget_asked(&mut self, from: AssociationId) {
        if let Some(known) = self.associations.get_mut(from) {
            known.asked.forget();
        }
    }

    /// The resolution that is kept of this association came again. False: it is to be looked at like any other.
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
