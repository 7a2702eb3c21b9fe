//! The user's side of the session layer (RFC 5352 sections 3.8 and 3.9): one link at a time, the latest cookie, and the
//! next element.

use super::choose::{Choose, Later, Request};
use super::config::OwnCard;
use super::event::{Event, ResolveError};
use super::resolve::Waiting;
use super::{Link, PoolUser, SessionId, Timer};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle};
use holdfast_wire::rserpool::{SctpTransport, Transport, TransportUse};
use std::time::Duration;

#[derive(Debug)]
enum Phase {
    /// Waiting for a registrar's answer.
    Waiting,
    /// Waiting for answers to probes.
    Probing,
    /// Pausing before the next request.
    Pausing,
    Connecting {
        link: Link,
        element: ElementId,
        /// True if the cookie was sent.
        resumed: bool,
    },
    Up {
        link: Link,
        element: ElementId,
    },
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) handle: PoolHandle,
    pub(super) choose: Choose,
    /// The open request, for a session that chooses by itself.
    pub(super) request: Option<Request>,
    own: Option<OwnCard>,
    /// "The PU's ASAP endpoint stores the Cookie parameter and discards an older cookie if it is previously stored."
    cookie: Option<Bytes>,
    /// Elements to fail over to: "a preferred list for failover order".
    preferred: Vec<PoolElement>,
    phase: Phase,
    /// Time at which the session is given up; none while it has an element.
    until: Option<Duration>,
    pauses: u32,
    /// Reason for having no element.
    error: ResolveError,
    /// Time of the next timeout, as set in the timers.
    due: Option<Duration>,
}

impl Session {
    /// Returns the session's element.
    pub(super) fn element(&self) -> Option<ElementId> {
        match self.phase {
            Phase::Up { element, .. } => Some(element),
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
        own: Option<OwnCard>,
    ) -> SessionId {
        self.handle_open_choosing(now, handle, own, Choose::Registrar)
    }

    /// Opens a session with the pool, and a method of choosing its element. The events are those of
    /// [`PoolUser::handle_open`].
    pub fn handle_open_choosing(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        own: Option<OwnCard>,
        choose: Choose,
    ) -> SessionId {
        let id = SessionId(self.number());
        let session = Session {
            handle: handle.clone(),
            choose,
            request: None,
            own,
            cookie: None,
            preferred: Vec::new(),
            phase: Phase::Waiting,
            until: Some(now + self.config.give_up_after),
            pauses: 0,
            error: ResolveError::NoRegistrar,
            due: None,
        };
        self.sessions.insert(id, session);
        let pool = self.pools.entry(handle.clone()).or_default();
        pool.sessions += 1;
        if choose != Choose::Registrar && !pool.wide {
            pool.wide = true;
            // The cache may have only some of the elements.
            pool.fetched = None;
        }
        self.arm(id, None);
        self.want(now, handle, Waiting::Session(id));
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
    pub fn handle_failed(&mut self, now: Duration, id: SessionId) {
        if let Some(link) = self.session_link(id) {
            self.hunt.close(link);
            self.session_lost(now, id);
        }
    }

    fn session_link(&self, id: SessionId) -> Option<Link> {
        match self.sessions.get(&id)?.phase {
            Phase::Connecting { link, .. } | Phase::Up { link, .. } => Some(link),
            Phase::Waiting | Phase::Probing | Phase::Pausing => None,
        }
    }

    fn end_session(&mut self, now: Duration, id: SessionId) {
        self.request_abandoned(id);
        if let Some(link) = self.session_link(id) {
            self.links.remove(&link);
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
            pool.due = Some(now + self.config.usable_for);
            let due = pool.due;
            self.set_timer(Timer::Cache(session.handle), None, due);
        }
    }

    /// Sets the session's timer to `due`, or to its end if that is sooner.
    fn arm(&mut self, id: SessionId, due: Option<Duration>) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let before = session.due;
        session.due = due.into_iter().chain(session.until).min();
        let due = session.due;
        self.set_timer(Timer::Session(id), before, due);
    }

    /// Turns to the next known element: first from the business card, then by the pool's policy. Returns true if there
    /// was one.
    pub(super) fn session_seeks(&mut self, now: Duration, id: SessionId) -> bool {
        let Some(session) = self.sessions.get(&id) else {
            // The session was closed meanwhile.
            return true;
        };
        if self.session_link(id).is_some() {
            return true;
        }
        let is_late = matches!(session.phase, Phase::Probing);
        let Some(pool) = self.pools.get_mut(&session.handle) else {
            return false;
        };
        let mut preferred = session.preferred.iter();
        let preferred = preferred.find(|element| !pool.is_missed(now, element.id));
        let chosen = match preferred.cloned() {
            Some(element) => Ok(Some(element)),
            None => self.chosen(now, id, is_late),
        };
        match chosen {
            Ok(Some(element)) => {
                self.session_connects(now, id, element.id, element.user_transport);
            }
            Ok(None) => return false,
            Err(Later) => self.session_awaits_answers(now, id),
        }
        true
    }

    fn session_awaits_answers(&mut self, now: Duration, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.phase = Phase::Probing;
            self.arm(id, Some(PoolUser::answers_until(now)));
        }
    }

    /// Chooses an element for a session that has waited for answers to probes.
    pub(super) fn session_has_answers(&mut self, now: Duration, id: SessionId) {
        if let Some(session) = self.sessions.get(&id)
            && matches!(session.phase, Phase::Probing)
        {
            let handle = session.handle.clone();
            self.session_moves(now, id, handle);
        }
    }

    fn session_connects(
        &mut self,
        now: Duration,
        id: SessionId,
        element: ElementId,
        transport: Transport,
    ) {
        let control = has_control(&transport);
        let link = self.hunt.connect(transport);
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let cookie = session.cookie.clone().filter(|_| control);
        session.phase = Phase::Connecting {
            link,
            element,
            resumed: cookie.is_some(),
        };
        self.links.insert(link, id);
        // "it SHOULD send the latest received cookie parameter in an ASAP_COOKIE_ECHO message to the new PE as the
        // first message on the control channel."
        if let Some(cookie) = cookie {
            self.hunt.send(link, Message::CookieEcho(cookie));
        }
        // "A PU should send an ASAP_BUSINESS_CARD message to a PE only if it is part of a PU/PE combination."
        if let Some(own) = session.own.clone().filter(|_| control) {
            let card = Message::BusinessCard {
                handle: own.handle,
                policy: Some(own.policy),
                elements: own.elements,
            };
            self.hunt.send(link, card);
        }
        self.arm(id, Some(now + self.config.connect_timeout));
    }

    pub(super) fn session_connected(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let Phase::Connecting {
            link,
            element,
            resumed,
        } = session.phase
        else {
            return;
        };
        session.phase = Phase::Up { link, element };
        session.until = None;
        session.pauses = 0;
        if let Some(pool) = self.pools.get_mut(&session.handle) {
            pool.reached(element);
        }
        self.arm(id, None);
        self.hunt.event(Event::SessionUp {
            session: id,
            link,
            element,
            resumed,
        });
    }

    /// Leaves an element that was lost or not reached, and turns to the next.
    pub(super) fn session_lost(&mut self, now: Duration, id: SessionId) {
        if let Some((handle, element)) = self.session_leaves(now, id) {
            self.unreachable(now, &handle, element);
            self.session_moves(now, id, handle);
        }
    }

    /// Leaves an element that has closed the session in order, and turns to the next one, or to the same after a while.
    pub(super) fn session_ended(&mut self, now: Duration, id: SessionId) {
        if let Some((handle, element)) = self.session_leaves(now, id) {
            self.avoid(now, &handle, element);
            self.session_moves(now, id, handle);
        }
    }

    /// Takes a session off its element. Returns the element, if there was one.
    fn session_leaves(&mut self, now: Duration, id: SessionId) -> Option<(PoolHandle, ElementId)> {
        self.request_failed(now, id);
        let session = self.sessions.get_mut(&id)?;
        let (link, element) = match session.phase {
            Phase::Connecting { link, element, .. } => (link, element),
            Phase::Up { link, element } => {
                self.hunt.event(Event::SessionBroken {
                    session: id,
                    link,
                    element,
                });
                (link, element)
            }
            Phase::Waiting | Phase::Probing | Phase::Pausing => return None,
        };
        session.phase = Phase::Waiting;
        session.error = ResolveError::NoElement;
        let until = now + self.config.give_up_after;
        session.until = Some(session.until.unwrap_or(until));
        let handle = session.handle.clone();
        self.links.remove(&link);
        Some((handle, element))
    }

    fn session_moves(&mut self, now: Duration, id: SessionId, handle: PoolHandle) {
        if self.session_seeks(now, id) {
            return self.refresh(now, handle);
        }
        self.arm(id, None);
        self.ask(now, handle, Some(Waiting::Session(id)));
    }

    /// Pauses a session without a known element; it tries again later.
    pub(super) fn session_pauses(&mut self, now: Duration, id: SessionId, error: ResolveError) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let wait = self.config.pause * (1 << session.pauses.min(16));
        session.pauses += 1;
        session.phase = Phase::Pausing;
        session.error = error;
        self.arm(id, Some(now + wait.min(self.config.pause_max)));
    }

    pub(super) fn session_due(&mut self, now: Duration, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.due = None;
        let over = session.until.is_some_and(|until| until <= now);
        let error = session.error.clone();
        let handle = session.handle.clone();
        if over {
            self.handle_close(now, id);
            return self.hunt.event(Event::SessionFailed { session: id, error });
        }
        match session.phase {
            Phase::Connecting { .. } => self.handle_failed(now, id),
            Phase::Probing => self.session_has_answers(now, id),
            Phase::Pausing => {
                session.phase = Phase::Waiting;
                self.arm(id, None);
                self.ask(now, handle, Some(Waiting::Session(id)));
            }
            Phase::Waiting | Phase::Up { .. } => {}
        }
    }

    /// Handles a message of the session's element.
    pub(super) fn session_message(&mut self, now: Duration, id: SessionId, message: Message) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        match message {
            // A copy: the receive buffer may be much larger, and the cookie stays.
            Message::Cookie(cookie) => session.cookie = Some(Bytes::copy_from_slice(&cookie)),
            Message::BusinessCard {
                handle, elements, ..
            } if handle == session.handle => {
                session.preferred = elements;
                // BC1: "if no entry exists in the translation cache [...] perform an ASAP_HANDLE_RESOLUTION".
                let known = self
                    .pools
                    .get(&handle)
                    .is_some_and(|pool| pool.fetched.is_some());
                if !known {
                    self.ask(now, handle, None);
                }
            }
            _ => {}
        }
    }
}

/// Returns true if the transport has a control channel beside the data: by SCTP's payload protocol identifiers, or as
/// rsplib does over TCP.
fn has_control(transport: &Transport) -> bool {
    let usage = match transport {
        Transport::Sctp(SctpTransport { usage, .. }) | Transport::Tcp { usage, .. } => *usage,
        _ => return false,
    };
    usage == TransportUse::DataAndControl
}
