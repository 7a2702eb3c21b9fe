//! The start (RFC 5353 section 3.2): a mentor's list of registrars, then its handlespace.

use super::associations::endpoints;
use super::dials::DialPurpose;
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, DialId, Event, PoolProtocol, Registrar};
use holdfast_wire::rserpool::enrp::{EnrpBody, PoolEntry};
use holdfast_wire::rserpool::{RegistrarId, SctpTransport};
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum StartupPhase {
    /// Listening for another registrar, which becomes the mentor.
    #[default]
    Hunting,
    /// Connecting to a mentor, or waiting to retry.
    Connecting,
    /// The mentor was asked for its list.
    RequestingList(AssociationId),
    /// The mentor was asked for its handlespace.
    RequestingHandlespace(AssociationId),
    /// Elements and users are served.
    Done,
}

/// Progress of the registrar's start.
#[derive(Debug, Default)]
pub(super) struct Startup {
    phase: StartupPhase,
    /// Number of attempts to reach a mentor that have failed.
    mentor_failures: usize,
    /// The open attempt to connect to a mentor.
    mentor_dial: Option<DialId>,
}

/// Number of attempts for each mentor. Registrars that start together refuse each other: one of them has to begin.
const MENTOR_ROUNDS: usize = 2;

impl Startup {
    /// Returns true if elements and users are served.
    #[inline]
    pub(super) fn serves(&self) -> bool {
        matches!(self.phase, StartupPhase::Done)
    }

    /// Returns true while the registrar listens for a mentor.
    pub(super) fn is_hunting(&self) -> bool {
        self.phase == StartupPhase::Hunting
    }

    /// Returns true if this is the open attempt to connect to a mentor.
    pub(super) fn is_mentor_dial(&self, dial: DialId) -> bool {
        self.mentor_dial == Some(dial)
    }

    /// Returns true if the mentor at the other side of this association was asked for its handlespace.
    pub(super) fn is_requesting_handlespace(&self, from: AssociationId) -> bool {
        self.phase == StartupPhase::RequestingHandlespace(from)
    }

    /// Returns true if the mentor at the other side of this association was asked for something.
    fn is_requesting(&self, from: AssociationId) -> bool {
        matches!(self.phase, StartupPhase::RequestingList(asked) | StartupPhase::RequestingHandlespace(asked) if asked == from)
    }

    /// Returns the mentor to ask next.
    fn next_mentor<'a>(&self, mentors: &'a [Vec<SocketAddr>]) -> Option<&'a Vec<SocketAddr>> {
        mentors.get(self.mentor_failures % mentors.len().max(1))
    }

    /// Counts a failed attempt. Returns false if no further one is allowed.
    fn record_failure(&mut self, mentors: usize) -> bool {
        self.mentor_dial = None;
        self.mentor_failures += 1;
        if self.mentor_failures >= MENTOR_ROUNDS * mentors {
            return false;
        }
        self.phase = StartupPhase::Connecting;
        true
    }
}

impl Registrar {
    pub(super) fn begin_startup(&mut self, now: Duration) {
        if !self.config.mentors.is_empty() {
            self.startup.phase = StartupPhase::Connecting;
            self.dial_mentor(now);
        } else if self.config.settings.enrp_multicast {
            let body = self.presence(true);
            self.outbox.multicast_enrp(body);
            let until = now + self.config.settings.mentor_hunt_time;
            self.schedule.set(RegistrarTimer::StartupStep, until);
        } else {
            // "If no existing peer server is specified, the initiating server MUST assume that it is alone".
            self.finish_startup(now);
        }
    }

    fn dial_mentor(&mut self, now: Duration) {
        let Some(mentor) = self.startup.next_mentor(&self.config.mentors) else {
            return self.finish_startup(now);
        };
        let mentor = mentor.clone();
        self.reach_mentor(now, mentor);
    }

    fn reach_mentor(&mut self, now: Duration, mentor: Vec<SocketAddr>) {
        self.startup.phase = StartupPhase::Connecting;
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(RegistrarTimer::StartupStep, until);
        let dial = self.dial(PoolProtocol::Enrp, mentor, DialPurpose::Mentor);
        self.startup.mentor_dial = Some(dial);
    }

    pub(super) fn on_mentor_found(&mut self, now: Duration, transport: &SctpTransport) {
        let config = &self.config;
        let allowed = |at: &SocketAddr| {
            super::associations::is_registrar_permitted(at.ip(), &config.settings, &config.mentors)
        };
        let addresses: Vec<_> = endpoints(transport).filter(allowed).collect();
        if !addresses.is_empty() {
            self.reach_mentor(now, addresses);
        }
    }

    pub(super) fn on_mentor_reached(&mut self, now: Duration, association: AssociationId) {
        if self.startup.phase == StartupPhase::Connecting {
            self.startup.phase = StartupPhase::RequestingList(association);
            self.startup.mentor_dial = None;
            self.ask_mentor(now, association, RegistrarId(0), EnrpBody::ListRequest);
        }
    }

    fn ask_mentor(&mut self, now: Duration, to: AssociationId, id: RegistrarId, body: EnrpBody) {
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(RegistrarTimer::StartupStep, until);
        self.outbox.send_enrp(to, id, body);
    }

    pub(super) fn on_mentor_lost(&mut self, now: Duration, association: AssociationId) {
        if self.startup.is_requesting(association) {
            self.on_mentor_failed(now);
        }
    }

    /// Turns to the next mentor, if there is one; after all of them have failed, the registrar begins alone.
    pub(super) fn on_mentor_failed(&mut self, now: Duration) {
        if self.startup.serves() {
            return;
        }
        self.outbox.push_event(Event::MentorFailed);
        if !self.startup.record_failure(self.config.mentors.len()) {
            return self.finish_startup(now);
        }
        let retry_at = now + self.config.settings.retry_interval;
        self.schedule.set(RegistrarTimer::StartupStep, retry_at);
    }

    pub(super) fn on_startup_timeout(&mut self, now: Duration) {
        match self.startup.phase {
            StartupPhase::Hunting => self.finish_startup(now),
            StartupPhase::Connecting if self.startup.mentor_dial.is_none() => self.dial_mentor(now),
            StartupPhase::Connecting
            | StartupPhase::RequestingList(_)
            | StartupPhase::RequestingHandlespace(_) => self.on_mentor_failed(now),
            StartupPhase::Done => {}
        }
    }

    pub(super) fn on_mentor_list(
        &mut self,
        now: Duration,
        from: AssociationId,
        mentor: RegistrarId,
        rejected: bool,
    ) {
        if self.startup.phase != StartupPhase::RequestingList(from) {
            return;
        }
        if rejected {
            return self.on_mentor_failed(now);
        }
        self.startup.phase = StartupPhase::RequestingHandlespace(from);
        let body = EnrpBody::HandleTableRequest { own_only: false };
        self.ask_mentor(now, from, mentor, body);
    }

    /// Handles a block of the mentor's handlespace; none if the mentor refuses.
    pub(super) fn on_mentor_table(
        &mut self,
        now: Duration,
        from: AssociationId,
        mentor: RegistrarId,
        block: Option<(bool, Vec<PoolEntry>)>,
    ) {
        let Some((more, entries)) = block else {
            return self.on_mentor_failed(now);
        };
        self.store_table_elements(now, from, mentor, entries, None);
        if !more {
            return self.finish_startup(now);
        }
        let body = EnrpBody::HandleTableRequest { own_only: false };
        self.ask_mentor(now, from, mentor, body);
    }

    fn finish_startup(&mut self, now: Duration) {
        self.startup.phase = StartupPhase::Done;
        self.schedule.stop(RegistrarTimer::StartupStep);
        self.schedule.set(RegistrarTimer::Heartbeat, now);
        self.start_announcing(now);
        let elements = self.elements.space().elements();
        self.outbox.push_event(Event::Ready { elements });
    }
}
