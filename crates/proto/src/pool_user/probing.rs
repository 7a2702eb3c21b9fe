//! Sessions that choose by the elements' answers to probes ([`ByProbes`](crate::choice::ByProbes), Prequal).
//!
//! A probe is sent to an element's ASAP transport, at which its registrar reaches it, over a link shared by all
//! elements there. An element has one probe at a time. A session begins at once if recent answers exist; otherwise it
//! waits for the first of them, for [`PATIENCE`] at most.
//!
//! An element that has never answered (rsplib's, or an unmodified server that cannot be observed) is *mute*, but is
//! used all the same: mute elements get their share of the pool as share of the choices, made by latency; the answers
//! decide the other choices.

use super::choose::{Later, Learnt};
use super::pool::Pool;
use super::{Link, PoolUser, SessionId, Timer};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, SctpTransport, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which a probe counts as lost, and a session stops waiting. Equal to the time for which answers are kept.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time after which a mute element is probed again; doubles each time.
const MUTE_FOR: Duration = Duration::from_secs(1);
/// Upper limit of that time.
const MUTE_MAX: Duration = Duration::from_secs(64);
/// Time without a probe after which a link is closed.
const IDLE: Duration = Duration::from_secs(30);

/// State of an element's probes.
#[derive(Debug, Default)]
pub(super) struct Voice {
    /// The open probe: its time, and its link.
    asked: Option<(Duration, Link)>,
    /// True if the probe counts as lost. Its answer may still arrive.
    is_late: bool,
    has_answered: bool,
    /// Number of probes lost in a row.
    lost: u32,
    /// Earliest time of the next probe.
    again: Duration,
}

impl Voice {
    fn is_mute(&self) -> bool {
        !self.has_answered && self.lost > 0
    }

    fn may_be_asked(&self, now: Duration) -> bool {
        (self.asked.is_none() || self.is_late) && self.again <= now
    }

    fn lose(&mut self, now: Duration) {
        self.is_late = true;
        if !self.has_answered {
            self.again = now + (MUTE_FOR * (1 << self.lost.min(16))).min(MUTE_MAX);
        }
        self.lost = self.lost.saturating_add(1);
    }
}

/// Links for probes.
#[derive(Debug, Default)]
pub(super) struct Ways {
    by_place: BTreeMap<SctpTransport, Link>,
    ways: BTreeMap<Link, Way>,
}

#[derive(Debug)]
struct Way {
    to: SctpTransport,
    used: Duration,
    /// Time of the next check, as set in the timers.
    due: Duration,
}

impl Ways {
    /// Returns true if the link is for probes.
    pub(super) fn contains(&self, link: Link) -> bool {
        self.ways.contains_key(&link)
    }
}

impl PoolUser {
    /// Returns the element for a session that chooses by probes. `is_late` is true if the session has waited for
    /// answers.
    pub(super) fn chosen_by_probes(
        &mut self,
        now: Duration,
        handle: &PoolHandle,
        id: SessionId,
        is_late: bool,
    ) -> Result<Option<ElementId>, Later> {
        if !is_late {
            self.probe_some(now, handle);
        }
        let Some(pool) = self.pools.get_mut(handle) else {
            return Ok(None);
        };
        let (mute, speaking) = pool.mute_and_speaking(now);
        let learnt = &mut pool.learnt;
        let random = &mut self.hunt.random;
        let mut below = |end| random.below(end);
        let is_for_mute = !mute.is_empty() && below(mute.len() + speaking.len()) < mute.len();
        let among = if is_for_mute { &mute } else { &speaking };
        let place = if !is_for_mute && learnt.probes.is_informed(now, &speaking) {
            learnt.probes.choose(now, &speaking, &mut below)
        } else if !is_for_mute && !is_late && learnt.is_asking(&speaking) {
            learnt.waiting.push(id);
            return Err(Later);
        } else {
            learnt.latency.choose(among, &mut below)
        };
        Ok(place.map(|place| among[place]))
    }

    /// Returns the time at which a session stops waiting for answers.
    pub(super) fn answers_until(now: Duration) -> Duration {
        now + PATIENCE
    }

    /// Probes a few elements for their load, besides a choice.
    fn probe_some(&mut self, now: Duration, handle: &PoolHandle) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        let candidates = pool.candidates(now);
        if candidates.len() < 2 {
            return;
        }
        pool.learnt.lose_late(now);
        let random = &mut self.hunt.random;
        let probes = &mut pool.learnt.probes;
        let places = probes.probe(&candidates, &mut |end| random.below(end));
        for place in places {
            self.probe(now, handle, candidates[place]);
        }
    }

    fn probe(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) {
        let pool = self.pools.get(handle);
        let Some(at) = pool.and_then(|pool| pool.askable(now, id)).cloned() else {
            return;
        };
        let link = self.way_to(now, at);
        let probe = Message::Probe {
            handle: handle.clone(),
            id,
        };
        self.hunt.send(link, probe);
        if let Some(pool) = self.pools.get_mut(handle) {
            let voice = pool.learnt.voices.entry(id).or_default();
            voice.asked = Some((now, link));
            voice.is_late = false;
        }
    }

    fn way_to(&mut self, now: Duration, to: SctpTransport) -> Link {
        if let Some(link) = self.ways.by_place.get(&to)
            && let Some(way) = self.ways.ways.get_mut(link)
        {
            way.used = now;
            return *link;
        }
        let link = self.hunt.connect(Transport::Sctp(to.clone()));
        self.ways.by_place.insert(to.clone(), link);
        let (used, due) = (now, now + IDLE);
        self.ways.ways.insert(link, Way { to, used, due });
        self.set_timer(Timer::Way(link), None, Some(due));
        link
    }

    /// Closes an idle link.
    pub(super) fn way_due(&mut self, now: Duration, link: Link) {
        let Some(way) = self.ways.ways.get_mut(&link) else {
            return;
        };
        if way.used + IDLE > now {
            way.due = way.used + IDLE;
            let due = way.due;
            return self.set_timer(Timer::Way(link), None, Some(due));
        }
        self.hunt.close(link);
        self.way_lost(now, link);
    }

    /// Handles the loss of a link, with its probes.
    pub(super) fn way_lost(&mut self, now: Duration, link: Link) {
        let Some(way) = self.ways.ways.remove(&link) else {
            return;
        };
        self.ways.by_place.remove(&way.to);
        self.set_timer(Timer::Way(link), Some(way.due), None);
        let mut concerned = Vec::new();
        for (handle, pool) in &mut self.pools {
            for voice in pool.learnt.voices.values_mut() {
                if voice.asked.is_some_and(|(_, asked)| asked == link) {
                    if !voice.is_late {
                        voice.lose(now);
                    }
                    voice.asked = None;
                }
            }
            if !pool.learnt.waiting.is_empty() {
                concerned.push(handle.clone());
            }
        }
        for handle in concerned {
            self.answers_came(now, &handle);
        }
    }

    /// Handles an element's answer: its requests in flight, and their latency in microseconds.
    pub(super) fn probe_answered(
        &mut self,
        now: Duration,
        link: Link,
        (handle, id): (&PoolHandle, ElementId),
        (in_flight, latency_us): (u32, Option<u32>),
    ) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        let Some(voice) = pool.learnt.voices.get_mut(&id) else {
            return;
        };
        // Only the probed element can answer, and only once.
        if voice.asked.is_none_or(|(_, asked)| asked != link) {
            return;
        }
        *voice = Voice {
            has_answered: true,
            ..Voice::default()
        };
        let latency = latency_us.map(|us| Duration::from_micros(us.into()));
        let elements = pool.elements.len();
        let probes = &mut pool.learnt.probes;
        probes.answered(now, id, (in_flight, latency), elements);
        self.answers_came(now, handle);
    }

    /// Resumes sessions that wait for answers, if there are enough, or no more can be expected.
    fn answers_came(&mut self, now: Duration, handle: &PoolHandle) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        if pool.learnt.waiting.is_empty() {
            return;
        }
        let (_, speaking) = pool.mute_and_speaking(now);
        let learnt = &mut pool.learnt;
        if !learnt.probes.is_informed(now, &speaking) && learnt.is_asking(&speaking) {
            return;
        }
        for id in std::mem::take(&mut learnt.waiting) {
            self.session_has_answers(now, id);
        }
    }
}

impl Learnt {
    /// Counts probes without an answer for too long as lost.
    fn lose_late(&mut self, now: Duration) {
        for voice in self.voices.values_mut() {
            let is_due = |(since, _)| since + PATIENCE <= now;
            if !voice.is_late && voice.asked.is_some_and(is_due) {
                voice.lose(now);
            }
        }
    }

    /// Returns true if an open probe to one of these elements is worth waiting for: elements that did not answer the
    /// last probe are not.
    fn is_asking(&self, ids: &[ElementId]) -> bool {
        let voice = |id: &ElementId| self.voices.get(id);
        let mut voices = ids.iter().filter_map(voice);
        voices.any(|voice| voice.asked.is_some() && voice.lost == 0)
    }
}

impl Pool {
    /// Splits the selectable elements: into ones that are known not to answer probes, and the others.
    fn mute_and_speaking(&mut self, now: Duration) -> (Vec<ElementId>, Vec<ElementId>) {
        let candidates = self.candidates(now);
        candidates.into_iter().partition(|id| {
            let voice = self.learnt.voices.get(id);
            voice.is_some_and(Voice::is_mute) || self.asap_transport(*id).is_none()
        })
    }

    /// Returns the address for a probe, if the element may be probed.
    fn askable(&self, now: Duration, id: ElementId) -> Option<&SctpTransport> {
        let voice = self.learnt.voices.get(&id);
        let may_be = voice.is_none_or(|voice| voice.may_be_asked(now));
        self.asap_transport(id).filter(|_| may_be)
    }
}
