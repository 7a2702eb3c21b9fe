//! The start (RFC 5353 section 3.2): a mentor's list of registrars, then its handlespace.

use super::associations::endpoints;
use super::dial::Purpose;
use super::schedule::Timer;
use super::{AssociationId, Event, Protocol, Registrar};
use holdfast_wire::rserpool::enrp::{Body, PoolEntry};
use holdfast_wire::rserpool::{RegistrarId, SctpTransport};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Start {
    /// Listening for a registrar.
    #[default]
    Hunting,
    /// Connecting to a mentor, or waiting to retry.
    Reaching,
    /// The mentor was asked for its list.
    Listing(AssociationId),
    /// The mentor was asked for its handlespace.
    Loading(AssociationId),
    /// Elements and users are served.
    Done,
}

/// Number of attempts for each mentor. Registrars that start together refuse each other: one of them has to begin.
const ROUNDS: usize = 2;

impl Registrar {
    pub(super) fn begin(&mut self, now: Duration) {
        if !self.config.mentors.is_empty() {
            self.start = Start::Reaching;
            self.dial_mentor(now);
        } else if self.config.settings.enrp_multicast {
            let body = self.presence(true);
            self.out.multicast_enrp(body);
            let until = now + self.config.settings.mentor_hunt;
            self.schedule.set(Timer::Start, until);
        } else {
            // "If no existing peer server is specified, the initiating server MUST assume that it is alone".
            self.ready(now);
        }
    }

    pub(super) fn hunts(&self) -> bool {
        self.start == Start::Hunting
    }

    fn dial_mentor(&mut self, now: Duration) {
        let mentors = &self.config.mentors;
        let Some(mentor) = mentors.get(self.mentor_failures % mentors.len().max(1)) else {
            return self.ready(now);
        };
        let mentor = mentor.clone();
        self.reach_mentor(now, mentor);
    }

    fn reach_mentor(&mut self, now: Duration, mentor: Vec<std::net::SocketAddr>) {
        self.start = Start::Reaching;
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(Timer::Start, until);
        let dial = self.dial(Protocol::Enrp, mentor, Purpose::Mentor);
        self.mentor_dial = Some(dial);
    }

    pub(super) fn mentor_found(&mut self, now: Duration, transport: &SctpTransport) {
        let config = &self.config;
        let allowed = |at: &std::net::SocketAddr| {
            super::associations::is_registrar(at.ip(), &config.settings, &config.mentors)
        };
        let addresses: Vec<_> = endpoints(transport).filter(allowed).collect();
        if !addresses.is_empty() {
            self.reach_mentor(now, addresses);
        }
    }

    pub(super) fn mentor_reached(&mut self, now: Duration, association: AssociationId) {
        if self.start == Start::Reaching {
            self.start = Start::Listing(association);
            self.mentor_dial = None;
            self.ask_mentor(now, association, RegistrarId(0), Body::ListRequest);
        }
    }

    fn ask_mentor(&mut self, now: Duration, to: AssociationId, id: RegistrarId, body: Body) {
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(Timer::Start, until);
        self.out.enrp(to, id, body);
    }

    pub(super) fn mentor_lost(&mut self, now: Duration, association: AssociationId) {
        if matches!(self.start, Start::Listing(a) | Start::Loading(a) if a == association) {
            self.mentor_failed(now);
        }
    }

    /// Turns to the next mentor, if there is one; after all of them have failed, the registrar begins alone.
    pub(super) fn mentor_failed(&mut self, now: Duration) {
        if self.start == Start::Done {
            return;
        }
        self.out.event(Event::MentorFailed);
        self.mentor_dial = None;
        self.mentor_failures += 1;
        if self.mentor_failures >= ROUNDS * self.config.mentors.len() {
            return self.ready(now);
        }
        self.start = Start::Reaching;
        let again = now + self.config.settings.retry;
        self.schedule.set(Timer::Start, again);
    }

    pub(super) fn start_timeout(&mut self, now: Duration) {
        match self.start {
            Start::Hunting => self.ready(now),
            Start::Reaching if self.mentor_dial.is_none() => self.dial_mentor(now),
            Start::Reaching | Start::Listing(_) | Start::Loading(_) => self.mentor_failed(now),
            Start::Done => {}
        }
    }

    pub(super) fn list_came(
        &mut self,
        now: Duration,
        from: AssociationId,
        mentor: RegistrarId,
        rejected: bool,
    ) {
        if self.start != Start::Listing(from) {
            return;
        }
        if rejected {
            return self.mentor_failed(now);
        }
        self.start = Start::Loading(from);
        let body = Body::HandleTableRequest { own_only: false };
        self.ask_mentor(now, from, mentor, body);
    }

    /// Handles a block of the mentor's handlespace; none if the mentor refuses.
    pub(super) fn mentor_table(
        &mut self,
        now: Duration,
        from: AssociationId,
        mentor: RegistrarId,
        block: Option<(bool, Vec<PoolEntry>)>,
    ) {
        let Some((more, entries)) = block else {
            return self.mentor_failed(now);
        };
        self.store_all(now, from, mentor, entries, None);
        if !more {
            return self.ready(now);
        }
        let body = Body::HandleTableRequest { own_only: false };
        self.ask_mentor(now, from, mentor, body);
    }

    fn ready(&mut self, now: Duration) {
        self.start = Start::Done;
        self.schedule.stop(Timer::Start);
        self.schedule.set(Timer::Heartbeat, now);
        self.start_announcing(now);
        let elements = self.space.elements();
        self.out.event(Event::Ready { elements });
    }
}
