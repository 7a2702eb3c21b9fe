//! Registration, re-registration and deregistration (RFC 5352 sections 3.1 and 3.2).

use super::event::{DeregistrationResult, Event, RegistrationRefusal};
use super::{LinkId, PoolElement};
use crate::server_hunt::HomeChange;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{CauseCode, ElementId, ErrorCause};
use holdfast_wire::rserpool::{Policy, PoolElement as Description, PoolHandle, RegistrarId};
use std::time::Duration;

/// Number of identifiers tried before the registrar's reports of a conflict are doubted.
const CONFLICTS_MAX: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RegistrationGoal {
    /// No registration is wanted.
    Unregistered,
    /// The element should be registered.
    Registered,
    /// The element should be deregistered.
    Leaving,
}

/// Kind of a request to the home registrar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RegistrationRequestKind {
    Register,
    Deregister,
}

/// A registration accepted by a registrar.
#[derive(Debug)]
pub(super) struct AcceptedRegistration {
    /// The reported policy.
    policy: Policy,
    /// Time of the request, which is the earliest start of the life.
    since: Duration,
}

#[derive(Debug)]
pub(super) struct RegistrationState {
    pub(super) id: ElementId,
    pub(super) goal: RegistrationGoal,
    /// Current policy values of the element.
    pub(super) policy: Policy,
    pub(super) accepted: Option<AcceptedRegistration>,
    /// The open request, with the reported policy and the time.
    pub(super) pending_request: Option<(RegistrationRequestKind, Policy, Duration)>,
    /// Time of the next registration.
    pub(super) registration_due: Duration,
    pub(super) deregistration_deadline: Option<Duration>,
    pub(super) conflicts: u32,
    /// Number of registrations in a row without an answer.
    unanswered_count: u32,
    /// True if a registrar may know the element by this identifier.
    pub(super) may_be_known: bool,
}

impl RegistrationState {
    pub(super) fn new(id: ElementId, policy: Policy) -> RegistrationState {
        RegistrationState {
            id,
            goal: RegistrationGoal::Unregistered,
            policy,
            accepted: None,
            pending_request: None,
            registration_due: Duration::ZERO,
            deregistration_deadline: None,
            conflicts: 0,
            unanswered_count: 0,
            may_be_known: false,
        }
    }
}

impl PoolElement {
    /// Starts actions that an input may have made possible.
    pub(super) fn pursue_registration_goal(&mut self, now: Duration) {
        match self.registration.goal {
            RegistrationGoal::Leaving if !self.registration.may_be_known => {
                self.finish_deregistration(DeregistrationResult::Confirmed)
            }
            RegistrationGoal::Leaving => self.send_deregistration(now),
            RegistrationGoal::Registered => self.send_registration(now),
            RegistrationGoal::Unregistered => {}
        }
    }

    fn send_registration(&mut self, now: Duration) {
        let (Some(link), None) = (self.hunt.home(), &self.registration.pending_request) else {
            return;
        };
        if self.next_registration() > now {
            return;
        }
        let message = Message::Registration {
            handle: self.config.handle.clone(),
            element: Description {
                id: self.registration.id,
                home: self.hunt.home_id().unwrap_or(RegistrarId(0)),
                registration_life: self.config.encoded_life(),
                user_transport: self.config.user_transport.clone(),
                policy: self.registration.policy,
                asap_transport: self.config.asap_transport.clone(),
            },
        };
        self.send_request(now, link, RegistrationRequestKind::Register, message);
        self.registration.may_be_known = true;
    }

    fn send_deregistration(&mut self, now: Duration) {
        let (Some(link), None) = (self.hunt.home(), &self.registration.pending_request) else {
            return;
        };
        let message = Message::Deregistration {
            handle: self.config.handle.clone(),
            id: self.registration.id,
        };
        self.send_request(now, link, RegistrationRequestKind::Deregister, message);
    }

    fn send_request(
        &mut self,
        now: Duration,
        link: LinkId,
        question: RegistrationRequestKind,
        message: Message,
    ) {
        self.hunt.send(link, message);
        self.registration.pending_request = Some((question, self.registration.policy, now));
    }

    pub(super) fn is_own_element(&self, handle: &PoolHandle, id: ElementId) -> bool {
        *handle == self.config.handle && id == self.registration.id
    }

    pub(super) fn is_expected_response(
        &self,
        link: LinkId,
        handle: &PoolHandle,
        id: ElementId,
        to: RegistrationRequestKind,
    ) -> bool {
        let pending = self.registration.pending_request.as_ref();
        self.hunt.home() == Some(link)
            && self.is_own_element(handle, id)
            && pending.is_some_and(|(question, ..)| *question == to)
    }

    pub(super) fn on_registration_response(
        &mut self,
        now: Duration,
        rejected: bool,
        causes: Vec<ErrorCause>,
    ) {
        let Some((_, policy, since)) = self.registration.pending_request.take() else {
            return;
        };
        self.registration.unanswered_count = 0;
        if rejected {
            return self.on_rejected(now, causes);
        }
        self.registration.conflicts = 0;
        // Re-register up to a tenth earlier, so that elements started together drift apart.
        let wait = self.config.reregistration_interval();
        let earlier = wait / 10 * self.hunt.random.below(1001) as u32 / 1000;
        self.registration.registration_due = since + wait - earlier;
        let before = self
            .registration
            .accepted
            .replace(AcceptedRegistration { policy, since });
        if before.is_none() || !causes.is_empty() {
            self.hunt.push_event(Event::Registered {
                id: self.registration.id,
                warnings: causes,
            });
        }
    }

    /// Handles a rejection. "the PE must either re-attempt registration after correcting the error or return a failure
    /// indication to the PE's upper layer" (section 3.1): a new identifier is a correction that the machine can make
    /// itself.
    fn on_rejected(&mut self, now: Duration, causes: Vec<ErrorCause>) {
        let conflict = causes.iter().any(|cause| {
            cause.code == CauseCode::NON_UNIQUE_ELEMENT_ID
                || cause.code == CauseCode::RSPLIB_DUPLICATE_ID
        });
        self.registration.accepted = None;
        self.registration.conflicts += 1;
        if conflict && self.registration.conflicts < CONFLICTS_MAX {
            self.registration.id = ElementId(self.hunt.random.next_u32());
            self.registration.registration_due = now;
            return;
        }
        self.registration.goal = RegistrationGoal::Unregistered;
        self.registration.may_be_known = false;
        self.hunt.stop();
        self.hunt
            .push_event(Event::RegistrationRefused(RegistrationRefusal { causes }));
    }

    /// Handles the end of the registration's life.
    pub(super) fn on_expired(&mut self, now: Duration) {
        if self.registration.accepted.take().is_some() {
            // Re-register soon, but not as fast as a registrar can expire the registration.
            self.registration.registration_due = now + self.config.update_interval;
            self.hunt.push_event(Event::RegistrationExpired);
        }
    }

    pub(super) fn on_registration_timeout(&mut self, now: Duration) {
        if self
            .registration
            .deregistration_deadline
            .is_some_and(|until| until <= now)
        {
            return self.finish_deregistration(DeregistrationResult::TimedOut);
        }
        if self.life_end().is_some_and(|end| end <= now) {
            self.on_expired(now);
        }
        if self.answer_deadline().is_some_and(|due| due <= now) {
            self.on_unanswered(now);
        }
    }

    /// Handles an unanswered request. "If the T2-registration timer expires [...] the PE shall start the Server Hunt
    /// procedure".
    fn on_unanswered(&mut self, now: Duration) {
        self.registration.pending_request = None;
        self.registration.unanswered_count += 1;
        let attempts = self.registration.unanswered_count;
        if attempts == self.config.attempts_max
            && self.registration.goal == RegistrationGoal::Registered
        {
            self.hunt.push_event(Event::Unanswered { attempts });
        }
        let change: Option<HomeChange> = self.hunt.drop_home(now);
        self.on_home_change(change);
    }

    pub(super) fn finish_deregistration(&mut self, departure: DeregistrationResult) {
        let registration = &mut self.registration;
        registration.goal = RegistrationGoal::Unregistered;
        registration.accepted = None;
        registration.pending_request = None;
        registration.deregistration_deadline = None;
        registration.may_be_known = false;
        self.hunt.stop();
        self.hunt.push_event(Event::Deregistered(departure));
    }

    /// Returns the registration's timers, without the hunt's.
    pub(super) fn registration_timers(&self) -> impl Iterator<Item = Duration> {
        let idle = self.registration.pending_request.is_none() && self.hunt.home().is_some();
        let register = (self.registration.goal == RegistrationGoal::Registered && idle)
            .then(|| self.next_registration());
        let times = [
            register,
            self.answer_deadline(),
            self.life_end(),
            self.registration.deregistration_deadline,
        ];
        times.into_iter().flatten()
    }

    /// Returns the time of the next registration: as planned, or sooner if the policy values have changed.
    fn next_registration(&self) -> Duration {
        match &self.registration.accepted {
            Some(accepted) if accepted.policy != self.registration.policy => {
                let update = accepted.since + self.config.update_interval;
                update.min(self.registration.registration_due)
            }
            _ => self.registration.registration_due,
        }
    }

    fn answer_deadline(&self) -> Option<Duration> {
        let (_, _, since) = self.registration.pending_request.as_ref()?;
        Some(*since + self.config.answer_timeout)
    }

    fn life_end(&self) -> Option<Duration> {
        let accepted = self.registration.accepted.as_ref()?;
        Some(accepted.since + self.config.life?)
    }
}
