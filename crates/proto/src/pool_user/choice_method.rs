//! Sessions that choose their element by observation, not by the pool's policy: by latency ([`LatencyChooser`]), or by the
//! elements' answers to probes ([`super::probe_links`]).
//!
//! All sessions of a machine with one pool learn together. A request lasts from a message to the element until its
//! first answer. A session's first request begins when the element is chosen, so that the connection time counts. A
//! session that closes before an answer teaches nothing; one that loses its element counts as slow.

use super::cached_pool::CachedPool;
use super::probe_links::ElementProbeState;
use super::{PoolUser, SessionId};
use crate::element_choice::{LatencyChooser, ProbeChooser, ProbeSettings};
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Method of choosing a session's element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ChoiceMethod {
    /// By the registrar, with the pool's policy.
    #[default]
    Registrar,
    /// By this user: of two elements drawn at random the faster one ([`LatencyChooser`]).
    Latency,
    /// By this user, with the elements' answers to probes ([`ProbeChooser`]); among elements without answers as with
    /// [`ChoiceMethod::Latency`].
    Probes,
}

/// Number of elements to request if the user chooses: the most that registrars return by default.
pub(super) const CANDIDATES_MAX: u32 = 64;
/// Time without news after which a past latency has the weight 1/e.
const LATENCY_DECAY: Duration = Duration::from_secs(10);

/// Observations of all sessions with a pool.
#[derive(Debug)]
pub(super) struct PoolObservations {
    pub(super) latency: LatencyChooser,
    pub(super) probes: ProbeChooser,
    /// Elements that were probed.
    pub(super) probe_states: BTreeMap<ElementId, ElementProbeState>,
    /// Sessions that wait for answers to probes.
    pub(super) waiting_sessions: Vec<SessionId>,
}

impl Default for PoolObservations {
    fn default() -> PoolObservations {
        PoolObservations {
            latency: LatencyChooser::new(LATENCY_DECAY),
            probes: ProbeChooser::new(ProbeSettings::default()),
            probe_states: BTreeMap::new(),
            waiting_sessions: Vec::new(),
        }
    }
}

/// Result for a choice that has to wait for answers to probes.
#[derive(Debug)]
pub(super) struct MustAwaitAnswers;

/// A request in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenRequest {
    element: ElementId,
    since: Duration,
}

impl PoolUser {
    /// Notes a message from the session to its element.
    pub fn handle_sent(&mut self, now: Duration, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else {
            return;
        };
        if session.choice_method != ChoiceMethod::Registrar
            && session.request.is_none()
            && let Some(element) = session.element()
        {
            self.begin_request(now, id, element);
        }
    }

    /// Notes a message from the session's element.
    pub fn handle_received(&mut self, now: Duration, id: SessionId) {
        self.end_request(id, |observations, request| {
            let duration = now.saturating_sub(request.since);
            observations
                .latency
                .end_request(now, request.element, duration);
        });
    }

    pub(super) fn fail_request(&mut self, now: Duration, id: SessionId) {
        self.end_request(id, |observations, request| {
            let duration = now.saturating_sub(request.since);
            observations
                .latency
                .fail_request(now, request.element, duration);
        });
    }

    pub(super) fn abandon_request(&mut self, id: SessionId) {
        self.end_request(id, |observations, request| {
            observations.latency.abandon_request(request.element)
        });
    }

    /// Returns the element for a session without a preference. `has_waited` is true if the session has waited for answers
    /// to probes.
    pub(super) fn choose_element(
        &mut self,
        now: Duration,
        id: SessionId,
        has_waited: bool,
    ) -> Result<Option<PoolElement>, MustAwaitAnswers> {
        let Some(session) = self.sessions.get(&id) else {
            return Ok(None);
        };
        let (handle, choose) = (session.handle.clone(), session.choice_method);
        let chosen = match choose {
            ChoiceMethod::Registrar => {
                let pool = self.pools.get_mut(&handle);
                let element = pool.and_then(|pool| pool.select(now, &mut self.hunt.random));
                return Ok(element.cloned());
            }
            ChoiceMethod::Latency => self.choose_by_latency(now, &handle),
            ChoiceMethod::Probes => self.choose_by_probes(now, &handle, id, has_waited)?,
        };
        let pool = self.pools.get_mut(&handle);
        let element = pool.and_then(|pool| pool.mark_selected(chosen?).cloned());
        if let Some(element) = &element {
            self.begin_request(now, id, element.id);
        }
        Ok(element)
    }

    fn choose_by_latency(&mut self, now: Duration, handle: &PoolHandle) -> Option<ElementId> {
        let pool = self.pools.get_mut(handle)?;
        let candidates = pool.candidates(now);
        let (latency, random) = (&pool.observations.latency, &mut self.hunt.random);
        let index = latency.choose(&candidates, &mut |end| random.below(end))?;
        Some(candidates[index])
    }

    fn begin_request(&mut self, now: Duration, id: SessionId, element: ElementId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.request = Some(OpenRequest {
            element,
            since: now,
        });
        if let Some(pool) = self.pools.get_mut(&session.handle) {
            pool.observations.latency.begin_request(element);
        }
    }

    fn end_request(
        &mut self,
        id: SessionId,
        record: impl FnOnce(&mut PoolObservations, OpenRequest),
    ) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if let Some(request) = session.request.take()
            && let Some(pool) = self.pools.get_mut(&session.handle)
        {
            record(&mut pool.observations, request);
        }
    }
}

impl CachedPool {
    /// Forgets observations of elements that are not in the pool any more.
    pub(super) fn forget_removed_elements(&mut self) {
        let present: BTreeSet<ElementId> = self.elements.iter().map(|element| element.id).collect();
        self.observations
            .latency
            .retain_elements(|id| present.contains(&id));
        self.observations
            .probe_states
            .retain(|id, _| present.contains(id));
    }
}
