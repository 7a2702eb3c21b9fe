//! Sessions that choose their element by observation, not by the pool's policy: by latency ([`ByLatency`]), or by the
//! elements' answers to probes ([`super::probing`]).
//!
//! All sessions of a machine with one pool learn together. A request lasts from a message to the element until its
//! first answer. A session's first request begins when the element is chosen, so that the connection time counts. A
//! session that closes before an answer teaches nothing; one that loses its element counts as slow.

use super::pool::Pool;
use super::probing::Voice;
use super::{PoolUser, SessionId};
use crate::choice::{ByLatency, ByProbes, Probing};
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Method of choosing a session's element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choose {
    /// By the registrar, with the pool's policy.
    #[default]
    Registrar,
    /// By this user: of two elements drawn at random the faster one ([`ByLatency`]).
    Latency,
    /// By this user, with the elements' answers to probes ([`ByProbes`]); among elements without answers as with
    /// [`Choose::Latency`].
    Probes,
}

/// Number of elements to request if the user chooses: the most that registrars return by default.
pub(super) const CANDIDATES: u32 = 64;
/// Time without news after which a past latency has the weight 1/e.
const DECAY: Duration = Duration::from_secs(10);

/// Observations of all sessions with a pool.
#[derive(Debug)]
pub(super) struct Learnt {
    pub(super) latency: ByLatency,
    pub(super) probes: ByProbes,
    /// Elements that were probed.
    pub(super) voices: BTreeMap<ElementId, Voice>,
    /// Sessions that wait for answers to probes.
    pub(super) waiting: Vec<SessionId>,
}

impl Default for Learnt {
    fn default() -> Learnt {
        Learnt {
            latency: ByLatency::new(DECAY),
            probes: ByProbes::new(Probing::default()),
            voices: BTreeMap::new(),
            waiting: Vec::new(),
        }
    }
}

/// Result for a choice that has to wait for answers to probes.
#[derive(Debug)]
pub(super) struct Later;

/// A request in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    element: ElementId,
    since: Duration,
}

impl PoolUser {
    /// Notes a message from the session to its element.
    pub fn handle_sent(&mut self, now: Duration, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else {
            return;
        };
        if session.choose != Choose::Registrar
            && session.request.is_none()
            && let Some(element) = session.element()
        {
            self.begin_request(now, id, element);
        }
    }

    /// Notes a message from the session's element.
    pub fn handle_heard(&mut self, now: Duration, id: SessionId) {
        self.end_request(id, |learnt, request| {
            let took = now.saturating_sub(request.since);
            learnt.latency.end(now, request.element, took);
        });
    }

    pub(super) fn request_failed(&mut self, now: Duration, id: SessionId) {
        self.end_request(id, |learnt, request| {
            let took = now.saturating_sub(request.since);
            learnt.latency.failed(now, request.element, took);
        });
    }

    pub(super) fn request_abandoned(&mut self, id: SessionId) {
        self.end_request(id, |learnt, request| {
            learnt.latency.abandon(request.element)
        });
    }

    /// Returns the element for a session without a preference. `is_late` is true if the session has waited for answers
    /// to probes.
    pub(super) fn chosen(
        &mut self,
        now: Duration,
        id: SessionId,
        is_late: bool,
    ) -> Result<Option<PoolElement>, Later> {
        let Some(session) = self.sessions.get(&id) else {
            return Ok(None);
        };
        let (handle, choose) = (session.handle.clone(), session.choose);
        let chosen = match choose {
            Choose::Registrar => {
                let pool = self.pools.get_mut(&handle);
                let element = pool.and_then(|pool| pool.select(now, &mut self.hunt.random));
                return Ok(element.cloned());
            }
            Choose::Latency => self.chosen_by_latency(now, &handle),
            Choose::Probes => self.chosen_by_probes(now, &handle, id, is_late)?,
        };
        let pool = self.pools.get_mut(&handle);
        let element = pool.and_then(|pool| pool.take(chosen?).cloned());
        if let Some(element) = &element {
            self.begin_request(now, id, element.id);
        }
        Ok(element)
    }

    fn chosen_by_latency(&mut self, now: Duration, handle: &PoolHandle) -> Option<ElementId> {
        let pool = self.pools.get_mut(handle)?;
        let candidates = pool.candidates(now);
        let (latency, random) = (&pool.learnt.latency, &mut self.hunt.random);
        let place = latency.choose(&candidates, &mut |end| random.below(end))?;
        Some(candidates[place])
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
            pool.learnt.latency.begin(element);
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
    /// Forgets observations of elements that are not in the pool any more.
    pub(super) fn forget_others(&mut self) {
        let there: BTreeSet<ElementId> = self.elements.iter().map(|element| element.id).collect();
        self.learnt.latency.retain(|id| there.contains(&id));
        self.learnt.voices.retain(|id, _| there.contains(id));
    }
}
