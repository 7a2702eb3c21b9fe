//! Sessions that choose by the elements' answers to probes ([`ProbeChooser`](crate::element_choice::ProbeChooser), Prequal).
//!
//! A probe is sent to an element's ASAP transport, at which its registrar reaches it, over a link shared by all
//! elements there. An element has one probe at a time. A session begins at once if recent answers exist; otherwise it
//! waits for the first of them, for [`ANSWER_TIMEOUT`] at most.
//!
//! An element that has never answered (rsplib's, or an unmodified server that cannot be observed) is *mute*, but is
//! used all the same: mute elements get their share of the pool as share of the choices, made by latency; the answers
//! decide the other choices.

use super::cached_pool::CachedPool;
use super::choice_method::{MustAwaitAnswers, PoolObservations};
use super::{LinkId, PoolUser, SessionId, Timer};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, SctpTransport, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which a probe counts as lost, and a session stops waiting. Equal to the time for which answers are kept.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which a mute element is probed again; doubles each time.
const SILENT_FOR: Duration = Duration::from_secs(1);
/// Upper limit of the time after which a mute element is probed again.
const SILENT_MAX: Duration = Duration::from_secs(64);
/// Time without a probe after which a link is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// State of an element's probes.
#[derive(Debug, Default)]
pub(super) struct ElementProbeState {
    /// The open probe: its time, and its link.
    open_probe: Option<(Duration, LinkId)>,
    /// True if the probe counts as lost. Its answer may still arrive.
    is_lost: bool,
    has_answered: bool,
    /// Number of probes lost in a row.
    lost_in_a_row: u32,
    /// Earliest time of the next probe.
    next_probe: Duration,
}

impl ElementProbeState {
    fn is_silent(&self) -> bool {
        !self.has_answered && self.lost_in_a_row > 0
    }

    fn may_be_probed(&self, now: Duration) -> bool {
        (self.open_probe.is_none() || self.is_lost) && self.next_probe <= now
    }

    fn record_loss(&mut self, now: Duration) {
        self.is_lost = true;
        if !self.has_answered {
            self.next_probe =
                now + (SILENT_FOR * (1 << self.lost_in_a_row.min(16))).min(SILENT_MAX);
        }
        self.lost_in_a_row = self.lost_in_a_row.saturating_add(1);
    }
}

/// Links to elements on which probes are sent.
#[derive(Debug, Default)]
pub(super) struct ProbeLinks {
    by_transport: BTreeMap<SctpTransport, LinkId>,
    links: BTreeMap<LinkId, ProbeLink>,
}

#[derive(Debug)]
struct ProbeLink {
    transport: SctpTransport,
    last_used: Duration,
    /// Time of the next check, as set in the timers.
    due: Duration,
}

impl ProbeLinks {
    /// Returns true if the link is for probes.
    pub(super) fn contains(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }
}

impl PoolUser {
    /// Returns the element for a session that chooses by probes. `is_lost` is true if the session has waited for
    /// answers.
    pub(super) fn choose_by_probes(
        &mut self,
        now: Duration,
        handle: &PoolHandle,
        id: SessionId,
        has_waited: bool,
    ) -> Result<Option<ElementId>, MustAwaitAnswers> {
        if !has_waited {
            self.send_probes(now, handle);
        }
        let Some(pool) = self.pools.get_mut(handle) else {
            return Ok(None);
        };
        let (silent, responsive) = pool.split_silent_and_responsive(now);
        let observations = &mut pool.observations;
        let random = &mut self.hunt.random;
        let mut below = |end| random.below(end);
        let picks_silent =
            !silent.is_empty() && below(silent.len() + responsive.len()) < silent.len();
        let candidates = if picks_silent { &silent } else { &responsive };
        if !picks_silent {
            observations.probes.remove_stale_answers(now, &responsive);
        }
        let index = if !picks_silent && observations.probes.has_enough_answers() {
            observations.probes.choose(now, &responsive, &mut below)
        } else if !picks_silent && !has_waited && observations.is_awaiting(&responsive) {
            observations.waiting_sessions.push(id);
            return Err(MustAwaitAnswers);
        } else {
            observations.latency.choose(candidates, &mut below)
        };
        Ok(index.map(|place| candidates[place]))
    }

    /// Returns the time at which a session stops waiting for answers.
    pub(super) fn answer_deadline(now: Duration) -> Duration {
        now + ANSWER_TIMEOUT
    }

    /// Probes a few elements for their load, besides a choice.
    fn send_probes(&mut self, now: Duration, handle: &PoolHandle) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        let candidates = pool.candidates(now);
        if candidates.len() < 2 {
            return;
        }
        pool.observations.expire_probes(now);
        let random = &mut self.hunt.random;
        let probes = &mut pool.observations.probes;
        let indices = probes.choose_probe_targets(&candidates, &mut |end| random.below(end));
        for index in indices {
            self.probe(now, handle, candidates[index]);
        }
    }

    fn probe(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) {
        let pool = self.pools.get(handle);
        let Some(at) = pool.and_then(|pool| pool.probe_target(now, id)).cloned() else {
            return;
        };
        let link = self.probe_link_to(now, at);
        let probe = Message::Probe {
            handle: handle.clone(),
            id,
        };
        self.hunt.send(link, probe);
        if let Some(pool) = self.pools.get_mut(handle) {
            let state = pool.observations.probe_states.entry(id).or_default();
            state.open_probe = Some((now, link));
            state.is_lost = false;
        }
    }

    fn probe_link_to(&mut self, now: Duration, to: SctpTransport) -> LinkId {
        if let Some(link) = self.probe_links.by_transport.get(&to)
            && let Some(probe_link) = self.probe_links.links.get_mut(link)
        {
            probe_link.last_used = now;
            return *link;
        }
        let link = self.hunt.connect(Transport::Sctp(to.clone()));
        self.probe_links.by_transport.insert(to.clone(), link);
        let (used, due) = (now, now + IDLE_TIMEOUT);
        self.probe_links.links.insert(
            link,
            ProbeLink {
                transport: to,
                last_used: used,
                due,
            },
        );
        self.set_timer(Timer::ProbeLink(link), None, Some(due));
        link
    }

    /// Closes an idle link.
    pub(super) fn on_probe_link_due(&mut self, now: Duration, link: LinkId) {
        let Some(probe_link) = self.probe_links.links.get_mut(&link) else {
            return;
        };
        if probe_link.last_used + IDLE_TIMEOUT > now {
            probe_link.due = probe_link.last_used + IDLE_TIMEOUT;
            let due = probe_link.due;
            return self.set_timer(Timer::ProbeLink(link), None, Some(due));
        }
        self.hunt.close(link);
        self.on_probe_link_lost(now, link);
    }

    /// Handles the loss of a link, with its probes.
    pub(super) fn on_probe_link_lost(&mut self, now: Duration, link: LinkId) {
        let Some(probe_link) = self.probe_links.links.remove(&link) else {
            return;
        };
        self.probe_links.by_transport.remove(&probe_link.transport);
        self.set_timer(Timer::ProbeLink(link), Some(probe_link.due), None);
        let mut affected_pools = Vec::new();
        for (handle, pool) in &mut self.pools {
            for state in pool.observations.probe_states.values_mut() {
                if state.open_probe.is_some_and(|(_, asked)| asked == link) {
                    if !state.is_lost {
                        state.record_loss(now);
                    }
                    state.open_probe = None;
                }
            }
            if !pool.observations.waiting_sessions.is_empty() {
                affected_pools.push(handle.clone());
            }
        }
        for handle in affected_pools {
            self.resume_waiting_sessions(now, &handle);
        }
    }

    /// Handles an element's answer: its requests in flight, and their latency in microseconds.
    pub(super) fn on_probe_answer(
        &mut self,
        now: Duration,
        link: LinkId,
        (handle, id): (&PoolHandle, ElementId),
        (in_flight, latency_us): (u32, Option<u32>),
    ) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        let Some(state) = pool.observations.probe_states.get_mut(&id) else {
            return;
        };
        // Only the probed element can answer, and only once.
        if state.open_probe.is_none_or(|(_, asked)| asked != link) {
            return;
        }
        *state = ElementProbeState {
            has_answered: true,
            ..ElementProbeState::default()
        };
        let latency = latency_us.map(|us| Duration::from_micros(us.into()));
        let elements = pool.elements.len();
        let probes = &mut pool.observations.probes;
        probes.record_answer(now, id, (in_flight, latency), elements);
        self.resume_waiting_sessions(now, handle);
    }

    /// Resumes sessions that wait for answers, if there are enough, or no more can be expected.
    fn resume_waiting_sessions(&mut self, now: Duration, handle: &PoolHandle) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        if pool.observations.waiting_sessions.is_empty() {
            return;
        }
        let (_, responsive) = pool.split_silent_and_responsive(now);
        let observations = &mut pool.observations;
        observations.probes.remove_stale_answers(now, &responsive);
        if !observations.probes.has_enough_answers() && observations.is_awaiting(&responsive) {
            return;
        }
        for id in std::mem::take(&mut observations.waiting_sessions) {
            self.on_probe_answers(now, id);
        }
    }
}

impl PoolObservations {
    /// Counts probes without an answer for too long as lost.
    fn expire_probes(&mut self, now: Duration) {
        for state in self.probe_states.values_mut() {
            let is_due = |(since, _)| since + ANSWER_TIMEOUT <= now;
            if !state.is_lost && state.open_probe.is_some_and(is_due) {
                state.record_loss(now);
            }
        }
    }

    /// Returns true if an open probe to one of these elements is worth waiting for: elements that did not answer the
    /// last probe are not.
    fn is_awaiting(&self, ids: &[ElementId]) -> bool {
        let state = |id: &ElementId| self.probe_states.get(id);
        let mut voices = ids.iter().filter_map(state);
        voices.any(|state| state.open_probe.is_some() && state.lost_in_a_row == 0)
    }
}

impl CachedPool {
    /// Splits the selectable elements: into ones that are known not to answer probes, and the others.
    fn split_silent_and_responsive(&mut self, now: Duration) -> (Vec<ElementId>, Vec<ElementId>) {
        let candidates = self.candidates(now);
        candidates.into_iter().partition(|id| {
            let state = self.observations.probe_states.get(id);
            state.is_some_and(ElementProbeState::is_silent) || self.asap_transport(*id).is_none()
        })
    }

    /// Returns the address for a probe, if the element may be probed.
    fn probe_target(&self, now: Duration, id: ElementId) -> Option<&SctpTransport> {
        let state = self.observations.probe_states.get(&id);
        let may_be = state.is_none_or(|state| state.may_be_probed(now));
        self.asap_transport(id).filter(|_| may_be)
    }
}
