//! Sessions that choose their element by what they see, not by the pool's policy.
//!
//! All sessions of a machine with one pool learn together ([`ByLatency`]). A request is a message to the element and its first
//! answer; a session's first one begins when the element is chosen, so that the way to it counts. A session that is not answered before
//! it closes teaches nothing, one that loses its element teaches that it was slow.

use super::pool::Pool;
use super::{PoolUser, SessionId};
use crate::choice::ByLatency;
use holdfast_wire::rserpool::{ElementId, PoolElement};
use std::time::Duration;

/// Who chooses the element of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choose {
    /// The registrar, by the pool's policy.
    #[default]
    Registrar,
    /// This user: of two drawn by chance the one that answers sooner ([`ByLatency`]).
    Latency,
}

/// Elements that a registrar is asked for where the user chooses: as many as registrars give by default.
pub(super) const CANDIDATES: u32 = 64;
/// After so long without news a past latency counts 1/e of what it did.
const DECAY: Duration = Duration::from_secs(10);

/// What a pool's sessions have learnt.
#[derive(Debug, Clone)]
pub(super) struct Learnt(ByLatency);

impl Default for Learnt {
    fn default() -> Learnt {
        Learnt(ByLatency::new(DECAY))
    }
}

/// A request under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    element: ElementId,
    since: Duration,
}

impl PoolUser {
    /// The session sends a message to its element.
    pub fn handle_sent(&mut self, now: Duration, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else {
            return;
        };
        if session.choose == Choose::Latency
            && session.request.is_none()
            && let Some(element) = session.element()
        {
            self.begin_request(now, id, element);
        }
    }

    /// Its element has said something.
    pub fn handle_heard(&mut self, now: Duration, id: SessionId) {
        self.end_request(id, |learnt, request| {
            let took = now.saturating_sub(request.since);
            learnt.0.end(now, request.element, took);
        });
    }

    pub(super) fn request_failed(&mut self, now: Duration, id: SessionId) {
        self.end_request(id, |learnt, request| {
            let took = now.saturating_sub(request.since);
            learnt.0.failed(now, request.element, took);
        });
    }

    pub(super) fn request_abandoned(&mut self, id: SessionId) {
        self.end_request(id, |learnt, request| learnt.0.abandon(request.element));
    }

    /// The element of a session that chooses for itself, by what is known: its place.
    pub(super) fn chosen_by_latency(
        &mut self,
        now: Duration,
        id: SessionId,
    ) -> Option<PoolElement> {
        let handle = &self.sessions.get(&id)?.handle;
        let pool = self.pools.get_mut(handle)?;
        let candidates = pool.candidates(now);
        let random = &mut self.hunt.random;
        let place = pool
            .learnt
            .0
            .choose(&candidates, &mut |end| random.below(end))?;
        let element = pool.take(candidates[place])?.clone();
        self.begin_request(now, id, element.id);
        Some(element)
    }

    fn begin_request(&mut self, now: Duration, id: SessionId, element: ElementId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.request = Some(Request {
            element,
            since: now,
        });
        if let Some(pool) = self.pools.get_mut(&session.handle) {
            pool.learnt.0.begin(element);
        }
    }

    fn end_request(&mut self, id: SessionId, how: impl FnOnce(&mut Learnt, Request)) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if let Some(request) = session.request.take()
            && let Some(pool) = self.pools.get_mut(&session.handle)
        {
            how(&mut pool.learnt, request);
        }
    }
}

impl Pool {
    /// Elements that are not there any more are nothing to remember.
    pub(super) fn forget_others(&mut self) {
        let there: std::collections::BTreeSet<ElementId> =
            self.elements.iter().map(|element| element.id).collect();
        self.learnt.0.retain(|id| there.contains(&id));
    }
}
