//! The user's side of the session layer (RFC 5352 sections 3.8 and 3.9): one link at a time, the latest cookie, and the
//! next element.

use super::choice_method::{ChoiceMethod, MustAwaitAnswers, OpenRequest};
use super::config::OwnBusinessCard;
use super::event::{Event, ResolveError};
use super::resolve::ResolutionRecipient;
use super::{LinkId, PoolUser, SessionId, Timer};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle};
use holdfast_wire::rserpool::{SctpTransport, Transport, TransportUse};
use std::time::Duration;

#[derive(Debug)]
enum SessionPhase {
    /// Waiting for a registrar's answer.
    Waiting,
    /// Waiting for answers to probes.
    Probing,
    /// Pausing before the next request.
    Pausing,
    Connecting {
        link: LinkId,
        element: ElementId,
        /// True if the cookie was sent.
        resumed: bool,
    },
    Connected {
        link: LinkId,
        element: ElementId,
    },
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) handle: PoolHandle,
    pub(super) choice_method: ChoiceMethod,
    /// The open request, for a session that chooses by itself.
    pub(super) request: Option<OpenRequest>,
    business_card: Option<OwnBusinessCard>,
    /// "The PU's ASAP endpoint stores the Cookie parameter and discards an older cookie if it is previously stored."
    cookie: Option<Bytes>,
    /// Elements to fail over to: "a preferred list for failover order".
    failover_order: Vec<PoolElement>,
    phase: SessionPhase,
    /// Time at which the session is given up; none while it has an element.
    give_up_at: Option<Duration>,
    pauses: u32,
    /// Reason for having no element.
    last_error: ResolveError,
    /// Time of the next timeout, as set in the timers.
    due: Option<Duration>,
}

impl Session {
    /// Returns the session's element.
    pub(super) fn element(&self) -> Option<ElementId> {
        match self.phase {
            SessionPhase::Connected { element, .. } => Some(element),
            _ => None,
        }
    }
}

impl PoolUser {
    /// Opens a session with the pool. [`Event::SessionUp`] follows, and after each loss of an element
    /// [`Event::SessionBroken`] and [`Event::SessionUp`], until [`Event::SessionFailed`] or [`PoolUser::handle_close`].
    pub fn handle_open(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        business_card: Option<OwnBusinessCard>,
    ) -> SessionId {
        self.handle_open_with_method(now, handle, business_card, ChoiceMethod::Registrar)
    }

    /// Opens a session with the pool, and a method of choosing its element. The events are those of
    /// [`PoolUser::handle_open`].
    pub fn handle_open_with_method(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        business_card: Option<OwnBusinessCard>,
        choose: ChoiceMethod,
    ) -> SessionId {
        let id = SessionId(self.next_number());
        let session = Session {
            handle: handle.clone(),
            choice_method: choose,
            request: None,
            business_card,
            cookie: None,
            failover_order: Vec::new(),
            phase: SessionPhase::Waiting,
            give_up_at: Some(now + self.config.give_up_after),
            pauses: 0,
            last_error: ResolveError::NoRegistrar,
            due: None,
        };
        self.sessions.insert(id, session);
        let pool = self.pools.entry(handle.clone()).or_default();
        pool.sessions += 1;
        if choose != ChoiceMethod::Registrar && !pool.needs_all_elements {
            pool.needs_all_elements = true;
            // The cache may have only some of the elements.
            pool.fetched = None;
        }
        self.set_session_timer(id, None);
        self.request_pool(now, handle, ResolutionRecipient::Session(id));
        id
    }

    /// Closes a session; no event follows.
    pub fn handle_close(&mut self, now: Duration, id: SessionId) {
        if let Some(link) = self.session_link(id) {
            self.hunt.close(link);
        }
        self.end_session(now, id);
    }

    /// Leaves an element that malfunctions although its link is up: the session turns to another.
    pub fn handle_malfunction(&mut self, now: Duration, id: SessionId) {
        if let Some(link) = self.session_link(id) {
            self.hunt.close(link);
            self.on_session_lost(now, id);
        }
    }

    fn session_link(&self, id: SessionId) -> Option<LinkId> {
        match self.sessions.get(&id)?.phase {
            SessionPhase::Connecting { link, .. } | SessionPhase::Connected { link, .. } => {
                Some(link)
            }
            SessionPhase::Waiting | SessionPhase::Probing | SessionPhase::Pausing => None,
        }
    }

    fn end_session(&mut self, now: Duration, id: SessionId) {
        self.abandon_request(id);
        if let Some(link) = self.session_link(id) {
            self.session_links.remove(&link);
        }
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        self.set_timer(Timer::Session(id), session.due, None);
        let Some(pool) = self.pools.get_mut(&session.handle) else {
            return;
        };
        pool.sessions -= 1;
        if pool.due.is_none() {
            // The pool has never had an answer.
            pool.due = Some(now + self.config.cache_usable_for);
            let due = pool.due;
            self.set_timer(Timer::Cache(session.handle), None, due);
        }
    }

    /// Sets the session's timer to `due`, or to its end if that is sooner.
    fn set_session_timer(&mut self, id: SessionId, due: Option<Duration>) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let before = session.due;
        session.due = due.into_iter().chain(session.give_up_at).min();
        let due = session.due;
        self.set_timer(Timer::Session(id), before, due);
    }

    /// Turns to the next known element: first from the business card, then by the pool's policy. Returns true if there
    /// was one.
    pub(super) fn seek_element(&mut self, now: Duration, id: SessionId) -> bool {
        let Some(session) = self.sessions.get(&id) else {
            // The session was closed meanwhile.
            return true;
        };
        if self.session_link(id).is_some() {
            return true;
        }
        let is_late = matches!(session.phase, SessionPhase::Probing);
        let Some(pool) = self.pools.get_mut(&session.handle) else {
            return false;
        };
        let mut preferred = session.failover_order.iter();
        let preferred = preferred.find(|element| !pool.is_unreachable(now, element.id));
        let chosen = match preferred.cloned() {
            Some(element) => Ok(Some(element)),
            None => self.choose_element(now, id, is_late),
        };
        match chosen {
            Ok(Some(element)) => {
                self.connect_session(now, id, element.id, element.user_transport);
            }
            Ok(None) => return false,
            Err(MustAwaitAnswers) => self.await_probe_answers(now, id),
        }
        true
    }

    fn await_probe_answers(&mut self, now: Duration, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.phase = SessionPhase::Probing;
            self.set_session_timer(id, Some(PoolUser::answer_deadline(now)));
        }
    }

    /// Chooses an element for a session that has waited for answers to probes.
    pub(super) fn on_probe_answers(&mut self, now: Duration, id: SessionId) {
        if let Some(session) = self.sessions.get(&id)
            && matches!(session.phase, SessionPhase::Probing)
        {
            let handle = session.handle.clone();
            self.seek_next_element(now, id, handle);
        }
    }

    fn connect_session(
        &mut self,
        now: Duration,
        id: SessionId,
        element: ElementId,
        transport: Transport,
    ) {
        let has_control_channel = has_control_channel(&transport);
        let link = self.hunt.connect(transport);
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let cookie = session.cookie.clone().filter(|_| has_control_channel);
        session.phase = SessionPhase::Connecting {
            link,
            element,
            resumed: cookie.is_some(),
        };
        self.session_links.insert(link, id);
        // "it SHOULD send the latest received cookie parameter in an ASAP_COOKIE_ECHO message to the new PE as the
        // first message on the control channel."
        if let Some(cookie) = cookie {
            self.hunt.send(link, Message::CookieEcho(cookie));
        }
        // "A PU should send an ASAP_BUSINESS_CARD message to a PE only if it is part of a PU/PE combination."
        if let Some(business_card) = session
            .business_card
            .clone()
            .filter(|_| has_control_channel)
        {
            let card = Message::BusinessCard {
                handle: business_card.handle,
                policy: Some(business_card.policy),
                elements: business_card.elements,
            };
            self.hunt.send(link, card);
        }
        self.set_session_timer(id, Some(now + self.config.connect_timeout));
    }

    pub(super) fn on_session_connected(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let SessionPhase::Connecting {
            link,
            element,
            resumed,
        } = session.phase
        else {
            return;
        };
        session.phase = SessionPhase::Connected { link, element };
        session.give_up_at = None;
        session.pauses = 0;
        if let Some(pool) = self.pools.get_mut(&session.handle) {
            pool.mark_reached(element);
        }
        self.set_session_timer(id, None);
        self.hunt.push_event(Event::SessionUp {
            session: id,
            link,
            element,
            resumed,
        });
    }

    /// Leaves an element that was lost or not reached, and turns to the next.
    pub(super) fn on_session_lost(&mut self, now: Duration, id: SessionId) {
        if let Some((handle, element)) = self.leave_element(now, id) {
            self.report_unreachable(now, &handle, element);
            self.seek_next_element(now, id, handle);
        }
    }

    /// Leaves an element that has closed the session in order, and turns to the next one, or to the same after a while.
    pub(super) fn on_session_closed(&mut self, now: Duration, id: SessionId) {
        if let Some((handle, element)) = self.leave_element(now, id) {
            self.exclude_element(now, &handle, element);
            self.seek_next_element(now, id, handle);
        }
    }

    /// Takes a session off its element. Returns the element, if there was one.
    fn leave_element(&mut self, now: Duration, id: SessionId) -> Option<(PoolHandle, ElementId)> {
        self.fail_request(now, id);
        let session = self.sessions.get_mut(&id)?;
        let (link, element) = match session.phase {
            SessionPhase::Connecting { link, element, .. } => (link, element),
            SessionPhase::Connected { link, element } => {
                self.hunt.push_event(Event::SessionBroken {
                    session: id,
                    link,
                    element,
                });
                (link, element)
            }
            SessionPhase::Waiting | SessionPhase::Probing | SessionPhase::Pausing => return None,
        };
        session.phase = SessionPhase::Waiting;
        session.last_error = ResolveError::NoElement;
        let until = now + self.config.give_up_after;
        session.give_up_at = Some(session.give_up_at.unwrap_or(until));
        let handle = session.handle.clone();
        self.session_links.remove(&link);
        Some((handle, element))
    }

    fn seek_next_element(&mut self, now: Duration, id: SessionId, handle: PoolHandle) {
        if self.seek_element(now, id) {
            return self.refresh_stale_cache(now, handle);
        }
        self.set_session_timer(id, None);
        self.request_resolution(now, handle, Some(ResolutionRecipient::Session(id)));
    }

    /// Pauses a session without a known element; it tries again later.
    pub(super) fn pause_session(&mut self, now: Duration, id: SessionId, error: ResolveError) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let wait = self.config.retry_pause * (1 << session.pauses.min(16));
        session.pauses += 1;
        session.phase = SessionPhase::Pausing;
        session.last_error = error;
        self.set_session_timer(id, Some(now + wait.min(self.config.retry_pause_max)));
    }

    pub(super) fn on_session_timeout(&mut self, now: Duration, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.due = None;
        let is_expired = session.give_up_at.is_some_and(|until| until <= now);
        let error = session.last_error.clone();
        let handle = session.handle.clone();
        if is_expired {
            self.handle_close(now, id);
            return self
                .hunt
                .push_event(Event::SessionFailed { session: id, error });
        }
        match session.phase {
            SessionPhase::Connecting { .. } => self.handle_malfunction(now, id),
            SessionPhase::Probing => self.on_probe_answers(now, id),
            SessionPhase::Pausing => {
                session.phase = SessionPhase::Waiting;
                self.set_session_timer(id, None);
                self.request_resolution(now, handle, Some(ResolutionRecipient::Session(id)));
            }
            SessionPhase::Waiting | SessionPhase::Connected { .. } => {}
        }
    }

    /// Handles a message of the session's element.
    pub(super) fn on_session_message(&mut self, now: Duration, id: SessionId, message: Message) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        match message {
            // A copy: the receive buffer may be much larger, and the cookie stays.
            Message::Cookie(cookie) => session.cookie = Some(Bytes::copy_from_slice(&cookie)),
            Message::BusinessCard {
                handle, elements, ..
            } if handle == session.handle => {
                session.failover_order = elements;
                // BC1: "if no entry exists in the translation cache [...] perform an ASAP_HANDLE_RESOLUTION".
                let is_fetched = self
                    .pools
                    .get(&handle)
                    .is_some_and(|pool| pool.fetched.is_some());
                if !is_fetched {
                    self.request_resolution(now, handle, None);
                }
            }
            _ => {}
        }
    }
}

/// Returns true if the transport has a control channel beside the data: by SCTP's payload protocol identifiers, or as
/// rsplib does over TCP.
fn has_control_channel(transport: &Transport) -> bool {
    let usage = match transport {
        Transport::Sctp(SctpTransport { usage, .. }) | Transport::Tcp { usage, .. } => *usage,
        _ => return false,
    };
    usage == TransportUse::DataAndControl
}
