//! The start (RFC 5353 section 3.2): a mentor's list of registrars, then its handlespace.

use super::associations::endpoints;
use super::dials::DialPurpose;
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Event, PoolProtocol, Registrar};
use holdfast_wire::rserpool::enrp::{EnrpBody, PoolEntry};
use holdfast_wire::rserpool::{RegistrarId, SctpTransport};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum StartupPhase {
    /// Listening for a registrar.
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

/// Number of attempts for each mentor. Registrars that start together refuse each other: one of them has to begin.
const MENTOR_ROUNDS: usize = 2;

impl Registrar {
    pub(super) fn begin_startup(&mut self, now: Duration) {
        if !self.config.mentors.is_empty() {
            self.startup = StartupPhase::Connecting;
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

    pub(super) fn is_hunting(&self) -> bool {
        self.startup == StartupPhase::Hunting
    }

    fn dial_mentor(&mut self, now: Duration) {
        let mentors = &self.config.mentors;
        let Some(mentor) = mentors.get(self.mentor_failures % mentors.len().max(1)) else {
            return self.finish_startup(now);
        };
        let mentor = mentor.clone();
        self.reach_mentor(now, mentor);
    }

    fn reach_mentor(&mut self, now: Duration, mentor: Vec<std::net::SocketAddr>) {
        self.startup = StartupPhase::Connecting;
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(RegistrarTimer::StartupStep, until);
        let dial = self.dial(PoolProtocol::Enrp, mentor, DialPurpose::Mentor);
        self.mentor_dial = Some(dial);
    }

    pub(super) fn on_mentor_found(&mut self, now: Duration, transport: &SctpTransport) {
        let config = &self.config;
        let allowed = |at: &std::net::SocketAddr| {
            super::associations::is_registrar_permitted(at.ip(), &config.settings, &config.mentors)
        };
        let addresses: Vec<_> = endpoints(transport).filter(allowed).collect();
        if !addresses.is_empty() {
            self.reach_mentor(now, addresses);
        }
    }

    pub(super) fn on_mentor_reached(&mut self, now: Duration, association: AssociationId) {
        if self.startup == StartupPhase::Connecting {
            self.startup = StartupPhase::RequestingList(association);
            self.mentor_dial = None;
            self.ask_mentor(now, association, RegistrarId(0), EnrpBody::ListRequest);
        }
    }

    fn ask_mentor(&mut self, now: Duration, to: AssociationId, id: RegistrarId, body: EnrpBody) {
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(RegistrarTimer::StartupStep, until);
        self.outbox.send_enrp(to, id, body);
    }

    pub(super) fn on_mentor_lost(&mut self, now: Duration, association: AssociationId) {
        if matches!(self.startup, StartupPhase::RequestingList(a) | StartupPhase::RequestingHandlespace(a) if a == association)
        {
            self.on_mentor_failed(now);
        }
    }

    /// Turns to the next mentor, if there is one; after all of them have failed, the registrar begins alone.
    pub(super) fn on_mentor_failed(&mut self, now: Duration) {
        if self.startup == StartupPhase::Done {
            return;
        }
        self.outbox.push_event(Event::MentorFailed);
        self.mentor_dial = None;
        self.mentor_failures += 1;
        if self.mentor_failures >= MENTOR_ROUNDS * self.config.mentors.len() {
            return self.finish_startup(now);
        }
        self.startup = StartupPhase::Connecting;
        let retry_at = now + self.config.settings.retry_interval;
        self.schedule.set(RegistrarTimer::StartupStep, retry_at);
    }

    pub(super) fn on_startup_timeout(&mut self, now: Duration) {
        match self.startup {
            StartupPhase::Hunting => self.finish_startup(now),
            StartupPhase::Connecting if self.mentor_dial.is_none() => self.dial_mentor(now),
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
        if self.startup != StartupPhase::RequestingList(from) {
            return;
        }
        if rejected {
            return self.on_mentor_failed(now);
        }
        self.startup = StartupPhase::RequestingHandlespace(from);
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
        self.startup = StartupPhase::Done;
        self.schedule.stop(RegistrarTimer::StartupStep);
        self.schedule.set(RegistrarTimer::Heartbeat, now);
        self.start_announcing(now);
        let elements = self.handlespace.elements();
        self.outbox.push_event(Event::Ready { elements });
    }
}
