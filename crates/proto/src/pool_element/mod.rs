//! A pool element's side of ASAP (RFC 5352 sections 3.1, 3.2, 3.4 and 3.6): one machine for each element, and
//! [`Sessions`] for the control channels to its users.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`. Links
//! that registrars make to the element are told of by the first message from them; the daemon lets in only registrars
//! that it is to trust.
//!
//! There is one question at a time, and a registrar that does not answer it is left. So an answer always is to the
//! question last asked, though messages have no numbers.

mod config;
mod cookie;
mod event;
mod registration;
mod session;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod tests;

pub use crate::hunt::{HuntConfig, Link, Output as LinkOutput};
pub use crate::life::LifeUnit;
pub use config::Config;
pub use cookie::{CookieError, CookieKey};
pub use event::{Departure, Event, PolicyChanged, Refusal};
pub use session::{SessionEvent, SessionOutput, Sessions, SessionsConfig};

use crate::hunt::{Change, Hunt, Reach};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, Policy, RegistrarId, Transport};
use registration::{Goal, Question, Registration};
use std::time::Duration;

/// Something for the daemon to do.
pub type Output = LinkOutput<Event>;

/// The machine. See the module's text.
#[derive(Debug)]
pub struct PoolElement {
    config: Config,
    hunt: Hunt<Event>,
    registration: Registration,
}

impl PoolElement {
    /// A machine with nothing to do.
    pub fn new(config: Config) -> PoolElement {
        let mut hunt = Hunt::new(config.hunt.clone(), config.seed, Reach::Sctp);
        // R2.2: "Fill in the PE identifier using a good-quality randomly generated number".
        let id = ElementId(hunt.random.number());
        PoolElement {
            registration: Registration::new(id, config.policy),
            config,
            hunt,
        }
    }

    /// Registers the element and keeps it registered. Also to be called after [`Event::Refused`], with what was wrong put right.
    pub fn handle_register(&mut self, now: Duration) {
        if self.registration.goal == Goal::Out {
            self.registration.goal = Goal::In;
            self.registration.conflicts = 0;
            self.registration.due = now;
        }
        self.hunt.start(now);
        self.pump(now);
    }

    /// Tells the registrar how things stand with the element. Of several in a short time, the last is told.
    ///
    /// # Errors
    /// When the policy is another than that of the registration; nothing is changed.
    pub fn handle_policy(&mut self, now: Duration, policy: Policy) -> Result<(), PolicyChanged> {
        let (has, wanted) = (self.registration.policy.kind(), policy.kind());
        if has != wanted {
            return Err(PolicyChanged { has, wanted });
        }
        self.registration.policy = policy;
        self.pump(now);
        Ok(())
    }

    /// Takes the element out of its pool; [`Event::Left`] follows. Users that know it may still come for a while.
    pub fn handle_deregister(&mut self, now: Duration) {
        if self.registration.goal == Goal::Leaving {
            return;
        }
        self.registration.goal = Goal::Leaving;
        self.registration.question = None;
        self.registration.leave_until = Some(now + self.config.leave_timeout);
        self.pump(now);
    }

    /// A link of this machine is made.
    pub fn handle_connected(&mut self, now: Duration, link: Link) {
        let change = self.hunt.handle_connected(link);
        if change == Some(Change::Found) {
            // "After establishing a new Home ENRP server, the PE SHOULD restart the registration procedure."
            self.registration.due = now;
        }
        self.changed(change);
        self.pump(now);
    }

    /// A link could not be made, or was lost. One on which a message could not be delivered counts as lost; the daemon closes it.
    pub fn handle_lost(&mut self, now: Duration, link: Link) {
        let change = self.hunt.handle_lost(now, link);
        self.changed(change);
        self.pump(now);
    }

    /// A registrar's announce by multicast, as `Message::ServerAnnounce` has it; `source` is where it came from, with
    /// ASAP's port.
    pub fn handle_announce(
        &mut self,
        now: Duration,
        registrar: RegistrarId,
        transports: Vec<Transport>,
        source: Option<Transport>,
    ) {
        self.hunt
            .handle_announce(now, registrar, transports, source);
        self.pump(now);
    }

    /// A message from a registrar.
    pub fn handle_message(&mut self, now: Duration, link: Link, message: Message) {
        self.hunt.handle_heard(link);
        match message {
            Message::EndpointKeepAlive {
                home,
                registrar,
                handle,
                id,
            } if handle == self.config.handle && id.is_none_or(|id| id == self.registration.id) => {
                // KA1: "If the Pool Handle does not match, the PE MUST silently discard the message."
                self.keep_alive(link, home, registrar);
            }
            Message::RegistrationResponse {
                rejected,
                handle,
                id,
                causes,
            } if self.is_answer(link, &handle, id, Question::Register) => {
                self.registration_answered(now, rejected, causes);
            }
            Message::DeregistrationResponse { handle, id, causes }
                if self.is_answer(link, &handle, id, Question::Deregister) =>
            {
                self.end(if causes.is_empty() {
                    Departure::Confirmed
                } else {
                    Departure::Refused(causes)
                });
            }
            Message::DeregistrationResponse { handle, id, .. }
                if self.hunt.home() == Some(link)
                    && self.is_meant(&handle, id)
                    && self.registration.goal == Goal::In =>
            {
                // "or due to the expiration of the registration life of the PE in the pool" (section 2.2.4).
                self.expire(now);
            }
            Message::Error(causes) if self.hunt.home() == Some(link) => {
                self.hunt.event(Event::Reported(causes));
            }
            _ => {}
        }
        self.pump(now);
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        let change = self.hunt.handle_timeout(now);
        self.changed(change);
        self.registration_timed_out(now);
        self.pump(now);
    }

    /// The next thing to do, none when all is done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.hunt.outputs.pop_front()
    }

    /// When to call `handle_timeout`, none for never. May be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let hunt = self.hunt.poll_timeout();
        hunt.into_iter().chain(self.registration_due()).min()
    }

    /// The element's identifier; it changes if another element of the pool has it.
    pub fn id(&self) -> ElementId {
        self.registration.id
    }

    /// Whether a registrar has the element in its handlespace, as far as is known here.
    pub fn is_registered(&self) -> bool {
        self.registration.accepted.is_some()
    }

    /// Who the home registrar is, if there is one and it has said so.
    pub fn home(&self) -> Option<RegistrarId> {
        self.hunt.home_id()
    }

    fn keep_alive(&mut self, link: Link, home: bool, registrar: RegistrarId) {
        // An answer may be on its way. But who was never registered or leaves is no element: the registrar is to notice.
        if self.registration.goal != Goal::In || !self.registration.asked_once {
            return;
        }
        self.hunt.send(
            link,
            Message::EndpointKeepAliveAck {
                handle: self.config.handle.clone(),
                id: self.registration.id,
            },
        );
        // KA2.4: "adopt the sender of the ASAP_ENDPOINT_KEEP_ALIVE message as the new Home ENRP server".
        if home {
            let change = self.hunt.adopt(link, registrar);
            self.changed(change);
        }
    }

    fn changed(&mut self, change: Option<Change>) {
        let event = match change {
            Some(Change::Found) => Event::NewHome {
                registrar: self.hunt.home_id(),
            },
            Some(Change::Lost) => Event::HomeLost,
            Some(Change::NotFound) => Event::NoRegistrar,
            None => return,
        };
        if event != Event::NoRegistrar {
            // What the old one was asked, the new one is asked anew.
            self.registration.question = None;
        }
        self.hunt.event(event);
    }
}
