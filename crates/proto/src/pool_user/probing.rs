//! Sessions that choose by what elements answer to probes ([`ByProbes`](crate::choice::ByProbes), Prequal).
//!
//! A probe goes where an element's registrar reaches it, to its ASAP transport, over a link that all elements there share. An element has
//! one probe at a time. A session begins at once if answers of late are there, else it waits for the first of them, for
//! [`PATIENCE`] at most.
//!
//! An element that has never answered (rsplib's, an unmodified server of which nothing can be seen) is *mute*. It is used all the same:
//! as large a share of the choices as they have of the pool is made among mute elements, by latency; the others are made by the answers.

use super::choose::{Later, Learnt};
use super::pool::Pool;
use super::{Link, PoolUser, SessionId, Timer};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, SctpTransport, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

/// After so long a probe counts as lost; a session waits no longer for answers. As long as answers are believed.
const PATIENCE: Duration = Duration::from_secs(1);
/// After so long a mute element is probed again, twice as long each time.
const MUTE_FOR: Duration = Duration::from_secs(1);
/// The most that may become.
const MUTE_MAX: Duration = Duration::from_secs(64);
/// A link on which nothing was asked for so long is closed.
const IDLE: Duration = Duration::from_secs(30);

/// How an element answers probes.
#[derive(Debug, Default)]
pub(super) struct Voice {
    /// The probe under way: since when, and on which link.
    asked: Option<(Duration, Link)>,
    /// It counts as lost. Its answer may still come.
    is_late: bool,
    has_answered: bool,
    /// Probes lost in a row.
    lost: u32,
    /// Not to be probed before.
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

/// Links that probes go by.
#[derive(Debug, Default)]
pub(super) struct Ways {
    by_place: BTreeMap<SctpTransport, Link>,
    ways: BTreeMap<Link, Way>,
}

#[derive(Debug)]
struct Way {
    to: SctpTransport,
    used: Duration,
    /// As it is in the timers.
    due: Duration,
}

impl Ways {
    /// Whether probes go by this link.
    pub(super) fn contains(&self, link: Link) -> bool {
        self.ways.contains_key(&link)
    }
}

impl PoolUser {
    /// The element of a session that chooses by probes. `is_late`: it has waited for answers.
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

    /// When a session waits no longer for answers.
    pub(super) fn answers_until(now: Duration) -> Duration {
        now + PATIENCE
    }

    /// Asks a few elements beside a choice how busy they are.
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

    /// Closes a link that is not used.
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

    /// A link that probes went by is gone, and they are lost.
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

    /// An element says how busy it is: requests in flight, and what they take in microseconds.
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
        // Nobody else is believed, and nobody unasked.
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

    /// Sessions that wait for answers go on if these are enough, or no more are to be expected.
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
    /// Probes that have had no answer for too long are lost.
    fn lose_late(&mut self, now: Duration) {
        for voice in self.voices.values_mut() {
            let is_due = |(since, _)| since + PATIENCE <= now;
            if !voice.is_late && voice.asked.is_some_and(is_due) {
                voice.lose(now);
            }
        }
    }

    /// Whether one of these was asked whose answer is worth waiting for: not one that has not answered last time either.
    fn is_asking(&self, ids: &[ElementId]) -> bool {
        let voice = |id: &ElementId| self.voices.get(id);
        let mut voices = ids.iter().filter_map(voice);
        voices.any(|voice| voice.asked.is_some() && voice.lost == 0)
    }
}

impl Pool {
    /// Whom may be chosen: those that are known not to answer probes, and the others.
    fn mute_and_speaking(&mut self, now: Duration) -> (Vec<ElementId>, Vec<ElementId>) {
        let candidates = self.candidates(now);
        candidates.into_iter().partition(|id| {
            let voice = self.learnt.voices.get(id);
            voice.is_some_and(Voice::is_mute) || self.asap_transport(*id).is_none()
        })
    }

    /// Where the element is to be probed, if it is.
    fn askable(&self, now: Duration, id: ElementId) -> Option<&SctpTransport> {
        let voice = self.learnt.voices.get(&id);
        let may_be = voice.is_none_or(|voice| voice.may_be_asked(now));
        self.asap_transport(id).filter(|_| may_be)
    }
}
