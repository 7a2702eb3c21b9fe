//! Registration, re-registration and deregistration (RFC 5352 sections 3.1 and 3.2).

use super::event::{Departure, Event, Refusal};
use super::{Link, PoolElement};
use crate::hunt::Change;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Cause, CauseCode, ElementId};
use holdfast_wire::rserpool::{Policy, PoolElement as Description, PoolHandle, RegistrarId};
use std::time::Duration;

/// Number of identifiers tried before the registrar's reports of a conflict are doubted.
const CONFLICTS_MAX: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// No registration is wanted.
    Out,
    /// The element should be registered.
    In,
    /// The element should be deregistered.
    Leaving,
}

/// Request to the home registrar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    Register,
    Deregister,
}

/// A registration accepted by a registrar.
#[derive(Debug)]
pub(super) struct Accepted {
    /// The reported policy.
    policy: Policy,
    /// Time of the request, which is the earliest start of the life.
    since: Duration,
}

#[derive(Debug)]
pub(super) struct Registration {
    pub(super) id: ElementId,
    pub(super) goal: Goal,
    /// Current policy values of the element.
    pub(super) policy: Policy,
    pub(super) accepted: Option<Accepted>,
    /// The open request, with the reported policy and the time.
    pub(super) question: Option<(Question, Policy, Duration)>,
    /// Time of the next registration.
    pub(super) due: Duration,
    pub(super) leave_until: Option<Duration>,
    pub(super) conflicts: u32,
    /// Number of registrations in a row without an answer.
    unanswered: u32,
    /// True if a registrar may know the element by this identifier.
    pub(super) asked_once: bool,
}

impl Registration {
    pub(super) fn new(id: ElementId, policy: Policy) -> Registration {
        Registration {
            id,
            goal: Goal::Out,
            policy,
            accepted: None,
            question: None,
            due: Duration::ZERO,
            leave_until: None,
            conflicts: 0,
            unanswered: 0,
            asked_once: false,
        }
    }
}

impl PoolElement {
    /// Starts actions that an input may have made possible.
    pub(super) fn pump(&mut self, now: Duration) {
        match self.registration.goal {
            Goal::Leaving if !self.registration.asked_once => self.end(Departure::Confirmed),
            Goal::Leaving => self.ask_to_leave(now),
            Goal::In => self.ask_to_register(now),
            Goal::Out => {}
        }
    }

    fn ask_to_register(&mut self, now: Duration) {
        let (Some(link), None) = (self.hunt.home(), &self.registration.question) else {
            return;
        };
        if self.register_at() > now {
            return;
        }
        let message = Message::Registration {
            handle: self.config.handle.clone(),
            element: Description {
                id: self.registration.id,
                home: self.hunt.home_id().unwrap_or(RegistrarId(0)),
                registration_life: self.config.life_on_wire(),
                user_transport: self.config.user_transport.clone(),
                policy: self.registration.policy,
                asap_transport: self.config.asap_transport.clone(),
            },
        };
        self.ask(now, link, Question::Register, message);
        self.registration.asked_once = true;
    }

    fn ask_to_leave(&mut self, now: Duration) {
        let (Some(link), None) = (self.hunt.home(), &self.registration.question) else {
            return;
        };
        let message = Message::Deregistration {
            handle: self.config.handle.clone(),
            id: self.registration.id,
        };
        self.ask(now, link, Question::Deregister, message);
    }

    fn ask(&mut self, now: Duration, link: Link, question: Question, message: Message) {
        self.hunt.send(link, message);
        self.registration.question = Some((question, self.registration.policy, now));
    }

    pub(super) fn is_meant(&self, handle: &PoolHandle, id: ElementId) -> bool {
        *handle == self.config.handle && id == self.registration.id
    }

    pub(super) fn is_answer(
        &self,
        link: Link,
        handle: &PoolHandle,
        id: ElementId,
        to: Question,
    ) -> bool {
        let asked = self.registration.question.as_ref();
        self.hunt.home() == Some(link)
            && self.is_meant(handle, id)
            && asked.is_some_and(|(question, ..)| *question == to)
    }

    pub(super) fn registration_answered(
        &mut self,
        now: Duration,
        rejected: bool,
        causes: Vec<Cause>,
    ) {
        let Some((_, policy, since)) = self.registration.question.take() else {
            return;
        };
        self.registration.unanswered = 0;
        if rejected {
            return self.rejected(now, causes);
        }
        self.registration.conflicts = 0;
        // Re-register up to a tenth earlier, so that elements started together drift apart.
        let wait = self.config.reregistration();
        let earlier = wait / 10 * self.hunt.random.below(1001) as u32 / 1000;
        self.registration.due = since + wait - earlier;
        let before = self
            .registration
            .accepted
            .replace(Accepted { policy, since });
        if before.is_none() || !causes.is_empty() {
            self.hunt.event(Event::Registered {
                id: self.registration.id,
                warnings: causes,
            });
        }
    }

    /// Handles a rejection. "the PE must either re-attempt registration after correcting the error or return a failure
    /// indication to the PE's upper layer" (section 3.1): a new identifier is a correction that the machine can make
    /// itself.
    fn rejected(&mut self, now: Duration, causes: Vec<Cause>) {
        let conflict = causes.iter().any(|cause| {
            cause.code == CauseCode::NON_UNIQUE_ELEMENT_ID
                || cause.code == CauseCode::RSPLIB_DUPLICATE_ID
        });
        self.registration.accepted = None;
        self.registration.conflicts += 1;
        if conflict && self.registration.conflicts < CONFLICTS_MAX {
            self.registration.id = ElementId(self.hunt.random.number());
            self.registration.due = now;
            return;
        }
        self.registration.goal = Goal::Out;
        self.registration.asked_once = false;
        self.hunt.stop();
        self.hunt.event(Event::Refused(Refusal { causes }));
    }

    /// Handles the end of the registration's life.
    pub(super) fn expire(&mut self, now: Duration) {
        if self.registration.accepted.take().is_some() {
            // Re-register soon, but not as fast as a registrar can expire the registration.
            self.registration.due = now + self.config.update_interval;
            self.hunt.event(Event::Expired);
        }
    }

    pub(super) fn registration_timed_out(&mut self, now: Duration) {
        if self
            .registration
            .leave_until
            .is_some_and(|until| until <= now)
        {
            return self.end(Departure::TimedOut);
        }
        if self.life_end().is_some_and(|end| end <= now) {
            self.expire(now);
        }
        if self.answer_due().is_some_and(|due| due <= now) {
            self.unanswered(now);
        }
    }

    /// Handles an unanswered request. "If the T2-registration timer expires [...] the PE shall start the Server Hunt
    /// procedure".
    fn unanswered(&mut self, now: Duration) {
        self.registration.question = None;
        self.registration.unanswered += 1;
        let attempts = self.registration.unanswered;
        if attempts == self.config.attempts_max && self.registration.goal == Goal::In {
            self.hunt.event(Event::Unanswered { attempts });
        }
        let change: Option<Change> = self.hunt.give_home_up(now);
        self.changed(change);
    }

    pub(super) fn end(&mut self, departure: Departure) {
        let registration = &mut self.registration;
        registration.goal = Goal::Out;
        registration.accepted = None;
        registration.question = None;
        registration.leave_until = None;
        registration.asked_once = false;
        self.hunt.stop();
        self.hunt.event(Event::Left(departure));
    }

    /// Returns the registration's timers, without the hunt's.
    pub(super) fn registration_due(&self) -> impl Iterator<Item = Duration> {
        let idle = self.registration.question.is_none() && self.hunt.home().is_some();
        let register = (self.registration.goal == Goal::In && idle).then(|| self.register_at());
        let times = [
            register,
            self.answer_due(),
            self.life_end(),
            self.registration.leave_until,
        ];
        times.into_iter().flatten()
    }

    /// Returns the time of the next registration: as planned, or sooner if the policy values have changed.
    fn register_at(&self) -> Duration {
        match &self.registration.accepted {
            Some(accepted) if accepted.policy != self.registration.policy => {
                let update = accepted.since + self.config.update_interval;
                update.min(self.registration.due)
            }
            _ => self.registration.due,
        }
    }

    fn answer_due(&self) -> Option<Duration> {
        let (_, _, since) = self.registration.question.as_ref()?;
        Some(*since + self.config.answer_timeout)
    }

    fn life_end(&self) -> Option<Duration> {
        let accepted = self.registration.accepted.as_ref()?;
        Some(accepted.since + self.config.life?)
    }
}
