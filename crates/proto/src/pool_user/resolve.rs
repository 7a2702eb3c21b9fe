//! Handle resolution with a cache (RFC 5352 section 3.3), and reports of unreachable elements (section 3.5).

use super::choose::CANDIDATES;
use super::event::{Event, ResolveError};
use super::pool::Pool;
use super::{Link, PoolUser, RequestId, SessionId, Timer};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Cause, CauseCode, ElementId, Policy, PolicyKind};
use holdfast_wire::rserpool::{PoolElement, PoolHandle};
use std::time::Duration;

/// Recipient of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waiting {
    One(RequestId),
    All(RequestId),
    Session(SessionId),
}

/// An open request about a pool.
#[derive(Debug)]
pub(super) struct Pending {
    waiting: Vec<Waiting>,
    /// Most elements wanted by a recipient, if any names a number.
    items: Option<u32>,
    /// Time of the request to the home registrar; none if none was sent.
    asked: Option<Duration>,
    /// End of the total wait.
    until: Duration,
    /// Time of the next timeout, as set in the timers.
    due: Duration,
}

impl PoolUser {
    /// Answers from the cache or asks a registrar. C1: "Be consulted before sending a handle resolution."
    pub(super) fn want(&mut self, now: Duration, handle: PoolHandle, waiting: Waiting) {
        let fetched = self.pools.get(&handle).and_then(|pool| pool.fetched);
        let usable = fetched.is_some_and(|fetched| now < fetched + self.config.usable_for);
        // C3: "in parallel, update the cache and answer the request"; C4: "If the cache entry is NOT stale, the
        // endpoint SHOULD NOT send a handle resolution request".
        if usable && self.answer(now, &handle, waiting) {
            self.refresh(now, handle);
        } else {
            self.ask(now, handle, Some(waiting));
        }
    }

    /// Asks a registrar if the cache is stale. C2: "If the cache entry is determined to be stale upon a cache hit, a
    /// handle resolution message SHOULD be sent".
    pub(super) fn refresh(&mut self, now: Duration, handle: PoolHandle) {
        let fetched = self.pools.get(&handle).and_then(|pool| pool.fetched);
        if fetched.is_none_or(|fetched| fetched + self.config.fresh_for <= now) {
            self.ask(now, handle, None);
        }
    }

    /// Answers from the cache. Returns true if there was an answer.
    fn answer(&mut self, now: Duration, handle: &PoolHandle, waiting: Waiting) -> bool {
        let Some(pool) = self.pools.get_mut(handle) else {
            return false;
        };
        let event = match waiting {
            Waiting::One(request) => {
                let Some(element) = pool.select(now, &mut self.hunt.random) else {
                    return false;
                };
                Event::Selected {
                    request,
                    element: element.clone(),
                }
            }
            Waiting::All(request) => {
                pool.use_all();
                Event::Resolved {
                    request,
                    policy: pool.policy,
                    elements: pool.elements.clone(),
                }
            }
            Waiting::Session(session) => return self.session_seeks(now, session),
        };
        self.hunt.event(event);
        true
    }

    fn fail(&mut self, now: Duration, waiting: Waiting, error: &ResolveError) {
        match waiting {
            Waiting::One(request) | Waiting::All(request) => self.hunt.event(Event::Failed {
                request,
                error: error.clone(),
            }),
            Waiting::Session(session) => self.session_pauses(now, session, error.clone()),
        }
    }

    /// Asks a registrar about the pool, unless a request is open.
    pub(super) fn ask(&mut self, now: Duration, handle: PoolHandle, waiting: Option<Waiting>) {
        self.ask_for(now, handle, waiting, None);
    }

    /// Asks a registrar for up to `items` elements of the pool. A request that is open already may return fewer.
    pub(super) fn ask_for(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        waiting: Option<Waiting>,
        items: Option<u32>,
    ) {
        self.hunt.start(now);
        let wide = self.pools.get(&handle).is_some_and(|pool| pool.wide);
        let items = items.max(wide.then_some(CANDIDATES));
        if let Some(pending) = self.pending.get_mut(&handle) {
            pending.waiting.extend(waiting);
            pending.items = pending.items.max(items);
            return;
        }
        let until = now + self.config.answer_timeout * (1 + self.config.retries_max);
        let pending = Pending {
            waiting: waiting.into_iter().collect(),
            items,
            asked: None,
            until,
            due: until,
        };
        self.pending.insert(handle.clone(), pending);
        self.timers.insert((until, Timer::Answer(handle.clone())));
        self.send_question(now, &handle);
    }

    fn send_question(&mut self, now: Duration, handle: &PoolHandle) {
        let (Some(link), Some(pending)) = (self.hunt.home(), self.pending.get_mut(handle)) else {
            return;
        };
        let before = pending.due;
        pending.asked = Some(now);
        pending.due = pending.until.min(now + self.config.answer_timeout);
        let due = pending.due;
        let items = pending.items.or(self.config.items);
        let message = Message::HandleResolution {
            updates: self.pools.get(handle).is_some_and(|pool| pool.watched),
            handle: handle.clone(),
            items,
        };
        self.hunt.send(link, message);
        self.set_timer(Timer::Answer(handle.clone()), Some(before), Some(due));
    }

    /// Sends everything that waits to a new home registrar: open requests, reports, and requests for watched pools, as
    /// "the PU will need to re-send an ASAP_HANDLE_RESOLUTION message with the 'S' bit set" (section 2.2.5).
    pub(super) fn ask_all(&mut self, now: Duration) {
        let waiting: Vec<PoolHandle> = self.pending.keys().cloned().collect();
        for handle in &waiting {
            self.send_question(now, handle);
        }
        let watched = self.pools.iter().filter(|(_, pool)| pool.watched);
        let watched: Vec<PoolHandle> = watched.map(|(handle, _)| handle.clone()).collect();
        for handle in watched {
            self.ask(now, handle, None);
        }
        if let Some(link) = self.hunt.home() {
            for (handle, id) in std::mem::take(&mut self.reports) {
                let report = Message::EndpointUnreachable { handle, id };
                self.hunt.send(link, report);
            }
        }
    }

    /// Marks all requests as unsent after the loss of the home registrar.
    pub(super) fn none_asked(&mut self) {
        let asked: Vec<PoolHandle> = self.pending.keys().cloned().collect();
        for handle in asked {
            if let Some(pending) = self.pending.get_mut(&handle) {
                let before = pending.due;
                pending.asked = None;
                pending.due = pending.until;
                let due = pending.due;
                self.set_timer(Timer::Answer(handle), Some(before), Some(due));
            }
        }
    }

    /// Handles T1-ENRPrequest. The registrar is left at once: repeating the request over a transport that loses no
    /// messages would gain nothing. (RFC 5352 section 3.7.2 repeats it and hunts in parallel.)
    pub(super) fn answer_due(&mut self, now: Duration, handle: PoolHandle) {
        let Some(pending) = self.pending.get(&handle) else {
            return;
        };
        let (asked, over) = (pending.asked, pending.until <= now);
        if over {
            let error = match asked {
                Some(_) => ResolveError::Unanswered,
                None => ResolveError::NoRegistrar,
            };
            self.give_up(now, &handle, &error);
        }
        if asked.is_some_and(|asked| asked + self.config.answer_timeout <= now) {
            let change = self.hunt.give_home_up(now);
            self.changed(now, change);
        }
    }

    fn give_up(&mut self, now: Duration, handle: &PoolHandle, error: &ResolveError) {
        let Some(pending) = self.end_question(handle) else {
            return;
        };
        if let Some(pool) = self.pools.get_mut(handle) {
            // Watched pools, and pools with sessions, are requested again.
            let (before, due) = (pool.due, Some(now + self.config.fresh_for));
            pool.due = due;
            self.set_timer(Timer::Cache(handle.clone()), before, due);
        }
        for waiting in pending.waiting {
            self.fail(now, waiting, error);
        }
    }

    fn end_question(&mut self, handle: &PoolHandle) -> Option<Pending> {
        let pending = self.pending.remove(handle)?;
        self.timers
            .remove(&(pending.due, Timer::Answer(handle.clone())));
        Some(pending)
    }

    /// Handles an answer, or an update of a watched pool.
    pub(super) fn resolved(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        updates: Option<Link>,
        policy: Option<Policy>,
        elements: Vec<PoolElement>,
    ) {
        let pending = self.end_question(&handle);
        let known = self.pools.contains_key(&handle);
        if pending.is_none() && !known {
            // An unrequested answer takes no memory.
            return;
        }
        let pool = self.pools.entry(handle.clone()).or_default();
        let kind = policy.map_or(PolicyKind::RoundRobin, |policy| policy.kind());
        let changed = pool.refill(now, kind, elements);
        pool.updates = updates;
        self.told(now, &handle, changed);
        for waiting in pending.into_iter().flat_map(|pending| pending.waiting) {
            if !self.answer(now, &handle, waiting) {
                self.fail(now, waiting, &ResolveError::NoElement);
            }
        }
    }

    /// Handles a negative answer.
    pub(super) fn refused(&mut self, now: Duration, handle: PoolHandle, causes: Vec<Cause>) {
        let pending = self.end_question(&handle);
        let unknown = |cause: &Cause| cause.code == CauseCode::UNKNOWN_POOL_HANDLE;
        let error = if causes.iter().any(unknown) {
            ResolveError::UnknownPool
        } else {
            ResolveError::Refused(causes)
        };
        if let Some(pool) = self.pools.get_mut(&handle) {
            // "If a negative response is returned, no further updates to the Pool (when it is created) will occur."
            pool.updates = None;
            let changed = error == ResolveError::UnknownPool && pool.clear(now);
            self.told(now, &handle, changed);
        }
        for waiting in pending.into_iter().flat_map(|pending| pending.waiting) {
            self.fail(now, waiting, &error);
        }
    }

    /// Reports changed data of a watched pool, and schedules the next check.
    fn told(&mut self, now: Duration, handle: &PoolHandle, changed: bool) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        // A session needs another element to fail over to.
        let scarce = pool.sessions > 0 && pool.elements.len() < 2;
        let wait = if scarce || pool.watched && pool.updates.is_none() {
            self.config.fresh_for
        } else {
            self.config.usable_for
        };
        let (before, due) = (pool.due, Some(now + wait));
        pool.due = due;
        if pool.watched && changed {
            let elements = pool.elements.clone();
            self.hunt.event(Event::Changed {
                handle: handle.clone(),
                elements,
            });
        }
        self.set_timer(Timer::Cache(handle.clone()), before, due);
    }

    /// Handles an expired cache entry: an unused one is removed. C2: "Have a stale timeout timer associated with each
    /// cache entry."
    pub(super) fn cache_due(&mut self, now: Duration, handle: PoolHandle) {
        let Some(pool) = self.pools.get_mut(&handle) else {
            return;
        };
        pool.due = None;
        if pool.watched || pool.sessions > 0 {
            self.ask(now, handle, None);
        } else {
            self.pools.remove(&handle);
        }
    }

    /// Reports an unreachable element. "It should be noted that an ASAP Endpoint MUST report no more than once each
    /// time it encounters such an event."
    pub(super) fn unreachable(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) {
        if !self.avoid(now, handle, id) {
            return;
        }
        if let Some(link) = self.hunt.home() {
            let handle = handle.clone();
            self.hunt
                .send(link, Message::EndpointUnreachable { handle, id });
        } else {
            self.reports.insert((handle.clone(), id));
        }
    }

    /// Excludes an element from selection for a while. Returns true if it was not excluded before.
    pub(super) fn avoid(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) -> bool {
        let pool: &mut Pool = self.pools.entry(handle.clone()).or_default();
        let is_news = !pool.is_missed(now, id);
        if is_news {
            pool.miss(now, id, (self.config.avoid_for, self.config.avoid_max));
        }
        is_news
    }
}
