//! Handle resolution with a cache (RFC 5352 section 3.3), and reports of unreachable elements (section 3.5).

use super::cached_pool::CachedPool;
use super::choice_method::CANDIDATES_MAX;
use super::event::{Event, ResolveError};
use super::{LinkId, PoolUser, RequestId, SessionId, Timer};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{CauseCode, ElementId, ErrorCause, Policy, PolicyKind};
use holdfast_wire::rserpool::{PoolElement, PoolHandle};
use std::time::Duration;

/// Recipient of a registrar's answer about a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResolutionRecipient {
    Selection(RequestId),
    Resolution(RequestId),
    Session(SessionId),
}

/// An open request about a pool.
#[derive(Debug)]
pub(super) struct PendingResolution {
    recipients: Vec<ResolutionRecipient>,
    /// Most elements wanted by a recipient, if any names a number.
    items: Option<u32>,
    /// Time of the request to the home registrar; none if none was sent.
    sent_at: Option<Duration>,
    /// End of the total wait.
    deadline: Duration,
    /// Time of the next timeout, as set in the timers.
    due: Duration,
}

impl PoolUser {
    /// Answers from the cache or asks a registrar. C1: "Be consulted before sending a handle resolution."
    pub(super) fn request_pool(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        recipient: ResolutionRecipient,
    ) {
        let fetched = self.pools.get(&handle).and_then(|pool| pool.fetched);
        let usable = fetched.is_some_and(|fetched| now < fetched + self.config.cache_usable_for);
        // C3: "in parallel, update the cache and answer the request"; C4: "If the cache entry is NOT stale, the
        // endpoint SHOULD NOT send a handle resolution request".
        if usable && self.answer_from_cache(now, &handle, recipient) {
            self.refresh_stale_cache(now, handle);
        } else {
            self.request_resolution(now, handle, Some(recipient));
        }
    }

    /// Asks a registrar if the cache is stale. C2: "If the cache entry is determined to be stale upon a cache hit, a
    /// handle resolution message SHOULD be sent".
    pub(super) fn refresh_stale_cache(&mut self, now: Duration, handle: PoolHandle) {
        let fetched = self.pools.get(&handle).and_then(|pool| pool.fetched);
        if fetched.is_none_or(|fetched| fetched + self.config.cache_fresh_for <= now) {
            self.request_resolution(now, handle, None);
        }
    }

    /// Answers from the cache. Returns true if there was an answer.
    fn answer_from_cache(
        &mut self,
        now: Duration,
        handle: &PoolHandle,
        recipient: ResolutionRecipient,
    ) -> bool {
        let Some(pool) = self.pools.get_mut(handle) else {
            return false;
        };
        let event = match recipient {
            ResolutionRecipient::Selection(request) => {
                let Some(element) = pool.select(now, &mut self.hunt.random) else {
                    return false;
                };
                Event::Selected {
                    request,
                    element: element.clone(),
                }
            }
            ResolutionRecipient::Resolution(request) => {
                pool.mark_all_selected();
                Event::Resolved {
                    request,
                    policy: pool.policy,
                    elements: pool.elements.clone(),
                }
            }
            ResolutionRecipient::Session(session) => return self.seek_element(now, session),
        };
        self.hunt.push_event(event);
        true
    }

    fn fail_recipient(
        &mut self,
        now: Duration,
        recipient: ResolutionRecipient,
        error: &ResolveError,
    ) {
        match recipient {
            ResolutionRecipient::Selection(request) | ResolutionRecipient::Resolution(request) => {
                self.hunt.push_event(Event::RequestFailed {
                    request,
                    error: error.clone(),
                })
            }
            ResolutionRecipient::Session(session) => {
                self.pause_session(now, session, error.clone())
            }
        }
    }

    /// Asks a registrar about the pool, unless a request is open.
    pub(super) fn request_resolution(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        recipient: Option<ResolutionRecipient>,
    ) {
        self.request_items(now, handle, recipient, None);
    }

    /// Asks a registrar for up to `items` elements of the pool. A request that is open already may return fewer.
    pub(super) fn request_items(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        recipient: Option<ResolutionRecipient>,
        items: Option<u32>,
    ) {
        self.hunt.start(now);
        let needs_all_elements = self
            .pools
            .get(&handle)
            .is_some_and(|pool| pool.needs_all_elements);
        let items = items.max(needs_all_elements.then_some(CANDIDATES_MAX));
        if let Some(pending) = self.pending_resolutions.get_mut(&handle) {
            pending.recipients.extend(recipient);
            pending.items = pending.items.max(items);
            return;
        }
        let until = now + self.config.answer_timeout * (1 + self.config.retries_max);
        let pending = PendingResolution {
            recipients: recipient.into_iter().collect(),
            items,
            sent_at: None,
            deadline: until,
            due: until,
        };
        self.pending_resolutions.insert(handle.clone(), pending);
        self.timers.insert((until, Timer::Answer(handle.clone())));
        self.send_resolution(now, &handle);
    }

    fn send_resolution(&mut self, now: Duration, handle: &PoolHandle) {
        let (Some(link), Some(pending)) =
            (self.hunt.home(), self.pending_resolutions.get_mut(handle))
        else {
            return;
        };
        let before = pending.due;
        pending.sent_at = Some(now);
        pending.due = pending.deadline.min(now + self.config.answer_timeout);
        let due = pending.due;
        let items = pending.items.or(self.config.items_requested);
        let message = Message::HandleResolution {
            updates: self.pools.get(handle).is_some_and(|pool| pool.watched),
            handle: handle.clone(),
            items_max: items,
        };
        self.hunt.send(link, message);
        self.set_timer(Timer::Answer(handle.clone()), Some(before), Some(due));
    }

    /// Sends everything that waits to a new home registrar: open requests, reports, and requests for watched pools, as
    /// "the PU will need to re-send an ASAP_HANDLE_RESOLUTION message with the 'S' bit set" (section 2.2.5).
    pub(super) fn send_all_pending(&mut self, now: Duration) {
        let recipient: Vec<PoolHandle> = self.pending_resolutions.keys().cloned().collect();
        for handle in &recipient {
            self.send_resolution(now, handle);
        }
        let watched = self.pools.iter().filter(|(_, pool)| pool.watched);
        let watched: Vec<PoolHandle> = watched.map(|(handle, _)| handle.clone()).collect();
        for handle in watched {
            self.request_resolution(now, handle, None);
        }
        if let Some(link) = self.hunt.home() {
            for (handle, id) in std::mem::take(&mut self.pending_reports) {
                let report = Message::EndpointUnreachable { handle, id };
                self.hunt.send(link, report);
            }
        }
    }

    /// Marks all requests as unsent after the loss of the home registrar.
    pub(super) fn mark_all_unsent(&mut self) {
        let handles: Vec<PoolHandle> = self.pending_resolutions.keys().cloned().collect();
        for handle in handles {
            if let Some(pending) = self.pending_resolutions.get_mut(&handle) {
                let before = pending.due;
                pending.sent_at = None;
                pending.due = pending.deadline;
                let due = pending.due;
                self.set_timer(Timer::Answer(handle), Some(before), Some(due));
            }
        }
    }

    /// Handles T1-ENRPrequest. The registrar is left at once: repeating the request over a transport that loses no
    /// messages would gain nothing. (RFC 5352 section 3.7.2 repeats it and hunts in parallel.)
    pub(super) fn on_answer_timeout(&mut self, now: Duration, handle: PoolHandle) {
        let Some(pending) = self.pending_resolutions.get(&handle) else {
            return;
        };
        let (sent_at, is_expired) = (pending.sent_at, pending.deadline <= now);
        if is_expired {
            let error = match sent_at {
                Some(_) => ResolveError::Unanswered,
                None => ResolveError::NoRegistrar,
            };
            self.fail_resolution(now, &handle, &error);
        }
        if sent_at.is_some_and(|sent_at| sent_at + self.config.answer_timeout <= now) {
            let change = self.hunt.drop_home(now);
            self.on_home_change(now, change);
        }
    }

    fn fail_resolution(&mut self, now: Duration, handle: &PoolHandle, error: &ResolveError) {
        let Some(pending) = self.take_pending(handle) else {
            return;
        };
        if let Some(pool) = self.pools.get_mut(handle) {
            // Watched pools, and pools with sessions, are requested again.
            let (before, due) = (pool.due, Some(now + self.config.cache_fresh_for));
            pool.due = due;
            self.set_timer(Timer::Cache(handle.clone()), before, due);
        }
        for recipient in pending.recipients {
            self.fail_recipient(now, recipient, error);
        }
    }

    fn take_pending(&mut self, handle: &PoolHandle) -> Option<PendingResolution> {
        let pending = self.pending_resolutions.remove(handle)?;
        self.timers
            .remove(&(pending.due, Timer::Answer(handle.clone())));
        Some(pending)
    }

    /// Handles an answer, or an update of a watched pool.
    pub(super) fn on_resolved(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        updates: Option<LinkId>,
        policy: Option<Policy>,
        elements: Vec<PoolElement>,
    ) {
        let pending = self.take_pending(&handle);
        let was_cached = self.pools.contains_key(&handle);
        if pending.is_none() && !was_cached {
            // An unrequested answer takes no memory.
            return;
        }
        let pool = self.pools.entry(handle.clone()).or_default();
        let kind = policy.map_or(PolicyKind::RoundRobin, |policy| policy.kind());
        let changed = pool.store_answer(now, kind, elements);
        pool.update_link = updates;
        self.finish_update(now, &handle, changed);
        for recipient in pending.into_iter().flat_map(|pending| pending.recipients) {
            if !self.answer_from_cache(now, &handle, recipient) {
                self.fail_recipient(now, recipient, &ResolveError::NoElement);
            }
        }
    }

    /// Handles a registrar's negative answer about a pool.
    pub(super) fn on_refused(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        causes: Vec<ErrorCause>,
    ) {
        let pending = self.take_pending(&handle);
        let unknown = |cause: &ErrorCause| cause.code == CauseCode::UNKNOWN_POOL_HANDLE;
        let error = if causes.iter().any(unknown) {
            ResolveError::UnknownPool
        } else {
            ResolveError::Refused(causes)
        };
        if let Some(pool) = self.pools.get_mut(&handle) {
            // "If a negative response is returned, no further updates to the Pool (when it is created) will occur."
            pool.update_link = None;
            let changed = error == ResolveError::UnknownPool && pool.clear(now);
            self.finish_update(now, &handle, changed);
        }
        for recipient in pending.into_iter().flat_map(|pending| pending.recipients) {
            self.fail_recipient(now, recipient, &error);
        }
    }

    /// Reports changed data of a watched pool, and schedules the next check.
    fn finish_update(&mut self, now: Duration, handle: &PoolHandle, changed: bool) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        // A session needs another element to fail over to.
        let scarce = pool.sessions > 0 && pool.elements.len() < 2;
        let wait = if scarce || pool.watched && pool.update_link.is_none() {
            self.config.cache_fresh_for
        } else {
            self.config.cache_usable_for
        };
        let (before, due) = (pool.due, Some(now + wait));
        pool.due = due;
        if pool.watched && changed {
            let elements = pool.elements.clone();
            self.hunt.push_event(Event::PoolChanged {
                handle: handle.clone(),
                elements,
            });
        }
        self.set_timer(Timer::Cache(handle.clone()), before, due);
    }

    /// Handles an expired cache entry: an unused one is removed. C2: "Have a stale timeout timer associated with each
    /// cache entry."
    pub(super) fn on_cache_timeout(&mut self, now: Duration, handle: PoolHandle) {
        let Some(pool) = self.pools.get_mut(&handle) else {
            return;
        };
        pool.due = None;
        if pool.watched || pool.sessions > 0 {
            self.request_resolution(now, handle, None);
        } else {
            self.pools.remove(&handle);
        }
    }

    /// Reports an unreachable element. "It should be noted that an ASAP Endpoint MUST report no more than once each
    /// time it encounters such an event."
    pub(super) fn report_unreachable(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) {
        if !self.exclude_element(now, handle, id) {
            return;
        }
        if let Some(link) = self.hunt.home() {
            let handle = handle.clone();
            self.hunt
                .send(link, Message::EndpointUnreachable { handle, id });
        } else {
            self.pending_reports.insert((handle.clone(), id));
        }
    }

    /// Excludes an element from selection for a while. Returns true if it was not excluded before.
    pub(super) fn exclude_element(
        &mut self,
        now: Duration,
        handle: &PoolHandle,
        id: ElementId,
    ) -> bool {
        let pool: &mut CachedPool = self.pools.entry(handle.clone()).or_default();
        let is_news = !pool.is_unreachable(now, id);
        if is_news {
            pool.mark_unreachable(
                now,
                id,
                (self.config.unreachable_for, self.config.unreachable_max),
            );
        }
        is_news
    }
}
